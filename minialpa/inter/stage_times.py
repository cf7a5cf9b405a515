"""Times of a stage: the solved tasks of a mesh in, seconds of its passes and of its update out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minialpa.cluster import LogicalMesh
from minialpa.cost import Collective, CollectiveKind
from minialpa.inter.mesh_problem import TaskCollectives
from minialpa.intra.problem import MeshEquations, MeshSharding
from minialpa.intra.spmd import Communication
from minialpa.plan import PlannedPass


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of each pass of a stage for one micro-batch, and of what it does once per step."""

    passes: tuple[PlannedPass, ...]
    update_s: float

    @property
    def pass_s(self) -> float:
        """Seconds of one micro-batch in all passes."""
        return sum(one.seconds for one in self.passes)


def stage_times(
    problem: MeshEquations, sharding: MeshSharding, moved: Sequence[TaskCollectives], mesh: LogicalMesh
) -> StageTimes:
    """`moved`: the tasks of the mesh, in order, and what they communicate.

    Collectives of gradients, and those of the update, do not wait for each other, and compilers combine them.
    """
    compute_s = {id(eqn): seconds for eqn, seconds in zip(problem.eqns, sharding.compute_s, strict=True)}
    passes: list[PlannedPass] = []
    once_s = 0.0
    in_update: list[Communication] = []
    for task, collectives in ((m.task, m.collectives) for m in moved):
        compute = sum(compute_s[id(eqn)] for eqn in task.eqns)
        if task.kind == "forward" or task.kind == "backward" or task.kind == "step":
            communication = sum(one.times * one.collective.seconds(mesh) for one in collectives if not one.of_gradient)
            communication += _combined_s([one for one in collectives if one.of_gradient], mesh)
            passes.append(PlannedPass(task.kind, task.chunk, compute, communication))
            continue
        once_s += compute
        in_update += collectives
    return StageTimes(tuple(passes), once_s + _combined_s(in_update, mesh))


def _combined_s(collectives: Sequence[Communication], mesh: LogicalMesh) -> float:
    """Seconds of collectives of which all of one kind, along the same axes, start together."""
    n_bytes: dict[tuple[CollectiveKind, tuple[int, ...]], float] = {}
    for c, times, _ in collectives:
        n_bytes[c.kind, c.axes] = n_bytes.get((c.kind, c.axes), 0.0) + times * c.n_bytes
    return sum(Collective(kind, total, axes).seconds(mesh) for (kind, axes), total in n_bytes.items())
