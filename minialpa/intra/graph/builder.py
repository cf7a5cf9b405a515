"""A `MeshEquations` in; a cost graph for each memory limit out, and the specs of a solution of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from jax.extend.core import Var
from numpy.typing import NDArray

from minialpa.intra.graph.collector import CollectedCosts
from minialpa.intra.graph.decisions import Choice, LoopRecord, Record
from minialpa.intra.graph.memory_constraints import Demand, MemoryLimit, Usage, check_least, demands_of, terms_of
from minialpa.intra.graph.problem import MeshSharding
from minialpa.intra.solver.cost_graph import FORBIDDEN
from minialpa.intra.solver.solve import CostGraph, GraphSolution
from minialpa.support.identity import ById

#: Measured bytes of the strategies, choices and records of one equation.
_EQUATION_BYTES = 3000


class GraphBuilder(CollectedCosts):
    """Adds memory limits to the collected costs (`graph`), and turns solutions into specs (`read`)."""

    @property
    def n_bytes(self) -> float:
        return self.costs.n_bytes + _EQUATION_BYTES * len(self.problem.eqns)

    @property
    def least_compute_s(self) -> float:
        """Per step, if each equation has its cheapest strategy."""
        return sum(n * one.least_compute_s for n, one in zip(self.problem.times, self.records, strict=True))

    def graph(self, limit: MemoryLimit | None = None, kept: Sequence[Usage] = (), byte_s: float = 0.0) -> CostGraph:
        """Each byte per device of `kept` costs `byte_s` seconds.

        Raises InfeasibleError if the smallest shardings of all values exceed `limit`.
        """
        node_costs = list(self.costs.nodes)
        if byte_s:
            for demand in self._demands(kept):
                if demand.node is not None:
                    node_costs[demand.node] = node_costs[demand.node] + byte_s * demand.n_bytes

        edges = tuple(self.costs.edges)
        if limit is None:
            return CostGraph(node_costs=tuple(node_costs), edges=edges)

        # These stay for the whole step.
        n_times = limit.n_times
        n_of, inputs = self.problem.repeats.n_variables, self.problem.inputs
        stays = [Usage(var, n_of(var), 0, n_times) for var, role in inputs if role in ("parameter", "state")]
        demands = self._demands([*stays, *limit.usages])
        check_least(demands, limit, self._allowed_strategies)
        terms = terms_of(demands, limit.limit_bytes, n_times)
        usage_limit = math.floor(limit.limit_bytes) if terms else None
        return CostGraph(node_costs=tuple(node_costs), edges=edges, usages=terms, usage_limit=usage_limit)

    def _demands(self, usages: Sequence[Usage]) -> list[Demand]:
        return demands_of(usages, self.choices, self.mesh.shape, self._operand_choice)

    def _operand_choice(self, var: Var, reader: Var) -> Choice | None:
        """reader: the first result of the equation that reads `var`."""
        i = self._maker_numbers[reader]
        k = self.problem.eqns[i].invars.index(var)
        record = self.records[i]
        if isinstance(record, Record):
            return Choice(record.node, record.strategies.operands[k])
        return record.operands[k] if isinstance(record, LoopRecord) else None

    @cached_property
    def _maker_numbers(self) -> dict[Var, int]:
        return {eqn.outvars[0]: i for i, eqn in enumerate(self.problem.eqns) if eqn.outvars}

    def _allowed_strategies(self, demand: Demand) -> NDArray[np.bool_]:
        if demand.node is None:
            return np.ones(1, bool)
        return self.costs.nodes[demand.node] < FORBIDDEN

    def read(self, solution: GraphSolution) -> MeshSharding:
        picks = solution.choices
        specs = {var: choice.read(picks) for var, choice in self.choices.items()}
        results = {var: self.final.get(var, self.choices[var]).read(picks) for var, _ in self.problem.results}

        # Equations share records.
        read = {record: record.value.read(picks) for record in set(map(ById, self.records))}
        return MeshSharding(
            specs=specs,
            results=results,
            equations=tuple(read[ById(record)] for record in self.records),
            compute_s=tuple(record.compute_s(picks) for record in self.records),
            optimal=solution.optimal,
            gap=solution.gap,
            bound_s=solution.lower_bound - self.inputs_s,
        )
