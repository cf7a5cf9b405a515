"""Plans beside programs that XLA compiles for GPUs, on a machine without a GPU: collectives and memory.

    python -m benchmarks.gpu_fidelity --cache FOLDER [--only NAME ...] [--json FILE]

Each case is a model of realistic width and few layers, a method and a cluster. For each program of its plan:

    bytes_error   = sum |compiled - predicted| / max(sum compiled, sum predicted)   over kinds of collectives
    memory_error  = (predicted - compiled) / compiled                                of the program alone

All programs take the arguments of their whole stage, so `memory_error` is about all bytes that a GPU needs while the
program runs. If a GPU has free memory, XLA starts kernels early so that they run beside collectives, and the program
needs more memory. So a program that needs more than predicted is compiled a second time, for a GPU with exactly the
predicted memory:

    tight_error    = (predicted - compiled for that GPU) / compiled for that GPU

Seconds of a step are compared with XLA's estimates of kernels. `xla_gpu.kernels` corrects estimates that cannot be
right. The folder keeps compiled programs: the first run takes half an hour on two cores, the next one two minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import minialpa
from benchmarks.corpus import arguments
from benchmarks.planning import planned, traced_step
from benchmarks.registry import Rows, Size, benchmark
from benchmarks.run import table
from minialpa import AutoLayerOption, ClusterSpec, PipeshardParallel, UniformStageOption, hlo
from minialpa.inter.context import compiler_of
from minialpa.inter.lower.emit import emit_program
from minialpa.inter.lower.mesh_programs import input_types, split_by_mesh
from minialpa.inter.lower.planned_step import PlannedStep, planned_step
from minialpa.inter.staging.staged_step import mesh_problems, realise
from minialpa.inter.staging.tasks import Task
from minialpa.intra.memory.liveness import peak_bytes
from minialpa.intra.spmd import ShardedEquations, collectives_of
from minialpa.methods import DataParallel, Method, ShardParallel, Zero2Parallel, Zero3Parallel
from minialpa.plan import Plan
from minialpa.support.collection import collection_paused
from minialpa.support.files import write_text
from minialpa.xla_gpu.compile import compile_for_gpus
from minialpa.xla_gpu.targets import target_of
from minialpa.xla_gpu.timeline import timeline
from minialpa.xla_gpu.worker import CompileRequest, GpuProgram

#: The fraction of a GPU's memory that the schedule of a program may use in XLA: 95 % of 80 %.
_SCHEDULED_PART = 0.8 * 0.95


@dataclass(frozen=True, slots=True)
class GpuCase:
    """A model on a cluster under a method.

    Attributes:
        model: a name of `minialpa.models`.
        sizes: arguments of its builder.
        method: its name in `_METHODS`.
        hosts: (hosts, GPUs of each).
        gpu: preset of the cluster.
    """

    model: str
    sizes: dict[str, Any]
    method: str
    hosts: tuple[int, int] = (1, 8)
    gpu: str = "h100"

    @property
    def name(self) -> str:
        flags = [key for key in ("scan_layers", "remat_blocks", "loss_chunks") if self.sizes.get(key)]
        width, dtype = self.sizes.get("hidden", ""), self.sizes.get("dtype", "float32")
        parts = (self.model, width, dtype, *flags, self.method, f"{self.hosts[0]}x{self.hosts[1]}", self.gpu)
        return " ".join(str(part) for part in parts if part)


def _pipeline(n_micro_batches: int, n_stages: int, remat: Any = "none") -> Callable[[], Method]:
    return lambda: PipeshardParallel(
        num_micro_batches=n_micro_batches,
        layer_option=AutoLayerOption(n_stages, remat=remat),
        stage_option=UniformStageOption(n_stages),
    )


_METHODS: dict[str, Callable[[], Method]] = {
    "shard": ShardParallel,
    "shard of 4": lambda: ShardParallel(num_micro_batches=4),
    "data": DataParallel,
    "zero-2": Zero2Parallel,
    "zero-3": Zero3Parallel,
    "zero-3 of 2": lambda: Zero3Parallel(num_micro_batches=2),
    "pipeline": _pipeline(4, 2),
    "pipeline, remat": _pipeline(4, 2, "full"),
    "pipeline, dots": _pipeline(4, 2, "dots"),
    "one stage, remat": _pipeline(4, 1, "full"),
}

_GPT = {"hidden": 2048, "n_heads": 16, "n_layers": 4, "seq_len": 1024, "vocab_size": 51200, "batch_size": 32}
_LLAMA = {
    "hidden": 2048, "n_heads": 16, "n_kv_heads": 4, "ffn": 5632, "n_layers": 4, "seq_len": 2048, "vocab_size": 32000,
    "batch_size": 32, "dtype": "bfloat16",
}  # fmt: skip
_WIDE_LLAMA = {**_LLAMA, "hidden": 4096, "n_heads": 32, "n_kv_heads": 8, "ffn": 14336, "n_layers": 2, "batch_size": 16}
_MOE = {
    "hidden": 1024, "n_heads": 16, "n_layers": 4, "n_experts": 8, "factor": 8, "seq_len": 1024, "vocab_size": 32000,
    "batch_size": 32, "dtype": "bfloat16",
}  # fmt: skip
_BERT = {"hidden": 1024, "n_heads": 16, "n_layers": 4, "seq_len": 512, "vocab_size": 30592, "batch_size": 64}
_T5 = {
    "hidden": 1024,
    "n_heads": 16,
    "n_layers": 2,
    "source_len": 512,
    "seq_len": 512,
    "vocab_size": 32128,
    "reach": 128,
    "batch_size": 32,
}
_VIT = {
    "hidden": 1024,
    "n_heads": 16,
    "n_layers": 4,
    "image_size": 224,
    "patch": 16,
    "n_classes": 1000,
    "batch_size": 256,
}
_RESNET = {
    "filters": 160, "width_factor": 2, "kind": "bottleneck", "stage_sizes": (2, 2, 2, 2), "image_size": 224,
    "n_classes": 1024, "imagenet_stem": True, "batch_size": 64,
}  # fmt: skip
_UNET = {"image_size": 64, "image_channels": 4, "channels": (256, 512, 1024), "n_groups": 32, "batch_size": 64}
_HALF, _BF16 = {"dtype": "float16"}, {"dtype": "bfloat16"}

CASES = (
    GpuCase("gpt", _GPT | _BF16, "shard"),
    GpuCase("gpt", _GPT | _BF16, "data"),
    GpuCase("gpt", _GPT | _BF16, "zero-2"),
    GpuCase("gpt", _GPT | _BF16, "zero-3"),
    GpuCase("gpt", _GPT | _BF16, "shard of 4", (2, 8)),
    GpuCase("gpt", _GPT | _BF16, "pipeline", (2, 8)),
    GpuCase("gpt", _GPT | _BF16, "pipeline, remat", (2, 8)),
    GpuCase("gpt", _GPT | _BF16, "one stage, remat"),
    GpuCase("gpt", _GPT, "shard", (1, 4), "a100-40gb"),
    GpuCase("gpt", _GPT | _HALF, "pipeline", (1, 4), "a100-40gb"),
    GpuCase("llama", _LLAMA, "shard"),
    GpuCase("llama", _LLAMA, "zero-3"),
    GpuCase("llama", _LLAMA | {"scan_layers": True}, "shard"),
    GpuCase("llama", _LLAMA | {"scan_layers": True, "remat_blocks": True}, "zero-3", (2, 8)),
    GpuCase("llama", _LLAMA | {"loss_chunks": 8}, "zero-3 of 2"),
    GpuCase("llama", _WIDE_LLAMA, "pipeline, dots", (2, 8)),
    GpuCase("llama", _WIDE_LLAMA, "zero-2", (1, 8), "h200"),
    GpuCase("llama", _LLAMA | {"dtype": "float32"}, "pipeline, remat", (1, 8), "a100-80gb"),
    GpuCase("moe", _MOE, "shard"),
    GpuCase("moe", _MOE, "pipeline", (2, 8)),
    GpuCase("moe", _MOE | {"dtype": "float32"}, "zero-2"),
    GpuCase("bert", _BERT, "shard"),
    GpuCase("bert", _BERT | _BF16, "zero-3", (2, 8)),
    GpuCase("bert", _BERT | _BF16, "pipeline, remat"),
    GpuCase("t5", _T5, "data"),
    GpuCase("t5", _T5 | _BF16, "pipeline"),
    GpuCase("vit", _VIT, "zero-2"),
    GpuCase("vit", _VIT | _BF16, "pipeline, remat"),
    GpuCase("resnet", _RESNET, "data"),
    GpuCase("resnet", _RESNET, "pipeline", (1, 4), "a100-40gb"),
    GpuCase("unet", _UNET, "shard"),
    GpuCase("unet", _UNET | _BF16, "pipeline"),
)
_TINY = GpuCase(
    "gpt",
    {"hidden": 256, "n_heads": 4, "n_layers": 1, "seq_len": 128, "vocab_size": 512, "batch_size": 8},
    "zero-3",
    (1, 4),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRow:
    """One program of a plan, predicted and compiled.

    Attributes:
        case: name of the case.
        program: name of the program.
        predicted: bytes of collectives by kind, for one run.
        compiled: the same, in the compiled program.
        predicted_bytes: bytes that a device needs while the program runs.
        compiled_bytes: the same, by XLA.
        temporary_bytes: (predicted, compiled), without arguments and results.
        tight_bytes: by XLA for a GPU with the predicted memory; `compiled_bytes` if XLA does not need more.
        seconds: (predicted, by XLA's estimates), for all runs of the program in a step.
    """

    case: str
    program: str
    predicted: dict[str, float]
    compiled: dict[str, float]
    predicted_bytes: float
    compiled_bytes: float
    temporary_bytes: tuple[float, float]
    tight_bytes: float
    seconds: tuple[float, float]

    @property
    def bytes_error(self) -> float:
        kinds = self.predicted | self.compiled
        wrong = sum(abs(self.predicted.get(kind, 0.0) - self.compiled.get(kind, 0.0)) for kind in kinds)
        return wrong / max(sum(self.predicted.values()), sum(self.compiled.values()), 1.0)

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.compiled_bytes - 1

    @property
    def tight_error(self) -> float:
        return self.predicted_bytes / self.tight_bytes - 1

    @property
    def same_kinds(self) -> bool:
        """Kinds with at least a thousandth of the bytes count: XLA sums scalars, such as a loss, with other arrays."""
        most = max(sum(self.predicted.values()), sum(self.compiled.values()))
        of = [{kind for kind, n in made.items() if n > most / 1000} for made in (self.predicted, self.compiled)]
        return of[0] == of[1]


@benchmark("gpu_fidelity")
def gpu_fidelity(size: Size) -> Rows:
    """Predicted collectives and memory of plans, next to programs that XLA compiles for GPUs."""
    found = [row for case in (CASES if size == "full" else (_TINY,)) for row in rows_of(case, None)]
    return [*map(_columns, found), summary(found)]


def rows_of(case: GpuCase, cache: Path | None) -> Iterator[ProgramRow]:
    """Plan a case, and compile the programs of its tasks."""
    cluster = _cluster(case)
    built = minialpa.models.build(case.model, **case.sizes)
    traced = traced_step(built.train_step(minialpa.value_and_grad), *arguments(built))
    plan = planned(traced, cluster, _METHODS[case.method]())
    with collection_paused():
        staged = realise(traced, plan).staged
        step = planned_step(staged, mesh_problems(staged), plan)
        program = emit_program(traced, plan)
        by_mesh = split_by_mesh(program, input_types(program, traced), cluster=cluster, platform="cuda")

    target = target_of(cluster.device.name)
    compiler = compiler_of(cluster)
    wanted = []
    for run in _runs(step):
        (function,) = (f for f in by_mesh[run.task.mesh].functions if f.name == run.name)
        stage = plan.stages[run.task.mesh]
        wanted.append((run, function, CompileRequest(function, stage.logical_shape, stage.submesh[0], target)))
    made = compile_for_gpus([request for *_, request in wanted], cache=cache)
    memory = [peak_bytes(run.program, function.donated, compiler=compiler) for run, function, _ in wanted]

    tight = {
        i: _without_room(request, memory[i].peak_bytes)
        for i, (*_, request) in enumerate(wanted)
        if memory[i].peak_bytes < made[i].peak_bytes
    }
    tight_made = dict(zip(tight, compile_for_gpus(list(tight.values()), cache=cache), strict=True))

    for i, (run, function, _) in enumerate(wanted):
        yield ProgramRow(
            case=case.name,
            program=function.name,
            predicted=_predicted_bytes(run.program),
            compiled={kind: n for kind, n in hlo.bytes_by_kind(hlo.collectives(made[i].text)).items()},
            predicted_bytes=memory[i].peak_bytes,
            compiled_bytes=made[i].peak_bytes,
            temporary_bytes=(memory[i].temp_bytes, made[i].temporary_bytes),
            tight_bytes=tight_made.get(i, made[i]).peak_bytes,
            seconds=_seconds(run, plan, made[i]),
        )


@dataclass(frozen=True, slots=True)
class _Runs:
    """Equal runs of a task in a step: the function, its program, and the number of runs."""

    task: Task
    name: str
    program: ShardedEquations
    n: int


def _runs(step: PlannedStep) -> Iterator[_Runs]:
    """The programs of a step, with the programs of last passes."""
    for one in step.programs:
        n = step.plan.n_micro_batches if one.task.per_micro_batch else 1
        yield _Runs(one.task, one.task.name, one.program, n - (one.last is not None))
        if one.last is not None:
            yield _Runs(one.task, f"{one.task.name}.last", one.last.program, 1)


def _seconds(runs: _Runs, plan: Plan, made: GpuProgram) -> tuple[float, float]:
    """Seconds of all runs of a program in a step: predicted, and by XLA's estimates of its kernels.

    Collectives take the time that the links of the plan give. XLA's schedule decides how much of it is hidden.
    """
    task, stage = runs.task, plan.stages[runs.task.mesh]
    seconds_of = functools.cache(lambda one: hlo.seconds([dataclasses.replace(one, times=1)], stage.mesh))
    found = timeline(made.text, seconds_of, plan.cluster.device).total_s
    if not task.per_micro_batch:
        return stage.update_s if task.level == 0 and task.kind == "update" else 0.0, found
    (own,) = (p for p in stage.passes if (p.kind, p.chunk, p.loop) == (task.kind, task.chunk, task.loop))
    return runs.n * own.seconds, runs.n * found


def _cluster(case: GpuCase) -> ClusterSpec:
    """A cluster on which each product runs at the speed of a single product, as in XLA's estimates."""
    cluster = ClusterSpec.preset(case.gpu, num_hosts=case.hosts[0], devices_per_host=case.hosts[1])  # type: ignore[arg-type]
    assert cluster.device.kernels is not None, case
    kernels = dataclasses.replace(cluster.device.kernels, sustained=1.0)
    return dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, kernels=kernels))


