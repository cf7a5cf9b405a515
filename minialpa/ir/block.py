"""`Block`: a program as a list of operations in an order in which they can run. `verify_block` checks one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from minialpa.errors import VerifyError
from minialpa.ir.equations import Atom, aval_of, is_literal, live_equations
from minialpa.ir.op import Op, Origin
from minialpa.ir.text import ProgramText, direction, modules
from minialpa.support.private_jax import result_avals


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """A program in which every variable is defined once.

    Attributes:
        constvars: variables for captured arrays.
        consts: their values.
        invars: operands.
        ops: operations; `eqns` and `origins` hold their fields under the same numbers.
        outvars: results.
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
        """The number of the operation that defines each value; inputs are absent."""
        return {value: i for i, eqn in enumerate(self.eqns) for value in eqn.outvars}

    def text(self, names: Mapping[Var, str]) -> ProgramText:
        """names: of operands; operands without a name are numbered."""
        return ProgramText((*self.constvars, *self.invars), self.ops, names)

    def __str__(self) -> str:
        text = self.text({})
        results = ", ".join(map(text.name_of, self.outvars))
        return "\n".join((*text.lines((direction, modules)), f"return {results}"))

    def with_eqns(self, eqns: Sequence[JaxprEqn]) -> Block:
        """The block with one new equation for each operation."""
        ops = zip(self.ops, eqns, strict=True)
        return replace(self, ops=tuple(op if op.eqn is eqn else replace(op, eqn=eqn) for op, eqn in ops))

    def with_each_written_as(self, written: Iterable[Sequence[JaxprEqn]]) -> Block:
        """The block with any number of equations for each operation, which keep its origin, scope and source."""
        pairs = zip(self.ops, written, strict=True)
        return replace(self, ops=tuple(replace(op, eqn=eqn) for op, eqns in pairs for eqn in eqns))

    def without_dead_operations(self) -> Block:
        """The block without operations that no result needs. Operations with side effects stay."""
        is_live = live_equations(self.eqns, self.outvars)
        return self if all(is_live) else replace(self, ops=tuple(itertools.compress(self.ops, is_live)))


def block_of(closed: ClosedJaxpr) -> Block:
    """A program of jax as a block."""
    return Block(
        constvars=tuple(closed.jaxpr.constvars),
        consts=tuple(closed.consts),
        invars=tuple(closed.jaxpr.invars),
        ops=tuple(map(Op, closed.jaxpr.eqns)),
        outvars=tuple(closed.jaxpr.outvars),
    )


def verify_block(block: Block, known: AbstractSet[Var] = frozenset(), *, later: Mapping[Var, int] = {}) -> None:
    """Raise VerifyError, with the number of the operation, unless

    - every value is an operand of the block, in `known`, or defined once before it is read;
    - every result has the shape and dtype that its primitive computes.

    later: values that exist from the operation of this number on, although no operation defines them.
    """
    there = {*block.constvars, *block.invars, *known}

    def require(atom: Atom, i: int, what: str) -> None:
        if not is_literal(atom) and atom not in there and later.get(atom, i + 1) > i:
            raise VerifyError(
                f"{what} reads a value of type {aval_of(atom)} that is not defined before it. This is a bug in "
                "minialpa: report it with this message."
            )

    for i, eqn in enumerate(block.eqns):
        what = f"Operation %{i}, `{eqn.primitive.name}`,"
        for atom in eqn.invars:
            require(atom, i, what)
        for value in eqn.outvars:
            if value in there:
                raise VerifyError(
                    f"{what} defines a value that is already defined. This is a bug in minialpa: report it with this "
                    "message."
                )
            there.add(value)
        _verify_types(eqn, what)
    for atom in block.outvars:
        require(atom, len(block.eqns), "A result of the block")


def _verify_types(eqn: JaxprEqn, what: str) -> None:
    made = result_avals(eqn, tuple(map(aval_of, eqn.invars)), eqn.params)
    for expected, found in zip(made, map(aval_of, eqn.outvars), strict=True):
        if any(getattr(expected, name, None) != getattr(found, name, None) for name in ("shape", "dtype")):
            raise VerifyError(
                f"{what} computes {expected}, but its result has the type {found}. This is a bug in minialpa: report "
                "it with this message."
            )
