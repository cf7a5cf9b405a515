"""A case and its plan in, the numbers for people out: seconds, tokens, memory, cost, and the binding limit."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from minialpa.errors import MinialpaError
from minialpa.plan import Plan
from minialpa.plan.text import variant_text
from minialpa.report.figures import stage_memory, throughput, time_parts
from minialpa.what_if.grid import Case

#: The keys of `report.figures.time_parts`.
TIME_PARTS = ("compute", "communication", "bubble", "update", "idle")
#: Above this part of its memory, a device is full.
_FULL = 0.95
#: Letters of a reason.
_MOST_LETTERS = 220
_BYTES = re.compile(r"\d [kMG]?B\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOutcome:
    """The plan of a case in numbers, or the reason why there is no plan.

    Attributes:
        reason: empty if there is a plan.
        is_error: whether the step cannot be planned, even with enough memory.
        examples, tokens, utilisation: as in `report.figures.Throughput`.
        parts: as in `report.figures.time_parts`.
        peak_bytes, memory: of each device of the fullest stage, and by kind.
        mesh: logical shapes, such as `2x4`.
        binds: `memory`, or the largest of `parts` except `idle`; empty for an error.
        price: dollars per GPU-hour.
    """

    case: Case
    reason: str = ""
    is_error: bool = False
    step_s: float | None = None
    examples: float | None = None
    tokens: float | None = None
    utilisation: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    peak_bytes: float | None = None
    memory: dict[str, float] = field(default_factory=dict)
    stages: int | None = None
    mesh: str = ""
    micro_batches: int | None = None
    rematerialisation: str = ""
    idle: int = 0
    plan: str = ""
    binds: str = "memory"
    price: float | None = None

    @property
    def fits(self) -> bool:
        return not self.reason

    @property
    def verdict(self) -> str:
        return "fits" if self.fits else "fails" if self.is_error else "does not fit"

    @property
    def per_second(self) -> float | None:
        """Tokens; without tokens, examples."""
        return self.tokens if self.tokens is not None else self.examples

    @property
    def per_gpu(self) -> float | None:
        return None if self.per_second is None else self.per_second / self.case.gpus

    @property
    def gpu_hours(self) -> float | None:
        """For a million tokens; without tokens, for a million examples. Idle devices count."""
        return 1e6 / 3600 / self.per_gpu if self.per_gpu else None

    @property
    def cost(self) -> float | None:
        """In dollars."""
        return None if self.price is None or self.gpu_hours is None else self.price * self.gpu_hours

    @property
    def used(self) -> float | None:
        """Fraction of the memory of a device of the fullest stage."""
        return None if self.peak_bytes is None else self.peak_bytes / self.case.memory_bytes

    def record(self) -> dict[str, Any]:
        """Columns of the CSV file, with units in their names; None for unknown values."""
        case = self.case
        return {
            "model": case.model,
            "cluster": case.cluster,
            "hosts": case.hosts,
            "gpus": case.gpus,
            "batch": case.batch,
            "sequence": case.sequence,
            "memory_gb": case.memory_bytes / 1e9,
            "link_speed": case.link_speed,
            "verdict": self.verdict,
            "reason": self.reason,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens,
            "examples_per_s": self.examples,
            "per_s_per_gpu": self.per_gpu,
            "model_flop_utilisation": self.utilisation,
            "price_per_gpu_hour": self.price,
            "gpu_hours_per_million": self.gpu_hours,
            "cost_per_million": self.cost,
            "peak_gb": None if self.peak_bytes is None else self.peak_bytes / 1e9,
            "binds": self.binds,
            **{f"{name}_fraction": self.parts.get(name) for name in TIME_PARTS},
            "stages": self.stages,
            "mesh": self.mesh,
            "micro_batches": self.micro_batches,
            "rematerialisation": self.rematerialisation,
            "idle_gpus": self.idle,
            "plan": self.plan,
        }


def unit_of(outcomes: Iterable[CaseOutcome]) -> str:
    """`tokens`, `examples`, or both."""
    has_tokens = {one.tokens is not None for one in outcomes if one.fits}
    return "tokens" if has_tokens == {True} else "tokens or examples" if len(has_tokens) == 2 else "examples"


def outcome_of(case: Case, plan: Plan, price: float | None) -> CaseOutcome:
    """The plan may be for more memory than the case has, if it fits there."""
    rates, parts = throughput(plan), time_parts(plan)
    fullest = max(range(len(plan.stages)), key=lambda k: plan.stages[k].peak_bytes)
    kept = "/".join(sorted(set(plan.remat) - {"none"}))
    peak_bytes = plan.stages[fullest].peak_bytes

    is_short = bool(kept) or peak_bytes > _FULL * case.memory_bytes
    return CaseOutcome(
        case=case,
        step_s=plan.cost.total_s,
        examples=rates.examples,
        tokens=rates.tokens,
        utilisation=rates.utilisation,
        parts=parts,
        peak_bytes=peak_bytes,
        memory=stage_memory(plan, fullest).parts,
        stages=len(plan.stages),
        mesh=" and ".join(dict.fromkeys("x".join(map(str, stage.logical_shape)) for stage in plan.stages)),
        micro_batches=plan.n_micro_batches,
        rematerialisation=kept,
        idle=case.gpus - sum(stage.n_devices for stage in plan.stages),
        plan=variant_text(plan),
        binds="memory" if is_short else max(TIME_PARTS[:-1], key=lambda part: parts[part]),
        price=price,
    )


def reason_of(error: BaseException) -> str:
    """The first sentence, and the next one if only it has bytes. Errors of others have their type."""
    text = " ".join(str(error).partition("\n")[0].split())
    if not isinstance(error, MinialpaError):
        text = f"{type(error).__name__}: {text}"
    first, *rest = re.split(r"(?<=[.!?]) (?=[A-Z`])", text)
    if rest and _BYTES.search(rest[0]) and not _BYTES.search(first):
        first = f"{first} {rest[0]}"
    return first if len(first) <= _MOST_LETTERS else f"{first[: _MOST_LETTERS - 1]}…"
