"""Programs as text: one line per operation.

A value is the path of an argument, such as `state.params['w']`, or `%12`, the result of operation 12; `%12.1` is its
second result. Columns of facts follow, and a column in which nothing is known is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.extend.core import Var

from minialpa.ir.equations import Atom, aval_of, is_literal, source_line, sub_jaxprs
from minialpa.ir.op import Op
from minialpa.ir.repetitions import Line, aligned, without_numbers
from minialpa.ir.scopes import module_path

#: A literal, or a parameter of an operation, that takes more letters than this is left out.
_MOST_LETTERS = 32

#: What to print of an operation, by its number and itself.
Fact = Callable[[int, Op], str]


class ProgramText:
    """Operations whose values have names, all of them or some as text."""

    def __init__(self, inputs: Sequence[Var], ops: Sequence[Op], names: Mapping[Var, str]) -> None:
        """names: of what no operation makes; inputs without one are numbered."""
        self._ops = ops
        self._made_by = {value: i for i, op in enumerate(ops) for value in op.eqn.outvars}
        self._given = {value: f"input{k}" for k, value in enumerate(inputs)} | dict(names)

    def name_of(self, atom: Atom) -> str:
        """`%12` or `%12.1` for a result, the path of an argument, the value of a small literal."""
        if is_literal(atom):
            text = str(atom.val)
            return text if len(text) <= _MOST_LETTERS else type_text(atom)
        number = self._made_by.get(atom)
        if number is None:
            return self._given.get(atom, "?")
        results = self._ops[number].eqn.outvars
        return f"%{number}" + (f".{results.index(atom)}" if len(results) > 1 else "")

    def lines(self, facts: Sequence[Fact], numbers: Sequence[int] | None = None) -> list[str]:
        """One line for each operation. facts: further columns. numbers: of the operations; all by default."""
        chosen = range(len(self._ops)) if numbers is None else numbers
        return aligned([self._line(i, facts) for i in chosen])

    def _line(self, i: int, facts: Sequence[Fact]) -> Line:
        op = self._ops[i]
        types = " ".join(map(type_text, op.eqn.outvars))
        computed = f"{op.eqn.primitive.name}{_parameters(op)} {', '.join(map(self.name_of, op.eqn.invars))}".rstrip()
        found = [fact(i, op) for fact in facts]
        return Line(
            number=i,
            cells=(f"%{i}", types, computed, *found),
            kind=(types, op.eqn.primitive.name, _parameters(op), *map(without_numbers, found)),
            reads=tuple(map(self._read, op.eqn.invars)),
            body=tuple(f"    {line}" for inner in _bodies(op) for line in inner),
        )

    def _read(self, atom: Atom) -> int | str:
        """The number of the operation that makes an operand, or else what is equal in repetitions."""
        if is_literal(atom):
            return self.name_of(atom)
        number = self._made_by.get(atom)
        return without_numbers(self.name_of(atom)) if number is None else number


def _bodies(op: Op) -> Iterator[list[str]]:
    """The programs inside of a loop, or of branches."""
    for body in sub_jaxprs(op.eqn):
        inputs, results = (*body.constvars, *body.invars), tuple(body.outvars)
        inside = ProgramText(inputs, list(map(Op, body.eqns)), {})
        operands = ", ".join(f"{inside.name_of(v)} {type_text(v)}" for v in inputs)
        yield [f"({operands}) ->", *inside.lines(()), f"return {', '.join(map(inside.name_of, results))}"]


def type_text(atom: Atom) -> str:
    """The type of a value, such as `f32[8,16]`."""
    text: str = aval_of(atom).str_short(short_dtypes=True)
    return text


def _parameters(op: Op) -> str:
    """The parameters of an operation that fit in a line, but for precisions, shardings and programs."""
    shown = []
    for name, value in op.eqn.params.items():
        text = _contracted(value) if name == "dimension_numbers" else _parameter(value)
        if text and name not in _LEFT_OUT:
            shown.append(text if name == "dimension_numbers" else f"{name}={text}")
    return f"[{' '.join(shown)}]" if shown else ""


#: Parameters that repeat the types of operands and results, or that no plan depends on.
_LEFT_OUT = (
    *("accuracy", "donated_invars", "inline", "keep_unused", "name", "new_dtype", "new_sizes", "out_sharding"),
    *("precision", "preferred_element_type", "shape", "sharding", "unroll", "update_consts", "update_jaxpr"),
    "weak_type",
)


def _contracted(numbers: Any) -> str:
    """The contracted dimensions of a product, and those of the batch, as `1x0` and `0x0`; nothing for others."""
    try:
        contracted, batch = ([f"{a}x{b}" for a, b in zip(*pair, strict=True)] for pair in numbers)
    except (TypeError, ValueError):  # of a convolution or a gather
        return ""
    return ",".join(contracted) + (f" batch={','.join(batch)}" if batch else "")


def _parameter(value: Any) -> str:
    if value is None or value is False or value == ():
        return ""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        text = f"({','.join(map(str, value))})"
    else:
        text = str(value) if isinstance(value, int | float | str) else ""
    return text if len(text) <= _MOST_LETTERS else ""


# ---- facts -----------------------------------------------------------------------------------------------------------


def direction(_: int, op: Op) -> str:
    """The part of the step that an operation belongs to, and its forward group; nothing outside of both passes."""
    group = "" if op.origin.group is None else f" {op.origin.group}"
    return "" if op.origin.direction == "other" else f"{op.origin.direction}{group}"


def modules(_: int, op: Op) -> str:
    """The modules of the user that an operation is of, such as `GPT/blocks_3/attn`."""
    return module_path(op.scope)


def where(_: int, op: Op) -> str:
    """The line of the user's code that an operation is from, as `file:line`."""
    return Path(source_line(op.eqn).split(" ")[0]).name
