"""Stages in the user's options, uniform or by hand, in; stages with layers, submesh and first device out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from minialpa.cluster import ClusterSpec
from minialpa.errors import ShardingError
from minialpa.inter.schedule.schedules import splits_backward
from minialpa.inter.search.submeshes import Candidate
from minialpa.options import AutoShardingOption, ManualStageOption, PlanOptions, UniformStageOption
from minialpa.plan import StagePlan
from minialpa.support.divisors import divisors


@dataclasses.dataclass(frozen=True, slots=True)
class DecidedStage:
    """Before its shardings are solved. layers: empty in a step without layers."""

    layers: tuple[int, ...]
    candidate: Candidate
    option: AutoShardingOption
    first_device: int


def as_planned(stage: StagePlan, cluster: ClusterSpec, layers: tuple[int, ...]) -> DecidedStage:
    device = cluster.device_of(stage.first_device // cluster.devices_per_host) if cluster.host_devices else None
    candidate = Candidate(stage.submesh, stage.logical_shape, device)
    return DecidedStage(layers, candidate, stage.option, stage.first_device)


def given_stages(cluster: ClusterSpec, options: PlanOptions, n_layers: int) -> list[DecidedStage]:
    """Uniform stages by default. Raises ShardingError if they do not fit on the cluster."""
    match options.stages:
        case ManualStageOption() as manual:
            return _manual_stages(manual, cluster, options.sharding, n_layers)
        case UniformStageOption() as uniform:
            return _uniform_stages(uniform, cluster, options, n_layers)
        case _:
            return _uniform_stages(UniformStageOption(), cluster, options, n_layers)


def _uniform_stages(
    option: UniformStageOption, cluster: ClusterSpec, options: PlanOptions, n_layers: int
) -> list[DecidedStage]:
    n_devices = cluster.n_devices
    n_stages = option.num_stages
    if n_stages is None:
        n_stages = max(s for s in range(1, n_layers + 1) if n_devices % s == 0)
    n_chunks = n_stages * option.num_chunks
    _check_uniform(option, n_stages, n_devices, n_layers)

    submesh = option.submesh_physical_shape or submesh_of(n_devices // n_stages, cluster)
    chosen = option.submesh_autosharding_option or options.sharding
    candidate = Candidate(submesh, tuple(option.submesh_logical_shape or chosen.open_shape(submesh[0] * submesh[1])))

    bounds = [round(c * n_layers / n_chunks) for c in range(n_chunks + 1)]
    chunks = [tuple(range(a, b)) for a, b in itertools.pairwise(bounds)]
    layers = layers_in(chunks, n_stages, in_v=option.num_chunks == 2 and splits_backward(options.schedule))
    return placed_stages([(own, candidate, chosen) for own in layers], cluster)


def layers_in(chunks: Sequence[tuple[int, ...]], n_stages: int, *, in_v: bool) -> list[tuple[int, ...]]:
    """The layers of each stage. Stage k of p has the chunks k, p + k, ...; in a V, the chunks k and 2 p - 1 - k."""
    if in_v:
        return [chunks[k] + chunks[2 * n_stages - 1 - k] for k in range(n_stages)]
    return [sum(chunks[k::n_stages], ()) for k in range(n_stages)]


def _check_uniform(option: UniformStageOption, n_stages: int, n_devices: int, n_layers: int) -> None:
    if n_stages * option.num_chunks > n_layers:
        each = f" and `num_chunks={option.num_chunks}` need" if option.num_chunks > 1 else " needs"
        raise ShardingError(
            f"`num_stages={n_stages}`{each} at least {n_stages * option.num_chunks} layers, but the model has "
            f"{n_layers}. Set `layer_option=AutoLayerOption(layer_num={n_stages * option.num_chunks})`, or call "
            "`mark_pipeline_boundary()` at more places of the model."
        )
    if option.submesh_physical_shape is None and n_devices % n_stages:
        raise ShardingError(
            f"{n_devices} devices cannot be divided equally among {n_stages} stages. Set `num_stages` to one of "
            f"{', '.join(map(str, divisors(n_devices)))}, or set `submesh_physical_shape`."
        )


def submesh_of(n_devices: int, cluster: ClusterSpec) -> tuple[int, int]:
    """Raises ShardingError unless adjacent devices are part of a host or whole hosts."""
    per_host = cluster.devices_per_host
    if n_devices <= per_host:
        return (1, n_devices)
    if n_devices % per_host:
        raise ShardingError(
            f"{n_devices} devices are neither part of a host of {per_host} devices nor whole hosts. Use at most "
            f"{per_host} devices, or a multiple of {per_host}."
        )
    return (n_devices // per_host, per_host)


def _manual_stages(
    option: ManualStageOption, cluster: ClusterSpec, sharding: AutoShardingOption, n_layers: int
) -> list[DecidedStage]:
    layers = [tuple(ids) for ids in option.forward_stage_layer_ids]
    dicts = list(option.submesh_autosharding_option_dicts) or [{}] * len(layers)
    _check_layers(layers, n_layers)
    shapes, logical = option.submesh_physical_shapes, option.submesh_logical_shapes

    parts = [
        (ids, Candidate((submesh[0], submesh[1]), tuple(shape)), dataclasses.replace(sharding, **fields))
        for ids, submesh, shape, fields in zip(layers, shapes, logical, dicts, strict=True)
    ]
    return placed_stages(parts, cluster)


def _check_layers(layers: Sequence[tuple[int, ...]], n_layers: int) -> None:
    """Raise ShardingError unless the stages have each layer once, ascending, and are in order of their first layers."""
    starts = [ids[:1] for ids in layers]
    is_partition = sorted(layer for ids in layers for layer in ids) == list(range(n_layers))
    if not is_partition or starts != sorted(starts) or any(ids != tuple(sorted(ids)) for ids in layers):
        raise ShardingError(
            f"List each of the layers 0 to {n_layers - 1} of the model once and in order in `forward_stage_layer_ids`; "
            f"got {[list(ids) for ids in layers]}."
        )


def placed_stages(
    parts: Sequence[tuple[tuple[int, ...], Candidate, AutoShardingOption]], cluster: ClusterSpec
) -> list[DecidedStage]:
    """Stages on the devices of the cluster in order: each starts after the last one, or at the next host.

    parts: layers, submesh and options of each stage. Raises ShardingError if they do not fit.
    """
    needed = sum(candidate.n_devices for _, candidate, _ in parts)
    if needed > cluster.n_devices:
        if len(parts) == 1:
            given, advice = f"The submesh needs {needed} devices", "Choose a smaller submesh."
        else:
            given = f"The {len(parts)} stages need {needed} devices together"
            advice = "Use fewer stages, or fewer devices for a stage."
        raise ShardingError(f"{given}, but the cluster has {cluster.n_devices}. {advice}")

    per_host, at = cluster.devices_per_host, 0
    stages = []
    for k, (layers, candidate, option) in enumerate(parts):
        hosts, n = candidate.submesh
        if (hosts > 1 or at % per_host + n > per_host) and at % per_host:
            at += per_host - at % per_host
        is_part = n <= per_host if hosts == 1 else n == per_host
        if not is_part or at + candidate.n_devices > cluster.n_devices:
            raise ShardingError(
                f"The submesh of stage {k}, {hosts} x {n} devices, does not fit on the devices from {at} on, because a "
                f"stage is part of one host of {per_host} devices or whole hosts. Choose submeshes that fill one host "
                "after the other."
            )

        device = cluster.device_of(at // per_host) if cluster.host_devices else None
        stages.append(DecidedStage(layers, dataclasses.replace(candidate, device=device), option, at))
        at += candidate.n_devices
    return stages
