"""Groups of sums that start together.

Compilers combine all-reduces that do not wait for each other, so that they share the time to start. Gradients wait only
for the backward pass. Values that neither wait for a gradient nor lead to one, such as the loss, can start with them.
Other sums of one *depth*, the number of contractions and reductions on the longest path to them, cannot wait for each
other, such as the mean and the mean square of a normalisation.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jax.extend.core import JaxprEqn, Var

from minialpa.cluster import LogicalMesh
from minialpa.cost import CollectiveKind, combined_kinds
from minialpa.ir.equations import is_gradient_marker, operand_vars
from minialpa.options import AutoShardingOption
from minialpa.rules.expensive import has_contraction

#: The group of sums that start with the gradients.
WITH_GRADIENTS = 0
#: Kind and axes of collectives that may start as one, and their number.
StartCounts = tuple[tuple[CollectiveKind, tuple[int, ...], int], ...]


@dataclass(frozen=True, slots=True)
class Sharing:
    """How many sums start as one.

    Attributes:
        kinds: of the collectives that do.
        n: if they are not `counted`: each is priced as if all n were of its kind and axes.
        counted: the starts of a solution. A start that it does not have is paid in full.
    """

    kinds: tuple[CollectiveKind, ...] = ()
    n: int = 1
    counted: StartCounts | None = None

    def of(self, kind: CollectiveKind, axes: tuple[int, ...]) -> int:
        """How many collectives start with one of this kind along these axes, itself included."""
        if kind not in self.kinds:
            return 1
        if self.counted is None:
            return self.n
        return max((n for other, along, n in self.counted if (other, along) == (kind, axes)), default=1)


ALONE = Sharing()


def combined_sums(mesh: LogicalMesh, option: AutoShardingOption) -> tuple[CollectiveKind, ...]:
    """Kinds of sums that start together.

    With a sharded update, users expect that each part of a gradient is summed where it is used. So reduce-scatters are
    priced as if they start together, even where one all-reduce of many small gradients is faster.
    """
    scatters = option.sharded_update or "reduce-scatter" in combined_kinds(mesh)
    return ("all-reduce", "reduce-scatter") if scatters else ("all-reduce",)


class SumGroups(NamedTuple):
    """Sums of a program that start together.

    number: for each variable whose sum starts with others, the number of their group.
    n_together: for each of these variables, the number of reductions and gradients in its group; at least 1.
    """

    number: Mapping[Var, int]
    n_together: Mapping[Var, int]


@functools.lru_cache(maxsize=8)
def sum_groups(eqns: tuple[JaxprEqn, ...]) -> SumGroups:
    """The groups of the sums in `eqns`. The solutions of a stage share its equations."""
    number = _reductions_by_depth(eqns)
    number.update((var, WITH_GRADIENTS) for var in _beside_gradients(eqns))

    made = {var for eqn in eqns if eqn.primitive.name.startswith("reduce_") for var in eqn.outvars}
    gradients = {var for eqn in eqns if is_gradient_marker(eqn) for var in operand_vars(eqn)}
    counts = Counter(group for var, group in number.items() if var in made or var in gradients)
    return SumGroups(number, {var: max(1, counts[group]) for var, group in number.items()})


def _reductions_by_depth(eqns: Sequence[JaxprEqn]) -> dict[Var, int]:
    """The depth of each result of a reduction, from 1."""
    depth: dict[Var, int] = {}
    sums: dict[Var, int] = {}

    for eqn in eqns:
        reduces = eqn.primitive.name.startswith("reduce_")
        own = max((depth.get(var, 0) for var in operand_vars(eqn)), default=0)
        own += reduces or has_contraction(eqn)
        depth.update((var, own) for var in eqn.outvars)
        if reduces:
            sums.update((var, own) for var in eqn.outvars)
    return sums


def _beside_gradients(eqns: Sequence[JaxprEqn]) -> Iterator[Var]:
    """Gradients before they are summed, and values that neither wait for these sums nor lead to gradients."""
    markers = [eqn for eqn in eqns if is_gradient_marker(eqn)]
    if not markers:
        return
    summed = {var for eqn in markers for var in eqn.outvars}
    gradients = {var for eqn in markers for var in operand_vars(eqn)}
    yield from gradients

    late = set(summed)  # waits for a gradient
    for eqn in eqns:
        if not late.isdisjoint(operand_vars(eqn)):
            late.update(eqn.outvars)
    ahead = set(gradients)  # a gradient waits for it
    for eqn in reversed(eqns):
        if not ahead.isdisjoint(eqn.outvars):
            ahead.update(operand_vars(eqn))
    yield from (var for eqn in eqns for var in eqn.outvars if var not in late and var not in ahead)
