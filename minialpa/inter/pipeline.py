"""The planner: a traced step, a cluster and options in, a plan out. Pure; no devices."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence

from minialpa.cluster import ClusterSpec, LogicalMesh
from minialpa.cost import CollectiveKind
from minialpa.errors import InfeasibleError, ShardingError
from minialpa.fingerprint import Fingerprint
from minialpa.inter.chunks import Chunks, check_chunks, chunks_of
from minialpa.inter.forward import assign_layers
from minialpa.inter.mesh_problem import ShardedView, TaskCollectives, mesh_collectives, mesh_equations
from minialpa.inter.remat import rematerialise
from minialpa.inter.schedule import PipelineSize, live_counts, make_schedule
from minialpa.inter.search import Space, StageSearch
from minialpa.inter.split import StagedStep
from minialpa.inter.stage_cost import border_bytes
from minialpa.inter.stage_memory import Moments
from minialpa.inter.stage_solve import SolvedStage, StageSolver
from minialpa.inter.stage_times import StageTimes, stage_times
from minialpa.inter.staging import n_groups, stage_step
from minialpa.inter.submeshes import Candidate, candidates
from minialpa.inter.transfers import planned_transfers
from minialpa.intra.factors import primitives_without_rule
from minialpa.intra.problem import MeshEquations, MeshSharding
from minialpa.intra.strategies import is_contraction
from minialpa.jaxprs import Atom, dtype_name, is_literal, shape_of
from minialpa.options import (
    AutoShardingOption,
    AutoStageOption,
    ManualStageOption,
    PlanOptions,
    Remat,
    UniformStageOption,
    remats,
)
from minialpa.plan import PlacedValue, Plan, PlanCost, PlannedCollective, PlannedOperator, StagePlan
from minialpa.sharding import Spec
from minialpa.trace import TracedStep

Progress = Callable[[str, int, int], None]

#: A search ends when its best plan is at most this fraction slower than what else the sums of pieces promise, or after
#: this many plans.
_TOLERANCE, _MAX_ROUNDS = 0.01, 8
#: By how much of its time a plan on all devices has to be faster than one on none.
_PER_DEVICE = 1e-3
#: Steps of so many equations are planned for every promise that the sums of pieces make.
_FEW_EQUATIONS = 4000


@dataclasses.dataclass(frozen=True, slots=True)
class _Stage:
    """A decided stage, before its mesh is solved."""

    layers: tuple[int, ...]
    candidate: Candidate
    option: AutoShardingOption
    first_device: int


class _StageTooLargeError(InfeasibleError):
    """A stage does not fit with so many micro-batches in flight."""

    def __init__(self, message: str, stage: int, n_live: int) -> None:
        super().__init__(message)
        self.stage, self.n_live = stage, n_live


@dataclasses.dataclass(frozen=True, slots=True)
class _Layered:
    """A step as its layers compute it; the fingerprint of the step that was traced; the layer of each forward group,
    and what each layer computes again."""

    step: TracedStep
    fingerprint: Fingerprint
    of_group: tuple[int, ...] = ()
    remat: tuple[Remat, ...] = ()


def plan_step(
    traced: TracedStep,
    cluster: ClusterSpec,
    options: PlanOptions,
    *,
    logical_mesh: LogicalMesh | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Plan `traced` on `cluster`. `logical_mesh` overrides the view of the cluster when there is no pipeline.

    `progress(what, done, total)` is told about long work. Raises InfeasibleError when nothing fits in memory,
    ShardingError when a method asks for devices that the cluster does not have.
    """
    report = progress or (lambda what, done, total: None)
    _warn_of_missing_rules(traced)
    if options.layers is None:
        shape = options.logical_shape or (logical_mesh.shape if logical_mesh else (cluster.n_devices,))
        submesh = (cluster.num_hosts, cluster.devices_per_host)
        stages = [_Stage((), Candidate(submesh, shape), options.sharding, 0)]
        layered = _Layered(traced, traced.fingerprint)
        return _solve(layered, cluster, options, stages, logical_mesh, report, StageSolver())
    if logical_mesh is not None and isinstance(options.stages, AutoStageOption):
        raise ShardingError(
            "A LogicalMesh is one view of its devices, and a search looks at all of them. Give a ClusterSpec or a list "
            "of devices, or use `ShardParallel`."
        )
    if isinstance(options.stages, AutoStageOption) and n_groups(traced) == 0:
        return _best_shape(traced, cluster, options, options.stages, report)
    of_group = assign_layers(traced, options.layers)
    if isinstance(options.stages, AutoStageOption):
        return _searched(traced, cluster, options, options.stages, of_group, report)
    n_layers, fingerprint = max(of_group, default=-1) + 1, traced.fingerprint
    stages = _given_stages(cluster, options, n_layers)
    solver = StageSolver()
    plans: list[Plan] = []
    failure: InfeasibleError | None = None
    for remat in remats(options.layers, n_layers):
        layered = _Layered(rematerialise(traced, of_group, remat), fingerprint, of_group, remat)
        try:
            plans.append(_solve(layered, cluster, options, stages, logical_mesh, report, solver))
        except InfeasibleError as error:
            failure = error
    if not plans:
        assert failure is not None
        raise failure
    return min(plans, key=lambda plan: plan.cost.total_s)


