"""The region inside a control flow equation in; the factors of the equation, and its parameters on shards, out.

`body_splits` finds groups and their outcomes, `BoundaryTable` makes a factor of each group that may be split, and
`BodyShards` has the programs on shards, for `local_params` and `started`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from minialpa.ir.equations import Atom, is_literal, shape_of, type_of
from minialpa.rules.body_groups import Groups, Node, Region, find_groups, leading_nodes, node_of
from minialpa.rules.body_outcomes import Outcome, follow, zero_arrays
from minialpa.rules.common import FactorTable
from minialpa.rules.factors import Dims, Factors, Shapes
from minialpa.rules.known_rules import Starts
from minialpa.rules.shards import localize, part_of, run_from
from minialpa.support.private_jax import scopes_of
from minialpa.tracing.evaluation import eval_equation, eval_on_shards


@dataclass(frozen=True, slots=True, kw_only=True)
class BodySplits:
    """A region, and the outcome of each group that may be split.

    part_flops: of one run of each part.
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
    """Makes a factor for each group of a control flow equation."""

    splits: BodySplits
    table: FactorTable = field(default_factory=FactorTable)
    factors: dict[Node, int] = field(default_factory=dict)

    def dims(self, atom: Atom) -> Dims:
        return tuple(self._dim(node_of(atom, d), size) for d, size in enumerate(shape_of(atom)))

    def _dim(self, node: Node, size: int) -> tuple[int, ...]:
        group = self.splits.groups.find(node)
        outcome = self.splits.outcomes.get(group)
        if outcome is None or size <= 1:
            return self.table.dim(size, blocked=size > 1)

        # A group has at most `n_blocks`; a block is not cut.
        n_blocks = self.splits.groups.sizes[group]
        if group not in self.factors:
            is_positional = group in self.splits.groups.positional
            # Without dependent results, the factor is reduced, without partial results.
            reduction = outcome.reduction or (None if "split" in outcome.results else "sum")
            (self.factors[group],) = self.table.dim(n_blocks, positional=is_positional, reduction=reduction)
        rest = self.table.dim(size // n_blocks, blocked=True) if size != n_blocks else ()
        return (self.factors[group], *rest)

    def build(self, eqn: JaxprEqn, operands: Sequence[Dims], results: Sequence[Dims], flops: float) -> Factors:
        """The last operands are the inputs of the region."""
        n_before = len(operands) - len(self.splits.region.inputs)
        outcomes = {f: self.splits.outcomes[group] for group, f in self.factors.items()}
        reduced = {f: outcome for f, outcome in outcomes.items() if f in self.table.reductions}
        return replace(
            self.table.build(eqn, operands, results, flops=flops),
            unaffected=frozenset((f, r) for f, outcome in reduced.items() for r in outcome.replicated),
            counted_once=frozenset((f, n_before + i) for f, outcome in outcomes.items() for i in outcome.sums),
        )


# ---- on shards -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BodyShards:
    """A region on shards.

    groups: a group has `groups.sizes[group]` blocks.
    starts: the number of the shard's first block for each split positional group; empty if unknown.
    """

    region: Region
    groups: Groups
    n_splits: Mapping[Node, int]
    starts: Mapping[Node, Any]

    def structs(self, atoms: Sequence[Atom]) -> list[Any]:
        return [self._struct(atom) for atom in atoms]

    def _struct(self, atom: Any) -> Any:
        parts = (self.n_splits.get(self.groups.find(node_of(atom, d)), 1) for d in range(len(shape_of(atom))))
        shape = tuple(size // n for size, n in zip(shape_of(atom), parts, strict=True))
        return type_of(atom.aval, shape)

    def program(self, part: int) -> Any:
        """As a closed jaxpr; it keeps sharding constraints for micro-batches."""
        structs = self.structs(self.region.parts[part].invars)
        return jax.make_jaxpr(lambda *args: self._run(part, args, eval_equation))(*structs)

    def run(self, part: int, args: Sequence[Any]) -> list[Any]:
        return self._run(part, args, eval_on_shards)

    def _run(self, part: int, args: Sequence[Any], evaluate: Callable[..., list[Any]]) -> list[Any]:
        program = self.region.parts[part]
        consts = zip(program.constvars, program.consts, strict=True)
        env: dict[Any, Any] = {var: self._own_part(var, value) for var, value in consts}
        env.update(zip(program.invars, args, strict=True))

        for eqn in program.eqns:
            operands = [self._own_part(atom, atom.val) if is_literal(atom) else env[atom] for atom in eqn.invars]
            with scopes_of(eqn):
                env.update(zip(eqn.outvars, self._run_equation(eqn, operands, evaluate), strict=True))
        return [self._literal_result(atom) if is_literal(atom) else env[atom] for atom in program.outvars]

    def _run_equation(
        self, eqn: JaxprEqn, operands: Sequence[Any], evaluate: Callable[..., list[Any]]
    ) -> Sequence[Any]:
        factors = self.region.factors[eqn]
        groups = {f: self.groups.find(nodes[0]) for f, nodes in leading_nodes(eqn, factors).items()}
        n_splits = {f: self.n_splits.get(group, 1) for f, group in groups.items()}

        # A group may have fewer blocks than the factor has elements.
        begins = {
            f: self.starts[group] * (factors.sizes[f] // self.groups.sizes[group])
            for f, group in groups.items()
            if f in factors.blocked and group in self.starts
        }
        if begins:
            return run_from(eqn, factors, operands, n_splits, begins)
        return evaluate(eqn, operands, localize(eqn, factors, n_splits))

    def _own_part(self, atom: Atom, value: Any) -> Any:
        """The device holds the array in full."""
        for d, size in enumerate(shape_of(atom)):
            group = self.groups.find(node_of(atom, d))
            if size > 1 and group in self.starts:
                start = self.starts[group] * (size // self.groups.sizes[group])
                value = part_of(value, d, start, self.n_splits[group])
        return value

    def _literal_result(self, atom: Any) -> Any:
        """A literal may be a Python number."""
        return self._own_part(atom, np.asarray(atom.val, getattr(atom.aval, "dtype", None)))


def _n_splits(splits: BodySplits, local: Shapes) -> dict[Node, int]:
    """From local shapes of inputs and results."""
    atoms = (*splits.region.inputs, *(atoms[0] for atoms in splits.region.results))
    n_splits: dict[Node, int] = {}
    for atom, local_shape in zip(atoms, local, strict=True):
        for d, (size, local_size) in enumerate(zip(shape_of(atom), local_shape, strict=True)):
            if local_size != size:
                n_splits[splits.groups.find(node_of(atom, d))] = size // local_size
    return n_splits


def local_params(
    eqn: JaxprEqn, splits: BodySplits, inputs: Shapes, results: Shapes, params_of: Callable[[Callable[[int], Any]], Any]
) -> dict[str, Any]:
    """The parameters of a control flow equation on shards of these shapes.

    Programs that depend on positions, as through an `iota`, are unknown until `on_shards` runs: then the parameter
    `shards` describes the cut. No primitive has such a parameter, so the equation cannot run before.

    params_of: makes the parameters from `program(i)`, part i of the region on shards. A scan has
        `lambda program: {"jaxpr": program(0)}`.
    """
    region, groups = splits.region, splits.groups
    n_splits = _n_splits(splits, (*inputs, *results))
    shards = BodyShards(region=region, groups=groups, n_splits=n_splits, starts={})
    if not groups.positional.isdisjoint(n_splits):
        return dict(eqn.params, shards=shards)
    return dict(eqn.params, **params_of(shards.program))


def started(shards: BodyShards, starts: Starts) -> BodyShards:
    groups, region = shards.groups, shards.region
    n_before = len(starts.operands) - len(region.inputs)
    known: dict[Node, Any] = {}
    results = (atoms[0] for atoms in region.results)
    for atom, dims in zip((*region.inputs, *results), (*starts.operands[n_before:], *starts.results), strict=True):
        # A stack has one dimension more, for the iterations.
        array_dims = dims[len(dims) - len(shape_of(atom)) :]
        for d, start in enumerate(array_dims):
            group = groups.find(node_of(atom, d))
            if shape_of(atom)[d] > 1 and group in shards.n_splits and group in groups.positional:
                known[group] = jnp.asarray(start, np.int32)
    return replace(shards, starts=known)
