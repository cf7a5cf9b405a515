"""A published run in, minialpa's prediction out: the run gives the degrees, and the planner finds the shardings.

cluster_of    the machines of a run: its GPUs, and the bandwidth of a host
method_of     its degrees: a device has one mesh axis for examples, and one for operators
plan_of       the plan of its degrees
predict       seconds of a step, bytes of a device, and whether it fits
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jax.sharding import PartitionSpec

from benchmarks.planning import planned, traced_step
from benchmarks.published_runs.gpus import cluster_of_gpus, power_part
from benchmarks.published_runs.parts import Parts, key_of, load, parts_of, save, total_s
from benchmarks.published_runs.record import Run
from benchmarks.published_runs.trainers import EXPOSED_PART, OPERATORS_PART, Trainer, attention_efficiency
from minialpa import (
    AutoLayerOption,
    AutoShardingOption,
    ClusterSpec,
    PipeshardParallel,
    Plan,
    ShardParallel,
    UniformStageOption,
)
from minialpa.cluster import KernelRates
from minialpa.errors import MinialpaError
from minialpa.methods import Method
from minialpa.recognition.step import recognise
from minialpa.tracing.trace import TracedStep

#: Multiples of the GPUs' memory. A run is planned in the smallest one with a plan, because the plans of some completed
#: runs need more memory than their GPUs have.
_MEMORIES = (1.0, 1.25, 1.5, 2.0, 4.0)
#: Most chunks of a stage in a plan.
_MOST_CHUNKS = 5


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


def predict(run: Run, folder: Path | None = None) -> Prediction:
    """Plan a run in the memory of its GPUs, or in the smallest of `_MEMORIES` that is enough.

    If the source leaves open which values are recomputed: none if that fits, else all.

    folder: of files with the parts of the seconds of plans (`parts.py`). A run with a file is not planned.
    """
    found = _predicted(run, folder)
    if found.fits or not run.recomputation_is_open or run.model.recomputes != "none":
        return found
    model = dataclasses.replace(run.model, recomputes="full", recomputes_unread=run.trainer.recomputes_unread)
    other = _predicted(dataclasses.replace(run, model=model), folder)
    return found if other.step_s is None else other


def _predicted(run: Run, folder: Path | None) -> Prediction:
    parts = parts_of_run(run, folder)
    if isinstance(parts, str):
        return Prediction(run, None, 0.0, False, 0.0, parts)
    cluster = cluster_of(run)
    peak_bytes = parts.peak_bytes - parts.uneven_bytes - spared_bytes(run)
    return Prediction(run, total_s(parts, cluster), peak_bytes, peak_bytes <= cluster.device.memory_bytes, parts.plan_s)


def parts_of_run(run: Run, folder: Path | None = None) -> Parts | str:
    """The seconds of a run's plan as a function of rates, or the reason if it has no plan."""
    short = _shortened(run)
    path = None if folder is None else folder / f"{_key(short)}.json"
    found = load(path) if path is not None and path.exists() else _planned_parts(short)
    if path is not None and not path.exists():
        save(path, found)
    if isinstance(found, str):
        return found
    waits = run.trainer.waits
    return dataclasses.replace(found, n_micro_batches=run.n_micro_batches, n_chunks=run.n_chunks, waits=waits)


def _planned_parts(run: Run) -> Parts | str:
    start = time.perf_counter()
    try:
        plan = least_plan_of(run)
    except MinialpaError as error:
        return str(error).splitlines()[0]
    hides = run.trainer.gathers_ahead and not run.shards_parameters
    seconds = time.perf_counter() - start
    return parts_of(traced(run), plan, hides_update=hides, plan_s=seconds, cast_bytes=run.trainer.cast_bytes)


def _shortened(run: Run) -> Run:
    """The run with two micro-batches and at most `_MOST_CHUNKS` chunks for each stage: passes are the same.

    Chunks move the memory of a stage by a few percent.
    """
    run = dataclasses.replace(run, n_chunks=_least_chunks(run))
    n, rest = 2 * run.pp, run.batch % run.n_micro_batches
    if run.pp == 1 or run.n_micro_batches <= n or rest:
        return run
    return dataclasses.replace(run, batch=run.batch // run.n_micro_batches * n, n_micro_batches=n)


def _least_chunks(run: Run) -> int:
    """At most `_MOST_CHUNKS`, at best of equally many layers, and at least three, as fewer need more memory."""
    most = min(run.n_chunks, _MOST_CHUNKS)
    per_stage = run.model.n_layers // run.pp
    return next((n for n in range(most, 2, -1) if per_stage % n == 0), most)


def _key(run: Run) -> str:
    """Equal for runs with equal plans, at any rates of kernels."""
    trainer = dataclasses.replace(run.trainer, waits=0)
    if not run.model.in_float8:
        trainer = dataclasses.replace(trainer, cast_bytes=Trainer().cast_bytes)
    plain = dataclasses.replace(
        run, number=0, system="", name="", notes="", step_s=None, peak_bytes=None, group=(), trainer=trainer,
        recomputation_is_open=False,
    )  # fmt: skip
    return key_of(plain, cluster_of(run).inter_host.beta_s_per_byte)


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


@functools.lru_cache(maxsize=1)
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
        within = dataclasses.replace(within, beta_s_per_byte=within.beta_s_per_byte * EXPOSED_PART)
    return dataclasses.replace(cluster, device=device, intra_host=within)


def _weight_specs(run: Run) -> dict[str, PartitionSpec]:
    """Specs of weights under tensor parallelism, and with groups that share weights."""
    # Axes of examples, of positions under context parallelism, and of operators.
    operators = ("z" if run.cp > 1 else "y") if run.tp > 1 else None
    groups = ("x", "y") if run.cp > 1 else "x"
    partitions = run.model.weight_partitions(operators, groups if run.shards_parameters else None)
    return {f"[0][0]{path}": partition for path, partition in partitions.items()}


def method_of(run: Run, cluster: ClusterSpec, memory_bytes: float | None = None) -> Method:
    """The degrees of a run. Without tensor parallelism, all devices of a stage split the examples."""
    per_stage = run.dp * run.fsdp * run.cp * run.tp
    in_host = min(run.per_host, per_stage)
    hosts = per_stage // in_host
    option = AutoShardingOption(prefer_reduce_scatter=True, memory_limit_bytes=memory_bytes, shardings="pin")
    if run.tp * run.cp > 1:
        shape = tuple(run.model.axes.values())
        # Without groups that share weights, the weights that a group splits stay split: no trainer gathers them.
        option = dataclasses.replace(
            option,
            force_batch_dim_to_mesh_dim=None if run.model.experts is not None else 0,
            fixed_specs=_weight_specs(run),
            allow_all_to_all=run.model.experts is not None,
        )
    elif run.model.experts is not None:
        shape = run.model.experts.mesh
        option = dataclasses.replace(option, fixed_specs=_weight_specs(run))
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
