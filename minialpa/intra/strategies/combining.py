"""Which collectives start together.

Compilers combine collectives that do not wait for each other, so that they share the time to start. Gradients wait for
nothing but the backward pass. Other sums of one *depth*, the number of contractions and reductions on the longest path
to them, cannot wait for each other: the mean and the mean square of a normalisation, say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jax.extend.core import JaxprEqn, Var

from minialpa.rules.heavy import has_contraction
from minialpa.tracing.jaxprs import operand_vars


def n_together(eqns: Sequence[JaxprEqn]) -> dict[Var, int]:
    """For each result of a reduction, how many reductions there are of its depth."""
    depth: dict[Var, int] = {}
    sums: dict[Var, int] = {}

    # In order, so the depths of all operands are known.
    for eqn in eqns:
        reduces = eqn.primitive.name.startswith("reduce_")
        own = max((depth.get(var, 0) for var in operand_vars(eqn)), default=0)
        own += reduces or has_contraction(eqn)
        depth.update((var, own) for var in eqn.outvars)
        if reduces:
            sums.update((var, own) for var in eqn.outvars)

    counts = Counter(sums.values())
    return {var: counts[own] for var, own in sums.items()}
