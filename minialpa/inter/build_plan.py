"""From decided stages to a plan: layers and `DecidedStage`s in, a `Plan` out.

`place_stages` makes the tasks of each mesh, `solve_meshes` their shardings, and `build_plan` the plan.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from minialpa.cluster import ClusterSpec, DeviceSpec
from minialpa.errors import InfeasibleError, MinialpaError, ShardingError, TraceError
from minialpa.inter.context import PlanningContext, compiler_options_of
from minialpa.inter.layers.layered_step import LayeredStep
from minialpa.inter.plan_details import (
    StepNames,
    argument_roles,
    model_flops,
    planned_collectives,
    planned_operators,
)
from minialpa.inter.schedule.chunks import Chunks, check_chunks, chunks_of, plan_chunks
from minialpa.inter.schedule.schedules import PipelineSize, Schedule, live_counts, make_schedule, splits_backward
from minialpa.inter.schedule.simulate import simulate
from minialpa.inter.search.stage_cost import border_bytes
from minialpa.inter.search.stage_in_memory import FreeSolution
from minialpa.inter.search.stage_memory import MeshMemory, Moments
from minialpa.inter.search.stage_solve import NotFasterError, SlowestStage, StageMemoryError
from minialpa.inter.search.stage_times import StageTimes, stage_times
from minialpa.inter.search.submeshes import preferred_seconds
from minialpa.inter.search.user_stages import DecidedStage
from minialpa.inter.short_plan import ShortStep, short_step_of, staged_short_step, sublayered_whole, sublayers_of_layers
from minialpa.inter.staging.cast_weights import casts_weights
from minialpa.inter.staging.leaf_placement import placed_inputs, placed_outputs
from minialpa.inter.staging.mesh_problem import ShardedView, TaskCollectives, mesh_equations
from minialpa.inter.staging.staged_step import (
    planned_row_sharing,
    planned_task_options,
    realise,
    row_sharing,
    stage_step,
    task_options,
)
from minialpa.inter.staging.tasks import StagedStep, planned_transfers
from minialpa.inter.user_shardings import user_shardings
from minialpa.intra.graph.option_constraints import UnevenBatchError
from minialpa.intra.graph.problem import MeshEquations, MeshSharding, gathered_state
from minialpa.plan import Plan, PlanCost, PlannedOperator, StagePlan
from minialpa.support.private_jax import warn
from minialpa.support.sizes import bytes_text

#: Steps with fewer equations are always planned as a whole.
_LEAST_SHORTENED = 1000
#: Most equations of a short step, as a part of the whole step. A longer one saves less than its expansion takes.
_MOST_OF_WHOLE = 0.6
#: Stages that are not the slowest may together lengthen a step by this part.
_SPARE_PART = 0.005


class StageTooLargeError(InfeasibleError):
    """A stage does not fit with so many micro-batches in flight, or is too slow.

    Attributes:
        n_live: most micro-batches in flight in a chunk.
        free: the fastest shardings in unlimited memory; None if the options forbid all, or if `is_too_slow`.
        is_too_slow: whether the caller has a faster plan.
        n_bytes: of the smallest shardings found, with the reserve; inf if unknown.
        by_compute: whether the compute alone is too slow.
    """

    def __init__(
        self,
        message: str,
        stage: int,
        n_live: int,
        *,
        free: FreeSolution | None = None,
        is_too_slow: bool = False,
        by_compute: bool = False,
        n_bytes: float = math.inf,
    ) -> None:
        super().__init__(message)
        self.stage, self.n_live, self.free = stage, n_live, free
        self.is_too_slow, self.by_compute, self.n_bytes = is_too_slow, by_compute, n_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStages:
    """Decided stages and their tasks.

    Attributes:
        chunks: the runs of layers of each stage.
        staged: the tasks; mesh k is the mesh of stage k.
        short: the short step of `staged`; None if `staged` is the whole step.
    """

    layered: LayeredStep
    stages: tuple[DecidedStage, ...]
    chunks: Chunks
    staged: StagedStep
    schedule: Schedule
    short: ShortStep | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedMesh:
    """The shardings of one mesh, with their seconds and bytes per device.

    Attributes:
        live: micro-batches in flight in each chunk, at each moment that may be the fullest.
        moved: the collectives of each task.
        free: the fastest shardings in unlimited memory.
    """

    problem: MeshEquations
    view: ShardedView
    sharding: MeshSharding
    memory: MeshMemory
    live: Moments
    moved: tuple[TaskCollectives, ...]
    times: StageTimes
    free: FreeSolution | None


def plan_stages(context: PlanningContext, layered: LayeredStep, stages: Sequence[DecidedStage]) -> Plan:
    """The plan with these stages. Raises StageTooLargeError if a stage does not fit, or is too slow."""
    placed = place_stages(context, layered, stages)
    casting = _stages_with_one_cast(context, placed)
    if casting is not None:
        context, placed = casting
    return build_plan(context, placed, solve_meshes(context, placed))


def _stages_with_one_cast(
    context: PlanningContext, placed: PlacedStages
) -> tuple[PlanningContext, PlacedStages] | None:
    """The context and the single stage with weights cast once per step instead of in each pass.

    None unless memory is short and the casts take neither more time nor more memory.

    The comparison is in unlimited memory, because shardings that save memory take the solver long. In other cases,
    `pipeline` compares finished plans.
    """
    options = context.options
    if len(placed.stages) > 1 or options.n_micro_batches == 1 or options.cast_once is not None:
        return None
    free = _free_solution(context, placed)
    if free is None or free.fits or not casts_weights(placed.staged.split):
        return None

    casting_context = context.asking(cast_once=True)
    casting = place_stages(casting_context, placed.layered, placed.stages)
    other = _free_solution(casting_context, casting)
    is_better = other is not None and other.seconds <= free.seconds and other.n_bytes <= free.n_bytes
    return (casting_context, casting) if is_better else None


def _free_solution(context: PlanningContext, placed: PlacedStages) -> FreeSolution | None:
    """`SolvedMesh.free` of a single stage; None if options forbid all shardings, or the caller has a faster plan."""
    try:
        return solve_meshes(context, placed, saves_memory=False)[0].free
    except StageTooLargeError as error:
        return error.free


def place_stages(context: PlanningContext, layered: LayeredStep, stages: Sequence[DecidedStage]) -> PlacedStages:
    """The tasks of each mesh. Raises ShardingError for stages or gradients that the schedule cannot have."""
    options = context.options
    sharing = row_sharing(options.n_micro_batches, [(stage.candidate.n_devices, stage.option) for stage in stages])
    made_by = (_layers_key(layered), sharing)
    layered = context.with_rows_in_slots(layered, sharing)
    chunks = chunks_of([stage.layers for stage in stages])
    check_chunks(chunks, options.schedule)
    staged, short = _short_staged_step(context, layered, chunks, made_by) or (
        _whole_staged_step(context, layered, chunks, made_by),
        None,
    )

    if options.schedule == "inference" and any(map(staged.trains, range(1, staged.split.n_loops + 1))):
        raise ShardingError(
            "The schedule `inference` has no backward pass, but the step computes gradients. Set "
            '`pipeline_schedule` to "1f1b" or "gpipe".'
        )
    # A single stage waits for no other: it ends each micro-batch before it starts the next.
    name = options.schedule if len(stages) > 1 else "1f1b"
    schedule = make_schedule(name, chunks.size(options.n_micro_batches))
    return PlacedStages(
        layered=layered, stages=tuple(stages), chunks=chunks, staged=staged, schedule=schedule, short=short
    )


def _whole_staged_step(context: PlanningContext, layered: LayeredStep, chunks: Chunks, made_by: Hashable) -> StagedStep:
    """made_by: how the step with rows in slots is made."""
    n, options, groups = (
        context.options.n_micro_batches,
        task_options(context.options),
        chunks.of_group(layered.of_group),
    )

    # Attempts that differ only in shardings share one staged step.
    return context.staged.get_or_make(
        (made_by, chunks, n, options),
        lambda: stage_step(layered.step(chunks.layers), n, groups, chunks.stage_of, options),
    )


def _layers_key(layered: LayeredStep) -> Hashable:
    """A cache key. Without layers, the equations identify the step."""
    return (layered.of_group, layered.remat, layered.row_blocks) if layered.of_group else layered.plain.flat


def _short_staged_step(
    context: PlanningContext, layered: LayeredStep, chunks: Chunks, made_by: Hashable
) -> tuple[StagedStep, ShortStep] | None:
    """The tasks of a short step, and the short step; None if too few equations repeat."""
    if not context.shortens or context.options.stack_matrices or len(layered.plain.flat.eqns) < _LEAST_SHORTENED:
        return None
    n, options = context.options.n_micro_batches, task_options(context.options)
    sublayer_of_group, layer_of_sublayer = sublayers_of_layers(layered.plain, layered.of_group)
    try:
        whole = context.sublayered.get_or_make(
            (layered.plain.flat, sublayer_of_group, n), lambda: sublayered_whole(layered.plain, sublayer_of_group, n)
        )
        chunk_of_layer = {layer: chunk for chunk, layers in enumerate(chunks.layers) for layer in layers}
        short = short_step_of(whole, layered, layer_of_sublayer, [chunk_of_layer[k] for k in sorted(chunk_of_layer)])
        if short is None or len(short.short.step.flat.eqns) > _MOST_OF_WHOLE * len(layered.plain.flat.eqns):
            return None
        staged = context.staged.get_or_make(
            ("short", layered.plain.flat, made_by, chunks, n, options),
            lambda: staged_short_step(short, n, chunks, options),
        )
    except TraceError:
        return None
    return staged, short


def staged_step_of(context: PlanningContext, plan: Plan) -> StagedStep:
    """The tasks of a plan that was made in this context."""
    if isinstance(plan, Sketch):  # a plan of a short step has its tasks
        return plan.placed.staged
    # The key of `_whole_staged_step`, so that the tasks are made once.
    made_by = (plan.layer_of_group, plan.remat, plan.row_blocks) if plan.layer_of_group else context.traced.flat
    return context.staged.get_or_make(
        (
            (made_by, planned_row_sharing(plan)),
            plan_chunks(plan),
            plan.n_micro_batches,
            planned_task_options(plan),
        ),
        lambda: realise(context.traced, plan).staged,
    )


def solve_meshes(context: PlanningContext, placed: PlacedStages, *, saves_memory: bool = True) -> list[SolvedMesh]:
    """The shardings of each mesh.

    saves_memory: whether to try slower shardings if the fastest do not fit.
    Raises StageTooLargeError if a stage does not fit, or cannot take less than `context.below_s`.
    Raises UnevenBatchError if the devices of the only stage do not divide the examples.
    """
    solved: list[SolvedMesh] = []
    for mesh in range(len(placed.stages)):
        context.report("stage shardings", mesh, len(placed.stages))
        slowest = _slowest_stage(placed, solved)
        try:
            solved.append(solve_mesh(context, placed, mesh, saves_memory=saves_memory, slowest=slowest))
        finally:
            context.report("stage shardings", mesh + 1, len(placed.stages))
    return solved


def _slowest_stage(placed: PlacedStages, solved: Sequence[SolvedMesh]) -> SlowestStage | None:
    """The slowest stage so far, and the seconds that each other stage may waste.

    Only one micro-batch of the other stages lengthens the step.
    """
    if not solved:
        return None
    n = placed.staged.split.n_micro_batches
    seconds = max(n * one.times.pass_s + one.times.per_step_s for one in solved)
    return SlowestStage(seconds, _SPARE_PART * seconds * n / len(placed.stages))


def solve_mesh(
    context: PlanningContext,
    placed: PlacedStages,
    mesh: int,
    *,
    saves_memory: bool,
    slowest: SlowestStage | None = None,
) -> SolvedMesh:
    """As `solve_meshes`."""
    stage, staged = placed.stages[mesh], placed.staged
    chosen = stage.candidate
    own_mesh = context.cluster.logical_mesh(chosen.submesh, chosen.logical_shape, chosen.device)
    view = ShardedView.of(context.logical_mesh or own_mesh, stage.option)
    problem = mesh_equations(staged, mesh)
    live = live_counts(placed.schedule, mesh)

    # The caller may try other stages, so the error names the stage that does not fit.
    try:
        stage.option.check_axes(view.mesh.shape)
        solved = context.solver.solve(
            staged, mesh, problem, view, stage.option, live,
            below_s=context.below_s, saves_memory=saves_memory, slowest=slowest,
        )  # fmt: skip
    except InfeasibleError as error:
        if isinstance(error, UnevenBatchError) and len(placed.stages) == 1:
            raise  # other stages cannot help
        message = f"Stage {mesh} on a mesh of shape {view.mesh.shape}: {error}"
        free, n_bytes = (error.free, error.n_bytes) if isinstance(error, StageMemoryError) else (None, math.inf)
        raise StageTooLargeError(
            message,
            mesh,
            max(map(max, live)),
            free=free,
            n_bytes=n_bytes,
            is_too_slow=isinstance(error, NotFasterError),
            by_compute=isinstance(error, NotFasterError) and error.by_compute,
        ) from error

    _check_host_bytes(mesh, view.mesh.device, solved.memory.host_bytes(live))
    if stage.option.sharded_update:
        for gathered in gathered_state(problem, solved.sharding, view.mesh):
            warn(str(gathered))

    return SolvedMesh(
        problem=problem,
        view=view,
        sharding=solved.sharding,
        memory=solved.memory,
        live=live,
        moved=solved.moved,
        times=stage_times(problem, solved.sharding, solved.moved, view.mesh, staged.split.n_loops),
        free=solved.free,
    )


def _check_host_bytes(mesh: int, device: DeviceSpec | None, n_bytes: float) -> None:
    """Raises StageTooLargeError."""
    limit = device.host_bytes if device is not None else None
    if limit is not None and n_bytes > limit:
        raise StageTooLargeError(
            f"Stage {mesh} keeps {bytes_text(n_bytes)} per device in host memory, and `host_bytes` of the device is "
            f"{bytes_text(limit)}. Use more devices or micro-batches, or move fewer arrays to the host.",
            mesh,
            1,
        )


def build_plan(context: PlanningContext, placed: PlacedStages, solved: Sequence[SolvedMesh]) -> Plan:
    """The plan, or a sketch of it if the stages were solved for a short step."""
    plan = plan_of(context, placed, solved)
    if placed.short is not None:
        fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(Plan)}
        plan = Sketch(**fields, placed=placed, solved=tuple(solved), context=context)
    context.made.append(plan)
    return plan


@dataclass(frozen=True, kw_only=True, eq=False)
class Sketch(Plan):
    """A plan with the costs of the whole step and the specs of a short step. `whole_plan` expands the chosen sketch."""

    placed: PlacedStages
    solved: tuple[SolvedMesh, ...]
    context: PlanningContext


def plan_of(context: PlanningContext, placed: PlacedStages, solved: Sequence[SolvedMesh]) -> Plan:
    layered, staged, options = placed.layered, placed.staged, context.options
    # A sketch is compared by its cost alone.
    names = StepNames(staged) if placed.short is None else None
    stages = tuple(_stage_plan(placed, mesh, found, names) for mesh, found in enumerate(solved))
    collectives = (
        ()
        if names is None
        else (
            planned_collectives(names, found.moved, mesh, options.n_micro_batches) for mesh, found in enumerate(solved)
        )
    )

    plan = Plan(
        fingerprint=layered.fingerprint,
        cluster=context.cluster,
        n_micro_batches=options.n_micro_batches,
        schedule=options.schedule,
        layer_of_group=layered.of_group,
        remat=layered.remat,
        stages=stages,
        inputs=placed_inputs(staged, [found.sharding.specs for found in solved]),
        outputs=placed_outputs(staged, [found.sharding.results for found in solved]),
        collectives=tuple(itertools.chain.from_iterable(collectives)),
        transfers=planned_transfers(staged),
        cost=_cost(stages, _border_seconds(placed, context.cluster), placed.schedule.size),
        row_blocks=layered.row_blocks,
        per_micro_batch=staged.split.per_micro_batch,
        keeps_activations=bool(options.keep_activations),
        casts_once=bool(options.cast_once) and options.n_micro_batches > 1,
        stack_matrices=options.stack_matrices or 0,
        batch=layered.plain.batch_arguments,
        compiler_options=compiler_options_of(context.cluster),
        roles=() if names is None else argument_roles(context.traced),
        model_flops=0.0 if names is None else model_flops(context.traced),
        user_shardings=user_shardings(
            (found.problem, found.sharding, found.view.mesh, stage.option)
            for found, stage in zip(solved, placed.stages, strict=True)
        ),
    )
    return _with_simulated_cost(plan) if len(stages) > 1 and splits_backward(options.schedule) else plan


def _with_simulated_cost(plan: Plan) -> Plan:
    """The closed formula of `_cost` has no split backward passes."""
    cost = plan.cost
    total_s = simulate(plan).total_s
    busy_s = cost.compute_s + cost.communication_s + cost.update_s
    return dataclasses.replace(
        plan, cost=dataclasses.replace(cost, total_s=total_s, bubble_s=max(0.0, total_s - busy_s))
    )


def _stage_plan(placed: PlacedStages, mesh: int, solved: SolvedMesh, names: StepNames | None) -> StagePlan:
    """names: None for a sketch."""
    stage, memory, logical_mesh = placed.stages[mesh], solved.memory, solved.view.mesh
    operators: tuple[PlannedOperator, ...] = ()
    if names is not None:
        layers = placed.layered.of_group
        operators = planned_operators(names, solved.problem, solved.sharding, logical_mesh, layers)

    return StagePlan(
        layers=stage.layers,
        submesh=stage.candidate.submesh,
        first_device=stage.first_device,
        logical_shape=logical_mesh.shape,
        alpha=logical_mesh.alpha,
        beta=logical_mesh.beta,
        spread=logical_mesh.spread,
        combined=solved.view.combined,
        option=stage.option,
        input_specs=tuple(solved.sharding.specs[v] for v, _ in solved.problem.inputs),
        equation_specs=solved.sharding.equations,
        operators=operators,
        passes=solved.times.passes,
        update_s=solved.times.update_s,
        fixed_bytes=memory.fixed_bytes + memory.temp_bytes,
        kept_bytes=memory.kept_bytes,
        peak_bytes=memory.peak_bytes(solved.live),
        temp_bytes=memory.temp_bytes,
        optimal=solved.sharding.optimal,
        gap=solved.sharding.gap,
        between_s=solved.times.between_s,
        host_bytes=memory.host_bytes(solved.live),
    )


def _border_seconds(placed: PlacedStages, cluster: ClusterSpec) -> list[float]:
    """For the border after each chunk except the last: seconds of one micro-batch, in both directions."""
    seconds = []
    borders = itertools.pairwise(placed.chunks.stage_of)
    for n_bytes, neighbours in zip(border_bytes(placed.staged), borders, strict=True):
        stages = [placed.stages[k] for k in neighbours]
        hosts = {stage.first_device // cluster.devices_per_host for stage in stages}
        inside_hosts = all(stage.candidate.submesh[0] == 1 for stage in stages)
        link = cluster.link(same_host=len(hosts) == 1 and inside_hosts)
        seconds.append(2 * link.alpha_s + link.beta_s_per_byte * n_bytes)
    return seconds


def _cost(stages: Sequence[StagePlan], borders: Sequence[float], size: PipelineSize) -> PlanCost:
    """The closed formula for p stages, B micro-batches and v chunks per stage, summed over loops:

        T = sum_loops [((v - 1) max(B, p) + B) / v max_k t_k + (sum_k t_k - max_k t_k) / v + max_k u_k] + sum borders

    t_k: seconds of one micro-batch in all chunks of stage k, which are taken to be equal.
    u_k: seconds of stage k between this loop and the next, or of its update.

    For v = 1 it is sum_k t_k + (B - 1) max_k t_k + ... (Alpa, OSDI'22, section 5.1, with transfers). With more chunks,
    the first micro-batch fills, and the last one drains, one chunk of each stage.
    """
    total = compute = communication = update = 0.0
    n_loops = 1 + max(len(s.between_s) for s in stages)
    for loop in range(1, n_loops + 1):
        compute_s = [sum(one.compute_s for one in s.passes if one.loop == loop) for s in stages]
        pass_s = [sum(one.seconds for one in s.passes if one.loop == loop) for s in stages]
        slowest = max(range(len(stages)), key=lambda k: pass_s[k])
        after_loop_s = max(s.between_s[loop - 1] if loop < n_loops else s.update_s for s in stages)

        total += _loop_seconds(pass_s, size) + after_loop_s
        compute += size.n_micro_batches * compute_s[slowest]
        communication += size.n_micro_batches * (pass_s[slowest] - compute_s[slowest])
        update += after_loop_s
    total += sum(borders[: size.n_stages - 1])

    return PlanCost(
        total_s=total,
        compute_s=compute,
        communication_s=communication,
        bubble_s=max(0.0, total - compute - communication - update),
        update_s=update,
        peak_bytes=tuple(s.peak_bytes for s in stages),
    )


def _loop_seconds(seconds: Sequence[float], size: PipelineSize) -> float:
    """seconds: t_k of `_cost`."""
    p, n_micro_batches, v = size.n_stages, size.n_micro_batches, size.n_chunks
    full = ((v - 1) * max(n_micro_batches, p) + n_micro_batches) / v
    return full * max(seconds) + (sum(seconds) - max(seconds)) / v


# ---- plans compared --------------------------------------------------------------------------------------------------


def best_of(
    attempts: Iterable[Callable[[], Plan]], excused: tuple[type[MinialpaError], ...] = (InfeasibleError,)
) -> Plan:
    """The best plan of all attempts; of equals, the first. If no attempt succeeds, raises the last `excused` error."""
    plans: list[Plan] = []
    failure: MinialpaError = InfeasibleError(
        "There is no plan to choose from. This is a bug in minialpa: report it with this message."
    )
    for attempt in attempts:
        try:
            plans.append(attempt())
        except excused as error:
            failure = error

    if not plans:
        raise failure
    return min(plans, key=preference)


def preference(plan: Plan) -> float:
    """Less is better: seconds of a step, and if nearly equal, devices."""
    n_devices = sum(stage.n_devices for stage in plan.stages)
    return preferred_seconds(plan.cost.total_s, n_devices / plan.cluster.n_devices)
