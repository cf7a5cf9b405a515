"""Tables of operators and collectives as text, equal layers once."""

from __future__ import annotations

from collections.abc import Sequence

from minialpa.plan.text import seconds_text
from minialpa.report.rows import CollectiveRow, OperatorRow
from minialpa.report.words import percent_text, place_words
from minialpa.support.sizes import bytes_text


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def table(rows: Sequence[Sequence[str]], widest: Sequence[int] = ()) -> list[str]:
    """Columns two spaces apart. widest: most letters of the first columns."""
    cut = [[_cut(cell, widest[i]) if i < len(widest) else cell for i, cell in enumerate(row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cut, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cut]


def operator_table(rows: Sequence[OperatorRow], other_share: float, most: int | None = None) -> list[str]:
    """other_share: of the compute, of operations without a row. most: lines, for the longest; None for all."""
    shown = list(rows)
    if most is not None and len(rows) > most - 2:
        longest = sorted(rows, key=lambda row: -row.seconds)[: max(1, most - 3)]
        shown = [row for row in rows if row in longest]
    if not shown:
        return []

    cells = [["", "operator", "split", "of compute", "line", "result of one micro-batch"]]
    cells += [_operator_cells(row) for row in shown]
    cells.append(["(other operations)", "", "", percent_text(other_share), "", ""])
    lines = table([row if most is None else row[:-1] for row in cells], () if most is None else (32, 10, 22, 10, 18))
    n_more = len(rows) - len(shown)
    return [*lines, f"and {n_more} shorter ones"] if n_more else lines


def _operator_cells(row: OperatorRow) -> list[str]:
    return [
        row.module or "(no module)",
        row.name if row.part == "forward" else f"{row.name} ({row.part})",
        row.split,
        percent_text(row.share),
        row.line,
        f"{row.dtype}[{', '.join(map(str, row.shape))}]",
    ]


def collective_table(rows: Sequence[CollectiveRow], most: int | None = None) -> list[str]:
    """most: rows, of the first; None for all."""
    if not rows:
        return []
    cells = [["", "of", "in", "per step", "", "line", "bytes", "pass", "times per step"]]
    cells += [_collective_cells(row, is_short=most is not None) for row in rows[:most]]
    lines = table([row if most is None else row[:-3] for row in cells], () if most is None else (14, 18, 21, 8, 11, 18))
    n_more = len(rows) - len(rows[:most])
    return [*lines, f"and {n_more} other kinds"] if n_more else lines


def _collective_cells(row: CollectiveRow, *, is_short: bool) -> list[str]:
    is_argument = "[" in row.array or "." in row.array
    return [
        row.kind,
        "weights" if is_argument and is_short else row.array,
        place_words(row.module, row.part),
        seconds_text(row.seconds),
        row.hidden,
        row.line,
        "-".join(dict.fromkeys(map(bytes_text, row.sizes))),
        row.part,
        str(row.n),
    ]
