"""Cost graph of one mesh: its equations and inputs in, nodes and edges out, and specs read back from a solution.

Every input and most equations are nodes; their strategies are specs. An equation whose operands all come from one node
*follows* it: it has the same strategies, and its cost is added to the node's. In the update, elementwise equations
follow the first optimizer value that they meet, so each parameter has a handful of nodes. An edge holds the seconds of
resharding a value from what its node makes to what a reader wants. Whatever happens per micro-batch is weighted so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jax.extend.core import JaxprEqn, Var
from numpy.typing import NDArray

from minialpa.cluster import LogicalMesh
from minialpa.intra import rules as _rules  # noqa: F401  (registers the rules)
from minialpa.intra.costgraph import FORBIDDEN
from minialpa.intra.factors import Factors, factors_of
from minialpa.intra.ilp import CostGraph, Edge, GraphSolution
from minialpa.intra.reshard import reshard_table
from minialpa.intra.spmd import EquationSpecs
from minialpa.intra.strategies import StrategySet, enumerate_strategies, follow, is_contraction
from minialpa.intra.usage import Demand, MemoryLimit, Usage, check_least, terms_of
from minialpa.jaxprs import Atom, aval_of, bytes_of, is_extended, is_literal, shape_of
from minialpa.options import AutoShardingOption
from minialpa.sharding import Spec, specs_of

Role = Literal["parameter", "state", "batch", "received"]


@dataclass(frozen=True, slots=True)
class MeshEquations:
    """What runs on one mesh.

    eqns, times, in_update: equations in order, how often per step each runs, and whether it belongs to the update.
    inputs: variables that come from outside, and their roles; `state` is read by the update only.
    aliases: donated inputs and their replacements. equal: pairs of variables (accumulated, total) with one spec.
    batch_dims: dimension of the examples, for variables that have one. whole: variables that leave the mesh, or are
    combined over micro-batches other than by a sum, and so may not be left as partial sums.
    """

    eqns: tuple[JaxprEqn, ...]
    times: tuple[int, ...]
    in_update: tuple[bool, ...]
    inputs: tuple[tuple[Var, Role], ...]
    aliases: tuple[tuple[Var, Var], ...]
    equal: Mapping[Var, Var]
    batch_dims: Mapping[Var, int]
    whole: frozenset[Var]


@dataclass(frozen=True, slots=True)
class MeshSharding:
    """Solution for one mesh.

    compute_s: seconds per micro-batch and, second, of the update.
    """

    specs: dict[Var, Spec]
    equations: tuple[EquationSpecs, ...]
    compute_s: tuple[float, float]
    optimal: bool
    gap: float


@dataclass(slots=True)
class _Node:
    costs: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Choice:
    """Specs of a variable for each strategy of `node`; node None has the one strategy."""

    node: int | None
    specs: tuple[Spec, ...]


@dataclass(frozen=True, slots=True)
class _Record:
    """Strategies of an equation for each strategy of `node`."""

    node: int | None
    strategies: StrategySet


class GraphBuilder:
    """Collects nodes and edges for `problem` on `mesh`; then `graph()`, and `read(solution)`."""

    def __init__(
        self, problem: MeshEquations, mesh: LogicalMesh, option: AutoShardingOption, limit: MemoryLimit | None = None
    ) -> None:
        self.problem, self.mesh, self.option, self.limit = problem, mesh, option, limit
        self.nodes: list[_Node] = []
        self.edges: dict[tuple[int, int], NDArray[np.float64]] = {}
        self.choices: dict[Var, _Choice] = {}
        self.records: list[_Record] = []
        self.clusters: set[int] = set()
        self.n_readers = Counter(v for eqn in problem.eqns for v in eqn.invars if not is_literal(v))
        for var, role in problem.inputs:
            self._add_input(var, role)
        for eqn, times, in_update in zip(problem.eqns, problem.times, problem.in_update, strict=True):
            self._add_equation(eqn, times, in_update)
        for source, target in problem.aliases:
            self._add_edge(target, self.choices[source].node, self.choices[source].specs, 1)

    def graph(self) -> CostGraph:
        """The graph, with a usage limit if there is one. Raises InfeasibleError where that is hopeless."""
        costs = tuple(node.costs for node in self.nodes)
        edges = tuple(Edge(a, b, cost) for (a, b), cost in self.edges.items())
        if self.limit is None:
            return CostGraph(costs, edges)
        demands = self._demands(self.limit)
        check_least(demands, self.limit, self._allowed)
        terms = terms_of(demands, self.limit.limit_bytes, self.limit.n_times)
        empty = tuple(np.zeros(len(cost)) for cost in costs)
        return CostGraph(costs, edges, empty, ((0, 1),) * len(costs), self.limit.limit_bytes, terms)

    def _demands(self, limit: MemoryLimit) -> list[Demand]:
        kept = [Usage(v, 1, 0, limit.n_times) for v, role in self.problem.inputs if role in ("parameter", "state")]
        out = []
        for usage in (*kept, *limit.usages):
            if usage.var in self.choices:
                choice, whole = self.choices[usage.var], usage.n_copies * bytes_of(usage.var)
                local = np.array([whole / spec.n_shards(self.mesh.shape) for spec in choice.specs])
                out.append(Demand(usage.var, choice.node, local, usage.start, usage.end))
        return out

    def _allowed(self, demand: Demand) -> NDArray[np.bool_]:
        if demand.node is None:
            return np.ones(1, bool)
        return self.nodes[demand.node].costs < FORBIDDEN

    # ---- nodes ----------------------------------------------------------------------------------------------------

    def _choice(self, atom: Atom) -> _Choice:
        """The choice of an operand that is not a literal."""
        assert isinstance(atom, Var), atom
        return self.choices[atom]

    def _new_node(self, costs: Sequence[float] | NDArray[np.float64]) -> int:
        self.nodes.append(_Node(np.array(costs, np.float64)))
        return len(self.nodes) - 1

    def _add_input(self, var: Var, role: Role) -> None:
        specs = self._input_specs(var, role)
        if len(specs) == 1 and role in ("batch", "received"):
            self.choices[var] = _Choice(None, specs)
            return
        local = [bytes_of(var) / spec.n_shards(self.mesh.shape) for spec in specs]
        # Reading an input once costs its bytes; a kept input costs only room, so it just breaks ties.
        bandwidth = self.mesh.device.memory_bandwidth if self.mesh.device else 1e12
        weight = (1.0 if role in ("batch", "received") else 1e-3) / bandwidth
        self.choices[var] = _Choice(self._new_node([weight * b for b in local]), specs)

    def _input_specs(self, var: Var, role: Role) -> tuple[Spec, ...]:
        shape, option = shape_of(var), self.option
        replicated = Spec.replicated(len(shape))
        if not option.enable_auto_sharding or is_extended(aval_of(var).dtype):
            return (replicated,)
        specs = tuple(specs_of(shape, self.mesh.shape))
        if role in ("batch", "received"):
            return self._batch_specs(var, specs)
        sharded = tuple(s for s in specs if s.n_shards(self.mesh.shape) == self.mesh.n_devices)
        if role == "state" and option.prefer_reduce_scatter and sharded:
            return sharded
        if option.force_data_parallel:
            return sharded if option.force_zero_stage_3 and sharded else (replicated,)
        if role == "parameter" and not option.allow_replicated_parameters and len(specs) > 1:
            return specs[1:]
        return specs

    def _batch_specs(self, var: Var, specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
        dim = self.problem.batch_dims.get(var)
        axes = self._batch_axes()
        if dim is None or not axes:
            return specs
        wanted = [s for s in specs if s.dims[dim] == axes]
        if self.option.force_data_parallel:
            wanted = [s for s in wanted if s.axes == axes]
        return tuple(wanted) or specs[:1]

    def _batch_axes(self) -> tuple[int, ...]:
        """Mesh axes that must split the examples."""
        if self.option.force_data_parallel:
            return tuple(axis for axis, n in enumerate(self.mesh.shape) if n > 1)
        axis = self.option.force_batch_dim_to_mesh_dim
        return () if axis is None or self.mesh.shape[axis] == 1 else (axis,)

    def _add_equation(self, eqn: JaxprEqn, times: int, in_update: bool) -> None:
        factors = factors_of(eqn)
        heavy = [k for k, v in enumerate(eqn.invars) if not is_literal(v) and self.choices[v].node is not None]
        nodes = {self._choice(eqn.invars[k]).node for k in heavy}
        fixed = {k: self.choices[v].specs[:1] for k, v in enumerate(eqn.invars) if not is_literal(v)}
        if not self.option.enable_auto_sharding or (not heavy and not _makes_array(eqn)):
            record = _Record(
                None, follow(eqn, factors, self.mesh, {} if heavy else fixed, 1, whole=self._is_whole(eqn))
            )
        elif len(nodes) == 1 and not self._has_own_strategies(eqn, factors):
            record = self._follow(eqn, factors, heavy, times)
        else:
            lead = self._cluster_operand(eqn, factors, heavy) if in_update else None
            record = (
                self._own(eqn, factors, times, in_update) if lead is None else self._follow(eqn, factors, lead, times)
            )
        self.records.append(record)
        for r, var in enumerate(eqn.outvars):
            self.choices[var] = _Choice(record.node, record.strategies.results[r])
            if var in self.problem.whole:
                self._forbid_partial(self.choices[var])
            total = self.problem.equal.get(var)
            if total is not None:
                self.choices[total] = self.choices[var]
        self._connect(eqn, record, times)

    def _is_whole(self, eqn: JaxprEqn) -> bool:
        return any(v in self.problem.whole for v in eqn.outvars)

    def _has_own_strategies(self, eqn: JaxprEqn, factors: Factors) -> bool:
        """Whether an equation does not just follow the one node that it reads from."""
        if is_contraction(eqn) or _widens(eqn, factors) or _is_marker(eqn):
            return True
        # The sum is wanted by several readers: it should not be priced once for each.
        return "sum" in factors.reductions.values() and any(self.n_readers[v] > 1 for v in eqn.outvars)

    def _forbid_partial(self, choice: _Choice) -> None:
        if choice.node is not None:
            self.nodes[choice.node].costs[[bool(spec.partial) for spec in choice.specs]] = np.inf

    def _cluster_operand(self, eqn: JaxprEqn, factors: Factors, heavy: Sequence[int]) -> list[int] | None:
        """Operands of the first optimizer cluster that an elementwise equation of the update can follow."""
        if not _is_elementwise(eqn, factors):
            return None
        for k in heavy:
            node = self._choice(eqn.invars[k]).node
            if node in self.clusters and shape_of(eqn.invars[k]) == shape_of(eqn.outvars[0]):
                return [j for j in heavy if self._choice(eqn.invars[j]).node == node]
        return None

    def _follow(self, eqn: JaxprEqn, factors: Factors, lead: Sequence[int], times: int) -> _Record:
        choices = {k: self._choice(eqn.invars[k]) for k in lead}
        node = choices[lead[0]].node
        assert node is not None
        given = {k: choice.specs for k, choice in choices.items()}
        strategies = follow(eqn, factors, self.mesh, given, len(self.nodes[node].costs), whole=self._is_whole(eqn))
        self.nodes[node].costs += times * strategies.seconds
        return _Record(node, strategies)

    def _own(self, eqn: JaxprEqn, factors: Factors, times: int, in_update: bool) -> _Record:
        required = self._required(eqn, factors, in_update)
        scatter = not self.option.force_data_parallel or self.option.prefer_reduce_scatter
        pending = {} if _is_marker(eqn) else self._n_pending(eqn, factors)
        strategies = enumerate_strategies(eqn, factors, self.mesh, required, pending, scatter=scatter)
        node = self._new_node(times * strategies.seconds)
        if in_update and _is_elementwise(eqn, factors):
            self.clusters.add(node)
        return _Record(node, strategies)

    def _n_pending(self, eqn: JaxprEqn, factors: Factors) -> dict[int, int]:
        """For each mesh axis how many operands may come as partial sums that can pass."""
        counts: dict[int, int] = {}
        for v in {eqn.invars[k] for k in factors.linear_operands if not is_literal(eqn.invars[k])}:
            for axis in {axis for spec in set(self._choice(v).specs) for axis in spec.partial}:
                counts[axis] = counts.get(axis, 0) + 1
        return counts

    def _required(self, eqn: JaxprEqn, factors: Factors, in_update: bool) -> dict[int, int | None]:
        """Factors that the options fix for mesh axes in this equation."""
        axes = self._batch_axes()
        if not axes:
            return {}
        for k, v in enumerate(eqn.invars):
            dim = None if is_literal(v) else self.problem.batch_dims.get(v)
            if dim is not None:
                factor = factors.leading_factor(k, dim)
                if factor is not None and factors.may_split(factor, math.prod(self.mesh.shape[a] for a in axes)):
                    return dict.fromkeys(axes, factor)
                return dict.fromkeys(axes, None)
        reads_arrays = any(not is_literal(v) and self.choices[v].node is not None for v in eqn.invars)
        free = not self.option.force_data_parallel or (in_update and self.option.prefer_reduce_scatter)
        return dict.fromkeys(axes, None) if reads_arrays and not free else {}

    # ---- edges ----------------------------------------------------------------------------------------------------

    def _connect(self, eqn: JaxprEqn, record: _Record, times: int) -> None:
        for v, wanted in zip(eqn.invars, record.strategies.operands, strict=True):
            if not is_literal(v):
                self._add_edge(v, record.node, wanted, times)

    def _add_edge(self, var: Var, reader: int | None, wanted: tuple[Spec, ...], times: int) -> None:
        """Pay for resharding `var` from what its node makes to `wanted`, by strategy of `reader`."""
        made = self.choices[var]
        table = reshard_table(shape_of(var), bytes_of(var), self.mesh, self.option.forbidden_collectives)
        cost = times * table.matrix(made.specs, wanted)
        if not cost.any():
            return
        if made.node is None or reader is None:
            node = made.node if reader is None else reader
            if node is not None:
                self.nodes[node].costs += cost.reshape(-1)
            return
        if made.node == reader:
            self.nodes[reader].costs += np.diagonal(cost)
            return
        key, matrix = ((made.node, reader), cost) if made.node < reader else ((reader, made.node), cost.T)
        self.edges[key] = self.edges[key] + matrix if key in self.edges else matrix

    # ---- reading a solution ---------------------------------------------------------------------------------------

    def read(self, solution: GraphSolution) -> MeshSharding:
        pick = [0 if r.node is None else solution.choices[r.node] for r in self.records]
        specs = {v: c.specs[0 if c.node is None else solution.choices[c.node]] for v, c in self.choices.items()}
        equations = tuple(
            EquationSpecs(*(tuple(column[s] for column in kind) for kind in (r.operands, r.made, r.results)))
            for r, s in zip((record.strategies for record in self.records), pick, strict=True)
        )
        compute = [0.0, 0.0]
        for record, s, late in zip(self.records, pick, self.problem.in_update, strict=True):
            compute[late] += float(record.strategies.compute_s[s])
        return MeshSharding(specs, equations, (compute[0], compute[1]), solution.optimal, solution.gap)


def _is_marker(eqn: JaxprEqn) -> bool:
    """Whether this is where an accumulated gradient is reduced, once for all micro-batches."""
    return eqn.primitive.name == "minialpa_gradient"


def _makes_array(eqn: JaxprEqn) -> bool:
    return any(math.prod(shape_of(v)) > 1 for v in eqn.outvars)


def _widens(eqn: JaxprEqn, factors: Factors) -> bool:
    """Whether the results have dimensions that no operand has, as a broadcast; these may be split freely."""
    read = {f for dims in factors.operands for dim in dims for f in dim}
    return any(f not in read and factors.sizes[f] > 1 and f not in factors.blocked
               for dims in factors.results for dim in dims for f in dim)  # fmt: skip


def _is_elementwise(eqn: JaxprEqn, factors: Factors) -> bool:
    result = factors.results[0] if len(factors.results) == 1 else None
    return result is not None and all(not dims or dims == result for dims in factors.operands)
