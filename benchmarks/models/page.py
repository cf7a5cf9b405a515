"""Writes the page benchmarks/models.md from the rows of the models."""

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

#: The text of each outcome of a row, in the order of the counts on the page.
_OUTCOMES = {
    "equal": "equal",
    "wrong": "**wrong**",
    "refused": "refused",
    "crash": "**crash**",
    "not run": "does not run on one device",
}


def page(rows: Rows) -> str:
    """The text of benchmarks/models.md from the rows of one run."""
    counts = Counter(row["outcome"] for row in rows)
    by_outcome = [f"{counts[outcome]} {text.strip('*')}" for outcome, text in _OUTCOMES.items() if counts[outcome]]
    return f"""# Models of other packages

The table compares training under minialpa with training under `jax.jit` on one device. Each step runs {N_STEPS} times
under minialpa, on {N_DEVICES} virtual devices of a CPU, and {N_STEPS} times under `jax.jit`. The models are small,
their data is synthetic, and a batch has {N_EXAMPLES} examples. The code is in `benchmarks/models`.

`python -m benchmarks.models.table --results rows.json --write benchmarks/models.md` makes this page, in an environment
with the packages of the extra `table`. If a run is interrupted, the same command continues it. All rows come from one
version of minialpa, with jax {jax.__version__}.

{len(rows)} rows ({_models(len(MODELS) - len(_missing(rows)))}): {", ".join(by_outcome)}.

*Difference* is the 2-norm of the difference between both runs, divided by the 2-norm of the update over all steps. It
is computed for each array of the state, and for the losses, where the divisor is the 2-norm of the losses; the column
has the median over the arrays of floats. *Rounding* is the same number between runs on one device: with inputs that
are rounded differently, and with a compiler that does not optimise. A row is equal if each array of floats differs by
at most {ROUNDINGS:.0f} times its own rounding plus a few last places of its dtype (benchmarks/models/comparison.py),
and if all integers are equal.

{_without_rows(rows)}{_table(row for row in rows if row["outcome"] != "not run")}{_refusals(rows)}"""


def _missing(rows: Rows) -> list[str]:
    """The models without a row."""
    found = {row["name"] for row in rows}
    return [name for name in MODELS if name not in found]


def _models(n: int) -> str:
    return f"all {n} models" if n == len(MODELS) else f"{n} of {len(MODELS)} models"


def _without_rows(rows: Rows) -> str:
    """A paragraph that lists the models without a row; empty for a complete run."""
    missing = _missing(rows)
    if not missing:
        return ""
    text = f"{len(missing)} models have no rows on this page: {', '.join(f'`{name}`' for name in missing)}."
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n\n"


def _table(rows: Iterable[dict[str, Any]]) -> str:
    lines = ["| package | model | optimizer | method | outcome | difference | rounding |", "|" + "---|" * 7]
    for row in rows:
        numbers = [f"{row[name]:.1e}" if name in row else "" for name in ("difference", "rounding")]
        cells = [row["package"], row["model"], row["optimizer"], row["method"], _OUTCOMES[row["outcome"]], *numbers]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _refusals(rows: Rows) -> str:
    """A section with the message of each row that is not equal; empty if all rows are equal."""
    unequal = [row for row in rows if row["outcome"] != "equal"]
    if not unequal:
        return ""
    lines = ["## Rows that are not equal", "", "| model | method | outcome | message |", "|---|---|---|---|"]
    for row in unequal:
        detail = row["detail"].replace("|", "\\|").replace("\n", " ").replace(str(Path.cwd()) + "/", "")
        lines.append(
            f"| {row['model']} ({row['package']}) | {row['method']} | {_OUTCOMES[row['outcome']]} | {detail} |"
        )
    return "\n" + "\n".join(lines) + "\n"
