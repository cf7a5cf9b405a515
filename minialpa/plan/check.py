"""The result of `Plan.check`: for each stage the planned figures beside the compiled ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass

from minialpa.plan.text import bytes_text, seconds_text


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCheck:
    """One compiled function of a stage.

    Attributes:
        name: of the function.
        times_per_step: number of its runs in a step.
        peak_bytes: of a device, for the function alone.
        kernels_s: seconds of its kernels, by XLA's estimates.
        total_s: seconds of kernels and exposed collectives.
        exposed_bytes: bytes of collectives without a kernel beside them.
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
        planned_bytes, compiled_bytes: at the fullest moment of a device.
        fullest: name of the function that runs then.
        planned_collectives, compiled_collectives: bytes in a step, by the kind of collective.
        planned_s, compiled_s: busy seconds of the stage in a step; compiled: by XLA's estimates of kernels.
        functions: all functions of the stage.
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
    """A plan beside its programs, compiled for the GPU `target`."""

    target: str
    stages: tuple[StageCheck, ...]

    @property
    def fits(self) -> bool:
        """Whether every stage fits in the memory of its devices."""
        return all(stage.fits for stage in self.stages)

    def to_json(self) -> str:
        """All fields, as JSON."""
        return json.dumps({"fits": self.fits, **dataclasses.asdict(self)}, indent=2)

    def __str__(self) -> str:
        return self.summary()

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
