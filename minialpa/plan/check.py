"""The result of `Plan.check`: planned and compiled numbers of each stage, as values, text and JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass

from minialpa.plan.text import seconds_text
from minialpa.support.sizes import bytes_text


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCheck:
    """One compiled function of a stage. Seconds and bytes are of one run on one device.

    Attributes:
        peak_bytes: of the function alone.
        kernels_s: by XLA's estimates.
        total_s: kernels and exposed collectives.
        exposed_bytes: of collectives that no kernel hides.
        hidden_bytes: of the other collectives.
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
        planned_bytes, compiled_bytes: peak memory of a device.
        fullest: the function at the compiled peak.
        planned_collectives, compiled_collectives: bytes per step, by the kind of collective.
        planned_s, compiled_s: busy seconds per step; compiled: XLA's estimates.
        planned_host_bytes, compiled_host_bytes: peak host memory for a device.
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
    planned_host_bytes: float = 0.0
    compiled_host_bytes: int = 0

    @property
    def fits(self) -> bool:
        return self.compiled_bytes <= self.limit_bytes


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """A plan and its programs, compiled for the GPU `target`."""

    target: str
    stages: tuple[StageCheck, ...]

    @property
    def fits(self) -> bool:
        return all(stage.fits for stage in self.stages)

    def to_json(self) -> str:
        return json.dumps({"fits": self.fits, **dataclasses.asdict(self)}, indent=2)

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
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
    if stage.planned_host_bytes or stage.compiled_host_bytes:
        host = map(bytes_text, (stage.compiled_host_bytes, stage.planned_host_bytes))
        yield "  host memory: {} for each device (planned {})".format(*host)
    for kind in sorted({*stage.planned_collectives, *stage.compiled_collectives}):
        planned, compiled = (of.get(kind, 0.0) for of in (stage.planned_collectives, stage.compiled_collectives))
        yield f"  {kind}: {bytes_text(compiled)} per step (planned {bytes_text(planned)})"
    for one in stage.functions:
        yield (
            f"  {one.name}: {one.times_per_step} x {seconds_text(one.total_s)}, kernels {seconds_text(one.kernels_s)}, "
            f"collectives {bytes_text(one.hidden_bytes)} hidden and {bytes_text(one.exposed_bytes)} exposed, "
            f"{bytes_text(one.peak_bytes)}"
        )
