"""The planner: a traced step, a cluster and options in, a plan out. Pure; no devices."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence

from minialpa.cluster import ClusterSpec, LogicalMesh
from minialpa.cost import Collective, CollectiveKind
from minialpa.errors import InfeasibleError, ShardingError
from minialpa.fingerprint import Fingerprint
from minialpa.inter.forward import assign_layers
from minialpa.inter.mesh_problem import ShardedView, mesh_collectives, mesh_equations
from minialpa.inter.remat import rematerialise
from minialpa.inter.schedule import make_schedule, n_live
from minialpa.inter.split import StagedStep
from minialpa.inter.stage_cost import Candidate, border_seconds, candidates, layer_table, stage_seconds
from minialpa.inter.stage_dp import choose_stages
from minialpa.inter.stage_solve import SolvedStage, solve_stage
from minialpa.inter.staging import stage_step
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Stage:
    """A decided stage, before its mesh is solved."""

    layers: tuple[int, ...]
    candidate: Candidate
    option: AutoShardingOption


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
        stages = [_Stage((), Candidate(submesh, shape), options.sharding)]
        return _solve(_Layered(traced, traced.fingerprint), cluster, options, stages, logical_mesh, report)
    of_group = assign_layers(traced, options.layers)
    n_layers, fingerprint = max(of_group, default=-1) + 1, traced.fingerprint
    plans: list[Plan] = []
    failure: InfeasibleError | None = None
    for remat in remats(options.layers, n_layers):
        layered = _Layered(rematerialise(traced, of_group, remat), fingerprint, of_group, remat)
        try:
            stages = _choose(layered.step, cluster, options, of_group, report)
            plans.append(_solve(layered, cluster, options, stages, logical_mesh, report))
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


def _choose(
    traced: TracedStep, cluster: ClusterSpec, options: PlanOptions, layer_of_group: Sequence[int], report: Progress
) -> list[_Stage]:
    n_layers = max(layer_of_group, default=-1) + 1
    match options.stages:
        case ManualStageOption() as manual:
            return _manual(manual, cluster, options.sharding, n_layers)
        case AutoStageOption() as auto:
            return _search(traced, cluster, options, auto, layer_of_group, report)
        case UniformStageOption() as uniform:
            return _uniform(uniform, cluster, options.sharding, n_layers)
        case None:
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
    if n_stages > n_layers:
        raise ShardingError(f"`num_stages={n_stages}` stages cannot be made of {n_layers} layers. Ask for more layers.")
    if option.submesh_physical_shape is None and n % n_stages:
        raise ShardingError(f"{n} devices cannot be divided equally among {n_stages} stages.")
    submesh = option.submesh_physical_shape or submesh_of(n // n_stages, cluster)
    shape = option.submesh_logical_shape or (submesh[0] * submesh[1],)
    bounds = [round(k * n_layers / n_stages) for k in range(n_stages + 1)]
    stages = [
        _Stage(tuple(range(a, b)), Candidate(submesh, tuple(shape)), option.submesh_autosharding_option or sharding)
        for a, b in itertools.pairwise(bounds)
    ]
    return _checked(stages, cluster)


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
    if [layer for ids in layers for layer in ids] != list(range(n_layers)):
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
    stages = [
        _Stage(ids, Candidate((s[0], s[1]), tuple(shape)), dataclasses.replace(sharding, **fields))
        for ids, s, shape, fields in zip(layers, shapes, logical, dicts, strict=True)
    ]
    return _checked(stages, cluster)


def _checked(stages: list[_Stage], cluster: ClusterSpec) -> list[_Stage]:
    needed = sum(stage.candidate.n_devices for stage in stages)
    if needed > cluster.n_devices:
        raise ShardingError(
            f"The stages need {needed} devices and the cluster has {cluster.n_devices}. Use fewer or smaller stages."
        )
    return stages


def _search(
    traced: TracedStep,
    cluster: ClusterSpec,
    options: PlanOptions,
    auto: AutoStageOption,
    layer_of_group: Sequence[int],
    report: Progress,
) -> list[_Stage]:
    """Search stages and submeshes with the costs of single layers."""
    n_layers = max(layer_of_group, default=-1) + 1
    choices = candidates(cluster, auto)
    one_per_mesh = stage_step(traced, options.n_micro_batches, layer_of_group, n_layers)
    table, columns = layer_table(
        one_per_mesh, cluster, choices, options.sharding, lambda done, total: report("Costs of layers", done, total)
    )
    found = choose_stages(
        table,
        n_devices=cluster.n_devices,
        n_micro_batches=options.n_micro_batches,
        memory_bytes=options.sharding.limit_bytes(cluster.device) or math.inf,
        schedule=options.schedule,
    )
    return [
        _Stage(tuple(range(s.first_layer, s.last_layer + 1)), columns[s.candidate], options.sharding)
        for s in found.stages
    ]


# ---- the plan -------------------------------------------------------------------------------------------------------


def _staged(layered: _Layered, options: PlanOptions, stages: Sequence[_Stage]) -> StagedStep:
    stage_of_layer = {layer: k for k, stage in enumerate(stages) for layer in stage.layers}
    groups = [stage_of_layer[layer] for layer in layered.of_group]
    staged = stage_step(layered.step, options.n_micro_batches, groups, len(stages))
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
) -> Plan:
    staged = _staged(layered, options, stages)
    shardings: list[MeshSharding] = []
    plans: list[StagePlan] = []
    collectives: list[PlannedCollective] = []
    schedule = make_schedule(options.schedule if len(stages) > 1 else "gpipe", len(stages), options.n_micro_batches)
    first_device = 0
    for k, stage in enumerate(stages):
        report("Shardings of stages", k, len(stages))
        mesh = logical_mesh or cluster.logical_mesh(stage.candidate.submesh, stage.candidate.logical_shape)
        problem = mesh_equations(staged, k)
        view = ShardedView(mesh, stage.option.forbidden_collectives)
        live = n_live(schedule, k)
        try:
            solved = solve_stage(staged, k, problem, view, stage.option, live)
        except InfeasibleError as error:
            raise InfeasibleError(f"Stage {k} on a mesh of {mesh.shape} devices: {error}") from error
        moved = mesh_collectives(solved.programs, options.n_micro_batches)
        seconds = stage_seconds(solved.sharding, moved, mesh, options.n_micro_batches)
        plans.append(_stage_plan(staged, stage, first_device, problem, solved, view, seconds, live, layered.of_group))
        shardings.append(solved.sharding)
        collectives.extend(_merged(moved, k))
        first_device += stage.candidate.n_devices
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
        _cost(plans, border_seconds(staged, cluster), options.n_micro_batches),
    )


def _stage_plan(
    staged: StagedStep,
    stage: _Stage,
    first_device: int,
    problem: MeshEquations,
    solved: SolvedStage,
    view: ShardedView,
    seconds: tuple[float, float, float],
    live: int,
    layer_of_group: Sequence[int],
) -> StagePlan:
    mesh, solution, memory = view.mesh, solved.sharding, solved.memory
    return StagePlan(
        stage.layers,
        stage.candidate.submesh,
        first_device,
        mesh.shape,
        mesh.alpha,
        mesh.beta,
        stage.option,
        tuple(solution.specs[v] for v, _ in problem.inputs),
        solution.equations,
        _operators(staged, problem, solution, layer_of_group),
        *seconds,
        memory.fixed_bytes + memory.temp_bytes,
        memory.in_flight_bytes,
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


def _merged(collectives: Sequence[tuple[Collective, int, bool]], stage: int) -> list[PlannedCollective]:
    """Collectives of a stage with equal ones counted together."""
    counts: dict[tuple[CollectiveKind, float, tuple[int, ...]], int] = {}
    for c, times, _ in collectives:
        key = (c.kind, c.n_bytes, c.axes)
        counts[key] = counts.get(key, 0) + times
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


def _cost(stages: Sequence[StagePlan], borders: Sequence[float], n_micro_batches: int) -> PlanCost:
    """T = sum_k t_k + sum borders + (B - 1) max_k t_k + max_k update_k (Alpa, OSDI'22, section 5.1, with transfers)."""
    seconds = [s.compute_s + s.communication_s for s in stages]
    slowest = max(stages, key=lambda s: s.compute_s + s.communication_s)
    update = max(s.update_s for s in stages)
    total = sum(seconds) + sum(borders) + (n_micro_batches - 1) * max(seconds) + update
    compute, communication = n_micro_batches * slowest.compute_s, n_micro_batches * slowest.communication_s
    bubble = max(0.0, total - compute - communication - update)
    return PlanCost(total, compute, communication, bubble, update, tuple(s.peak_bytes for s in stages))
