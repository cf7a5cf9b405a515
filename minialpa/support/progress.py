"""Progress of long work: one live line on a terminal, and one line in the log for each finished phase.

    with phase("compiling") as report:
        report("programs", 5, 12)           ->  compiling: 5 of 12 programs  0:03, about 0:04 left

A thread draws the innermost phase, if standard error is a terminal. The logger `minialpa` gets each finished phase at
level INFO.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TextIO

_log = logging.getLogger("minialpa")

Report = Callable[[str, int, int], None]
"""`report(what, done, total)`: so many items are done. A total of 0 is unknown; `done` of 0, too, names an activity."""

#: 0 turns the line off.
_VARIABLE = "MINIALPA_PROGRESS"
#: Seconds between drawings.
_REDRAW_S = 0.1
#: Seconds of work before the time left is estimated.
_LEAST_S = 2.0


class _Switch:
    disabled = False


def disable_progress() -> None:
    """In this process, from here on."""
    _Switch.disabled = True


@contextmanager
def phase(
    name: str,
    *,
    ticks: bool = True,
    look: Callable[[], tuple[str, int, int] | None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Report]:
    """ticks: whether to show the elapsed time. Without ticks, the line is drawn once, so that a debugger can be used.
    look: returns the arguments of a report, or None; the display calls it before it draws.
    """
    made = RunningPhase(name, ticks, look, clock)
    try:
        _display.open(made)
        yield made.report
    finally:
        _display.close(made)
    if _log.isEnabledFor(logging.INFO):
        _log.info("%s", made.summary())


# ---- counts ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Count:
    """Items of one kind in a phase. Neither number falls: repeated work continues its count.

    Attributes:
        earlier: items of earlier repetitions.
        seconds: during which these items were reported last.
    """

    begun_s: float
    done: int = 0
    total: int = 0
    earlier: int = 0
    last: int = 0
    seconds: float = 0.0
    has_grown: bool = False

    def update(self, done: int, total: int) -> None:
        if done < self.last:
            self.earlier = self.done
        self.last = done
        self.done = max(self.done, self.earlier + done)
        if total and self.earlier + total > self.total:
            self.has_grown, self.total = self.total > 0, self.earlier + total

    def left_s(self, now_s: float) -> float | None:
        """If all items take equally long; None at the begin, and if the total has grown."""
        spent_s = now_s - self.begun_s
        if not 0 < self.done < self.total or spent_s < _LEAST_S or self.has_grown:
            return None
        return spent_s / self.done * (self.total - self.done)


class RunningPhase:
    """`line` is for a terminal, `summary` for the log."""

    def __init__(
        self,
        name: str,
        ticks: bool = True,
        look: Callable[[], tuple[str, int, int] | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._ticks, self._look, self._clock = name, ticks, look, clock
        self._begun_s = self._last_s = clock()
        self._counts: dict[str, _Count] = {}
        self._latest = ""

    def report(self, what: str, done: int, total: int) -> None:
        now_s = self._note_time()
        if what not in self._counts:
            self._counts[what] = _Count(now_s)
        self._counts[what].update(done, total)
        self._latest = what

    def _look_once(self) -> None:
        """A lower number is out of date: `look` never repeats work."""
        seen = None if self._look is None else self._look()
        if seen is not None:
            what, done, total = seen
            last = self._counts[what].last if what in self._counts else 0
            self.report(what, max(done, last), total)

    def _note_time(self) -> float:
        """Returns the present time."""
        now_s = self._clock()
        if self._latest:
            self._counts[self._latest].seconds += now_s - self._last_s
        self._last_s = now_s
        return now_s

    def line(self) -> str:
        self._look_once()
        now_s, what = self._clock(), self._latest
        count = self._counts.get(what)
        text = f"{self._name}: {_count_text(what, count)}" if count is not None else self._name
        if self._ticks:
            text += f"  {_time_text(now_s - self._begun_s)}"
        left_s = None if count is None else count.left_s(now_s)
        return text if left_s is None else f"{text}, about {_time_text(left_s)} left"

    def summary(self) -> str:
        self._look_once()
        seconds = self._note_time() - self._begun_s
        parts = []
        for what, count in self._counts.items():
            items = f"{count.done} {what}" if count.done else what
            parts.append(f"{items} in {count.seconds:.1f} s")
        return f"{self._name} took {seconds:.1f} s" + (f" ({', '.join(parts)})" if parts else "")


def _count_text(what: str, count: _Count) -> str:
    if count.total:
        return f"{count.done} of {count.total} {what}"
    return f"{count.done} {what}" if count.done else what


def _time_text(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# ---- the terminal ----------------------------------------------------------------------------------------------------


class _Display:
    """The line of the innermost open phase in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phases: list[RunningPhase] = []
        self._terminal: TextIO | None = None
        self._ended = threading.Event()
        self._drawn = ""

    def open(self, phase: RunningPhase) -> None:
        with self._lock:
            if not self._phases and (terminal := _terminal()) is not None:
                self._terminal, self._ended = terminal, threading.Event()
                threading.Thread(target=self._redraw, args=(self._ended,), daemon=True).start()
            self._phases.append(phase)
            self._draw()

    def close(self, phase: RunningPhase) -> None:
        with self._lock:
            if phase in self._phases:
                self._phases.remove(phase)
            self._draw()
            if not self._phases:
                self._ended.set()
                self._terminal = None

    def _redraw(self, ended: threading.Event) -> None:
        while not ended.wait(_REDRAW_S):
            with self._lock:
                if not ended.is_set():
                    self._draw()

    def _draw(self) -> None:
        """The cursor stays at its begin, so other output overwrites the line."""
        if self._terminal is None:
            return
        line = self._phases[-1].line() if self._phases else ""
        if line == self._drawn:
            return
        self._drawn = line
        with suppress(OSError, ValueError):  # the terminal is gone, or the stream is closed
            width = os.get_terminal_size(self._terminal.fileno()).columns or 80
            self._terminal.write(f"\r\x1b[2K{line[: width - 1]}\r")
            self._terminal.flush()


def _terminal() -> TextIO | None:
    """A program without a console has no streams."""
    stream = sys.stderr
    if _Switch.disabled or os.environ.get(_VARIABLE) == "0" or os.environ.get("TERM") == "dumb":
        return None
    return stream if stream is not None and not stream.closed and stream.isatty() else None


_display = _Display()
