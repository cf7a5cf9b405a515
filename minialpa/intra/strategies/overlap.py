"""Values whose collectives other work can hide: a program in, and those that are there early or awaited late out.

A GPU computes while its links are busy, as far as something is there to compute that neither makes what is sent nor
waits for it. Two kinds of values leave all the work of a program to run beside their collectives:

    ahead     made of what is there before the program starts, without a contraction: a weight that is gathered
    behind    read by no contraction, and by nothing that waits for the program: a gradient that is summed

In a loop both are meant for each iteration: the slices and constants that it takes are there early, as an iteration can
fetch those of the next one, and the slices of results are awaited late.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jax.extend.core import JaxprEqn, Var

from minialpa.ir.equations import operand_vars
from minialpa.rules.heavy import has_contraction


def hidden_values(
    eqns: Sequence[JaxprEqn],
    invars: Sequence[Var],
    early: Collection[Var],
    awaited: Collection[Var],
    *,
    in_loop: bool = False,
) -> frozenset[Var]:
    """The values of a program whose collectives its work can hide.

    early: those of `invars` that are there before it starts. awaited: results that somebody waits for. in_loop: whether
    the program is an iteration of a loop, so that the iterations before and behind are beside it. Otherwise what the
    first contraction reads, and what is made of the last one, has no work beside it.
    """
    ahead = set(early)
    for eqn in eqns:
        if ahead.issuperset(operand_vars(eqn)) and not has_contraction(eqn):
            ahead.update(eqn.outvars)

    needed = set(awaited)
    for eqn in reversed(eqns):
        if has_contraction(eqn) or not needed.isdisjoint(eqn.outvars):
            needed.update(operand_vars(eqn))
    behind = {v for v in (*invars, *(v for eqn in eqns for v in eqn.outvars)) if v not in needed}
    if in_loop:
        return frozenset(ahead | behind)
    return frozenset((ahead - _read_first(eqns)) | (behind - _made_last(eqns)))


def _read_first(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """What the first contraction reads, or is made of."""
    first = next((i for i, eqn in enumerate(eqns) if has_contraction(eqn)), None)
    if first is None:
        return {v for eqn in eqns for v in operand_vars(eqn)}
    read = set(operand_vars(eqns[first]))
    for eqn in reversed(eqns[:first]):
        if not read.isdisjoint(eqn.outvars):
            read.update(operand_vars(eqn))
    return read


def _made_last(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """The results of the last contraction, and what is made of them."""
    last = next((i for i in reversed(range(len(eqns))) if has_contraction(eqns[i])), None)
    if last is None:
        return set()
    made = set(eqns[last].outvars)
    for eqn in eqns[last + 1 :]:
        if not made.isdisjoint(operand_vars(eqn)):
            made.update(eqn.outvars)
    return made
