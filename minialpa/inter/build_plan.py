"""From decided stages to a plan: each stage is solved as a whole, and what was found is written down."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence

from minialpa.cluster import ClusterSpec, LogicalMesh
from minialpa.cost import CollectiveKind
from minialpa.errors import InfeasibleError, ShardingError
from minialpa.inter.layers.layered_step import LayeredStep
from minialpa.inter.schedule.chunks import Chunks, check_chunks, chunks_of
from minialpa.inter.schedule.schedules import PipelineSize, live_counts, make_schedule
from minialpa.inter.search.stage_cost import border_bytes
from minialpa.inter.search.stage_memory import Moments
from minialpa.inter.search.stage_solve import SolvedStage, StageSolver
from minialpa.inter.search.stage_times import StageTimes, stage_times
from minialpa.inter.search.user_stages import DecidedStage
from minialpa.inter.staging.leaf_placement import placed_inputs, placed_outputs
from minialpa.inter.staging.mesh_problem import ShardedView, TaskCollectives, mesh_collectives, mesh_equations
from minialpa.inter.staging.staged_step import stage_step
from minialpa.inter.staging.tasks import StagedStep
from minialpa.inter.staging.transfers import planned_transfers
from minialpa.intra.graph.problem import MeshEquations, MeshSharding
from minialpa.intra.promises import gathered_state
from minialpa.intra.strategies.strategies import is_contraction
from minialpa.options import PlanOptions
from minialpa.plan import Plan, PlanCost, PlannedCollective, PlannedOperator, StagePlan
from minialpa.tracing.jaxprs import shape_of

Progress = Callable[[str, int, int], None]


class StageTooLargeError(InfeasibleError):
    """A stage does not fit with so many micro-batches in flight."""

    def __init__(self, message: str, stage: int, n_live: int) -> None:
        super().__init__(message)
        self.stage, self.n_live = stage, n_live


def _staged(layered: LayeredStep, options: PlanOptions, chunks: Chunks) -> StagedStep:
    check_chunks(chunks, options.schedule)
    groups = chunks.of_group(layered.of_group)
    keep = bool(options.keep_rows)
    staged = stage_step(layered.step, options.n_micro_batches, groups, chunks.stage_of, keep_rows=keep)
    if options.schedule == "inference" and any(map(staged.trains, range(1, staged.split.n_loops + 1))):
        raise ShardingError(
            "The schedule `inference` has no backward pass and the step computes gradients. Use `1f1b` or `gpipe`."
        )
    return staged


def assemble(
    layered: LayeredStep,
    cluster: ClusterSpec,
    options: PlanOptions,
    stages: Sequence[DecidedStage],
    logical_mesh: LogicalMesh | None,
    report: Progress,
    solver: StageSolver,
) -> Plan:
    """The plan with these stages, each solved by `solver`. Raises StageTooLargeError where one does not fit."""
    chunks = chunks_of([stage.layers for stage in stages])
    staged = _staged(layered, options, chunks)
    shardings: list[MeshSharding] = []
    plans: list[StagePlan] = []
    collectives: list[PlannedCollective] = []
    schedule = make_schedule(options.schedule if len(stages) > 1 else "gpipe", chunks.size(options.n_micro_batches))
    for k, stage in enumerate(stages):
        report("Shardings of stages", k, len(stages))
        chosen = stage.candidate
        mesh = logical_mesh or cluster.logical_mesh(chosen.submesh, chosen.logical_shape, chosen.device)
        problem = mesh_equations(staged, k)
        view = ShardedView(mesh, stage.option.forbidden_collectives)
        live = live_counts(schedule, k)
        try:
            solved = solver.solve(staged, k, problem, view, stage.option, live)
        except InfeasibleError as error:
            message = f"Stage {k} on a mesh of {mesh.shape} devices: {error}"
            raise StageTooLargeError(message, k, max(map(max, live))) from error
        if stage.option.sharded_update:
            for gathered in gathered_state(problem, solved.sharding, mesh):
                warnings.warn(str(gathered), UserWarning, stacklevel=2)
        moved = mesh_collectives(solved.programs)
        times = stage_times(problem, solved.sharding, moved, mesh, staged.split.n_loops)
        plans.append(_stage_plan(staged, stage, problem, solved, view, times, live, layered.of_group))
        shardings.append(solved.sharding)
        collectives.extend(_merged(moved, k, options.n_micro_batches))
    report("Shardings of stages", len(stages), len(stages))
    return Plan(
        layered.fingerprint,
        cluster,
        options.n_micro_batches,
        options.schedule,
        layered.of_group,
        layered.remat,
        tuple(plans),
        placed_inputs(staged, [sharding.specs for sharding in shardings]),
        placed_outputs(staged, [sharding.results for sharding in shardings]),
        tuple(collectives),
        planned_transfers(staged),
        _cost(plans, _border_seconds(staged, cluster, stages, chunks), schedule.size),
        layered.row_blocks,
        per_micro_batch=staged.split.own,
        keeps_rows=bool(options.keep_rows),
    )


def _border_seconds(
    staged: StagedStep, cluster: ClusterSpec, stages: Sequence[DecidedStage], chunks: Chunks
) -> list[float]:
    """Seconds of one micro-batch's values, both directions, over the border after each chunk but the last."""
    out = []
    for n_bytes, (a, b) in zip(border_bytes(staged), itertools.pairwise(chunks.stage_of), strict=True):
        hosts = {stages[k].first_device // cluster.devices_per_host for k in (a, b)}
        inside = all(stages[k].candidate.submesh[0] == 1 for k in (a, b))
        link = cluster.link(same_host=len(hosts) == 1 and inside)
        out.append(2 * link.alpha_s + link.beta_s_per_byte * n_bytes)
    return out


def _stage_plan(
    staged: StagedStep,
    stage: DecidedStage,
    problem: MeshEquations,
    solved: SolvedStage,
    view: ShardedView,
    times: StageTimes,
    live: Moments,
    layer_of_group: Sequence[int],
) -> StagePlan:
    mesh, solution, memory = view.mesh, solved.sharding, solved.memory
    return StagePlan(
        stage.layers,
        stage.candidate.submesh,
        stage.first_device,
        mesh.shape,
        mesh.alpha,
        mesh.beta,
        stage.option,
        tuple(solution.specs[v] for v, _ in problem.inputs),
        solution.equations,
        _operators(staged, problem, solution, layer_of_group),
        times.passes,
        times.update_s,
        memory.fixed_bytes + memory.temp_bytes,
        memory.kept_bytes,
        memory.peak_bytes(live),
        solution.optimal,
        times.between_s,
    )


def _operators(
    staged: StagedStep, problem: MeshEquations, solution: MeshSharding, layer_of_group: Sequence[int]
) -> tuple[PlannedOperator, ...]:
    """Matrix products and convolutions of a mesh, with their layers."""
    origins = staged.split.traced.origins
    source = {id(op.eqn): op.source for op in staged.split.ops}
    out = []
    for eqn, specs in zip(problem.eqns, solution.equations, strict=True):
        if is_contraction(eqn):
            origin = origins[source[id(eqn)]]
            group = origin.group
            layer = None if group is None else layer_of_group[group] if layer_of_group else 0
            shape = shape_of(eqn.outvars[0])
            out.append(
                PlannedOperator(eqn.primitive.name, origin.direction, layer, shape, specs.results[0], specs.operands)
            )
    return tuple(out)


def _merged(moved: Sequence[TaskCollectives], stage: int, n_micro_batches: int) -> list[PlannedCollective]:
    """Collectives of a stage with equal ones counted together."""
    counts: dict[tuple[CollectiveKind, float, tuple[int, ...]], int] = {}
    for task, collectives in ((m.task, m.collectives) for m in moved):
        for c, n, _ in collectives:
            key = (c.kind, c.n_bytes, c.axes)
            counts[key] = counts.get(key, 0) + n * (n_micro_batches if task.per_micro_batch else 1)
    return [PlannedCollective(kind, size, axes, stage, n) for (kind, size, axes), n in counts.items()]


def _cost(stages: Sequence[StagePlan], borders: Sequence[float], size: PipelineSize) -> PlanCost:
    """T = ((v - 1) max(B, p) + B) / v max_k t_k + (sum_k t_k - max_k t_k) / v + sum borders + max_k update_k.

    Several loops follow each other: the first two terms and the last for each of them.
    With one chunk per stage, v = 1, this is sum_k t_k + (B - 1) max_k t_k + ... (Alpa, OSDI'22, section 5.1, with
    transfers). With several the first micro-batch fills, and the last one drains, only one chunk of each of the p
    stages. t_k: seconds of a micro-batch in all chunks of a stage, which are taken to be equal.
    """
    total = compute = communication = update = 0.0
    n_loops = 1 + max(len(s.between_s) for s in stages)
    for loop in range(1, n_loops + 1):
        compute_s = [sum(one.compute_s for one in s.passes if one.loop == loop) for s in stages]
        seconds = [sum(one.seconds for one in s.passes if one.loop == loop) for s in stages]
        slowest = max(range(len(stages)), key=lambda k: seconds[k])
        behind = [s.between_s[loop - 1] if loop < n_loops else s.update_s for s in stages]
        total += _loop_seconds(seconds, size) + max(behind)
        compute += size.n_micro_batches * compute_s[slowest]
        communication += size.n_micro_batches * (seconds[slowest] - compute_s[slowest])
        update += max(behind)
    total += sum(borders[: size.n_stages - 1])
    bubble = max(0.0, total - compute - communication - update)
    return PlanCost(total, compute, communication, bubble, update, tuple(s.peak_bytes for s in stages))


def _loop_seconds(seconds: Sequence[float], size: PipelineSize) -> float:
    """Seconds of one loop, of the stages' `seconds` for one micro-batch."""
    p, n_micro_batches, v = size.n_stages, size.n_micro_batches, size.n_chunks
    full = ((v - 1) * max(n_micro_batches, p) + n_micro_batches) / v
    return full * max(seconds) + (sum(seconds) - max(seconds)) / v
