"""The equations of a program in; the groups of sums whose collectives start together out.

Compilers combine all-reduces that do not wait for each other, so that they share the latency of one start:
    group 0     sums of gradients, and values that neither need a gradient nor lead to one, such as the loss
    group d     other sums of depth d, such as the mean and the mean square of a normalisation
The depth of a sum is the number of contractions and reductions on the longest path to it: sums of one depth cannot
depend on each other.
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

#: The group of the sums of gradients.
WITH_GRADIENTS = 0
#: (kind, mesh axes, number) of collectives that may start together.
StartCounts = tuple[tuple[CollectiveKind, tuple[int, ...], int], ...]


@dataclass(frozen=True, slots=True)
class Sharing:
    """How many sums start together.

    kinds: of collectives that can start together.
    n: without `counted`, the size of the group: each sum is priced as if all n had its kind and axes.
    counted: the starts of an earlier solution. A start that is not in it is paid in full.
    """

    kinds: tuple[CollectiveKind, ...] = ()
    n: int = 1
    counted: StartCounts | None = None

    def of(self, kind: CollectiveKind, axes: tuple[int, ...]) -> int:
        """Collectives that start together with one of this kind along these axes, itself included."""
        if kind not in self.kinds:
            return 1
        if self.counted is None:
            return self.n
        return max((n for other, along, n in self.counted if (other, along) == (kind, axes)), default=1)


ALONE = Sharing()


def combined_sums(mesh: LogicalMesh, option: AutoShardingOption) -> tuple[CollectiveKind, ...]:
    """Kinds of sums that start together.

    With a sharded update, users expect that each shard of a gradient is summed where it is used. So reduce-scatters are
    priced as if they start together, even where one all-reduce of many small gradients is faster.
    """
    scatters = option.sharded_update or "reduce-scatter" in combined_kinds(mesh)
    return ("all-reduce", "reduce-scatter") if scatters else ("all-reduce",)


class SumGroups(NamedTuple):
    """Sums of a program that start together.

    n_together: the reductions and gradients in this group, at least 1.
    """

    number: Mapping[Var, int]
    n_together: Mapping[Var, int]


@functools.lru_cache(maxsize=8)
def sum_groups(eqns: tuple[JaxprEqn, ...]) -> SumGroups:
    number = _reductions_by_depth(eqns)
    number.update((var, WITH_GRADIENTS) for var in _values_with_gradients(eqns))

    made = {var for eqn in eqns if eqn.primitive.name.startswith("reduce_") for var in eqn.outvars}
    gradients = {var for eqn in eqns if is_gradient_marker(eqn) for var in operand_vars(eqn)}
    counts = Counter(group for var, group in number.items() if var in made or var in gradients)
    return SumGroups(number, {var: max(1, counts[group]) for var, group in number.items()})


def _reductions_by_depth(eqns: Sequence[JaxprEqn]) -> dict[Var, int]:
    """From 1."""
    depth: dict[Var, int] = {}
    sums: dict[Var, int] = {}

    for eqn in eqns:
        reduces = eqn.primitive.name.startswith("reduce_")
        level = max((depth.get(var, 0) for var in operand_vars(eqn)), default=0)
        level += reduces or has_contraction(eqn)
        depth.update((var, level) for var in eqn.outvars)
        if reduces:
            sums.update((var, level) for var in eqn.outvars)
    return sums


def _values_with_gradients(eqns: Sequence[JaxprEqn]) -> Iterator[Var]:
    """The unsummed gradients, and values that neither wait for their sums nor lead to gradients."""
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
