"""Programs and their plan in, a `PlanCheck` out: memory, communication and seconds of each stage, planned and compiled.

Both sides price collectives by the plan's links. They differ in the collectives that the compiler makes, joins and
hides. Memory of a device:

    peak = max over runs of (peak of the function + bytes of live buffers other than its arguments)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, assert_never

import numpy as np
from jax.sharding import NamedSharding

from minialpa.hlo import HloCollective, bytes_by_kind, collectives, seconds
from minialpa.plan import Plan
from minialpa.plan.check import FunctionCheck, PlanCheck, StageCheck
from minialpa.plan.record import device_of, limit_bytes
from minialpa.programs.mesh_program import MeshProgram, Receive, Relayout, Send
from minialpa.programs.program import Accumulate, Free, Run
from minialpa.sharding import abstract_mesh
from minialpa.xla_gpu.compile import compile_for_gpus
from minialpa.xla_gpu.targets import GpuTarget
from minialpa.xla_gpu.timeline import timeline
from minialpa.xla_gpu.worker import CompileRequest, GpuProgram


def check_programs(
    programs: Sequence[MeshProgram],
    plan: Plan,
    target: GpuTarget,
    *,
    cache: Path | None = None,
) -> PlanCheck:
    """Compile the functions of all meshes of a plan for a GPU, and compare with the plan.

    programs: of each mesh, with functions exported for "cuda".
    cache: a folder for compiled programs.
    """
    requests = [
        [CompileRequest(function, stage.logical_shape, stage.submesh[0], target) for function in program.functions]
        for program, stage in zip(programs, plan.stages, strict=True)
    ]
    made = iter(compile_for_gpus([r for each in requests for r in each], cache=cache))
    compiled = [[next(made) for _ in each] for each in requests]
    stages = [_stage_check(k, program, compiled[k], plan) for k, program in enumerate(programs)]
    return PlanCheck(target.name, tuple(stages))


def _stage_check(k: int, program: MeshProgram, compiled: Sequence[GpuProgram], plan: Plan) -> StageCheck:
    stage = plan.stages[k]
    peak_bytes, fullest_function = _peak_of(program, compiled)
    host_bytes, _ = _peak_of(program, compiled, in_host=True)
    times = Counter(i.function for i in program.instructions if isinstance(i, Run | Accumulate))
    functions = [_function_check(program, i, made, times[i], plan, k) for i, made in enumerate(compiled)]
    return StageCheck(
        limit_bytes=limit_bytes(plan, k),
        planned_bytes=stage.peak_bytes,
        compiled_bytes=peak_bytes,
        fullest=fullest_function,
        planned_collectives=_planned_collectives(plan, k),
        compiled_collectives=_compiled_collectives(compiled, times),
        planned_s=plan.n_micro_batches * (stage.compute_s + stage.communication_s)
        + stage.update_s
        + sum(stage.between_s),
        compiled_s=sum(one.times_per_step * one.total_s for one in functions),
        functions=tuple(functions),
        planned_host_bytes=stage.host_bytes,
        compiled_host_bytes=host_bytes,
    )


def _function_check(
    program: MeshProgram, number: int, made: GpuProgram, times: int, plan: Plan, k: int
) -> FunctionCheck:
    """times: runs in a step."""
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
    for one in (one for one in plan.collectives if one.stage == k):
        total[one.kind] += one.times_per_step * one.n_bytes
    return dict(total)


def _compiled_collectives(compiled: Sequence[GpuProgram], times: Counter[int]) -> dict[str, float]:
    total: defaultdict[str, Any] = defaultdict(float)
    for i, made in enumerate(compiled):
        for kind, n_bytes in bytes_by_kind(collectives(made.text)).items():
            total[kind] += times[i] * n_bytes
    return dict(total)


# ---- memory ----------------------------------------------------------------------------------------------------------


def _peak_of(program: MeshProgram, compiled: Sequence[GpuProgram], *, in_host: bool = False) -> tuple[int, str]:
    """Of a device of a mesh, or of host memory for it; also the function that runs then."""
    live = {slot.buffer for slot in program.inputs} | {slot.buffer for slot in program.constants}
    bytes_of = functools.partial(_buffer_bytes, program, in_host=in_host)
    peak_bytes, fullest = sum(map(bytes_of, live)), ""

    for instruction in program.instructions:
        match instruction:
            case Run() | Accumulate():
                function, inputs, outputs = _call(instruction)
                of_function = compiled[function].host_peak_bytes if in_host else compiled[function].peak_bytes
                needed_bytes = sum(map(bytes_of, live.difference(inputs))) + of_function
                if needed_bytes > peak_bytes:
                    peak_bytes, fullest = needed_bytes, program.functions[function].name
                live.difference_update(inputs[k] for k in program.functions[function].donated)
                live.update(outputs)
            case Free(buffers):
                live.difference_update(buffers)
            case Receive(target, _) | Relayout(_, target, _):
                live.add(target)
            case Send():
                pass
            case _:
                assert_never(instruction)
    return peak_bytes, fullest


def _call(instruction: Run | Accumulate) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    match instruction:
        case Run(function, inputs, outputs):
            return function, inputs, outputs
        case Accumulate(function, accumulators, values):
            return function, (*accumulators, *values), accumulators


def _buffer_bytes(program: MeshProgram, buffer: int, *, in_host: bool) -> int:
    kind = program.types[buffer]
    if kind.in_host != in_host:
        return 0
    sharding = NamedSharding(abstract_mesh(program.shape.logical_shape), program.specs[buffer])
    n_elements = math.prod(sharding.shard_shape(kind.data_shape))
    return math.ceil(n_elements * np.dtype(kind.dtype).itemsize)
