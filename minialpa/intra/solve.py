"""Intra-operator planning of one mesh: equations and a logical mesh in, the cheapest shardings out."""

from __future__ import annotations

from minialpa.cluster import LogicalMesh
from minialpa.intra.graph import GraphBuilder
from minialpa.intra.ilp import solve_graph
from minialpa.intra.problem import MeshEquations, MeshSharding
from minialpa.options import AutoShardingOption


def solve_mesh(problem: MeshEquations, mesh: LogicalMesh, option: AutoShardingOption) -> MeshSharding:
    """The sharding of all values on `mesh` with the least seconds per step. Raises InfeasibleError if nothing fits."""
    builder = GraphBuilder(problem, mesh, option)
    return builder.read(solve_graph(builder.graph(), time_limit_s=option.solver_time_limit_s))
