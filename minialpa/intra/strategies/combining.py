"""Which collectives start together: equations in, for each value the number of sums that are combined with its own.

Compilers put collectives that do not wait for each other into one, so that they share the time to start. Gradients wait
for nothing but the backward pass. Other sums of one *depth*, the number of contractions and reductions on the longest
way to them, cannot wait for each other: the mean and the mean square of a normalisation, say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jax.extend.core import JaxprEqn, Var

from minialpa.intra.strategies.strategies import has_contraction
from minialpa.tracing.jaxprs import operand_vars


def n_together(eqns: Sequence[JaxprEqn]) -> dict[Var, int]:
    """For each result of a reduction, how many reductions there are of its depth."""
    depth: dict[Var, int] = {}
    sums: dict[Var, int] = {}
    for eqn in eqns:
        reduces = eqn.primitive.name.startswith("reduce_")
        own = max((depth.get(v, 0) for v in operand_vars(eqn)), default=0)
        own += reduces or has_contraction(eqn)
        depth.update((v, own) for v in eqn.outvars)
        if reduces:
            sums.update((v, own) for v in eqn.outvars)
    counts = Counter(sums.values())
    return {v: counts[own] for v, own in sums.items()}
