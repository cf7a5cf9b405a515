"""Blocks: operations in an order in which they can run, with the operands and the results of all of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from minialpa.ir.equations import Atom, live_equations, operand_vars
from minialpa.ir.op import Op, Origin
from minialpa.ir.text import ProgramText, direction, modules


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """A program in which every variable is defined once.

    Attributes:
        constvars: variables for the arrays that the program captured by closure.
        consts: their values.
        invars: operands.
        ops: the operations.
        outvars: results.
        eqns: the equations of the operations, by the same numbers.
        origins: where each operation came from, likewise.
    """

    constvars: tuple[Var, ...] = ()
    consts: tuple[Any, ...] = ()
    invars: tuple[Var, ...]
    ops: tuple[Op, ...]
    outvars: tuple[Atom, ...]
    eqns: tuple[JaxprEqn, ...] = field(init=False, repr=False)
    origins: tuple[Origin, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "eqns", tuple(op.eqn for op in self.ops))
        object.__setattr__(self, "origins", tuple(op.origin for op in self.ops))

    @functools.cached_property
    def made_by(self) -> Mapping[Var, int]:
        """The number of the operation that makes each value; inputs are not in it."""
        return {value: i for i, eqn in enumerate(self.eqns) for value in eqn.outvars}

    @functools.cached_property
    def read_by(self) -> Mapping[Var, tuple[int, ...]]:
        """The numbers of the operations that read each value that any reads, in order."""
        readers: dict[Var, list[int]] = {}
        for i, eqn in enumerate(self.eqns):
            for value in dict.fromkeys(operand_vars(eqn)):
                readers.setdefault(value, []).append(i)
        return {value: tuple(numbers) for value, numbers in readers.items()}

    def text(self, names: Mapping[Var, str]) -> ProgramText:
        """What prints the block. names: of its operands; an operand without a name gets a number."""
        return ProgramText((*self.constvars, *self.invars), self.ops, names)

    def __str__(self) -> str:
        text = self.text({})
        results = ", ".join(map(text.name_of, self.outvars))
        return "\n".join((*text.lines((direction, modules)), f"return {results}"))

    def with_eqns(self, eqns: Sequence[JaxprEqn]) -> Block:
        """The block with another equation in each operation."""
        ops = zip(self.ops, eqns, strict=True)
        return replace(self, ops=tuple(op if op.eqn is eqn else replace(op, eqn=eqn) for op, eqn in ops))

    def with_each_written_as(self, written: Iterable[Sequence[JaxprEqn]]) -> Block:
        """The block with any number of equations in the place of each operation, which have its facts."""
        pairs = zip(self.ops, written, strict=True)
        return replace(self, ops=tuple(replace(op, eqn=eqn) for op, eqns in pairs for eqn in eqns))

    def without_dead_operations(self) -> Block:
        """The block without operations that no result depends on; side effects stay."""
        is_live = live_equations(self.eqns, self.outvars)
        return self if all(is_live) else replace(self, ops=tuple(itertools.compress(self.ops, is_live)))


def block_of(closed: ClosedJaxpr) -> Block:
    """A program of jax, equation by equation."""
    return Block(
        constvars=tuple(closed.jaxpr.constvars),
        consts=tuple(closed.consts),
        invars=tuple(closed.jaxpr.invars),
        ops=tuple(map(Op, closed.jaxpr.eqns)),
        outvars=tuple(closed.jaxpr.outvars),
    )
