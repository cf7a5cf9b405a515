"""Named timers, as Alpa's `timers`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from minialpa.errors import MinialpaError

Sync = Callable[[], object] | None


def _call(sync_func: Sync) -> None:
    if sync_func is not None:
        sync_func()


class Timer:
    """Measures intervals; each method calls `sync_func` before it reads the clock.

    costs: seconds of each interval.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()

    def reset(self) -> None:
        """Forget all intervals, and the one that is being measured."""
        self.costs: list[float] = []
        self._started_s: float | None = None
        self._suspended_s: float | None = None

    @property
    def started(self) -> bool:
        """Whether it is measuring."""
        return self._started_s is not None

    def start(self, sync_func: Sync = None) -> None:
        """Begin an interval, or go on with a suspended one."""
        if self.started:
            raise MinialpaError(f"The timer `{self.name}` runs already. Call `stop()` or `suspend()` first.")
        _call(sync_func)
        self._started_s = time.perf_counter()

    def suspend(self, sync_func: Sync = None) -> None:
        """Pause the interval."""
        if self._started_s is None:
            raise MinialpaError(f"The timer `{self.name}` does not run. Call `start()` first.")
        _call(sync_func)
        self._suspended_s = (self._suspended_s or 0.0) + time.perf_counter() - self._started_s
        self._started_s = None

    def stop(self, sync_func: Sync = None) -> None:
        """End the interval, also if it is suspended."""
        if self.started or self._suspended_s is None:
            self.suspend(sync_func)
        self.costs.append(self._suspended_s or 0.0)
        self._suspended_s = None

    def elapsed(self, mode: Literal["average", "sum"] = "average") -> float:
        """Seconds of all intervals together, or of one on average; 0 without intervals."""
        if mode not in ("average", "sum"):
            raise MinialpaError(f'`mode` is "average" or "sum"; got {mode!r}.')
        return sum(self.costs) / (max(len(self.costs), 1) if mode == "average" else 1)

    def log(self, mode: Literal["average", "sum"] = "average", normalizer: float = 1.0) -> None:
        """Print the milliseconds of `elapsed`, divided by `normalizer`."""
        print(f"time (ms) | {self.name}: {self.elapsed(mode) * 1e3 / normalizer:.2f}", flush=True)


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
