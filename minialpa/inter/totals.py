"""Totals over all examples that a micro-batch reads: a step and how its values depend on examples in; which totals the
micro-batches need, and which equations know them before the first micro-batch, out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from minialpa.inter.batching import AGGREGATE, Kinds
from minialpa.jaxprs import is_literal, live_equations
from minialpa.trace import TracedStep


@dataclass(frozen=True, slots=True)
class Totals:
    """needed: totals that enter a computation on examples, and those that they come from, but for the known ones.

    before: numbers of the equations that compute needed totals from the batch alone. kinds: how values depend on the
    examples in the loop, for which such totals are constants like any other input.
    """

    needed: set[Var]
    before: set[int]
    kinds: Kinds


def find_totals(step: TracedStep, eqns: Sequence[JaxprEqn], kinds: Kinds) -> Totals:
    """The totals of a step whose equations are `eqns`."""
    needed = _needed(eqns, kinds)
    before, roots = _computed_before(step, eqns, needed)
    rest = _without(eqns, kinds, roots)
    return Totals(needed & rest.keys(), before, rest)


def _needed(eqns: Sequence[JaxprEqn], kinds: Kinds) -> set[Var]:
    """Aggregates whose total enters a computation on examples, and the aggregates that those come from."""
    needed: set[Var] = set()
    for eqn in reversed(eqns):
        mine = [v for v in eqn.invars if not is_literal(v)]
        on_examples = any(isinstance(kinds.get(v), int) for v in mine)
        if on_examples or any(v in needed for v in eqn.outvars):
            needed.update(v for v in mine if kinds.get(v) == AGGREGATE)
    return needed


def _computed_before(step: TracedStep, eqns: Sequence[JaxprEqn], needed: set[Var]) -> tuple[set[int], set[Var]]:
    """Equations of needed aggregates that are cheap and depend on the batch alone, not on other float inputs; and these
    aggregates."""
    inputs = zip(step.flat.invars, step.batch_dims, strict=True)
    independent: set[Var] = {v for v, dim in inputs if dim is not None}
    independent.update(step.flat.constvars)
    computed: set[Var] = set()
    for eqn in eqns:
        heavy = eqn.primitive.name in ("dot_general", "conv_general_dilated") or bool(eqn.params.get("jaxpr"))
        if not heavy and all(is_literal(v) or v in independent for v in eqn.invars):
            independent.update(eqn.outvars)
            computed.update(eqn.outvars)
    roots = needed & computed
    keep = live_equations(list(eqns), list(roots)) if roots else [False] * len(eqns)
    return {i for i, k in enumerate(keep) if k and not eqns[i].effects}, roots


def _without(eqns: Sequence[JaxprEqn], kinds: Kinds, roots: set[Var]) -> Kinds:
    """`kinds` where `roots`, and what follows from such values alone, do not depend on the examples."""
    out = {v: kind for v, kind in kinds.items() if v not in roots}
    for eqn in eqns:
        inputs = [v for v in eqn.invars if not is_literal(v)]
        if any(v in out for v in eqn.outvars) and not any(v in out for v in inputs):
            for v in eqn.outvars:
                out.pop(v, None)
    return out
