"""Named timers, as Alpa's `timers`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from minialpa.errors import MinialpaError

Sync = Callable[[], object] | None


class Timer:
    """Measures intervals. `suspend` ends a part of an interval, and `stop` the interval.

    Attributes:
        name: its name.
        costs: seconds of each interval.
        start_times: when each part began, in seconds since the epoch.
        stop_times: when each interval ended, in seconds since the epoch.
    """

    costs: list[float]
    start_times: list[float]
    stop_times: list[float]
    _started_s: float | None
    _suspended_s: float | None

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()

    @property
    def started(self) -> bool:
        """Whether it is measuring."""
        return self._started_s is not None

    def start(self, sync_func: Sync = None) -> None:
        """Begin, after `sync_func`."""
        if self.started:
            raise MinialpaError(f"The timer `{self.name}` runs already. Call `stop()` or `suspend()` first.")
        _call(sync_func)
        self.start_times.append(time.time())
        self._started_s = time.perf_counter()

    def suspend(self, sync_func: Sync = None) -> None:
        """Pause, after `sync_func`; `start` goes on with the interval."""
        self._suspended_s = self._measured_s(sync_func) + (self._suspended_s or 0.0)
        self._started_s = None

    def stop(self, sync_func: Sync = None) -> None:
        """End the interval, after `sync_func`. A suspended timer may be stopped, too."""
        measured_s = 0.0 if not self.started and self._suspended_s is not None else self._measured_s(sync_func)
        self.costs.append(measured_s + (self._suspended_s or 0.0))
        self.stop_times.append(time.time())
        self._started_s = self._suspended_s = None

    def _measured_s(self, sync_func: Sync) -> float:
        if self._started_s is None:
            raise MinialpaError(f"The timer `{self.name}` does not run. Call `start()` first.")
        _call(sync_func)
        return time.perf_counter() - self._started_s

    def reset(self) -> None:
        """Forget all intervals, and the one that is being measured."""
        self.costs, self.start_times, self.stop_times = [], [], []
        self._started_s = self._suspended_s = None

    def elapsed(self, mode: Literal["average", "sum"] = "average") -> float:
        """Seconds of all intervals together, or of one on average; 0 without intervals."""
        if mode not in ("average", "sum"):
            raise MinialpaError(f'`mode` is "average" or "sum"; got {mode!r}.')
        return sum(self.costs) / (max(len(self.costs), 1) if mode == "average" else 1)

    def log(self, mode: Literal["average", "sum"] = "average", normalizer: float = 1.0) -> None:
        """Print the milliseconds of `elapsed`, divided by `normalizer`."""
        print(f"time (ms) | {self.name}: {self.elapsed(mode) * 1e3 / normalizer:.2f}", flush=True)


def _call(sync_func: Sync) -> None:
    if sync_func is not None:
        sync_func()


class Timers:
    """Timers by their names; calling it with a new name makes one."""

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, Timer(name))

    def __contains__(self, name: str) -> bool:
        return name in self.timers

    def log(self, names: Sequence[str], normalizer: float = 1.0) -> None:
        """Print the milliseconds of some timers in one line."""
        texts = (f" | {name}: {self.timers[name].elapsed() * 1e3 / normalizer:.2f}" for name in names)
        print("time (ms)" + "".join(texts), flush=True)


timers = Timers()
