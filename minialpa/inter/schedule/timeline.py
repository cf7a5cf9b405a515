"""Timelines: simulated passes, transfers and memory of stages in, text or a Perfetto trace out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from minialpa.plan import bytes_text, seconds_text
from minialpa.support.perfetto import Event, counter, interval, process_name, thread_name, write_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPass:
    """A pass of a micro-batch in chunk `number`, or the update of stage `number`. Times count from the step's start."""

    kind: Literal["forward", "backward", "weights", "step", "update"]
    number: int
    micro_batch: int | None
    start_s: float
    end_s: float

    @property
    def name(self) -> str:
        chunk = f" chunk {self.number}" if self.kind in ("forward", "backward", "weights") else ""
        return f"{self.kind}{chunk}" + ("" if self.micro_batch is None else f", micro-batch {self.micro_batch}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedTransfer:
    """A transfer between stages. kind: of the pass that made the bytes."""

    source_stage: int
    target_stage: int
    kind: Literal["forward", "backward", "weights", "update"]
    micro_batch: int | None
    n_bytes: float
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimeline:
    """One stage and its devices in the cluster.

    Attributes:
        passes: for each loop, its passes in order, and then its update.
        memory: (seconds, bytes per device from then on), in order.
        peak_live: the most live pairs (micro-batch, chunk), see `schedules.live_counts`.
    """

    first_device: int
    n_devices: int
    passes: tuple[TimedPass, ...]
    memory: tuple[tuple[float, float], ...]
    peak_live: int

    @property
    def busy_s(self) -> float:
        return sum(one.end_s - one.start_s for one in self.passes)

    @property
    def peak_bytes(self) -> float:
        return max(n_bytes for _, n_bytes in self.memory)


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step of a plan, as `simulate` predicts it."""

    schedule: str
    n_micro_batches: int
    stages: tuple[StageTimeline, ...]
    transfers: tuple[TimedTransfer, ...]

    @property
    def total_s(self) -> float:
        return max((stage.passes[-1].end_s for stage in self.stages if stage.passes), default=0.0)

    @property
    def bubble(self) -> tuple[float, ...]:
        """For each stage, the fraction of the step in which it waits."""
        total_s = self.total_s
        return tuple(1 - stage.busy_s / total_s if total_s else 0.0 for stage in self.stages)

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        return tuple(stage.peak_bytes for stage in self.stages)

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        order = f", schedule {self.schedule}" if len(self.stages) > 1 else ""
        lines = [
            f"Simulated {seconds_text(self.total_s)} per step: {len(self.stages)} stage{'s' * (len(self.stages) > 1)}, "
            f"{self.n_micro_batches} micro-batches{order}"
        ]
        for k, (stage, bubble) in enumerate(zip(self.stages, self.bubble, strict=True)):
            lines.append(
                f"Stage {k}: busy {seconds_text(stage.busy_s)}, waits {bubble:.1%}, at most {stage.peak_live} passes "
                f"in flight, {bytes_text(stage.peak_bytes)} per device"
            )
        return "\n".join(lines)

    def to_trace(self, path: str | Path) -> None:
        """Write a JSON trace for ui.perfetto.dev or chrome://tracing.

        Each stage is a process with a thread for passes, a thread per receiving stage, and a memory counter.
        """
        write_trace(path, self.events("passes"))

    def events(self, lane: str, first_thread: int = 0) -> list[Event]:
        """The events of `to_trace`, with `lane` as the name of the threads of passes, the first of their process."""
        return [*self._stage_events(lane, first_thread), *self._transfer_events(first_thread)]

    def _stage_events(self, lane: str, first_thread: int) -> list[Event]:
        events: list[Event] = []
        for k, stage in enumerate(self.stages):
            last = stage.first_device + stage.n_devices - 1
            events += [
                process_name(k, f"stage {k}, devices {stage.first_device}-{last}"),
                thread_name(k, first_thread, lane),
            ]
            events += [
                interval(k, first_thread, one.name, start_s=one.start_s, end_s=one.end_s, category=one.kind)
                for one in stage.passes
            ]
            events += [
                counter(k, f"bytes per device, {lane}", at_s, {"bytes": n_bytes}) for at_s, n_bytes in stage.memory
            ]
        return events

    def _transfer_events(self, first_thread: int) -> list[Event]:
        """Transfers are in the process of their source, on thread k + 1 for target k, after the thread of passes."""
        events: list[Event] = []
        for source, target in sorted({(one.source_stage, one.target_stage) for one in self.transfers}):
            events.append(thread_name(source, first_thread + target + 1, f"to stage {target}"))
        for one in self.transfers:
            name = one.kind if one.micro_batch is None else f"{one.kind}, micro-batch {one.micro_batch}"
            place, args = (one.source_stage, first_thread + one.target_stage + 1), {"bytes": one.n_bytes}
            events.append(interval(*place, name, start_s=one.start_s, end_s=one.end_s, category="transfer", args=args))
        return events
