"""The planner: a traced step, a cluster and options in, a plan out. Pure; no devices."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from minialpa.cluster import ClusterSpec, LogicalMesh
from minialpa.errors import InfeasibleError, MinialpaError, ShardingError, TraceError
from minialpa.inter.build_plan import Progress, StageTooLargeError, assemble
from minialpa.inter.layers.cut_scans import cut_scans, whole_scans, with_longer_scans
from minialpa.inter.layers.forward import balanced_runs, layer_flops
from minialpa.inter.layers.layered_step import CutStep, LayeredStep, layered_step
from minialpa.inter.schedule.chunks import plan_chunks
from minialpa.inter.search.cost_cache import load_costs, save_costs
from minialpa.inter.search.joint_search import Found, StageSearch
from minialpa.inter.search.stage_bounds import Space, StageBounds
from minialpa.inter.search.stage_solve import StageSolver
from minialpa.inter.search.submeshes import Candidate, candidates, preferred_seconds
from minialpa.inter.search.user_stages import DecidedStage, given_stages
from minialpa.inter.staging.replan import options_of
from minialpa.inter.staging.staged_step import realise
from minialpa.intra.graph.constraints import matches
from minialpa.options import (
    AutoLayerOption,
    AutoShardingOption,
    AutoStageOption,
    FixedLayerOption,
    PlanOptions,
    Remat,
    remats,
)
from minialpa.plan import Plan
from minialpa.rules.factors import primitives_without_rule
from minialpa.tracing.trace import TracedStep

#: A search ends when the sums of pieces promise nothing better, or after this many plans, or rounds, in some of which
#: stages do not fit.
_MAX_PLANS, _MAX_ROUNDS = 8, 30
#: Of the paths of arguments and results, those that a message lists.
_MOST_PATHS = 8
#: Of the step time, the bubble that is worth looking at interleaved stages.
_LARGE_BUBBLE = 0.02
#: Of the step time of a plan that has each layer by itself, what one with long scans may take.
_AS_FAST = 1.01
#: Steps of so many equations are planned for every promise that the sums of pieces make; and on one device, too.
_FEW_EQUATIONS, _VERY_FEW_EQUATIONS = 10_000, 4000


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
    _check_fixed_paths(traced, options)
    plan = _planned(traced, cluster, options, logical_mesh, report)
    if options.keep_rows is None and plan.n_loops > 1:
        return _or_kept_rows(plan, traced, cluster, logical_mesh, report)
    return plan


def _planned(
    traced: TracedStep,
    cluster: ClusterSpec,
    options: PlanOptions,
    logical_mesh: LogicalMesh | None,
    report: Progress,
) -> Plan:
    """The best plan of what the options leave open."""
    whole = LayeredStep(step=traced, fingerprint=traced.fingerprint)
    if options.layers is None:
        _check_view(options, logical_mesh)
        submesh = options.submesh or (cluster.num_hosts, cluster.devices_per_host)
        shape = options.logical_shape or (logical_mesh.shape if logical_mesh else (submesh[0] * submesh[1],))
        stages = [DecidedStage((), Candidate(submesh, shape), options.sharding, 0)]
        return assemble(whole, cluster, options, stages, logical_mesh, report, StageSolver())
    if logical_mesh is not None and isinstance(options.stages, AutoStageOption):
        raise ShardingError(
            "A LogicalMesh is one view of its devices, and a search looks at all of them. Give a ClusterSpec or a list "
            "of devices, or use `ShardParallel`."
        )
    if isinstance(options.stages, AutoStageOption):
        searched = dataclasses.replace(options, sharding=options.stages.sharding(options.sharding))
        search = _best_shape if traced.n_groups == 0 else _best_cut
        return search(whole, cluster, searched, options.stages, report)
    cut = cut_scans(whole, options.layers)
    one_stage = cut is not None and len(given_stages(cluster, options, cut.n_layers)) == 1
    if cut is None or (one_stage and not isinstance(options.layers, FixedLayerOption)):
        cut = whole_scans(whole, options.layers)
    stages = given_stages(cluster, options, cut.n_layers)
    _check_stages_on(logical_mesh, stages)
    solver = StageSolver()

    def attempt(remat: tuple[Remat, ...]) -> Plan:
        return assemble(layered_step(cut, remat), cluster, options, stages, logical_mesh, report, solver)

    best = _best(partial(attempt, remat) for remat in remats(options.layers, cut.n_layers))
    if logical_mesh is None and options.layers == AutoLayerOption():
        return _or_longer_scans(best, cut, cluster, options, report)
    return best


def _best(
    attempts: Iterable[Callable[[], Plan]], excused: tuple[type[MinialpaError], ...] = (InfeasibleError,)
) -> Plan:
    """The best of the plans that attempts make; of plans that hardly differ, the one on fewer devices.

    Raises the last of the `excused` errors where none makes any.
    """
    plans: list[Plan] = []
    failure: MinialpaError = InfeasibleError("There is nothing to choose from.")
    for attempt in attempts:
        try:
            plans.append(attempt())
        except excused as error:
            failure = error
    if not plans:
        raise failure
    return min(plans, key=_preference)


def _or_kept_rows(
    best: Plan, traced: TracedStep, cluster: ClusterSpec, logical_mesh: LogicalMesh | None, report: Progress
) -> Plan:
    """`best`, or the same stages with what later loops read kept by the earlier ones, where that is faster and fits."""
    if not realise(traced, best).split.computes_rows_again:
        return best
    options = dataclasses.replace(options_of(best), keep_rows=True)

    def kept() -> Plan:
        plan = _planned(traced, cluster, options, logical_mesh, report)
        return dataclasses.replace(plan, certificate=best.certificate)

    return _best([lambda: best, kept])


def _preference(plan: Plan) -> float:
    n_devices = sum(stage.n_devices for stage in plan.stages)
    return preferred_seconds(plan.cost.total_s, n_devices / plan.cluster.n_devices)


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


def _check_view(options: PlanOptions, logical_mesh: LogicalMesh | None) -> None:
    """Raise ShardingError where a LogicalMesh and another shape are asked for."""
    if logical_mesh is None:
        return
    shape, submesh = options.logical_shape, options.submesh
    if shape is not None and tuple(shape) != tuple(logical_mesh.shape):
        raise ShardingError(
            f"`logical_shape` is {tuple(shape)} and `devices` is a LogicalMesh of {logical_mesh.shape}. Leave one out."
        )
    if submesh is not None and submesh[0] * submesh[1] != logical_mesh.n_devices:
        raise ShardingError(
            f"`submesh` is {submesh} and `devices` is a LogicalMesh of {logical_mesh.shape}. Leave one out."
        )


def _check_stages_on(logical_mesh: LogicalMesh | None, stages: Sequence[DecidedStage]) -> None:
    """Raise ShardingError where a LogicalMesh is to hold stages that each have a part of its devices."""
    if logical_mesh is not None and any(s.candidate.n_devices != logical_mesh.n_devices for s in stages):
        raise ShardingError(
            f"`devices` is a LogicalMesh of {logical_mesh.shape}, one view of all of its devices, and there are "
            f"{len(stages)} stages on parts of them. Give a ClusterSpec or a list of devices."
        )


def _check_fixed_paths(traced: TracedStep, options: PlanOptions) -> None:
    """Raise ShardingError for a key of `fixed_specs` that no argument and no result matches."""
    paths = (*traced.in_paths, *traced.out_paths)
    for pattern in options.fixed_paths:
        if not any(matches(pattern, path) for path in paths):
            listed = ", ".join(f"`{path}`" for path in paths[:_MOST_PATHS]) + (", ..." if paths[_MOST_PATHS:] else "")
            raise ShardingError(
                f"`fixed_specs` has the key `{pattern}`, which no argument and no result matches. There are {listed}; "
                "`*` stands for any text."
            )


def _best_shape(
    whole: LayeredStep, cluster: ClusterSpec, options: PlanOptions, auto: AutoStageOption, report: Progress
) -> Plan:
    """The best plan of a step without layers, such as one that computes no gradients: one stage, on any submesh."""
    solver = StageSolver()

    def attempt(candidate: Candidate) -> Plan:
        host = next(h for h in range(cluster.num_hosts) if candidate.device in (None, cluster.device_of(h)))
        stage = DecidedStage((), candidate, options.sharding, host * cluster.devices_per_host)
        return assemble(whole, cluster, options, [stage], None, report, solver)

    n_least = cluster.n_devices if options.use_all_devices else 1
    found = [candidate for candidate in candidates(cluster, auto) if candidate.n_devices >= n_least]
    if not found:
        raise InfeasibleError(f"No submesh has all {cluster.n_devices} devices.")
    return _best(partial(attempt, candidate) for candidate in found)


def _best_cut(
    whole: LayeredStep, cluster: ClusterSpec, options: PlanOptions, auto: AutoStageOption, report: Progress
) -> Plan:
    """The best plan of a joint search, with scans over layers whole, and, where that may help, with stages in them."""
    assert options.layers is not None
    layers = options.layers
    cut = cut_scans(whole, layers) if cluster.n_devices > 1 else None

    def attempt(step: CutStep | None) -> Plan:
        chosen = step or whole_scans(whole, layers)
        found = _searched(chosen, cluster, options, auto, report)
        return _or_longer_scans(found, chosen, cluster, options, report)

    # A step whose layers are all in scans may have too little outside them to be layers, or batches.
    return _best([partial(attempt, step) for step in ((None, cut) if cut else (None,))], (InfeasibleError, TraceError))


def _or_longer_scans(best: Plan, cut: CutStep, cluster: ClusterSpec, options: PlanOptions, report: Progress) -> Plan:
    """`best`, or one scan for all rows of a chunk where that is as fast: its programs do not grow with the layers."""
    if not best.row_blocks or set(best.remat) != {"none"}:
        return best
    chunks = plan_chunks(best)
    longer = with_longer_scans(cut, chunks.of_group(range(len(best.remat))))
    if longer.row_blocks == best.row_blocks:
        return best
    of_stage = [tuple(c for c, k in enumerate(chunks.stage_of) if k == stage) for stage in range(chunks.n_stages)]
    stages = []
    for layers, s in zip(of_stage, best.stages, strict=True):
        device = cluster.device_of(s.first_device // cluster.devices_per_host) if cluster.host_devices else None
        stages.append(DecidedStage(layers, Candidate(s.submesh, s.logical_shape, device), s.option, s.first_device))
    chosen = dataclasses.replace(options, n_micro_batches=best.n_micro_batches, schedule=best.schedule)
    layered = layered_step(longer, tuple(itertools.repeat("none", longer.n_layers)))
    try:
        plan = assemble(layered, cluster, chosen, stages, None, report, StageSolver())
    except InfeasibleError:
        return best
    if plan.cost.total_s > _AS_FAST * best.cost.total_s:
        return best
    return dataclasses.replace(plan, certificate=best.certificate)


def _searched(
    cut: CutStep, cluster: ClusterSpec, options: PlanOptions, auto: AutoStageOption, report: Progress
) -> Plan:
    """The best plan of a joint search. Stages that it finds are solved as wholes, and what these cost is learned."""
    assert options.layers is not None
    traced = cut.step
    space = Space(
        options.micro_batch_choices(traced.batch_size),
        tuple(remat[0] for remat in remats(options.layers, 1)),
        tuple(candidates(cluster, auto)),
        options.schedule,
        options.use_all_devices,
        auto.tolerance,
    )
    known = load_costs(auto.cached_costs)
    bounds = StageBounds(traced, cut.of_group, cluster, space, options.sharding, known)
    search, solver = StageSearch(bounds, report), StageSolver(bounds.menus)
    plans: list[Plan] = []
    founds: list[Found] = []
    failure: InfeasibleError | None = None
    excess = 1.0  # by which whole stages cost more than the sums of their pieces
    for _ in range(_MAX_ROUNDS):
        try:
            found = search.best()
        except InfeasibleError as error:
            failure = failure or error
            break
        certificate = search.certificate
        best_s = min((plan.cost.total_s for plan in plans), default=math.inf)
        if best_s <= excess * found.seconds or len(plans) == _MAX_PLANS:
            break
        try:
            plan = _assembled(cut, cluster, options, found, solver, report)
        except StageTooLargeError as error:
            search.exclude(found, error.stage, error.n_live)
            failure = error
            continue
        search.learn(found, [(s.compute_s + s.communication_s, s.update_s) for s in plan.stages])
        if not plans and len(traced.flat.eqns) > _FEW_EQUATIONS:
            excess = max(1.0, plan.cost.total_s / found.seconds)
        plans.append(plan)
        founds.append(found)
    save_costs(auto.cached_costs, known)
    if not plans:
        assert failure is not None
        raise _explained(failure, cut.whole, cluster, options, auto, report)
    best, found = min(zip(plans, founds, strict=True), key=lambda pair: _preference(pair[0]))
    alike = [partial(_assembled, cut, cluster, options, other, solver, report) for other in search.alike(found)]
    best = _best([lambda: best, *alike])
    bound_s = min(certificate.bound_s, best.cost.total_s)
    if options.choose_schedule:
        best = _or_interleaved(best, cut, cluster, options, report, solver)
    if len(traced.flat.eqns) <= _VERY_FEW_EQUATIONS and not options.use_all_devices:
        best = _or_one_device(best, cut.whole, cluster, options, auto, report)
    return dataclasses.replace(best, certificate=dataclasses.replace(certificate, bound_s=bound_s))


def _explained(
    failure: InfeasibleError,
    whole: LayeredStep,
    cluster: ClusterSpec,
    options: PlanOptions,
    auto: AutoStageOption,
    report: Progress,
) -> InfeasibleError:
    """Why a search found nothing: what forbids the whole step on all devices, where options may be the reason."""
    kept = set(options.sharding.set_names) - {"memory_limit_bytes", "solver_time_limit_s"}
    if auto.sharding(AutoShardingOption()) != AutoShardingOption():
        kept = kept - {"force_batch_dim_to_mesh_dim"} | {"submesh_logical_shape_space"}
    if not kept or isinstance(failure, StageTooLargeError):
        return failure
    n = 1 if options.choose_micro_batches else options.n_micro_batches
    try:
        _best_shape(whole, cluster, dataclasses.replace(options, n_micro_batches=n), auto, report)
    except InfeasibleError as error:
        listed = ", ".join(f"`{name}`" for name in sorted(kept))
        return InfeasibleError(f"No pipeline keeps to {listed}, and neither does the step in one stage. {error}")
    return failure


def _assembled(
    cut: CutStep,
    cluster: ClusterSpec,
    options: PlanOptions,
    found: Found,
    solver: StageSolver,
    report: Progress,
) -> Plan:
    """The plan of what a search found. Raises StageTooLargeError where a stage does not fit after all."""
    remat = tuple(stage.remat for stage in found.stages for _ in stage.layers)
    layered = layered_step(cut, remat)
    stages = [DecidedStage(s.layers, s.candidate, options.sharding, s.choice.first_device) for s in found.stages]
    if len(stages) == 1 and not set(remat) - {"none"}:  # no use for layers
        layered, stages = cut.whole, [dataclasses.replace(stages[0], layers=())]
    chosen = dataclasses.replace(options, n_micro_batches=found.n_micro_batches)
    return assemble(layered, cluster, chosen, stages, None, report, solver)


def _or_interleaved(
    best: Plan, cut: CutStep, cluster: ClusterSpec, options: PlanOptions, report: Progress, solver: StageSolver
) -> Plan:
    """`best`, or its submeshes with several runs of layers each, where a shorter bubble is worth the transfers."""
    p, n_layers = len(best.stages), len(best.remat)
    alike = len({(stage.submesh, stage.logical_shape) for stage in best.stages}) == 1 and not cluster.host_devices
    if p == 1 or not alike or best.cost.bubble_s < _LARGE_BUBBLE * best.cost.total_s:
        return best
    layered = layered_step(cut, best.remat)
    chosen = dataclasses.replace(options, n_micro_batches=best.n_micro_batches, schedule="1f1b-interleaved")

    def attempt(v: int) -> Plan:
        chunks = balanced_runs(layer_flops(cut.step, best.layer_of_group), p * v)
        stages = [
            DecidedStage(sum(chunks[k::p], ()), Candidate(s.submesh, s.logical_shape), options.sharding, s.first_device)
            for k, s in enumerate(best.stages)
        ]
        return assemble(layered, cluster, chosen, stages, None, report, solver)

    return _best([lambda: best, *(partial(attempt, v) for v in (2, 4) if p * v <= n_layers)])


def _or_one_device(
    best: Plan, whole: LayeredStep, cluster: ClusterSpec, options: PlanOptions, auto: AutoStageOption, report: Progress
) -> Plan:
    """`best`, or one device where that is as fast: the sums of pieces can promise more than small steps keep."""
    alone = dataclasses.replace(cluster, num_hosts=1, devices_per_host=1, host_devices=cluster.host_devices[:1])
    n = 1 if options.choose_micro_batches else options.n_micro_batches
    one = partial(_best_shape, whole, alone, dataclasses.replace(options, n_micro_batches=n), auto, report)
    return _best([lambda: best, lambda: dataclasses.replace(one(), cluster=cluster)])
