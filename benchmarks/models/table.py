"""Trains all models, in processes of their own, and writes the table of docs/models.md.

python -m benchmarks.models.table --write docs/models.md        all of them, in 10 to 20 minutes on 2 quiet cores
python -m benchmarks.models.table mlp gan                       some of them
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from benchmarks.models.all_models import MODELS
from benchmarks.models.catalogue import N_DEVICES
from benchmarks.models.common import N_EXAMPLES, N_STEPS
from benchmarks.models.comparison import ROUNDINGS
from benchmarks.models.row import DONE, ROW
from benchmarks.registry import Rows
from minialpa.support.files import write_text

#: Models of one process, which starts in seconds and keeps what it has allocated.
_PER_PROCESS = 8
#: Seconds after which a process that trains one model is ended.
_MOST_S = 600.0
_OUTCOMES = {
    "equal": "equal",
    "wrong": "**wrong**",
    "refused": "refused",
    "crash": "**crash**",
    "not run": "does not run on one device",
}


def rows_of(names: Sequence[str], n_processes: int, tell: Callable[[str], object] = print) -> Rows:
    """The rows of the models, in the order of the names."""
    groups = [list(names[i : i + _PER_PROCESS]) for i in range(0, len(names), _PER_PROCESS)]
    found: Rows = []
    with ThreadPoolExecutor(n_processes) as pool:
        for rows in pool.map(lambda group: list(_rows_of_group(group, tell)), groups):
            found += rows
    return found


def _rows_of_group(names: list[str], tell: Callable[[str], object]) -> Iterator[dict[str, Any]]:
    """Rows of models in one process, or in another one for those behind a model that has ended it."""
    while names:
        process = _Process(names)
        for line in process.lines():
            if line.startswith(ROW):
                row = json.loads(line.removeprefix(ROW))
                tell(f"{row['outcome']:8} {row['name']}, {row['method']}: {row.get('detail', '')}")
                yield row
            elif line.startswith(DONE):
                names = names[1:]
        if names:
            what = f"the process ended with code {process.code}"
            tell(f"crash    {names[0]}: {what}")
            yield _described(names[0]) | {"method": "", "outcome": "crash", "detail": what}
            names = names[1:]


def _described(name: str) -> dict[str, Any]:
    model = MODELS[name]
    return {"name": name, "package": ", ".join(model.packages), "model": model.model, "optimizer": model.optimizer}


class _Process:
    """A process that trains models. It is ended if one takes too long."""

    def __init__(self, names: Sequence[str]) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.models.row", *names]
        # Neither of the other two frameworks of transformers; keras on jax.
        environment = os.environ | {"USE_TF": "0", "USE_TORCH": "0", "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        self.code: int | None = None

    def lines(self) -> Iterator[str]:
        assert self._process.stdout is not None
        timer = self._timer()
        for line in self._process.stdout:
            if line.startswith(DONE):
                timer.cancel()
                timer = self._timer()
            yield line.rstrip("\n")
        timer.cancel()
        self.code = self._process.wait()

    def _timer(self) -> threading.Timer:
        timer = threading.Timer(_MOST_S, self._process.kill)
        timer.daemon = True
        timer.start()
        return timer


def merged(runs: Iterable[Rows]) -> Rows:
    """Rows of several runs in the order of the models; a later run of a model takes the place of an earlier one."""
    of_model: dict[str, Rows] = {}
    for rows in runs:
        of_model |= {name: [row for row in rows if row["name"] == name] for name in {row["name"] for row in rows}}
    return [row for name in MODELS for row in of_model.get(name, [])]


# ---- the page -------------------------------------------------------------------------------------------------------


def page(rows: Rows) -> str:
    """docs/models.md."""
    counts = Counter(row["outcome"] for row in rows)
    told = ", ".join(f"{counts[outcome]} {_OUTCOMES[outcome].strip('*')}" for outcome in _OUTCOMES if counts[outcome])
    return f"""# Models of other packages

{N_STEPS} training steps of each model by minialpa on {N_DEVICES} virtual devices of a CPU, against the same function
under `jax.jit` on one device. `python -m benchmarks.models.table --write docs/models.md` made this page with jax
{jax.__version__}, in an environment with the packages of the extra `table`. The models are small, their data is
synthetic, and a batch has {N_EXAMPLES} examples. The code is in [benchmarks/models](../benchmarks/models).

{len(rows)} rows: {told}.

*Difference* is the 2-norm of what a leaf differs by, divided by that of its update over all steps (of the loss, for
losses): the median over the leaves of floats. *Rounding* is the same for serial runs among themselves: on inputs that
are rounded differently, and by a compiler that does not optimise. A row is equal if each leaf by itself differs by at
most {ROUNDINGS:.0f} times what these differ by, and a few places of its dtype (benchmarks/models/comparison.py), and
if integers are the same.

{_without_rows(rows)}{_table(row for row in rows if row["outcome"] != "not run")}{_refusals(rows)}"""


def _without_rows(rows: Rows) -> str:
    """The models that are missing, if the table was made of some of them."""
    missing = MODELS.keys() - {row["name"] for row in rows}
    if not missing:
        return ""
    listed = ", ".join(f"`{name}`" for name in MODELS if name in missing)
    told = f"The rows are of {len(MODELS) - len(missing)} of {len(MODELS)} models. Not run for this page: {listed}."
    return textwrap.fill(told, 120, break_long_words=False, break_on_hyphens=False) + "\n\n"


def _table(rows: Iterable[dict[str, Any]]) -> str:
    lines = ["| package | model | optimizer | method | outcome | difference | rounding |", "|" + "---|" * 7]
    for row in rows:
        numbers = [f"{row[name]:.1e}" if name in row else "" for name in ("difference", "rounding")]
        cells = [row["package"], row["model"], row["optimizer"], row["method"], _OUTCOMES[row["outcome"]], *numbers]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _refusals(rows: Rows) -> str:
    """What the errors say, one for each row that is not equal."""
    told = [row for row in rows if row["outcome"] != "equal"]
    if not told:
        return ""
    lines = ["## What is not equal", "", "| model | method | outcome | what is said |", "|---|---|---|---|"]
    for row in told:
        detail = row["detail"].replace("|", "\\|").replace("\n", " ").replace(str(Path.cwd()) + "/", "")
        lines.append(
            f"| {row['model']} ({row['package']}) | {row['method']} | {_OUTCOMES[row['outcome']]} | {detail} |"
        )
    return "\n" + "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.models.table", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models; none for all of them")
    parser.add_argument("--processes", type=int, default=2, help="processes at a time")
    parser.add_argument("--json", type=Path, help="a file for the rows")
    parser.add_argument("--write", type=Path, help="a file for the page")
    parser.add_argument("--from-json", type=Path, nargs="*", help="write the page of such rows, train nothing")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.names) - MODELS.keys()):
        parser.error(f"no model is called {', '.join(unknown)}")

    if args.from_json:
        rows = merged([json.loads(path.read_text("utf-8")) for path in args.from_json])
    else:
        rows = rows_of(args.names or list(MODELS), args.processes)
    if args.json is not None:
        write_text(args.json, json.dumps(rows, indent=1) + "\n")
    if args.write is not None:
        write_text(args.write, page(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
