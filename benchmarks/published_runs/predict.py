"""A published run in, what minialpa predicts of it out: its degrees are forced, the planner finds the shardings.

cluster_of    the machines that a run had: its GPUs, and what a host sends to others
method_of     its degrees: a device has one mesh axis for examples, and one for operators
predict       seconds of a step, bytes of a device, and whether it fits
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from benchmarks.planning import planned, traced_step
from benchmarks.published_runs.record import Run
from minialpa import (
    AutoLayerOption,
    AutoParallel,
    AutoShardingOption,
    ClusterSpec,
    PipeshardParallel,
    Plan,
    ShardParallel,
    UniformStageOption,
)
from minialpa.cluster import KernelRates, LinkSpec
from minialpa.errors import MinialpaError
from minialpa.methods import Method
from minialpa.recognition.step import recognise
from minialpa.tracing.trace import TracedStep

_PRESETS: dict[str, Any] = {"H100": "h100", "H200": "h200", "A100": "a100-80gb"}
#: Bytes per second that all adapters of a host send together: eight of 400 Gb/s, and eight of 200 Gb/s beside A100s.
#: The record does not say what each machine had.
_HOST_LINK = {"H100": 400e9, "H200": 400e9, "A100": 200e9}
#: Of the machines of a trainer that has others: four adapters of 100 Gb/s.
_OWN_HOST_LINK = {"Megatron-DeepSpeed": 50e9}
#: The part of the peak rate that the attention of a trainer reaches where it is not that of cuDNN. The first two, for a
#: kernel in Triton of 2023, are fitted to its runs. The others, for FlashAttention 2, are chosen by hand.
_OWN_ATTENTION = {
    ("llm-foundry (PyTorch FSDP)", "H100"): 0.18,
    ("llm-foundry (PyTorch FSDP)", "A100"): 0.32,
    ("torchtitan", "H100"): 0.33,
    ("torchtitan", "H200"): 0.33,
    ("nanotron v0.5", "H100"): 0.33,
}
#: No limit at all, for a run that ran although its plan needs more memory than there is.
PLENTY = 1e15


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is predicted of a run.

    Attributes:
        run: the run.
        step_s: seconds of a step; None where it could not be planned.
        peak_bytes: of the device that needs most.
        fits: whether that is in its memory.
        plan_s: seconds of planning.
        failure: why it could not be planned.
    """

    run: Run
    step_s: float | None
    peak_bytes: float
    fits: bool
    plan_s: float
    failure: str = ""

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured seconds of a step."""
        return None if self.step_s is None or self.run.step_s is None else self.step_s / self.run.step_s - 1


def predict(run: Run) -> Prediction:
    """Plan a run in the memory of its GPUs; if that is too little, in any amount of it."""
    start = time.perf_counter()
    cluster, step = cluster_of(run), traced(run)
    try:
        plan = planned(step, cluster, method_of(run, cluster))
    except MinialpaError:
        try:
            plan = planned(step, cluster, method_of(run, cluster, PLENTY))
        except MinialpaError as error:
            return Prediction(run, None, 0.0, False, time.perf_counter() - start, str(error).splitlines()[0])
    peak_bytes = max(plan.cost.peak_bytes)
    fits = peak_bytes <= cluster.device.memory_bytes
    return Prediction(run, plan.cost.total_s, peak_bytes, fits, time.perf_counter() - start)


def choose(run: Run) -> tuple[Plan, Plan]:
    """The plan of the run's degrees, and the planner's own for the same model and machines."""
    cluster, step = cluster_of(run), traced(run)
    return planned(step, cluster, method_of(run, cluster)), planned(step, cluster, AutoParallel(cluster))


def traced(run: Run) -> TracedStep:
    """The run's step."""
    step = traced_step(run.model.train_step, *run.model.arguments(run.batch))
    return recognise(step, everywhere=True) if run.fused_attention else step


def cluster_of(run: Run, change: Callable[[KernelRates], KernelRates] = lambda rates: rates) -> ClusterSpec:
    """The machines of a run. change: of what its kernels reach."""
    kind = run.gpu[:4]
    cluster = ClusterSpec.preset(_PRESETS[kind], num_hosts=run.n_hosts, devices_per_host=run.per_host)
    rate = _OWN_HOST_LINK.get(run.system, _HOST_LINK[kind])
    assert cluster.device.kernels is not None, kind
    own = _OWN_ATTENTION.get((run.system, kind), cluster.device.kernels.attention_efficiency)
    kernels = change(dataclasses.replace(cluster.device.kernels, attention_efficiency=own))
    device = dataclasses.replace(cluster.device, kernels=kernels)
    return dataclasses.replace(cluster, device=device, inter_host=LinkSpec(cluster.inter_host.alpha_s, 1 / rate))


def _weight_specs(run: Run) -> dict[str, PartitionSpec]:
    """Where weights lie under tensor parallelism: each device of a group has its columns of what makes heads and inner
    features, and its rows of what reads them. `fsdp` splits the other dimension between groups."""
    groups = "x" if run.shards_parameters else None
    columns, rows = PartitionSpec(None, groups, "y"), PartitionSpec(None, "y", groups)
    layout = {"query": columns, "key": columns, "value": columns, "out": rows, "up": columns, "down": rows}
    specs = {f"['blocks']['{name}']": spec for name, spec in layout.items()}
    specs["['words']"] = PartitionSpec("y", groups)
    if run.model.family == "llama":
        specs |= {"['blocks']['gate']": columns, "['head']": PartitionSpec(groups, "y")}
    return {f"[0][0]{name}": spec for name, spec in specs.items()}


def method_of(run: Run, cluster: ClusterSpec, memory_bytes: float | None = None) -> Method:
    """The degrees of a run. Without tensor parallelism, all devices of a stage split the examples."""
    per_stage = run.dp * run.fsdp * run.tp
    in_host = min(run.per_host, per_stage)
    hosts = per_stage // in_host
    option = AutoShardingOption(prefer_reduce_scatter=True, memory_limit_bytes=memory_bytes)
    if run.tp > 1:
        shape: tuple[int, ...] = (run.dp * run.fsdp, run.tp)
        option = dataclasses.replace(option, force_batch_dim_to_mesh_dim=0, fixed_specs=_weight_specs(run))
    else:
        shape = (hosts, in_host) if hosts > 1 else (in_host,)
        option = dataclasses.replace(option, force_data_parallel=True, force_zero_stage_3=run.shards_parameters)
    if run.pp == 1:
        return ShardParallel(cluster, run.n_micro_batches, option, shape, (hosts, in_host))

    stages = UniformStageOption(
        run.pp,
        submesh_physical_shape=(hosts, in_host),
        submesh_logical_shape=shape,
        submesh_autosharding_option=option,
        num_chunks=run.n_chunks,
    )
    return PipeshardParallel(
        cluster,
        num_micro_batches=run.n_micro_batches,
        pipeline_schedule="1f1b-interleaved" if run.n_chunks > 1 else "1f1b",
        layer_option=AutoLayerOption(run.pp * run.n_chunks),
        stage_option=stages,
    )
