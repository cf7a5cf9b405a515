"""The verifier of blocks: it raises where an operation reads what is not there, or has a result of another type."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from jax.extend.core import Var

from minialpa.errors import VerifyError
from minialpa.ir.block import Block
from minialpa.ir.equations import Atom, aval_of, is_literal
from minialpa.support.private_jax import result_avals


def verify_block(block: Block, known: AbstractSet[Var] = frozenset(), *, later: Mapping[Var, int] = {}) -> None:
    """Raise VerifyError, with the number of the operation, unless

    - every value is an operand of the block or of `known`, or made once, before it is read;
    - every operation makes the types that its primitive computes of the types that it reads.

    later: for values that no operation makes, and that are there from an operation of this number on.
    """
    there = {*block.constvars, *block.invars, *known}

    def require(atom: Atom, i: int, what: str) -> None:
        if not is_literal(atom) and atom not in there and later.get(atom, i + 1) > i:
            raise VerifyError(f"{what} reads a value of type {aval_of(atom)} that is not there.")

    for i, eqn in enumerate(block.eqns):
        what = f"Operation %{i}, `{eqn.primitive.name}`,"
        for atom in eqn.invars:
            require(atom, i, what)
        for value in eqn.outvars:
            if value in there:
                raise VerifyError(f"{what} makes a value that is there already.")
            there.add(value)
        _verify_types(block, i)
    for atom in block.outvars:
        require(atom, len(block.eqns), "A result of the block")


def _verify_types(block: Block, i: int) -> None:
    """Raise VerifyError unless operation i makes what its primitive computes."""
    eqn = block.eqns[i]
    made = result_avals(eqn, tuple(map(aval_of, eqn.invars)), eqn.params)
    for expected, value in zip(made, eqn.outvars, strict=True):
        found = aval_of(value)
        if (getattr(expected, "shape", None), getattr(expected, "dtype", None)) != (
            getattr(found, "shape", None),
            getattr(found, "dtype", None),
        ):
            raise VerifyError(f"Operation %{i}, `{eqn.primitive.name}`, makes {expected}, and its result is {found}.")
