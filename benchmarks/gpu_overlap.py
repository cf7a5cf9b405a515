"""Exposed communication of steps on GPUs, by XLA for GPUs: as planned, and with plain programs for each micro-batch.

    python -m benchmarks.gpu_overlap [--only PART ...] [--cache FOLDER] [--write PAGE]

Each case is planned and compiled twice. `before`: passes cast weights and return gradients, other programs add these to
accumulators, the update sums them over devices, and XLA schedules by its defaults. `after`: weights may be cast and
gathered once (`inter/staging/cast_weights.py`), passes add to accumulators and the last pass sums them
(`inter/staging/last_pass.py`), with the XLA options of the plan. Columns, from the compiled texts:

    exposed_ms     per step: collectives without a kernel beside them, at the plan's links
    hidden         fraction of the bytes of collectives beside which kernels run long enough
    with_work      fraction of the bytes of collectives beside which any kernel runs
    moved_gb       per step: arguments and results of all programs, each read or written at least once

`planned_hidden` is the fraction of the seconds of collectives that the passes of all micro-batches hide, by the plan.
It leaves out the seconds that only the last pass hides.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import minialpa.models
from benchmarks.corpus import arguments
from benchmarks.planning import traced_step
from benchmarks.registry import Rows, Size, benchmark
from benchmarks.run import table
from minialpa import ClusterSpec, hlo
from minialpa.inter.lower.emit import emit_program
from minialpa.inter.lower.mesh_programs import input_types, split_by_mesh
from minialpa.inter.pipeline import plan_step
from minialpa.methods import Method, Zero2Parallel, Zero3Parallel
from minialpa.models.sizes import SIZES
from minialpa.plan import Plan
from minialpa.programs.mesh_program import MeshProgram
from minialpa.programs.program import Accumulate, Run
from minialpa.support.collection import collection_paused
from minialpa.support.files import write_text
from minialpa.tracing.trace import TracedStep
from minialpa.xla_gpu.compile import compile_for_gpus
from minialpa.xla_gpu.targets import target_of
from minialpa.xla_gpu.timeline import DeviceTimeline, timeline
from minialpa.xla_gpu.worker import CompileRequest, GpuProgram

_GPT = SIZES["gpt-1.3b"].arguments | {"dtype": "bfloat16"}
_LLAMA = SIZES["llama-3-8b"].arguments | {"scan_layers": True, "remat_blocks": True, "loss_chunks": 8}
_TINY = {"hidden": 64, "n_heads": 2, "n_layers": 1, "seq_len": 32, "vocab_size": 64, "batch_size": 16}


@dataclass(frozen=True, slots=True)
class Case:
    """A model on H100s.

    Attributes:
        name: name of the case.
        model: a name of `minialpa.models`.
        sizes: arguments of its builder.
        n_hosts: hosts of 8 GPUs.
        method: how the step is split.
    """

    name: str
    model: str
    sizes: dict[str, Any]
    n_hosts: int
    method: Method


def _cases() -> Iterator[Case]:
    """Each GPU has 4 examples of GPT in a micro-batch, or 1 of Llama."""
    for n_hosts in (1, 8):
        n = 8 * n_hosts
        for name, model, sizes, each in (("gpt-1.3b", "gpt", _GPT, 4), ("llama-3-8b", "llama", _LLAMA, 1)):
            one, four = {**sizes, "batch_size": each * n}, {**sizes, "batch_size": 4 * each * n}
            yield Case(f"{name}, {n} GPUs, zero-3", model, one, n_hosts, Zero3Parallel())
            yield Case(f"{name}, {n} GPUs, zero-3 of 4", model, four, n_hosts, Zero3Parallel(num_micro_batches=4))
            if model == "gpt":
                yield Case(f"{name}, {n} GPUs, zero-2 of 4", model, four, n_hosts, Zero2Parallel(num_micro_batches=4))


@benchmark("gpu_overlap")
def gpu_overlap(size: Size) -> Rows:
    """Communication that compiled programs expose, with sums in the update and in last passes."""
    tiny = Case("gpt, tiny", "gpt", _TINY, 1, Zero2Parallel(num_micro_batches=2))
    return [row for case in (_cases() if size == "full" else (tiny,)) for row in rows_of(case, None)]


def rows_of(case: Case, cache: Path | None) -> list[dict[str, Any]]:
    """The rows `before` and `after` of a case."""
    cluster = ClusterSpec.preset("h100", num_hosts=case.n_hosts)
    built = minialpa.models.build(case.model, **case.sizes)
    traced = traced_step(built.train_step(minialpa.value_and_grad), *arguments(built))
    before, after = (
        plan_step(traced, cluster, dataclasses.replace(case.method.options(), cast_once=cast_once))
        for cast_once in (False, None)
    )
    return [
        {"case": case.name, "programs": "before", **_columns(traced, _with_sums_in_the_update(before), before, cache)},
        {"case": case.name, "programs": "after", **_columns(traced, after, after, cache)},
    ]


def _with_sums_in_the_update(plan: Plan) -> Plan:
    """The same plan for devices whose passes neither add to accumulators nor sum them, without compiler options."""
    device = dataclasses.replace(plan.cluster.device, name="cpu")
    return dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, device=device), compiler_options=())


def _programs(traced: TracedStep, plan: Plan, cluster: ClusterSpec) -> MeshProgram:
    """The program of the only stage, exported for GPUs."""
    with collection_paused():
        program = emit_program(traced, plan)
        (only,) = split_by_mesh(program, input_types(program, traced), cluster=cluster, platform="cuda")
    return only


def _columns(traced: TracedStep, compiled: Plan, plan: Plan, cache: Path | None) -> dict[str, Any]:
    """Columns from the programs of `compiled`, and the predictions of `plan`."""
    (stage,), device = plan.stages, plan.cluster.device
    program = _programs(traced, compiled, plan.cluster)
    target = target_of(device.name)
    requests = [CompileRequest(f, stage.logical_shape, stage.submesh[0], target) for f in program.functions]
    times = Counter(x.function for x in program.instructions if isinstance(x, Run | Accumulate))
    made = compile_for_gpus(requests, cache=cache)

    def seconds_of(one: hlo.HloCollective) -> float:
        return hlo.seconds([dataclasses.replace(one, times=1)], stage.mesh)

    runs = [(times[i], one, timeline(one.text, seconds_of, device)) for i, one in enumerate(made)]
    n_bytes = sum(n * a.n_bytes for n, _, found in runs for a in found.exposed) or 1.0
    hidden_s = plan.n_micro_batches * sum(one.hidden_s for one in stage.passes)
    waited_s = plan.n_micro_batches * stage.communication_s + stage.update_s
    return {
        "exposed_ms": 1e3 * sum(n * a.collective.times * a.exposed_s for n, _, found in runs for a in found.exposed),
        "hidden": sum(n * found.hidden_bytes for n, _, found in runs) / n_bytes,
        "with_work": sum(n * _with_work(found) for n, _, found in runs) / n_bytes,
        "moved_gb": sum(n * _moved(one) for n, one, _ in runs) / 1e9,
        "peak_gb": max(one.peak_bytes for _, one, _ in runs) / 1e9,
        "planned_hidden": hidden_s / ((hidden_s + waited_s) or 1.0),
    }


def _with_work(found: DeviceTimeline) -> float:
    return sum(one.n_bytes for one in found.exposed if one.has_work)


def _moved(program: GpuProgram) -> int:
    return program.argument_bytes + program.output_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of cases")
    parser.add_argument("--cache", type=Path, default=None, metavar="FOLDER", help="keep compiled programs here")
    parser.add_argument("--write", type=Path, default=None, metavar="PAGE", help="write the table to this file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in _cases():
        if not options.only or any(part in case.name for part in options.only):
            rows += rows_of(case, options.cache)
            print(table(rows[-2:]), flush=True)
    if options.write is not None:
        write_text(options.write, table(rows) + "\n")


if __name__ == "__main__":
    main()
