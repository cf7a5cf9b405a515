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

from minialpa.rules.heavy import has_contraction
from minialpa.tracing.jaxprs import operand_vars


def hidden_values(
    eqns: Sequence[JaxprEqn], invars: Sequence[Var], early: Collection[Var], awaited: Collection[Var]
) -> frozenset[Var]:
    """The values of a program whose collectives all its work can hide.

    early: those of `invars` that are there before it starts. awaited: results that somebody waits for.
    """
    ahead = set(early)
    for eqn in eqns:
        if ahead.issuperset(operand_vars(eqn)) and not has_contraction(eqn):
            ahead.update(eqn.outvars)

    needed = set(awaited)
    for eqn in reversed(eqns):
        if has_contraction(eqn) or not needed.isdisjoint(eqn.outvars):
            needed.update(operand_vars(eqn))
    made = (*invars, *(v for eqn in eqns for v in eqn.outvars))
    return frozenset(ahead.union(v for v in made if v not in needed))
