"""Intra-operator planning of one mesh: equations and a logical mesh in, the cheapest shardings out."""

from __future__ import annotations

from minialpa.cluster import LogicalMesh
from minialpa.intra.graph import GraphBuilder
from minialpa.intra.ilp import solve_graph
from minialpa.intra.problem import MeshEquations, MeshSharding
from minialpa.intra.usage import MemoryLimit
from minialpa.options import AutoShardingOption


def solve_mesh(
    problem: MeshEquations, mesh: LogicalMesh, option: AutoShardingOption, limit: MemoryLimit | None = None
) -> MeshSharding:
    """The sharding of all values on `mesh` with the least seconds per step. Raises InfeasibleError if nothing fits.

    Without a `limit`, that of the options or of the device holds for parameters and optimizer state.
    """
    n_bytes = option.limit_bytes(mesh.device)
    if limit is None and n_bytes is not None:
        limit = MemoryLimit(n_bytes)
    builder = GraphBuilder(problem, mesh, option, limit)
    return builder.read(solve_graph(builder.graph(), time_limit_s=option.solver_time_limit_s))