def _without_room(request: CompileRequest, n_bytes: float) -> CompileRequest:
    """The same request for a GPU on which XLA may schedule the program in `n_bytes`."""
    target = dataclasses.replace(request.target, memory_bytes=int(n_bytes / _SCHEDULED_PART))
    return dataclasses.replace(request, target=target)


def _predicted_bytes(program: ShardedEquations) -> dict[str, float]:
    """Bytes of the collectives of each kind."""
    predicted: dict[str, float] = {}
    for one in collectives_of(program):
        kind = one.collective.kind
        predicted[kind] = predicted.get(kind, 0.0) + one.times * one.collective.n_bytes
    return predicted


def summary(found: Sequence[ProgramRow]) -> dict[str, Any]:
    """One row over all programs."""
    errors = np.array([row.memory_error for row in found])
    tight = np.array([row.tight_error for row in found])
    return {
        "case": f"all {len(found)} programs",
        "same_kinds": statistics.mean(row.same_kinds for row in found),
        "within_2_percent": statistics.mean(row.bytes_error <= 0.02 for row in found),
        "memory_error_median": float(np.median(np.abs(errors))),
        "memory_error_p95": float(np.percentile(np.abs(errors), 95)),
        "step_seconds_error_median": float(np.median(np.abs(_step_errors(found)))),
        "most_under": float(-errors.min()),
        "more_than_2_percent_under": int((errors < -0.02).sum()),
        "most_under_tight": float(-tight.min()),
        "tight_more_than_2_percent_under": int((tight < -0.02).sum()),
    }


