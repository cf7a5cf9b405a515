"""A plan beside what XLA for GPUs makes of it: programs and their plan in, a `PlanCheck` out.

For each stage: memory, communication and seconds as the plan has them, and as the compiled programs have them. Seconds
of collectives are those of the plan's links on both sides; what differs is which of them the compiler made, joined and
hid.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minialpa.hlo import HloCollective, bytes_by_kind, collectives, seconds
from minialpa.plan import Plan
from minialpa.plan.text import bytes_text, seconds_text
from minialpa.programs.mesh_program import MeshProgram
from minialpa.programs.program import Accumulate, Run
from minialpa.xla_gpu.compile import compile_for_gpus
from minialpa.xla_gpu.compiled import GpuProgram
from minialpa.xla_gpu.residency import peak_of
from minialpa.xla_gpu.targets import GpuTarget
from minialpa.xla_gpu.timeline import timeline
from minialpa.xla_gpu.worker import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCheck:
    """One function of a stage, as XLA made it.

    Attributes:
        name: of the function.
        times_per_step: how often a step runs it.
        peak_bytes: of a device, for the function alone.
        kernels_s: seconds of its kernels, by XLA's estimates.
        total_s: the same with the collectives that nothing hides.
        exposed_bytes: bytes of collectives that no kernel runs beside.
        hidden_bytes: the other bytes of collectives.
    """

    name: str
    times_per_step: int
    peak_bytes: int
    kernels_s: float
    total_s: float
    exposed_bytes: float
    hidden_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCheck:
    """One stage, as planned and as compiled.

    Attributes:
        limit_bytes: memory of a device.
        planned_bytes: predicted for the fullest moment of a device.
        compiled_bytes: what XLA needs then.
        fullest: name of the function that runs then.
        planned_collectives: bytes that a step communicates, by the kind of collective.
        compiled_collectives: the same, in the compiled programs.
        planned_s: seconds that the stage works in a step.
        compiled_s: the same by XLA's estimates of kernels.
        functions: what the stage runs.
    """

    limit_bytes: float
    planned_bytes: float
    compiled_bytes: int
    fullest: str
    planned_collectives: dict[str, float]
    compiled_collectives: dict[str, float]
    planned_s: float
    compiled_s: float
    functions: tuple[FunctionCheck, ...]

    @property
    def fits(self) -> bool:
        return self.compiled_bytes <= self.limit_bytes


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """A plan beside its compiled programs.

    Attributes:
        target: name of the GPU that they are compiled for.
        stages: from first to last.
    """

    target: str
    stages: tuple[StageCheck, ...]

    @property
    def fits(self) -> bool:
        """Whether every stage keeps within the memory of its devices."""
        return all(stage.fits for stage in self.stages)

    def to_json(self) -> str:
        """All fields, as JSON."""
        return json.dumps({"fits": self.fits, **dataclasses.asdict(self)}, indent=2)

    def summary(self) -> str:
        """A few lines for each stage."""
        lines = [f"Compiled for {self.target}: {'fits' if self.fits else 'DOES NOT FIT'}"]
        for k, stage in enumerate(self.stages):
            lines.extend(_stage_lines(k, stage))
        return "\n".join(lines)


def _stage_lines(k: int, stage: StageCheck) -> Iterator[str]:
    fits = "" if stage.fits else ", WHICH IS TOO MUCH"
    yield (
        f"Stage {k}: {bytes_text(stage.compiled_bytes)} of {bytes_text(stage.limit_bytes)} in `{stage.fullest}`{fits} "
        f"(planned {bytes_text(stage.planned_bytes)}); {seconds_text(stage.compiled_s)} per step "
        f"(planned {seconds_text(stage.planned_s)})"
    )
    for kind in sorted({*stage.planned_collectives, *stage.compiled_collectives}):
        planned, made = (of.get(kind, 0.0) for of in (stage.planned_collectives, stage.compiled_collectives))
        yield f"  {kind}: {bytes_text(made)} per step (planned {bytes_text(planned)})"
    for one in stage.functions:
        yield (
            f"  {one.name}: {one.times_per_step} x {seconds_text(one.total_s)}, kernels {seconds_text(one.kernels_s)}, "
            f"collectives {bytes_text(one.hidden_bytes)} hidden and {bytes_text(one.exposed_bytes)} exposed, "
            f"{bytes_text(one.peak_bytes)}"
        )


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
        [Request(function, stage.logical_shape, stage.submesh[0], target.text) for function in program.functions]
        for program, stage in zip(programs, plan.stages, strict=True)
    ]
    made = iter(compile_for_gpus([r for each in requests for r in each], n_processes=n_processes, cache=cache))
    compiled = [[next(made) for _ in each] for each in requests]
    stages = [_stage_check(k, program, compiled[k], plan) for k, program in enumerate(programs)]
    return PlanCheck(target.name, tuple(stages))


def _stage_check(k: int, program: MeshProgram, compiled: Sequence[GpuProgram], plan: Plan) -> StageCheck:
    stage, peak = plan.stages[k], peak_of(program, compiled)
    device_bytes = plan.cluster.device_of(stage.first_device).memory_bytes
    times = Counter(i.function for i in program.instructions if isinstance(i, Run | Accumulate))
    functions = [_function_check(program, i, made, times[i], plan, k) for i, made in enumerate(compiled)]
    return StageCheck(
        limit_bytes=stage.option.memory_limit_bytes or device_bytes,
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


def _function_check(
    program: MeshProgram, number: int, made: GpuProgram, times: int, plan: Plan, k: int
) -> FunctionCheck:
    mesh = plan.stages[k].mesh

    @functools.cache
    def seconds_of(one: HloCollective) -> float:
        return seconds([dataclasses.replace(one, times=1)], mesh)

    found = timeline(made.text, seconds_of)
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
