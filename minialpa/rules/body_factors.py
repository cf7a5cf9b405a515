"""The factors of an equation of control flow, and the equation on shards, from the region inside it.

`body_splits` finds the groups of a region and their outcomes; `BoundaryTable` makes a factor of each group that may be
split; `local_params` and `started` give programs on shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from minialpa.ir.equations import Atom, shape_of
from minialpa.rules.body_groups import Groups, Node, Region, find_groups, node_of
from minialpa.rules.body_outcomes import Outcome, follow, zero_arrays
from minialpa.rules.body_shards import BodyShards
from minialpa.rules.common import FactorTable
from minialpa.rules.factors import Dims, Factors, Shapes
from minialpa.rules.known_rules import Starts


@dataclass(frozen=True, slots=True, kw_only=True)
class BodySplits:
    """A region and the outcomes of its groups.

    Attributes:
        region: the equations inside.
        groups: the dimensions that are split together.
        outcomes: of each group that may be split; all others are blocked.
        part_flops: floating point operations of one run of each part of the region.
    """

    region: Region
    groups: Groups
    outcomes: Mapping[Node, Outcome]
    part_flops: tuple[float, ...]


def body_splits(region: Region) -> BodySplits:
    groups, zeros = find_groups(region), zero_arrays(region)
    at_boundary = dict.fromkeys(group for atom in (*region.inputs, *region.result_atoms) for group in groups.of(atom))

    outcomes: dict[Node, Outcome] = {}
    for group in at_boundary:
        if group not in groups.blocked and groups.sizes[group] > 1:
            outcome = follow(region, groups, group, zeros)
            if outcome is not None:
                outcomes[group] = outcome

    flops = tuple(sum(region.factors[eqn].flops for eqn in part.eqns) for part in region.parts)
    return BodySplits(region=region, groups=groups, outcomes=outcomes, part_flops=flops)


@dataclass(slots=True)
class BoundaryTable:
    """Makes the factors of a control flow equation, one for each group.

    Attributes:
        splits: the equation's region.
        table: the factors so far.
        factors: the factor of each group, if it has one so far.
    """

    splits: BodySplits
    table: FactorTable = field(default_factory=FactorTable)
    factors: dict[Node, int] = field(default_factory=dict)

    def dims(self, atom: Atom) -> Dims:
        """Factors of an input or result of the region."""
        return tuple(self._dim(node_of(atom, d), size) for d, size in enumerate(shape_of(atom)))

    def _dim(self, node: Node, size: int) -> tuple[int, ...]:
        group = self.splits.groups.find(node)
        outcome = self.splits.outcomes.get(group)
        if outcome is None or size <= 1:
            return self.table.dim(size, blocked=size > 1)

        # A group has at most `n_blocks`; the rest of the dimension stays together.
        n_blocks = self.splits.groups.sizes[group]
        if group not in self.factors:
            is_positional = group in self.splits.groups.positional
            # A factor of operands on which no result depends counts as reduced, without partial results.
            reduction = outcome.reduction or (None if "split" in outcome.results else "sum")
            (self.factors[group],) = self.table.dim(n_blocks, positional=is_positional, reduction=reduction)
        rest = self.table.dim(size // n_blocks, blocked=True) if size != n_blocks else ()
        return (self.factors[group], *rest)

    def build(self, eqn: JaxprEqn, operands: Sequence[Dims], results: Sequence[Dims], flops: float) -> Factors:
        """The factors of the equation; its last operands are the inputs of the region."""
        n_before = len(operands) - len(self.splits.region.inputs)
        outcomes = {f: self.splits.outcomes[group] for group, f in self.factors.items()}
        reduced = {f: outcome for f, outcome in outcomes.items() if f in self.table.reductions}
        return replace(
            self.table.build(eqn, operands, results, flops=flops),
            unaffected=frozenset((f, r) for f, outcome in reduced.items() for r in outcome.replicated),
            once=frozenset((f, n_before + i) for f, outcome in outcomes.items() for i in outcome.sums),
        )


def _n_splits(splits: BodySplits, local: Shapes) -> dict[Node, int]:
    """The number of parts of each group, from the local shapes of inputs and results."""
    atoms = (*splits.region.inputs, *(atoms[0] for atoms in splits.region.results))
    n_splits: dict[Node, int] = {}
    for atom, local_shape in zip(atoms, local, strict=True):
        for d, (size, local_size) in enumerate(zip(shape_of(atom), local_shape, strict=True)):
            if local_size != size:
                n_splits[splits.groups.find(node_of(atom, d))] = size // local_size
    return n_splits


def local_params(
    eqn: JaxprEqn, splits: BodySplits, inputs: Shapes, results: Shapes, named: Callable[[Callable[[int], Any]], Any]
) -> dict[str, Any]:
    """The parameters of a control flow equation on shards of these shapes.

    Programs that depend on positions are unknown until `on_shards` runs. Their parameter `shards` describes the cut; no
    primitive has such a parameter, so the equation cannot run before.

    named: from `program(i)`, the function for part i on shards, to the parameters with the parts.
    """
    region, groups = splits.region, splits.groups
    n_splits = _n_splits(splits, (*inputs, *results))
    shards = BodyShards(region=region, groups=groups, n_splits=n_splits, starts={})
    if not groups.positional.isdisjoint(n_splits):
        return dict(eqn.params, shards=shards)
    return dict(eqn.params, **named(shards.program))


def started(shards: BodyShards, starts: Starts) -> BodyShards:
    """The shards with their first blocks, as int32s."""
    groups, region = shards.groups, shards.region
    n_before = len(starts.operands) - len(region.inputs)
    known: dict[Node, Any] = {}
    results = (atoms[0] for atoms in region.results)
    for atom, dims in zip((*region.inputs, *results), (*starts.operands[n_before:], *starts.results), strict=True):
        # A stack has one dimension more than a slice, for the iterations.
        own = dims[len(dims) - len(shape_of(atom)) :]
        for d, start in enumerate(own):
            group = groups.find(node_of(atom, d))
            if shape_of(atom)[d] > 1 and group in shards.n_splits and group in groups.positional:
                known[group] = jnp.asarray(start, np.int32)
    return replace(shards, starts=known)
