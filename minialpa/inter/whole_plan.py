"""From the sketch of a plan, whose shardings are of a short step, to the plan of the whole step.

The whole step gets the shardings of the short one, and its collectives and memory are measured. If it needs more memory
than the short step promises, the short step is solved with less room.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from minialpa.inter.build_plan import PlacedStages, Sketch, SolvedMesh, StageTooLargeError, plan_of, solve_meshes
from minialpa.inter.context import PlanningContext
from minialpa.inter.layers.layered_step import LayeredStep
from minialpa.inter.search.stage_in_memory import needed
from minialpa.inter.search.stage_memory import mesh_memory
from minialpa.inter.search.stage_times import stage_times
from minialpa.inter.search.user_stages import DecidedStage
from minialpa.inter.short_plan import Expansion
from minialpa.inter.staging.mesh_problem import mesh_collectives, mesh_equations, mesh_programs
from minialpa.inter.staging.staged_step import stage_step
from minialpa.plan import Plan

#: Solutions of a short step, with less and less room, of which the whole step is measured.
_MOST_CORRECTIONS = 3


def whole_plan(plan: Plan) -> Plan:
    """The plan of the whole step.

    The memory of a short step is a prediction. If the whole step needs more than its devices have, the short one is
    solved with less room, by the difference.
    Raises NotExpandedError if the short step of a sketch differs from the whole one, and StageTooLargeError if the
    whole step does not fit.
    """
    if not isinstance(plan, Sketch):
        return plan
    placed, context, solved = plan.placed, plan.context, plan.solved
    assert placed.short is not None
    whole = _whole(context, placed, placed.short.layered)
    expansion = Expansion(placed.short, placed.staged, whole.staged)

    less_room = [0.0] * len(solved)
    for _ in range(_MOST_CORRECTIONS):
        measured = [_measured(context, whole, expansion, mesh, found) for mesh, found in enumerate(solved)]
        missing = [_missing_bytes(placed.stages[mesh], found) for mesh, found in enumerate(measured)]
        if max(missing) <= 0:
            made = plan_of(context, whole, measured)
            return dataclasses.replace(made, cluster=plan.cluster, certificate=plan.certificate)

        # As much less on each mesh that lacks memory, since stages that are alike are solved once.
        errors = [_needed(one) - _needed(other) for one, other in zip(measured, solved, strict=True)]
        less_room = [max(less, *errors) if lacks > 0 else less for less, lacks in zip(less_room, missing, strict=True)]
        asked = dataclasses.replace(context, below_s=math.inf)
        solved = tuple(solve_meshes(asked, _with_room(placed, solved, less_room)))
    worst = max(range(len(missing)), key=lambda mesh: missing[mesh])
    raise StageTooLargeError(f"Stage {worst} lacks {missing[worst]:,.0f} bytes per device.", worst, 1)


def _whole(context: PlanningContext, placed: PlacedStages, layered: LayeredStep) -> PlacedStages:
    """The stages of a short step, with the tasks of the whole one."""
    options = context.options
    staged = stage_step(
        layered.step,
        options.n_micro_batches,
        placed.chunks.of_group(layered.of_group),
        placed.chunks.stage_of,
        keep_rows=bool(options.keep_rows),
        cast_once=bool(options.cast_once),
    )
    return dataclasses.replace(placed, staged=staged, short=None)


def _needed(solved: SolvedMesh) -> float:
    """Bytes per device that a mesh needs."""
    return needed(solved.memory, solved.live)


def _measured(
    context: PlanningContext, whole: PlacedStages, expansion: Expansion, mesh: int, found: SolvedMesh
) -> SolvedMesh:
    """`found`, a solved mesh of a short step, in the whole one."""
    staged, view = whole.staged, found.view
    problem = mesh_equations(staged, mesh)
    sharding = expansion.sharding(problem, found.problem, found.sharding)
    programs = mesh_programs(staged, mesh, problem, sharding, view)
    moved = tuple(mesh_collectives(programs))
    return dataclasses.replace(
        found,
        problem=problem,
        sharding=sharding,
        memory=mesh_memory(staged, mesh, programs, sharding, view, compiler=context.solver.compiler),
        moved=moved,
        times=stage_times(problem, sharding, moved, view.mesh, staged.split.n_loops),
    )


def _missing_bytes(stage: DecidedStage, solved: SolvedMesh) -> float:
    """Bytes per device that a mesh needs beyond its memory."""
    limit_bytes = stage.option.limit_bytes(solved.view.mesh.device)
    return -math.inf if limit_bytes is None else solved.memory.peak_bytes(solved.live) - limit_bytes


def _with_room(placed: PlacedStages, solved: Sequence[SolvedMesh], less_room: Sequence[float]) -> PlacedStages:
    """The same stages with less memory per device."""
    stages = []
    for stage, one, less in zip(placed.stages, solved, less_room, strict=True):
        limit_bytes = stage.option.limit_bytes(one.view.mesh.device)
        if limit_bytes is not None and less > 0:
            option = dataclasses.replace(stage.option, memory_limit_bytes=limit_bytes - less)
            stage = dataclasses.replace(stage, option=option)
        stages.append(stage)
    return dataclasses.replace(placed, stages=tuple(stages))
