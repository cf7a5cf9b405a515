"""The cost graph of one mesh under a memory limit, and the specs that a solution of it picks.

The costs of nodes and edges are collected once (collector.py); a graph adds a memory limit to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from jax.extend.core import Var
from numpy.typing import NDArray

from minialpa.cluster import LogicalMesh
from minialpa.intra.graph.collector import collect_costs
from minialpa.intra.graph.decisions import Choice, LoopRecord, Record
from minialpa.intra.graph.memory_constraints import Demand, MemoryLimit, Usage, check_least, demands_of, terms_of
from minialpa.intra.graph.problem import MeshEquations, MeshSharding
from minialpa.intra.solver.cost_graph import FORBIDDEN
from minialpa.intra.solver.solve import CostGraph, Edge, GraphSolution
from minialpa.intra.strategies.combining import StartCounts
from minialpa.intra.strategies.strategy_cache import StrategyCache
from minialpa.options import AutoShardingOption
from minialpa.support.identity import ById

#: Bytes of the strategies, choices and records of one equation, about, as measured.
_EQUATION_BYTES = 3000


class GraphBuilder:
    """Makes the cost graphs of `problem` on `mesh`, one for each memory limit, and reads their solutions.

    Attributes:
        problem: equations, inputs and results of the mesh.
        costs: costs of nodes and edges.
        folding: which equations and inputs are sharded alike; None if each is decided on its own.
    """

    def __init__(
        self,
        problem: MeshEquations,
        mesh: LogicalMesh,
        option: AutoShardingOption,
        *,
        folded: bool = False,
        cache: StrategyCache | None = None,
        counted: StartCounts | None = None,
        forbidden_s: float = math.inf,
        hides: bool = False,
    ) -> None:
        """Raises InfeasibleError if an option cannot be kept on `mesh`.

        Args:
            problem: equations, inputs and results of the mesh.
            mesh: the logical mesh.
            option: what the user asks of shardings.
            folded: whether repeated layers are sharded alike.
            cache: strategies and prices that other problems have already computed.
            counted: how many sums of gradients start as one, in a solution; None if there is none yet.
            forbidden_s: see `reshard_table`.
            hides: whether collectives that work hides cost a part of their seconds.
        """
        cache = cache or StrategyCache()

        collected = collect_costs(
            problem,
            mesh,
            option,
            folded=folded,
            cache=cache,
            counted=counted,
            forbidden_s=forbidden_s,
            hides=hides,
        )
        self.problem, self.costs, self.folding = problem, collected.costs, collected.folding
        self._mesh_shape, self._collected = mesh.shape, collected

    @property
    def n_bytes(self) -> float:
        """Bytes of the arrays of costs and the objects of each equation, about."""
        return self.costs.n_bytes + _EQUATION_BYTES * len(self.problem.eqns)

    @property
    def least_compute_s(self) -> float:
        """The least compute of a step under any shardings, in seconds."""
        records = self._collected.records
        return sum(n * one.least_compute_s for n, one in zip(self.problem.times, records, strict=True))

    def graph(self, limit: MemoryLimit | None = None, kept: Sequence[Usage] = (), byte_s: float = 0.0) -> CostGraph:
        """The cost graph, in which each byte per device of `kept` costs `byte_s` seconds.

        Raises InfeasibleError if no strategies can keep `limit`.
        """
        node_costs = list(self.costs.nodes)
        if byte_s:
            for demand in self._demands(kept):
                if demand.node is not None:
                    node_costs[demand.node] = node_costs[demand.node] + byte_s * demand.n_bytes

        edges = tuple(Edge(a, b, cost) for (a, b), cost in self.costs.edges.items())
        if limit is None:
            return CostGraph(node_costs=tuple(node_costs), edges=edges)

        # Parameters and optimizer state stay for the whole step; the limit knows when all else is live.
        n_times = limit.n_times
        stays = [Usage(var, 1, 0, n_times) for var, role in self.problem.inputs if role in ("parameter", "state")]
        demands = self._demands([*stays, *limit.usages])
        check_least(demands, limit, self._allowed)
        terms = terms_of(demands, limit.limit_bytes, n_times)
        usage_limit = limit.limit_bytes if terms else None
        return CostGraph(node_costs=tuple(node_costs), edges=edges, usage_limit=usage_limit, extra_usages=terms)

    def _demands(self, usages: Sequence[Usage]) -> list[Demand]:
        return demands_of(usages, self._collected.choices, self._mesh_shape, self._as_read)

    def _as_read(self, var: Var, reader: Var) -> Choice | None:
        """The choice of the spec in which the equation whose first result is `reader` reads `var`."""
        i = self._made_by[reader]
        k = self.problem.eqns[i].invars.index(var)
        record = self._collected.records[i]
        if isinstance(record, Record):
            return Choice(record.node, record.strategies.operands[k])
        return record.operands[k] if isinstance(record, LoopRecord) else None

    @cached_property
    def _made_by(self) -> dict[Var, int]:
        """The number of the equation that makes each variable first of all its results."""
        return {eqn.outvars[0]: i for i, eqn in enumerate(self.problem.eqns) if eqn.outvars}

    def _allowed(self, demand: Demand) -> NDArray[np.bool_]:
        if demand.node is None:
            return np.ones(1, bool)
        return self.costs.nodes[demand.node] < FORBIDDEN

    def read(self, solution: GraphSolution) -> MeshSharding:
        """The specs that a solution of the graph picks."""
        picks, choices, final = solution.choices, self._collected.choices, self._collected.final
        records = self._collected.records
        specs = {var: choice.read(picks) for var, choice in choices.items()}
        results = {var: final[var].read(picks) if var in final else specs[var] for var, _ in self.problem.results}

        # Equations that are sharded alike share a record, and then also what is read from it.
        read = {record: record.value.read(picks) for record in set(map(ById, records))}
        return MeshSharding(
            specs=specs,
            results=results,
            equations=tuple(read[ById(record)] for record in records),
            compute_s=tuple(record.compute_s(picks) for record in records),
            optimal=solution.optimal,
            gap=solution.gap,
            bound_s=solution.lower_bound - self._collected.inputs_s,
        )
