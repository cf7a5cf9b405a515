"""A published run in, what minialpa predicts of it out: its degrees are forced, the planner finds the shardings.

cluster_of    the machines that a run had: its GPUs, and what a host sends to others
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

#: A run is planned in the smallest of these multiples of its GPUs' memory for which there is a plan: the plans of some
#: runs that ran need more than there is.
_MEMORIES = (1.0, 1.25, 1.5, 2.0, 4.0)


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
    """Plan a run in the memory of its GPUs; if that is too little, in as little more as is enough."""
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

    Raises MinialpaError if none is.
    """
    memory_bytes = cluster_of(run).device.memory_bytes
    limits = [part * memory_bytes + spared_bytes(run) for part in _MEMORIES]
    for limit in limits[:-1]:
        with contextlib.suppress(MinialpaError):
            return plan_of(run, limit)
    return plan_of(run, limits[-1])


def spared_bytes(run: Run) -> float:
    """How many bytes less the trainer's totals of gradients take on a device than minialpa's, which are float32."""
    n_accumulators = run.model.n_weights / (run.tp * run.pp) if run.n_micro_batches > 1 else 0.0
    return (4 - run.trainer.total_bytes) * n_accumulators


def plan_of(run: Run, memory_bytes: float | None = None) -> Plan:
    """The plan of a run's degrees. memory_bytes: of a device, instead of what its GPUs have."""
    cluster = cluster_of(run)
    return planned(traced(run), cluster, method_of(run, cluster, memory_bytes))


def step_s(run: Run, plan: Plan) -> float:
    """Seconds of a step under a plan, as the trainer of the run takes them."""
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
    """The machines of a run. change: of what its kernels reach."""
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
    """Where weights lie under tensor parallelism, and where groups share them."""
    partitions = run.model.weight_partitions("y" if run.tp > 1 else None, "x" if run.shards_parameters else None)
    return {f"[0][0]{path}": partition for path, partition in partitions.items()}


def method_of(run: Run, cluster: ClusterSpec, memory_bytes: float | None = None) -> Method:
    """The degrees of a run. Without tensor parallelism, all devices of a stage split the examples."""
    per_stage = run.dp * run.fsdp * run.tp
    in_host = min(run.per_host, per_stage)
    hosts = per_stage // in_host
    option = AutoShardingOption(prefer_reduce_scatter=True, memory_limit_bytes=memory_bytes)
    if run.tp > 1:
        shape: tuple[int, ...] = (run.dp * run.fsdp, run.tp)
        # Without them, weights that a group splits stay split: no trainer gathers them.
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
        # What is computed again is in the model.
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