def _step_errors(found: Sequence[ProgramRow]) -> list[float]:
    """(predicted - estimated) / estimated seconds of the step, for each case."""
    steps = defaultdict[str, list[ProgramRow]](list)
    for row in found:
        steps[row.case].append(row)
    sums = [[sum(row.seconds[i] for row in rows) for i in (0, 1)] for rows in steps.values()]
    return [predicted / estimated - 1 for predicted, estimated in sums]


def _columns(row: ProgramRow) -> dict[str, Any]:
    return {
        "case": row.case,
        "program": row.program,
        "same_kinds": row.same_kinds,
        "predicted_mb": sum(row.predicted.values()) / 1e6,
        "compiled_mb": sum(row.compiled.values()) / 1e6,
        "bytes_error": row.bytes_error,
        "predicted_peak_mb": row.predicted_bytes / 1e6,
        "compiled_peak_mb": row.compiled_bytes / 1e6,
        "memory_error": row.memory_error,
        "predicted_temp_mb": row.temporary_bytes[0] / 1e6,
        "compiled_temp_mb": row.temporary_bytes[1] / 1e6,
        "tight_error": row.tight_error,
        "predicted_s": row.seconds[0],
        "estimated_s": row.seconds[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of cases")
    parser.add_argument("--cache", type=Path, default=None, metavar="FOLDER", help="keep compiled programs here")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the rows to this file")
    options = parser.parse_args()
    chosen = [case for case in CASES if not options.only or any(part in case.name for part in options.only)]
    found: list[ProgramRow] = []
    for case in chosen:
        rows = list(rows_of(case, options.cache))
        found += rows
        print(table(list(map(_columns, rows))), flush=True)
    print(table([summary(found)]))
    if options.json is not None:
        write_text(options.json, json.dumps([*map(_columns, found), summary(found)], indent=2))


if __name__ == "__main__":
    main()
