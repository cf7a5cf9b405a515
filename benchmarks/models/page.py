"""The page docs/models.md from the rows of the models."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from benchmarks.models.all_models import MODELS
from benchmarks.models.catalogue import N_DEVICES
from benchmarks.models.common import N_EXAMPLES, N_STEPS
from benchmarks.models.comparison import ROUNDINGS
from benchmarks.registry import Rows

#: How the page writes each outcome of a row, in the order in which it counts them.
_OUTCOMES = {
    "equal": "equal",
    "wrong": "**wrong**",
    "refused": "refused",
    "crash": "**crash**",
    "not run": "does not run on one device",
}


def page(rows: Rows) -> str:
    """docs/models.md. The rows are those of one run."""
    counts = Counter(row["outcome"] for row in rows)
    told = ", ".join(f"{counts[outcome]} {_OUTCOMES[outcome].strip('*')}" for outcome in _OUTCOMES if counts[outcome])
    return f"""# Models of other packages

Each training step runs {N_STEPS} times under minialpa on {N_DEVICES} virtual devices of a CPU, and {N_STEPS} times
under `jax.jit` on one device; the rows say how far the results differ. The models are small, their data is synthetic,
and a batch has {N_EXAMPLES} examples. The code is in [benchmarks/models](../benchmarks/models).

`python -m benchmarks.models.table --results rows.json --write docs/models.md` makes this page, in an environment with
the packages of the extra `table`. An interrupted run goes on when the command is given again; all rows are of one
version of minialpa, here with jax {jax.__version__}.

{len(rows)} rows ({_models(len(MODELS) - len(_missing(rows)))}): {told}.

*Difference* is how far minialpa's results are from those of one device: for each array of the state, the 2-norm of the
difference, divided by that of the array's update over all steps (for losses, by that of the losses); the column shows
the median over the arrays of floats. *Rounding* is the same number for runs on one device among themselves: on inputs
that are rounded differently, and by a compiler that does not optimise. A row is equal if every array by itself differs
by at most {ROUNDINGS:.0f} times its own rounding and a few last places of its dtype (benchmarks/models/comparison.py),
and if integers are the same.

{_without_rows(rows)}{_table(row for row in rows if row["outcome"] != "not run")}{_refusals(rows)}"""


def _missing(rows: Rows) -> list[str]:
    """The models that have no rows."""
    found = {row["name"] for row in rows}
    return [name for name in MODELS if name not in found]


def _models(n: int) -> str:
    return f"all {n} models" if n == len(MODELS) else f"{n} of {len(MODELS)} models"


def _without_rows(rows: Rows) -> str:
    """The models that are missing, if the run was interrupted or was of some of them."""
    missing = _missing(rows)
    if not missing:
        return ""
    told = f"{len(missing)} models have not been run for this page: {', '.join(f'`{name}`' for name in missing)}."
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
