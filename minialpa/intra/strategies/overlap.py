"""The equations of a program in; the values whose collectives other work can hide out.

A GPU computes while its links are busy, if it has work that neither makes nor needs the data on the links. All the work
of a program can run beside the collectives of two kinds of values:

    ahead     made of values that are live on entry, without a contraction: a weight that is gathered
    late      read neither by a contraction nor for a required output: a gradient that is summed

In a loop, an iteration can fetch slices and constants for the next iteration, and slices of results can wait.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jax.extend.core import JaxprEqn, Var

from minialpa.ir.equations import operand_vars
from minialpa.rules.expensive import has_contraction


def hidden_values(
    eqns: Sequence[JaxprEqn],
    invars: Sequence[Var],
    live_on_entry: Collection[Var],
    required_outputs: Collection[Var],
    *,
    in_loop: bool = False,
) -> frozenset[Var]:
    """The values of a program whose collectives its work can hide.

    live_on_entry: the `invars` that exist before the program starts.
    required_outputs: the results for which later work waits.
    in_loop: whether the iterations before and after run beside the program. Otherwise, operands of the first
        contraction and values made of the last one have no work beside them.
    """
    ahead = set(live_on_entry)
    for eqn in eqns:
        if ahead.issuperset(operand_vars(eqn)) and not has_contraction(eqn):
            ahead.update(eqn.outvars)

    needed = set(required_outputs)
    for eqn in reversed(eqns):
        if has_contraction(eqn) or not needed.isdisjoint(eqn.outvars):
            needed.update(operand_vars(eqn))
    late = {v for v in (*invars, *(v for eqn in eqns for v in eqn.outvars)) if v not in needed}
    if in_loop:
        return frozenset(ahead | late)
    return frozenset((ahead - _needed_by_first_contraction(eqns)) | (late - _made_of_last_contraction(eqns)))


def _needed_by_first_contraction(eqns: Sequence[JaxprEqn]) -> set[Var]:
    first = next((i for i, eqn in enumerate(eqns) if has_contraction(eqn)), None)
    if first is None:
        return {v for eqn in eqns for v in operand_vars(eqn)}
    read = set(operand_vars(eqns[first]))
    for eqn in reversed(eqns[:first]):
        if not read.isdisjoint(eqn.outvars):
            read.update(operand_vars(eqn))
    return read


def _made_of_last_contraction(eqns: Sequence[JaxprEqn]) -> set[Var]:
    last = next((i for i in reversed(range(len(eqns))) if has_contraction(eqns[i])), None)
    if last is None:
        return set()
    made = set(eqns[last].outvars)
    for eqn in eqns[last + 1 :]:
        if not made.isdisjoint(operand_vars(eqn)):
            made.update(eqn.outvars)
    return made
