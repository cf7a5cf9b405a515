"""A published run in, minialpa's prediction out: the run gives the degrees, and the planner finds the shardings.

cluster_of    the machines of a run: its GPUs, and the bandwidth of a host
method_of     its degrees: a device has one mesh axis for examples, and one for operators
plan_of       the plan of its degrees
predict       seconds of a step, bytes of a device, and whether it fits
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from benchmarks.planning import planned, traced_step
from benchmarks.published_runs.gpus import cluster_of_gpus, power_part
from benchmarks.published_runs.record import Run
from benchmarks.published_runs.trainers import EXPOSED_PART, OPERATORS_PART, attention_efficiency
from minialpa import (
    AutoLayerOption,
    AutoShardingOption,
    ClusterSpec,
    PipeshardParallel,
    Plan,
    ShardParallel,
    UniformStageOption,
)
from minialpa.cluster import KernelRates, LinkSpec
from minialpa.cost import Collective
from minialpa.errors import MinialpaError
from minialpa.methods import Method
from minialpa.recognition.step import recognise
from minialpa.tracing.trace import TracedStep

#: Multiples of the GPUs' memory. A run is planned in the smallest one with a plan, because the plans of some completed
#: runs need more memory than their GPUs have.
_MEMORIES = (1.0, 1.25, 1.5, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for a run.

    Attributes:
        run: the run.
        step_s: seconds of a step; None without a plan.
        peak_bytes: bytes of the device that needs most.
        fits: whether these bytes are in its memory.
        plan_s: seconds of planning.
        failure: the reason if there is no plan.
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
    """Plan a run in the memory of its GPUs, or in the smallest of `_MEMORIES` that is enough."""
    start = time.perf_counter()
    try:
        plan = least_plan_of(run)
    except MinialpaError as error:
        return Prediction(run, None, 0.0, False, time.perf_counter() - start, str(error).splitlines()[0])
    peak_bytes = max(plan.cost.peak_bytes) - spared_bytes(run)
    fits = peak_bytes <= plan.cluster.device.memory_bytes
    return Prediction(run, step_s(run, plan), peak_bytes, fits, time.perf_counter() - start)


def least_plan_of(run: Run) -> Plan:
    """The plan of a run's degrees in the memory of its GPUs, or in the smallest of `_MEMORIES` that is enough.

    Raises MinialpaError if all are too small.
    """
    memory_bytes = cluster_of(run).device.memory_bytes
    limits = [part * memory_bytes + spared_bytes(run) for part in _MEMORIES]
    for limit in limits[:-1]:
        with contextlib.suppress(MinialpaError):
            return plan_of(run, limit)
    return plan_of(run, limits[-1])


def spared_bytes(run: Run) -> float:
    """Bytes per device by which the trainer's accumulators are smaller than minialpa's, which are float32."""
    n_accumulators = run.model.n_weights / (run.tp * run.pp) if run.n_micro_batches > 1 else 0.0
    return (4 - run.trainer.total_bytes) * n_accumulators


def plan_of(run: Run, memory_bytes: float | None = None) -> Plan:
    """The plan of a run's degrees. memory_bytes: of a device, in place of the memory of its GPUs."""
    cluster = cluster_of(run)
    return planned(traced(run), cluster, method_of(run, cluster, memory_bytes))


def step_s(run: Run, plan: Plan) -> float:
    """Seconds of a step under a plan, if the trainer of the run hides the same work."""
    if not run.trainer.gathers_ahead or run.shards_parameters:
        return plan.cost.total_s
    slowest = max(range(len(plan.stages)), key=lambda stage: plan.stages[stage].update_s)
    mesh = plan.stages[slowest].mesh
    gathers_s = sum(
        Collective(one.kind, one.n_bytes, one.axes).seconds(mesh)
        for one in plan.collectives
        if one.stage == slowest and one.kind == "all-gather" and one.times_per_step <= run.n_chunks
    )
    forward_s = sum(
        one.compute_s / (3 if one.kind == "step" else 1)
        for one in plan.stages[slowest].passes
        if one.kind != "backward"
    )
    return plan.cost.total_s - min(gathers_s, forward_s)


def traced(run: Run) -> TracedStep:
    """The run's step."""
    step = traced_step(run.model.train_step, *run.model.arguments(run.batch), recognises=False)
    return step if run.model.writes_scores else recognise(step, everywhere=True)


def cluster_of(run: Run, change: Callable[[KernelRates], KernelRates] = lambda rates: rates) -> ClusterSpec:
    """The machines of a run. change: applied to the rates of the kernels."""
    cluster = cluster_of_gpus(run.gpu, run.n_hosts, run.per_host, run.notes)
    device, trainer = cluster.device, run.trainer
    kernels = device.kernels
    assert kernels is not None, run.gpu

    part = OPERATORS_PART if trainer.elementwise == "operators" else 1.0
    kernels = dataclasses.replace(
        kernels,
        attention_efficiency=attention_efficiency(trainer.attention, device.name) * power_part(run.gpu),
        memory_efficiency=kernels.memory_efficiency * part,
        launch_s=kernels.launch_s + trainer.blocked_s,
        overlap=trainer.overlap,
    )
    device = dataclasses.replace(device, kernels=change(kernels))
    within = cluster.intra_host
    if run.tp > 1 and trainer.hides_operators:
        within = LinkSpec(within.alpha_s, within.beta_s_per_byte * EXPOSED_PART)
    return dataclasses.replace(cluster, device=device, intra_host=within)


def _weight_specs(run: Run) -> dict[str, PartitionSpec]:
    """Specs of weights under tensor parallelism, and with groups that share weights."""
    partitions = run.model.weight_partitions("y" if run.tp > 1 else None, "x" if run.shards_parameters else None)
    return {f"[0][0]{path}": partition for path, partition in partitions.items()}


def method_of(run: Run, cluster: ClusterSpec, memory_bytes: float | None = None) -> Method:
    """The degrees of a run. Without tensor parallelism, all devices of a stage split the examples."""
    per_stage = run.dp * run.fsdp * run.tp
    in_host = min(run.per_host, per_stage)
    hosts = per_stage // in_host
    option = AutoShardingOption(prefer_reduce_scatter=True, memory_limit_bytes=memory_bytes, shardings="pin")
    if run.tp > 1:
        shape: tuple[int, ...] = (run.dp * run.fsdp, run.tp)
        # Without groups that share weights, the weights that a group splits stay split: no trainer gathers them.
        option = dataclasses.replace(
            option, force_batch_dim_to_mesh_dim=0, fixed_specs=_weight_specs(run), allow_all_to_all=False
        )
    elif run.shards_parameters:
        shape = (per_stage,)
        option = dataclasses.replace(option, force_batch_dim_to_mesh_dim=0, fixed_specs=_weight_specs(run))
    else:
        shape = (hosts, in_host) if hosts > 1 else (in_host,)
        option = dataclasses.replace(option, force_data_parallel=True)
    if run.pp == 1:
        # The model itself recomputes values.
        return ShardParallel(cluster, run.n_micro_batches, option, shape, (hosts, in_host), remat="none")

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
