"""Times of a stage: the seconds of its passes and of its update, from the solved tasks of its mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minialpa.cluster import LogicalMesh
from minialpa.cost import Collective, CollectiveKind
from minialpa.inter.staging.mesh_problem import TaskCollectives
from minialpa.intra.graph.problem import MeshEquations, MeshSharding
from minialpa.intra.spmd import Communication
from minialpa.plan import PlannedPass


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of each pass of a stage for one micro-batch, and of what it does once per step.

    update_s: before the first loop and behind the last; between_s: behind each other loop.
    """

    passes: tuple[PlannedPass, ...]
    update_s: float
    between_s: tuple[float, ...] = ()

    @property
    def pass_s(self) -> float:
        """Seconds of one micro-batch in all passes."""
        return sum(one.seconds for one in self.passes)

    @property
    def once_s(self) -> float:
        """Seconds of all that is done once per step."""
        return self.update_s + sum(self.between_s)


def stage_times(
    problem: MeshEquations,
    sharding: MeshSharding,
    moved: Sequence[TaskCollectives],
    mesh: LogicalMesh,
    n_loops: int = 1,
) -> StageTimes:
    """`moved`: the tasks of the mesh, in order, and what they communicate; n_loops: of the step.

    Collectives of gradients, and those of an update, do not wait for each other, and compilers combine them.
    """
    compute_s = {id(eqn): seconds for eqn, seconds in zip(problem.eqns, sharding.compute_s, strict=True)}
    passes: list[PlannedPass] = []

    # By loop: the seconds of what runs behind it, and its collectives, which may be combined.
    once_s = [0.0] * n_loops
    in_update: list[list[Communication]] = [[] for _ in range(n_loops)]
    for task, collectives in ((m.task, m.collectives) for m in moved):
        compute = sum(compute_s[id(eqn)] for eqn in task.eqns)
        if task.kind == "forward" or task.kind == "backward" or task.kind == "step":
            communication = sum(one.times * one.collective.seconds(mesh) for one in collectives if not one.of_gradient)
            communication += _combined_s([one for one in collectives if one.of_gradient], mesh)
            passes.append(
                PlannedPass(
                    kind=task.kind, chunk=task.chunk, compute_s=compute, communication_s=communication, loop=task.loop
                )
            )
            continue

        # A prologue counts with the update.
        behind = (task.loop or n_loops) - 1
        once_s[behind] += compute
        in_update[behind] += collectives

    *between, update = (s + _combined_s(moved, mesh) for s, moved in zip(once_s, in_update, strict=True))
    return StageTimes(tuple(passes), update, tuple(between))


def _combined_s(collectives: Sequence[Communication], mesh: LogicalMesh) -> float:
    """Seconds of collectives of which all of one kind, along the same axes, start together."""
    n_bytes: dict[tuple[CollectiveKind, tuple[int, ...]], float] = {}
    for c, times, _ in collectives:
        n_bytes[c.kind, c.axes] = n_bytes.get((c.kind, c.axes), 0.0) + times * c.n_bytes
    return sum(Collective(kind, total, axes).seconds(mesh) for (kind, axes), total in n_bytes.items())
