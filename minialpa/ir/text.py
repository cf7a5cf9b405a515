"""Prints programs: one line per operation, aligned columns, and each repetition once under its count.

A value is the path of an argument, such as `state.params['w']`, or `%12`, the result of operation 12; `%12.1` is its
second result. Layers that repeat print as

    3 times alike, to %9:
    | %1  f32[8,16]  dot_general[1x0] batch['x'], state.params['w']
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.extend.core import Var

from minialpa.ir.equations import Atom, aval_of, is_literal, source_line, sub_jaxprs
from minialpa.ir.op import Op, module_path

#: Longer literals and parameters are omitted.
_MOST_LETTERS = 32
#: A repetition that saves fewer lines is printed in full.
_LEAST_SAVED = 4
#: Maximal width by column. A longer cell shifts the rest of its line.
_WIDEST = {1: 16, 2: 56}

#: A column: (number, operation) -> text.
Fact = Callable[[int, Op], str]


@dataclass(frozen=True, slots=True)
class Line:
    """An operation as text.

    Attributes:
        kind: equal for lines that repeat: the cells without numbers of operations.
        reads: for each operand, the number of the operation that computes it, or its text.
        body: the lines of the inner programs, such as the body of a loop.
    """

    number: int
    cells: tuple[str, ...]
    kind: tuple[str, ...]
    reads: tuple[int | str, ...]
    body: tuple[str, ...] = ()


class ProgramText:
    def __init__(self, inputs: Sequence[Var], ops: Sequence[Op], names: Mapping[Var, str]) -> None:
        """names: of values that no operation defines. Inputs without a name are numbered."""
        self._ops = ops
        self._made_by = {value: i for i, op in enumerate(ops) for value in op.eqn.outvars}
        self._given = {value: f"input{k}" for k, value in enumerate(inputs)} | dict(names)

    def name_of(self, atom: Atom) -> str:
        """`%12` or `%12.1` for a result, the path of an argument, the value of a short literal."""
        if is_literal(atom):
            # jax's literals are subclasses of int that print their dtype.
            is_integer = isinstance(atom.val, int) and not isinstance(atom.val, bool)
            text = str(int(atom.val) if is_integer else atom.val)
            return text if len(text) <= _MOST_LETTERS else type_text(atom)
        number = self._made_by.get(atom)
        if number is None:
            return self._given.get(atom, "?")
        results = self._ops[number].eqn.outvars
        return f"%{number}" + (f".{results.index(atom)}" if len(results) > 1 else "")

    def lines(self, facts: Sequence[Fact], numbers: Sequence[int] | None = None) -> list[str]:
        """facts: additional columns. numbers: of the printed operations; all by default."""
        chosen = range(len(self._ops)) if numbers is None else numbers
        return _aligned_text([self._line(i, facts) for i in chosen])

    def _line(self, i: int, facts: Sequence[Fact]) -> Line:
        op = self._ops[i]
        types = " ".join(map(type_text, op.eqn.outvars))
        computed = f"{op.eqn.primitive.name}{_parameters(op)} {', '.join(map(self.name_of, op.eqn.invars))}".rstrip()
        found = [fact(i, op) for fact in facts]
        return Line(
            number=i,
            cells=(f"%{i}", types, computed, *found),
            kind=(types, op.eqn.primitive.name, _parameters(op), *map(_without_numbers, found)),
            reads=tuple(map(self._read, op.eqn.invars)),
            body=tuple(f"    {line}" for inner in _bodies(op) for line in inner),
        )

    def _read(self, atom: Atom) -> int | str:
        """The number of the operation that computes an operand, or text that is equal in repetitions."""
        if is_literal(atom):
            return self.name_of(atom)
        number = self._made_by.get(atom)
        return _without_numbers(self.name_of(atom)) if number is None else number


def _bodies(op: Op) -> Iterator[list[str]]:
    for body in sub_jaxprs(op.eqn):
        inputs, results = (*body.constvars, *body.invars), tuple(body.outvars)
        inside = ProgramText(inputs, list(map(Op, body.eqns)), {})
        operands = ", ".join(f"{inside.name_of(v)} {type_text(v)}" for v in inputs)
        yield [f"({operands}) ->", *inside.lines(()), f"return {', '.join(map(inside.name_of, results))}"]


def type_text(atom: Atom) -> str:
    """`f32[8,16]`, for example."""
    text: str = aval_of(atom).str_short(short_dtypes=True)
    return text


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "#", text)


# ---- parameters ------------------------------------------------------------------------------------------------------

#: Omitted: they repeat types of operands and results, or no plan depends on them.
_LEFT_OUT = (
    *("accuracy", "donated_invars", "inline", "keep_unused", "name", "new_dtype", "new_sizes", "out_sharding"),
    *("precision", "preferred_element_type", "shape", "sharding", "unroll", "update_consts", "update_jaxpr"),
    "weak_type",
)


def _parameters(op: Op) -> str:
    shown = []
    for name, value in op.eqn.params.items():
        text = _contracted_dims(value) if name == "dimension_numbers" else _parameter(value)
        if text and name not in _LEFT_OUT:
            shown.append(text if name == "dimension_numbers" else f"{name}={text}")
    return f"[{' '.join(shown)}]" if shown else ""


def _contracted_dims(numbers: Any) -> str:
    """`1x0 batch=0x0` for a product; empty for other operations."""
    try:
        contracted, batch = ([f"{a}x{b}" for a, b in zip(*pair, strict=True)] for pair in numbers)
    except (TypeError, ValueError):  # of a convolution or a gather
        return ""
    return ",".join(contracted) + (f" batch={','.join(batch)}" if batch else "")


def _parameter(value: Any) -> str:
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        text = f"({','.join(map(str, value))})" if value else ""
    else:
        text = str(value) if isinstance(value, int | float | str) and value is not False else ""
    return text if len(text) <= _MOST_LETTERS else ""


# ---- facts -----------------------------------------------------------------------------------------------------------


def direction(_: int, op: Op) -> str:
    """The pass of an operation and its forward group; empty outside both passes."""
    group = "" if op.origin.group is None else f" {op.origin.group}"
    return "" if op.origin.direction == "other" else f"{op.origin.direction}{group}"


def modules(_: int, op: Op) -> str:
    """The path in the user's modules, such as `GPT/blocks_3/attn`."""
    return module_path(op.scope)


