"""Intra-operator planning of one mesh: equations and a logical mesh in, the cheapest shardings out."""

from __future__ import annotations

import time
from collections.abc import Sequence

from minialpa.cluster import LogicalMesh
from minialpa.errors import InfeasibleError
from minialpa.intra.graph.blame import why_infeasible
from minialpa.intra.graph.builder import GraphBuilder
from minialpa.intra.graph.memory_constraints import MemoryLimit, Usage
from minialpa.intra.graph.problem import MeshEquations, MeshSharding
from minialpa.intra.solver.solve import GraphSolution, solve_graph
from minialpa.intra.strategies.strategy_cache import Menus
from minialpa.options import AutoShardingOption

#: Where layers that are sharded alike leave this gap, each is decided on its own, in models of so many equations.
_LARGE_GAP, _MOST_EQUATIONS = 0.01, 20_000


class MeshSolver:
    """`problem` on `mesh`, to be solved under one memory limit after the other."""

    def __init__(
        self, problem: MeshEquations, mesh: LogicalMesh, option: AutoShardingOption, menus: Menus | None = None
    ) -> None:
        """`menus`: shared with other problems."""
        self.problem, self.mesh, self.option, self.menus = problem, mesh, option, menus or Menus()
        self.folded = GraphBuilder(problem, mesh, option, folded=True, menus=self.menus)
        self._each: GraphBuilder | None = None

    def solve(
        self, limit: MemoryLimit | None, time_limit_s: float, kept: Sequence[Usage] = (), byte_s: float = 0.0
    ) -> MeshSharding:
        """The sharding of all values with the least seconds per step. Raises InfeasibleError if nothing fits.

        Layers that repeat are sharded alike, unless memory is so short that some should save more of it than others.
        Each byte per device of `kept` costs `byte_s` seconds.
        """
        deadline = time.monotonic() + time_limit_s
        graph = self.folded.graph(limit, kept, byte_s)
        alike: GraphSolution | None = None
        try:
            alike = solve_graph(graph, time_limit_s=time_limit_s)
        except InfeasibleError:
            if self.folded.folding is None:
                raise
        if alike is not None and (self.folded.folding is None or alike.gap <= _LARGE_GAP or self._is_large()):
            return self.folded.read(alike)
        free = self._each = self._each or GraphBuilder(self.problem, self.mesh, self.option, menus=self.menus)
        try:
            each = solve_graph(free.graph(limit, kept, byte_s), time_limit_s=max(1.0, deadline - time.monotonic()))
        except InfeasibleError:
            if alike is None:
                raise
            return self.folded.read(alike)
        return free.read(each) if alike is None or each.cost < alike.cost else self.folded.read(alike)

    def why_infeasible(self, time_limit_s: float) -> str | None:
        """Which options forbid every sharding, and at which operation; None where no forbidden collective does."""
        return why_infeasible(self.problem, self.mesh, self.option, self.menus, time_limit_s)

    @property
    def n_bytes(self) -> float:
        """About what this holds."""
        return self.folded.n_bytes + (self._each.n_bytes if self._each else 0.0)

    def _is_large(self) -> bool:
        return len(self.problem.eqns) > _MOST_EQUATIONS