def _warn_of_missing_rules(traced: TracedStep) -> None:
    names = primitives_without_rule(traced.flat.eqns)
    if names:
        listed = ", ".join(f"`{name}`" for name in names)
        warnings.warn(
            f"No sharding rule for {listed}: every device computes {'it' if len(names) == 1 else 'them'} whole. The "
            "numbers are right; the time and the memory may be more than they need be.",
            UserWarning,
            stacklevel=2,
        )


# ---- stages ---------------------------------------------------------------------------------------------------------


def _given_stages(cluster: ClusterSpec, options: PlanOptions, n_layers: int) -> list[_Stage]:
    match options.stages:
        case ManualStageOption() as manual:
            return _manual(manual, cluster, options.sharding, n_layers)
        case UniformStageOption() as uniform:
            return _uniform(uniform, cluster, options.sharding, n_layers)
        case _:
            return _uniform(UniformStageOption(), cluster, options.sharding, n_layers)


def _uniform(
    option: UniformStageOption, cluster: ClusterSpec, sharding: AutoShardingOption, n_layers: int
) -> list[_Stage]:
    n = cluster.n_devices
    n_stages = option.num_stages
    if n_stages is None:
        n_stages = max(s for s in range(1, n_layers + 1) if n % s == 0)
    if n_stages < 1:
        raise ShardingError(f"`num_stages` is at least 1; got {n_stages}.")
    n_chunks = n_stages * option.num_chunks
    if n_chunks < n_stages:
        raise ShardingError(f"`num_chunks` is at least 1; got {option.num_chunks}.")
    if n_chunks > n_layers:
        each = f" of {option.num_chunks} chunks" if option.num_chunks > 1 else ""
        raise ShardingError(
            f"`num_stages={n_stages}` stages{each} cannot be made of {n_layers} layers. Ask for more layers."
        )
    if option.submesh_physical_shape is None and n % n_stages:
        raise ShardingError(f"{n} devices cannot be divided equally among {n_stages} stages.")
    submesh = option.submesh_physical_shape or submesh_of(n // n_stages, cluster)
    candidate = Candidate(submesh, tuple(option.submesh_logical_shape or (submesh[0] * submesh[1],)))
    bounds = [round(c * n_layers / n_chunks) for c in range(n_chunks + 1)]
    chunks = [tuple(range(a, b)) for a, b in itertools.pairwise(bounds)]
    chosen = option.submesh_autosharding_option or sharding
    return _placed_stages([(sum(chunks[k::n_stages], ()), candidate, chosen) for k in range(n_stages)], cluster)


def submesh_of(n_devices: int, cluster: ClusterSpec) -> tuple[int, int]:
    """(hosts, devices per host) of `n_devices` devices in a row: part of a host or whole hosts, else ShardingError."""
    per_host = cluster.devices_per_host
    if n_devices <= per_host:
        return (1, n_devices)
    if n_devices % per_host:
        raise ShardingError(
            f"A submesh of {n_devices} devices is more than one host and not a whole number of hosts of {per_host}."
        )
    return (n_devices // per_host, per_host)


def _manual(
    option: ManualStageOption, cluster: ClusterSpec, sharding: AutoShardingOption, n_layers: int
) -> list[_Stage]:
    layers = [tuple(ids) for ids in option.forward_stage_layer_ids]
    starts = [ids[:1] for ids in layers]
    once = sorted(layer for ids in layers for layer in ids) == list(range(n_layers))
    if not once or starts != sorted(starts) or any(ids != tuple(sorted(ids)) for ids in layers):
        raise ShardingError(
            f"`forward_stage_layer_ids` must list the layers 0 to {n_layers - 1} once and in order; got {layers}."
        )
    dicts = list(option.submesh_autosharding_option_dicts) or [{}] * len(layers)
    shapes, logical = option.submesh_physical_shapes, option.submesh_logical_shapes
    if not len(layers) == len(shapes) == len(logical) == len(dicts):
        raise ShardingError(
            f"A manual stage option needs one submesh, logical shape and option dict for each of its {len(layers)} "
            f"stages; got {len(shapes)}, {len(logical)} and {len(dicts)}."
        )
    parts = [
        (ids, Candidate((s[0], s[1]), tuple(shape)), dataclasses.replace(sharding, **fields))
        for ids, s, shape, fields in zip(layers, shapes, logical, dicts, strict=True)
    ]
    return _placed_stages(parts, cluster)


def _placed_stages(
    parts: Sequence[tuple[tuple[int, ...], Candidate, AutoShardingOption]], cluster: ClusterSpec
) -> list[_Stage]:
    """Stages on the devices of the cluster in order, each where the one before ends or on the next host."""
    needed = sum(candidate.n_devices for _, candidate, _ in parts)
    if needed > cluster.n_devices:
        raise ShardingError(
            f"The stages need {needed} devices and the cluster has {cluster.n_devices}. Use fewer or smaller stages."
        )
    per_host, at = cluster.devices_per_host, 0
    stages = []
    for k, (layers, candidate, option) in enumerate(parts):
        hosts, n = candidate.submesh
        if (hosts > 1 or at % per_host + n > per_host) and at % per_host:
            at += per_host - at % per_host
        if n > per_host or at + candidate.n_devices > cluster.n_devices:
            raise ShardingError(
                f"There is no room for stage {k} on a submesh of {hosts} x {n} devices from device {at} on: stages "
                f"lie inside hosts of {per_host} devices or are whole hosts, in order. Use submeshes that fill hosts."
            )
        device = cluster.device_of(at // per_host) if cluster.host_devices else None
        stages.append(_Stage(layers, dataclasses.replace(candidate, device=device), option, at))
        at += candidate.n_devices
    return stages


def _best_shape(
    traced: TracedStep, cluster: ClusterSpec, options: PlanOptions, auto: AutoStageOption, report: Progress
) -> Plan:
    """The best plan of a step without layers, such as one that computes no gradients: one stage, on any submesh."""
    solver, layered = StageSolver(), _Layered(traced, traced.fingerprint)
    plans: list[Plan] = []
    failure: InfeasibleError | None = None
    for candidate in candidates(cluster, auto):
        if options.use_all_devices and candidate.n_devices < cluster.n_devices:
            continue
        host = next(h for h in range(cluster.num_hosts) if candidate.device in (None, cluster.device_of(h)))
        stage = _Stage((), candidate, options.sharding, host * cluster.devices_per_host)
        try:
            plans.append(_solve(layered, cluster, options, [stage], None, report, solver))
        except InfeasibleError as error:
            failure = error
    if not plans:
        raise failure or InfeasibleError(f"No submesh has all {cluster.n_devices} devices.")
    return min(plans, key=_preference)


def _preference(plan: Plan) -> float:
    """Predicted seconds; of plans that hardly differ, those on fewer devices are preferred."""
    n_devices = sum(stage.n_devices for stage in plan.stages)
    return plan.cost.total_s * (1 + _PER_DEVICE * n_devices / plan.cluster.n_devices)


def _searched(
    traced: TracedStep,
    cluster: ClusterSpec,
    options: PlanOptions,
    auto: AutoStageOption,
    of_group: tuple[int, ...],
    report: Progress,
) -> Plan:
    """The best plan of a joint search. Stages that it finds are solved as wholes, and what these cost is learned."""
    assert options.layers is not None
    space = Space(
        options.micro_batch_choices(traced.batch_size),
        tuple(remat[0] for remat in remats(options.layers, 1)),
        tuple(candidates(cluster, auto)),
        options.schedule,
        options.use_all_devices,
    )
    search = StageSearch(traced, of_group, cluster, space, options.sharding, report)
    fingerprint, solver = traced.fingerprint, StageSolver(search.menus)
    best: Plan | None = None
    failure: InfeasibleError | None = None
    excess = 1.0  # by which whole stages cost more than the sums of their pieces
    for _ in range(_MAX_ROUNDS):
        try:
            found = search.best()
        except InfeasibleError as error:
            failure = failure or error
            break
        if best is not None and best.cost.total_s * (1 - _TOLERANCE) <= excess * found.seconds:
            break
        remat = tuple(stage.remat for stage in found.stages for _ in stage.layers)
        if len(found.stages) == 1 and not set(remat) - {"none"}:  # no use for layers
            layered = _Layered(traced, fingerprint)
            stages = [_Stage((), found.stages[0].candidate, options.sharding, found.stages[0].first_device)]
        else:
            layered = _Layered(rematerialise(traced, of_group, remat), fingerprint, of_group, remat)
            stages = [_Stage(s.layers, s.candidate, options.sharding, s.first_device) for s in found.stages]
        chosen = dataclasses.replace(options, n_micro_batches=found.n_micro_batches)
        try:
            plan = _solve(layered, cluster, chosen, stages, None, report, solver)
        except _StageTooLargeError as error:
            search.exclude(found, error.stage, error.n_live)
            failure = error
            continue
        costs = [(s.compute_s + s.communication_s, s.update_s) for s in plan.stages]
        search.learn(found, {s.choice: cost for s, cost in zip(found.stages, costs, strict=True)})
        if best is None and len(traced.flat.eqns) > _FEW_EQUATIONS:
            excess = max(1.0, plan.cost.total_s / found.seconds)
        if best is None or _preference(plan) < _preference(best):
            best = plan
    if best is None:
        assert failure is not None
        raise failure
    if len(traced.flat.eqns) <= _FEW_EQUATIONS and not options.use_all_devices:
        best = _or_one_device(best, traced, cluster, options, auto, report)
    return best


def _or_one_device(
    best: Plan, traced: TracedStep, cluster: ClusterSpec, options: PlanOptions, auto: AutoStageOption, report: Progress
) -> Plan:
    """`best`, or one device where that is as fast: the sums of pieces can promise more than small steps keep."""
    alone = dataclasses.replace(cluster, num_hosts=1, devices_per_host=1, host_devices=cluster.host_devices[:1])
    whole = dataclasses.replace(options, n_micro_batches=1 if options.choose_micro_batches else options.n_micro_batches)
    try:
        plan = _best_shape(traced, alone, whole, auto, report)
    except InfeasibleError:
        return best
    plan = dataclasses.replace(plan, cluster=cluster)
    return min(best, plan, key=_preference)


# ---- the plan -------------------------------------------------------------------------------------------------------


def _staged(layered: _Layered, options: PlanOptions, chunks: Chunks) -> StagedStep:
    check_chunks(chunks, options.schedule)
    groups = chunks.of_group(layered.of_group)
    staged = stage_step(layered.step, options.n_micro_batches, groups, chunks.stage_of)
    if options.schedule == "inference" and any(task.kind == "backward" for task in staged.tasks):
        raise ShardingError(
            "The schedule `inference` has no backward pass and the step computes gradients. Use `1f1b` or `gpipe`."
        )
    return staged


def _solve(
    layered: _Layered,
    cluster: ClusterSpec,
    options: PlanOptions,
    stages: Sequence[_Stage],
    logical_mesh: LogicalMesh | None,
    report: Progress,
    solver: StageSolver,
) -> Plan:
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
            raise _StageTooLargeError(message, k, max(map(max, live))) from error
        moved = mesh_collectives(solved.programs)
        times = stage_times(problem, solved.sharding, moved, mesh)
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
        _placed_inputs(staged, shardings),
        _placed_outputs(staged, shardings),
        tuple(collectives),
        planned_transfers(staged),
        _cost(plans, _border_seconds(staged, cluster, stages, chunks), schedule.size),
    )


def _border_seconds(staged: StagedStep, cluster: ClusterSpec, stages: Sequence[_Stage], chunks: Chunks) -> list[float]:
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
    stage: _Stage,
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
        for c, n in collectives:
            key = (c.kind, c.n_bytes, c.axes)
            counts[key] = counts.get(key, 0) + n * (n_micro_batches if task.per_micro_batch else 1)
    return [PlannedCollective(kind, size, axes, stage, n) for (kind, size, axes), n in counts.items()]


def _placed(path: str, atom: Atom, specs: Mapping[int, Spec | None]) -> PlacedValue:
    """A value on meshes; where its spec is not known it is whole."""
    whole = Spec.replicated(len(shape_of(atom)))
    return PlacedValue(path, shape_of(atom), dtype_name(atom), tuple(specs), tuple(s or whole for s in specs.values()))


def _placed_inputs(staged: StagedStep, shardings: Sequence[MeshSharding]) -> tuple[PlacedValue, ...]:
    traced = staged.split.traced
    micro = dict(staged.split.micro_inputs)
    offset = len(traced.flat.constvars)
    out = []
    for i, (var, path) in enumerate(zip(traced.flat.invars, traced.in_paths, strict=True)):
        like, meshes = var, staged.input_meshes[offset + i]
        if var in micro:
            like = micro[var]
            meshes = tuple(sorted({task.mesh for task in staged.tasks if like in task.invars}))
        out.append(_placed(path, var, {mesh: shardings[mesh].specs.get(like) for mesh in meshes}))
    return tuple(out)


def _placed_outputs(staged: StagedStep, shardings: Sequence[MeshSharding]) -> tuple[PlacedValue, ...]:
    """Results; a replacement of a donated input is sharded as that input, so that the next step takes it as it is."""
    out = []
    for atom, path, meshes in zip(
        staged.split.outvars, staged.split.traced.out_paths, staged.output_meshes, strict=True
    ):
        results = [None if is_literal(atom) else shardings[mesh].results.get(atom) for mesh in meshes]
        out.append(_placed(path, atom, dict(zip(meshes, results, strict=True))))
    return tuple(out)


def _cost(stages: Sequence[StagePlan], borders: Sequence[float], size: PipelineSize) -> PlanCost:
    """T = ((v - 1) max(B, p) + B) / v max_k t_k + (sum_k t_k - max_k t_k) / v + sum borders + max_k update_k.

    With one chunk per stage, v = 1, this is sum_k t_k + (B - 1) max_k t_k + ... (Alpa, OSDI'22, section 5.1, with
    transfers). With several the first micro-batch fills, and the last one drains, only one chunk of each of the p
    stages. t_k: seconds of a micro-batch in all chunks of a stage, which are taken to be equal.
    """
    p, n_micro_batches, v = size.n_stages, size.n_micro_batches, size.n_chunks
    seconds = [s.compute_s + s.communication_s for s in stages]
    slowest = max(stages, key=lambda s: s.compute_s + s.communication_s)
    update = max(s.update_s for s in stages)
    full = ((v - 1) * max(n_micro_batches, p) + n_micro_batches) / v
    total = full * max(seconds) + (sum(seconds) - max(seconds)) / v + sum(borders[: p - 1]) + update
    compute, communication = n_micro_batches * slowest.compute_s, n_micro_batches * slowest.communication_s
    bubble = max(0.0, total - compute - communication - update)
    return PlanCost(total, compute, communication, bubble, update, tuple(s.peak_bytes for s in stages))