def where(_: int, op: Op) -> str:
    """`file:line` in the user's code."""
    return Path(source_line(op.eqn).split(" ")[0]).name


# ---- layout ----------------------------------------------------------------------------------------------------------


def _aligned_text(lines: Sequence[Line]) -> list[str]:
    """The lines in aligned columns, each repetition once."""
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
    """(first line, length, times) of consecutive repetitions."""
    start = 0
    while start < len(lines):
        period, times = _repetition(lines, start)
        yield start, period, times
        start += period * times


def _repetition(lines: Sequence[Line], start: int) -> tuple[int, int]:
    """(length, times) of the repetition from `start` that saves most lines; (1, 1) without one."""
    best, saved = (1, 1), _LEAST_SAVED - 1
    periods = (i - start for i in range(start + 1, len(lines)) if lines[i].kind == lines[start].kind)
    for period in periods:
        if 2 * period > len(lines) - start:
            break
        n = 0
        while start + n + period < len(lines) and _lines_repeat(lines, start, n, period):
            n += 1
        times = n // period + 1
        if period * (times - 1) > saved:
            best, saved = (period, times), period * (times - 1)
    return best


def _lines_repeat(lines: Sequence[Line], start: int, n: int, period: int) -> bool:
    """Whether lines `start + n` and `start + n + period` are equal, with equal operands or operands as far apart.

    Where later repetitions read the repetition before them, the first one may read any earlier value.
    """
    one, other = lines[start + n], lines[start + n + period]
    if one.kind != other.kind or len(one.reads) != len(other.reads) or one.body != other.body:
        return False
    first, second = lines[start].number, lines[start + period].number

    def reads_repeat(a: int | str, b: int | str) -> bool:
        """Whether operand `b` of the later line corresponds to operand `a` of the earlier one."""
        if a == b:
            return True
        if not isinstance(b, int):
            return False
        if n < period and (isinstance(a, str) or a < first):
            return first <= b < second
        return isinstance(a, int) and abs(b - a) == other.number - one.number

    return all(reads_repeat(a, b) for a, b in zip(one.reads, other.reads, strict=True))
