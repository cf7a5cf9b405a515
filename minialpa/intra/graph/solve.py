"""Intra-operator planning of one mesh: finds the cheapest shardings of its equations on one logical mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from minialpa.cluster import LogicalMesh
from minialpa.errors import InfeasibleError
from minialpa.intra.graph.blame import why_infeasible
from minialpa.intra.graph.builder import GraphBuilder
from minialpa.intra.graph.memory_constraints import MemoryLimit, Usage
from minialpa.intra.graph.problem import MeshEquations, MeshSharding
from minialpa.intra.solver.solve import CostGraph, Deadline, GraphSolution, solve_graph
from minialpa.intra.strategies.combining import StartCounts
from minialpa.intra.strategies.strategy_cache import StrategyCache
from minialpa.options import AutoShardingOption

#: Relative gap up to which a sharding under a memory limit is taken: far below what costs are off by.
_GAP = 1e-3
#: Largest relative gap at which repeated layers stay sharded alike; beyond it, each layer is decided on its own.
_LARGE_GAP = 0.01
#: Number of equations beyond which deciding on each layer would take too long.
_MOST_EQUATIONS = 20_000
#: Seconds that the search which decides on each layer always has, whatever the first search has left of the time.
_LEAST_TIME_S = 1.0


class MeshSolver:
    """Solves `problem` on `mesh` under one memory limit after the other."""

    def __init__(
        self,
        problem: MeshEquations,
        mesh: LogicalMesh,
        option: AutoShardingOption,
        cache: StrategyCache | None = None,
        counted: StartCounts | None = None,
        *,
        hides: bool = False,
    ) -> None:
        """`cache` is shared with other problems; `counted`, `hides`: see `GraphBuilder`."""
        self.problem, self.mesh, self.option, self.cache = problem, mesh, option, cache or StrategyCache()
        self._counted, self._hides = counted, hides
        self.folded = self._builder(folded=True)
        self._each: GraphBuilder | None = None  # decides on each layer; built when it is first needed

    def solve(
        self, limit: MemoryLimit | None, deadline: Deadline, kept: Sequence[Usage] = (), byte_s: float = 0.0
    ) -> MeshSharding:
        """The sharding of all values with the least seconds per step. Raises InfeasibleError if nothing fits.

        Repeated layers are sharded alike, unless memory is so short that some should save more of it than others.
        Each byte per device of `kept` costs `byte_s` seconds. `deadline` counts work, so that the answer does not
        depend on how busy the machine is.
        """
        graph = self.folded.graph(limit, kept, byte_s)
        alike: GraphSolution | None = None
        try:
            alike = solve_graph(graph, deadline, gap=_GAP)
        except InfeasibleError:
            if self.folded.folding is None:
                raise
        if alike is not None and self._is_good_enough(alike):
            return self._read(self.folded, graph, alike)

        # Memory is short. Layers that need not be alike may fit, or come closer to the bound.
        free = self._each = self._each or self._builder(folded=False)
        late = deadline.within(max(_LEAST_TIME_S, deadline.left_s))
        try:
            free_graph = free.graph(limit, kept, byte_s)
            each = solve_graph(free_graph, late, gap=_GAP)
        except InfeasibleError:
            if alike is None:
                raise
            return self._read(self.folded, graph, alike)
        if alike is None or each.cost < alike.cost:
            return self._read(free, free_graph, each)
        return self._read(self.folded, graph, alike)

    @staticmethod
    def _read(builder: GraphBuilder, graph: CostGraph, solution: GraphSolution) -> MeshSharding:
        return replace(builder.read(solution), counted_bytes=graph.peak_usage(solution.choices))

    def _builder(self, *, folded: bool) -> GraphBuilder:
        return GraphBuilder(
            self.problem,
            self.mesh,
            self.option,
            folded=folded,
            cache=self.cache,
            counted=self._counted,
            hides=self._hides,
        )

    def _is_good_enough(self, alike: GraphSolution) -> bool:
        """Whether deciding on each layer would gain nothing, or little, or take too long."""
        is_large = len(self.problem.eqns) > _MOST_EQUATIONS
        return self.folded.folding is None or alike.gap <= _LARGE_GAP or is_large

    def why_infeasible(self, time_limit_s: float) -> str | None:
        """Which options forbid every sharding, and at which operation; None if no forbidden collective does."""
        return why_infeasible(self.problem, self.mesh, self.option, self.cache, time_limit_s)

    @property
    def n_bytes(self) -> float:
        """Bytes of the graphs that are kept, about."""
        return self.folded.n_bytes + (self._each.n_bytes if self._each else 0.0)
