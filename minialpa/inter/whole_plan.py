"""From the `Sketch` of a plan, with shardings of a short step, to the plan of the whole step.

The whole step gets these shardings, and its collectives and memory are measured.
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
from minialpa.inter.staging.staged_step import stage_step, task_options
from minialpa.plan import Plan
from minialpa.support.sizes import bytes_text

#: Solutions of a short step, with lower and lower limits, that are expanded.
_MOST_CORRECTIONS = 3


def whole_plan(plan: Plan) -> Plan:
    """The plan of the whole step.

    If the whole step needs more memory than its devices have, the short step is solved with a limit lowered by the
    difference. Raises NotExpandedError if the short step differs from the whole step, StageTooLargeError if the whole
    step does not fit.
    """
    if not isinstance(plan, Sketch):
        return plan
    placed, context, solved = plan.placed, plan.context, plan.solved
    assert placed.short is not None
    whole = _placed_whole(context, placed, placed.short.layered)
    expansion = Expansion(placed.short, placed.staged, whole.staged)

    reserved_bytes = [0.0] * len(solved)
    for _ in range(_MOST_CORRECTIONS):
        measured = [_measured_mesh(context, whole, expansion, mesh, found) for mesh, found in enumerate(solved)]
        missing = [_missing_bytes(placed.stages[mesh], found) for mesh, found in enumerate(measured)]
        if max(missing) <= 0:
            made = plan_of(context, whole, measured)
            return dataclasses.replace(made, cluster=plan.cluster, certificate=plan.certificate)

        # Equal limits on all meshes that lack memory: stages that are alike are solved once.
        errors = [_needed_bytes(one) - _needed_bytes(other) for one, other in zip(measured, solved, strict=True)]
        reserved_bytes = [
            max(less, *errors) if lacks > 0 else less for less, lacks in zip(reserved_bytes, missing, strict=True)
        ]
        unbounded = dataclasses.replace(context, below_s=math.inf)
        solved = tuple(solve_meshes(unbounded, _with_less_memory(placed, solved, reserved_bytes)))
    worst = max(range(len(missing)), key=lambda mesh: missing[mesh])
    raise StageTooLargeError(
        f"Stage {worst} needs {bytes_text(missing[worst])} more memory per device than the limit. Use more devices or "
        "micro-batches, or raise `memory_limit_bytes`.",
        worst,
        1,
    )


def _placed_whole(context: PlanningContext, placed: PlacedStages, layered: LayeredStep) -> PlacedStages:
    options = context.options
    staged = stage_step(
        layered.step(placed.chunks.layers),
        options.n_micro_batches,
        placed.chunks.of_group(layered.of_group),
        placed.chunks.stage_of,
        task_options(options),
    )
    return dataclasses.replace(placed, staged=staged, short=None)


def _needed_bytes(solved: SolvedMesh) -> float:
    return needed(solved.memory, solved.live)


def _measured_mesh(
    context: PlanningContext, whole: PlacedStages, expansion: Expansion, mesh: int, found: SolvedMesh
) -> SolvedMesh:
    """`found`, a solved mesh of a short step, measured in the whole step."""
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
    """Bytes per device beyond the memory limit; negative if the mesh fits."""
    limit_bytes = stage.option.limit_bytes(solved.view.mesh.device)
    return -math.inf if limit_bytes is None else solved.memory.peak_bytes(solved.live) - limit_bytes


def _with_less_memory(
    placed: PlacedStages, solved: Sequence[SolvedMesh], reserved_bytes: Sequence[float]
) -> PlacedStages:
    """The same stages with the memory limits lowered by `reserved_bytes` bytes per device."""
    stages = []
    for stage, one, less in zip(placed.stages, solved, reserved_bytes, strict=True):
        limit_bytes = stage.option.limit_bytes(one.view.mesh.device)
        if limit_bytes is not None and less > 0:
            option = dataclasses.replace(stage.option, memory_limit_bytes=limit_bytes - less)
            stage = dataclasses.replace(stage, option=option)
        stages.append(stage)
    return dataclasses.replace(placed, stages=tuple(stages))
