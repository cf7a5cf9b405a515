"""Intra-operator planning of one mesh: equations and a logical mesh in, the cheapest shardings out."""

from __future__ import annotations

from minialpa.cluster import LogicalMesh
from minialpa.errors import InfeasibleError
from minialpa.intra.graph import GraphBuilder
from minialpa.intra.ilp import solve_graph
from minialpa.intra.problem import MeshEquations, MeshSharding
from minialpa.intra.usage import MemoryLimit
from minialpa.options import AutoShardingOption


class MeshSolver:
    """`problem` on `mesh`, to be solved under one memory limit after the other."""

    def __init__(self, problem: MeshEquations, mesh: LogicalMesh, option: AutoShardingOption) -> None:
        self.problem, self.mesh, self.option = problem, mesh, option
        self.folded = GraphBuilder(problem, mesh, option, folded=True)

    def solve(self, limit: MemoryLimit | None, time_limit_s: float) -> MeshSharding:
        """The sharding of all values with the least seconds per step. Raises InfeasibleError if nothing fits.

        Layers that repeat are sharded alike, if that fits.
        """
        graph = self.folded.graph(limit)
        try:
            return self.folded.read(solve_graph(graph, time_limit_s=time_limit_s))
        except InfeasibleError:
            if self.folded.folding is None:
                raise
        # Some layers may be sharded where not all need to be.
        free = GraphBuilder(self.problem, self.mesh, self.option)
        return free.read(solve_graph(free.graph(limit), time_limit_s=time_limit_s))


def solve_mesh(problem: MeshEquations, mesh: LogicalMesh, option: AutoShardingOption) -> MeshSharding:
    """`MeshSolver.solve` where the limit of the options, or of the device, holds for parameters and optimizer state."""
    n_bytes = option.limit_bytes(mesh.device)
    limit = None if n_bytes is None else MemoryLimit(n_bytes)
    return MeshSolver(problem, mesh, option).solve(limit, option.solver_time_limit_s)
