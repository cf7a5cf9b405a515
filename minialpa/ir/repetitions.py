"""Lines of a table as text: columns of one width, and a repetition once, under a line that counts it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: A repetition that saves fewer lines than this is printed line by line.
_LEAST_SAVED = 4
#: Columns are no wider than this, by number; what is longer moves the rest of its line.
_WIDEST = {1: 16, 2: 56}


@dataclass(frozen=True, slots=True)
class Line:
    """One operation as text.

    Attributes:
        number: of the operation.
        cells: its columns: results, types, what is computed of what, and facts.
        kind: what is equal in repetitions: the line without the numbers in it.
        reads: for each operand the number of the operation that makes it, or what it is.
        body: the lines of the programs inside, such as the body of a loop.
    """

    number: int
    cells: tuple[str, ...]
    kind: tuple[str, ...]
    reads: tuple[int | str, ...]
    body: tuple[str, ...] = ()


def without_numbers(text: str) -> str:
    return re.sub(r"\d+", "#", text)


def aligned(lines: Sequence[Line]) -> list[str]:
    """The lines with columns of one width, and each repetition once, under a line that counts it."""
    n_columns = len(lines[0].cells) if lines else 0
    shown = [k for k in range(n_columns) if any(line.cells[k] for line in lines)]
    groups = list(_repetitions(lines))
    printed = [lines[i] for start, period, _ in groups for i in range(start, start + period)]
    widths = {k: min(_WIDEST.get(k, 40), max(len(line.cells[k]) for line in printed)) for k in shown}

    out = []
    for start, period, times in groups:
        indent = ""
        if times > 1:
            last = lines[start + period * times - 1].number
            out.append(f"{times} times alike, to %{last}:")
            indent = "| "
        for line in lines[start : start + period]:
            out.append((indent + "  ".join(line.cells[k].ljust(widths[k]) for k in shown)).rstrip())
            out.extend(indent + inner for inner in line.body)
    return out


def _repetitions(lines: Sequence[Line]) -> Iterator[tuple[int, int, int]]:
    """Groups of lines in order: start, length, and how often lines like these follow each other from there on."""
    start = 0
    while start < len(lines):
        period, times = _repetition(lines, start)
        yield start, period, times
        start += period * times


def _repetition(lines: Sequence[Line], start: int) -> tuple[int, int]:
    """Length and number of the repetition from `start` on that saves most lines; (1, 1) where nothing repeats."""
    best, saved = (1, 1), _LEAST_SAVED - 1
    periods = (i - start for i in range(start + 1, len(lines)) if lines[i].kind == lines[start].kind)
    for period in periods:
        if 2 * period > len(lines) - start:
            break
        n = 0
        while start + n + period < len(lines) and _alike(lines, start, n, period):
            n += 1
        times = n // period + 1
        if period * (times - 1) > saved:
            best, saved = (period, times), period * (times - 1)
    return best


def _alike(lines: Sequence[Line], start: int, n: int, period: int) -> bool:
    """Whether the line `period` after line `start + n` is the same, of values that are the same or as far away.

    In the first repetition, what the others read of the repetition before them comes from anywhere outside.
    """
    one, other = lines[start + n], lines[start + n + period]
    if one.kind != other.kind or len(one.reads) != len(other.reads) or one.body != other.body:
        return False
    first, second = lines[start].number, lines[start + period].number

    def same(a: int | str, b: int | str) -> bool:
        if a == b:
            return True
        if not isinstance(b, int):
            return False
        if n < period and (isinstance(a, str) or a < first):
            return first <= b < second
        return isinstance(a, int) and abs(b - a) == other.number - one.number

    return all(same(a, b) for a, b in zip(one.reads, other.reads, strict=True))
