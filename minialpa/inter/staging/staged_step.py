"""From decisions to tasks: a traced step and the decisions of a plan in, the staged step out.

The planner stages a step and then solves each mesh. `realise` stages the step of a finished plan, whose specs are then
bound to the same equations. Tracing and splitting are deterministic, so equation numbers connect the two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from jax.extend.core import Var

from minialpa.inter.layers.offload import with_choices
from minialpa.inter.layers.unstack import with_row_blocks
from minialpa.inter.microbatch.rewrite import split_micro_batches
from minialpa.inter.microbatch.split_step import SplitStep, is_loop
from minialpa.inter.schedule.chunks import plan_chunks
from minialpa.inter.schedule.schedules import splits_backward
from minialpa.inter.staging.cast_weights import with_weights_cast_once
from minialpa.inter.staging.leaf_placement import values_of_parts
from minialpa.inter.staging.mesh_problem import mesh_equations
from minialpa.inter.staging.replan import check_fits
from minialpa.inter.staging.stack_matrices import with_stacked_matrices
from minialpa.inter.staging.stream_state import with_streamed_state
from minialpa.inter.staging.tasks import StagedStep, stage_split, traced_positions
from minialpa.inter.staging.verify_fit import blamed, verify_decisions, verify_layers
from minialpa.intra.graph.problem import MeshEquations
from minialpa.intra.strategies.sharing import share_reads
from minialpa.ir.equations import is_literal
from minialpa.ir.op import Op
from minialpa.options import AutoShardingOption, PlanOptions
from minialpa.plan import Plan, StagePlan
from minialpa.routing.rows import RowSharing, with_rows_in_slots
from minialpa.sharding import EquationSpecs, Spec
from minialpa.tracing.trace import TracedStep


@dataclasses.dataclass(frozen=True, slots=True)
class TaskOptions:
    """Decisions about the tasks of a step.

    keep_activations: see `split_micro_batches`.
    cast_once: see `with_weights_cast_once`; has an effect with several micro-batches.
    splits_backward: see `stage_split`.
    stack_matrices: if not 0, see `with_stacked_matrices`.
    """

    keep_activations: bool = False
    cast_once: bool = False
    splits_backward: bool = False
    stack_matrices: int = 0


def task_options(options: PlanOptions) -> TaskOptions:
    return TaskOptions(
        bool(options.keep_activations),
        bool(options.cast_once),
        splits_backward(options.schedule),
        options.stack_matrices or 0,
    )


def planned_task_options(plan: Plan) -> TaskOptions:
    return TaskOptions(plan.keeps_activations, plan.casts_once, splits_backward(plan.schedule), plan.stack_matrices)


def stage_step(
    traced: TracedStep,
    n_micro_batches: int,
    chunk_of_group: Sequence[int],
    mesh_of_chunk: Sequence[int],
    options: TaskOptions = TaskOptions(),
) -> StagedStep:
    """Split `traced` into micro-batches and chunks. Without a pipeline, `chunk_of_group` may be empty."""
    groups = chunk_of_group or [0] * traced.n_groups
    n_chunks = len(mesh_of_chunk)

    # Partial sums of different chunks are added after the loop, so the split needs the chunk of each equation.
    chunk_of = None
    if n_chunks > 1:
        positions = traced_positions(traced, groups, n_chunks)
        chunk_of = [None if p is None else min(p, 2 * n_chunks - 1 - p) for p in positions]

    # A pass of its own computes gradients of weights if backward passes are split.
    waits = not options.splits_backward
    split = split_micro_batches(
        traced, n_micro_batches, chunk_of, keep_activations=options.keep_activations, waits_for_sums=waits
    )
    if options.cast_once and n_micro_batches > 1:
        split = with_weights_cast_once(split)
    shared = _shared(split, by_direction=n_chunks > 1)
    staged = stage_split(shared, groups, mesh_of_chunk, splits_backward=options.splits_backward)
    if options.stack_matrices:
        staged = with_stacked_matrices(staged, options.stack_matrices)
    return with_streamed_state(staged)


def row_sharing(n_micro_batches: int, stages: Iterable[tuple[int, AutoShardingOption]]) -> RowSharing:
    """For all stages of a step. stages: (devices, option) of each."""
    devices, options = zip(*stages, strict=True)
    return RowSharing(n_micro_batches, math.lcm(*devices), max(option.expert_skew for option in options))


def planned_row_sharing(plan: Plan) -> RowSharing:
    return row_sharing(plan.n_micro_batches, [(stage.n_devices, stage.option) for stage in plan.stages])


def _shared(split: SplitStep, *, by_direction: bool) -> SplitStep:
    """`split`, with a copy of each value that several contractions of a task read, for them to read.

    by_direction: whether forward and backward passes are different tasks, as in a pipeline.
    """

    def task_of(op: Op) -> str | None:
        if not is_loop(op.segment):
            return None
        return f"{op.segment} {op.origin.direction if by_direction and op.source >= 0 else ''}"

    placed = share_reads([op.eqn for op in split.ops], [task_of(op) for op in split.ops])
    ops = tuple(dataclasses.replace(split.ops[p.number], eqn=p.eqn) for p in placed)
    dims = split.batch_dims
    copied = {p.eqn.outvars[0]: dims[p.copied] for p in placed if p.copied in dims}
    return dataclasses.replace(split, ops=ops, batch_dims={**dims, **copied})


def bind_specs(problem: MeshEquations, stage: StagePlan) -> tuple[dict[Var, Spec], tuple[EquationSpecs, ...]]:
    """Specs of a mesh's variables and equations, from the stage of a verified plan."""
    specs = {var: spec for (var, _), spec in zip(problem.inputs, stage.input_specs, strict=True)}
    for eqn, chosen in zip(problem.eqns, stage.equation_specs, strict=True):
        specs.update(zip(eqn.outvars, chosen.results, strict=True))
    specs.update((accumulator, specs[loop]) for loop, accumulator in problem.equal.items())
    return specs, stage.equation_specs


