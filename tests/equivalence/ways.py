"""The grammar of methods to run a drawn step, on up to eight virtual devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from minialpa import (
    AutoLayerOption,
    AutoShardingOption,
    AutoStageOption,
    ClusterSpec,
    DataParallel,
    LogicalMesh,
    ManualLayerOption,
    ManualStageOption,
    PipeshardParallel,
    ShardParallel,
    UniformStageOption,
    Zero2Parallel,
    Zero3Parallel,
    get_3d_parallel_method,
)
from minialpa.methods import AutoParallel, Method
from minialpa.options import Attention, PlanOptions
from minialpa.sharding import specs_of

ONE_STAGE: dict[str, Any] = {
    "shard": ShardParallel,
    "data": DataParallel,
    "zero2": Zero2Parallel,
    "zero3": Zero3Parallel,
}
_SCHEDULES = {
    "pipeline-gpipe": "gpipe",
    "pipeline-interleaved": "1f1b-interleaved",
    "pipeline-zb": "zb",
    "pipeline-zb-v": "zb-v",
}
#: Pipelines with two runs of layers in each stage.
TWO_RUNS = ("pipeline-interleaved", "pipeline-zb-v")


@dataclass(frozen=True, slots=True)
class Way:
    """kind: of method, see `make_method`. mesh: shape of the logical mesh, or the number of devices. n: micro-batches.

    stages: of a pipeline; they divide the devices. remat: of its layers. manual: layers end at the model's boundary.
    attention: the attentions that become one operation. first: the number of examples of an earlier call; 0 for no
    call. gpus: whether it is planned for GPUs, with the programs of GPUs, although it runs on CPUs. casts_once: weights
    are cast to narrower types before the micro-batches, even if that is slower. flag: the setting of jax that an
    earlier call has changed, see `FLAGS`; empty for no such call. spread: a seed of shardings for half of the
    arguments, at any cost, see `spread_specs`; 0 for no shardings.
    """

    kind: str = "shard"
    mesh: tuple[int, ...] = (1,)
    n: int = 2
    stages: int = 2
    remat: str = "none"
    manual: bool = False
    attention: Attention = "auto"
    first: int = 0
    gpus: bool = False
    casts_once: bool = False
    flag: str = ""
    spread: int = 0


#: Settings of jax, each with a value that differs from the tests' value.
FLAGS: dict[str, Any] = {
    "jax_threefry_partitionable": False,
    "jax_default_matmul_precision": "highest",
    "jax_numpy_rank_promotion": "warn",
    "jax_softmax_custom_jvp": False,
}
#: Steps are small here, and the tests need searches.
_SEARCHED = AutoStageOption(planned_steps=math.inf)


def spread_specs(
    leaves: Sequence[tuple[str, Any]], mesh: tuple[int, ...], n: int, batch_size: int, seed: int
) -> tuple[tuple[str, PartitionSpec], ...]:
    """A sharding for half of the arguments, by path: any that a micro-batch can have.

    So operators run on parts that no plan would choose: of windows, of sequences, of sums.
    """
    random, found = Random(seed), []
    for path, leaf in leaves:
        shape = np.shape(leaf)
        rows = (shape[0] // n, *shape[1:]) if shape and shape[0] == batch_size else shape
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended) or "key" in path
        specs = [spec for spec in specs_of(rows, mesh) if spec.axes]
        if specs and not is_key and random.random() < 0.5:
            found.append((path, random.choice(specs).partition_spec()))
    return tuple(found)


def make_method(way: Way, fixed: tuple[tuple[str, PartitionSpec], ...] = ()) -> Method | None:
    """The method for `way`; None leaves all decisions to minialpa. fixed: shardings of arguments."""
    if way.kind == "none":
        return None
    method = _method(way, fixed)
    return _casting_once(method) if way.casts_once else method


def _casting_once(method: Method) -> Method:
    """The method with a forced option, which it otherwise chooses by time."""
    kind: Any = type(method)

    class CastingOnce(kind):  # type: ignore[misc]
        def options(self) -> PlanOptions:
            return dataclasses.replace(kind.options(self), cast_once=True)

    return CastingOnce(**{field.name: getattr(method, field.name) for field in dataclasses.fields(method)})


def _method(way: Way, fixed: tuple[tuple[str, PartitionSpec], ...]) -> Method:
    n_devices = math.prod(way.mesh)
    devices: Any = ClusterSpec.preset("h100", devices_per_host=n_devices) if way.gpus else jax.devices()[:n_devices]
    option = AutoShardingOption(attention=way.attention, fixed_specs=fixed)
    if way.kind in ONE_STAGE:
        shape = way.mesh if len(way.mesh) > 1 else None
        if shape and not way.gpus:
            devices, shape = LogicalMesh(shape), None
        return ONE_STAGE[way.kind](devices, way.n, option, shape, remat=way.remat)
    if way.kind == "auto":
        return AutoParallel(devices, way.n, option, stage_option=_SEARCHED)
    if way.kind == "3d":
        method = get_3d_parallel_method(way.n, n_devices // way.stages, 1, way.stages, devices=devices)
        return dataclasses.replace(method, default_auto_sharding_option=option)
    return PipeshardParallel(
        devices,
        way.n,
        _SCHEDULES.get(way.kind, "1f1b"),
        layer_option=_layers(way),
        stage_option=_stages(way, n_devices),
        default_auto_sharding_option=option,
    )


def _layers(way: Way) -> Any:
    remat: Any = way.remat
    if way.manual:
        return ManualLayerOption(remat)
    return AutoLayerOption((2 if way.kind in TWO_RUNS else 1) * way.stages, remat=remat)


def _stages(way: Way, n_devices: int) -> Any:
    each = n_devices // way.stages
    match way.kind:
        case "pipeline-auto":
            return _SEARCHED
        case "pipeline-given":
            layers = [[i] for i in range(way.stages)]
            return ManualStageOption(layers, [(1, each)] * way.stages, [(each, 1)] * way.stages)
    return UniformStageOption(way.stages, num_chunks=2 if way.kind in TWO_RUNS else 1)
