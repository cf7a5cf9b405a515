"""A plan beside what XLA for GPUs makes of it: programs and their plan in, a `PlanCheck` out.

For each stage: memory, communication and seconds as the plan has them, and as the compiled programs have them. Seconds
of collectives are those of the plan's links on both sides; what differs is which of them the compiler made, joined and
hid.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minialpa.cluster import DeviceSpec
from minialpa.hlo import HloCollective, bytes_by_kind, collectives, seconds
from minialpa.plan import Plan
from minialpa.plan.check import FunctionCheck, PlanCheck, StageCheck
from minialpa.programs.mesh_program import MeshProgram
from minialpa.programs.program import Accumulate, Run
from minialpa.xla_gpu.compile import compile_for_gpus
from minialpa.xla_gpu.compiled import GpuProgram
from minialpa.xla_gpu.residency import peak_of
from minialpa.xla_gpu.targets import GpuTarget
from minialpa.xla_gpu.timeline import timeline
from minialpa.xla_gpu.worker import Request


def check_programs(
    programs: Sequence[MeshProgram],
    plan: Plan,
    target: GpuTarget,
    *,
    n_processes: int | None = None,
    cache: Path | None = None,
) -> PlanCheck:
    """Compile the functions of all meshes of a plan for a GPU, and compare.

    Args:
        programs: of each mesh of the plan, with functions exported for "cuda".
        plan: what they were made by.
        target: the GPU.
        n_processes: that compile at a time, see `compile_for_gpus`.
        cache: a folder for compiled programs, see `compile_for_gpus`.
    """
    requests = [
        [Request(function, stage.logical_shape, stage.submesh[0], target) for function in program.functions]
        for program, stage in zip(programs, plan.stages, strict=True)
    ]
    made = iter(compile_for_gpus([r for each in requests for r in each], n_processes=n_processes, cache=cache))
    compiled = [[next(made) for _ in each] for each in requests]
    stages = [_stage_check(k, program, compiled[k], plan) for k, program in enumerate(programs)]
    return PlanCheck(target.name, tuple(stages))


def _stage_check(k: int, program: MeshProgram, compiled: Sequence[GpuProgram], plan: Plan) -> StageCheck:
    stage, peak = plan.stages[k], peak_of(program, compiled)
    times = Counter(i.function for i in program.instructions if isinstance(i, Run | Accumulate))
    functions = [_function_check(program, i, made, times[i], plan, k) for i, made in enumerate(compiled)]
    return StageCheck(
        limit_bytes=stage.option.memory_limit_bytes or device_of(plan, k).memory_bytes,
        planned_bytes=stage.peak_bytes,
        compiled_bytes=peak.n_bytes,
        fullest=peak.function,
        planned_collectives=_planned_collectives(plan, k),
        compiled_collectives=_compiled_collectives(compiled, times),
        planned_s=plan.n_micro_batches * (stage.compute_s + stage.communication_s)
        + stage.update_s
        + sum(stage.between_s),
        compiled_s=sum(one.times_per_step * one.total_s for one in functions),
        functions=tuple(functions),
    )


def device_of(plan: Plan, k: int) -> DeviceSpec:
    """The device that stage `k` of a plan runs on."""
    return plan.cluster.device_of(plan.stages[k].first_device // plan.cluster.devices_per_host)


def _function_check(
    program: MeshProgram, number: int, made: GpuProgram, times: int, plan: Plan, k: int
) -> FunctionCheck:
    mesh = plan.stages[k].mesh

    @functools.cache
    def seconds_of(one: HloCollective) -> float:
        return seconds([dataclasses.replace(one, times=1)], mesh)

    found = timeline(made.text, seconds_of, device_of(plan, k))
    return FunctionCheck(
        name=program.functions[number].name,
        times_per_step=times,
        peak_bytes=made.peak_bytes,
        kernels_s=found.kernels_s,
        total_s=found.total_s,
        exposed_bytes=found.exposed_bytes,
        hidden_bytes=found.hidden_bytes,
    )


def _planned_collectives(plan: Plan, k: int) -> dict[str, float]:
    total: defaultdict[str, float] = defaultdict(float)
    for one in plan.collectives:
        if one.stage == k:
            total[one.kind] += one.times_per_step * one.n_bytes
    return dict(total)


def _compiled_collectives(compiled: Sequence[GpuProgram], times: Counter[int]) -> dict[str, float]:
    total: defaultdict[str, Any] = defaultdict(float)
    for i, made in enumerate(compiled):
        for kind, n_bytes in bytes_by_kind(collectives(made.text)).items():
            total[kind] += times[i] * n_bytes
    return dict(total)