def final_specs(staged: StagedStep, plan: Plan, mesh: int) -> dict[Var, Spec]:
    outputs = values_of_parts(plan.outputs, staged.split.traced.out_parts)
    return {
        atom: spec
        for atom, value in zip(staged.split.outvars, outputs, strict=True)
        for where, spec in zip(value.mesh_ids, value.specs, strict=True)
        if where == mesh and not is_literal(atom)
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RealisedStep:
    """A traced step with cut scans, then with rematerialisation, then as tasks on meshes."""

    cut: TracedStep
    rematerialised: TracedStep
    staged: StagedStep


def realise(traced: TracedStep, plan: Plan) -> RealisedStep:
    """The phases from a traced step to the tasks of its plan, in order:

    cut scans over layers -> put rows of experts in slots -> rematerialise layers -> split micro-batches
    -> split stages into tasks.

    Raises VerifyError if the plan was made for another step or other shapes, or if the step does not allow one of its
    decisions. `verify_staged` verifies its specs later.
    """
    check_fits(traced, plan)
    verify_decisions(traced, plan)
    cut = with_row_blocks(traced, plan.row_blocks).step if plan.row_blocks else traced
    verify_layers(cut.n_groups, plan)
    chunks = plan_chunks(plan)
    in_slots = with_rows_in_slots(cut, planned_row_sharing(plan))
    step = with_choices(in_slots, plan.layer_of_group, plan.remat, chunks.layers)

    with blamed("n_micro_batches", plan.n_micro_batches):
        groups = chunks.of_group(plan.layer_of_group)
        staged = stage_step(
            step,
            plan.n_micro_batches,
            groups,
            chunks.stage_of,
            planned_task_options(plan),
        )
    return RealisedStep(cut=cut, rematerialised=step, staged=staged)


def mesh_problems(staged: StagedStep) -> list[MeshEquations]:
    return [mesh_equations(staged, mesh) for mesh in range(staged.n_meshes)]
