"""Limits of a solve: deadlines in counted work, and the gap at which the solve may end.

    nominal seconds = operations / 1e9

An operation is about one read of a table entry and one addition. Compiled loops count the sizes of their arrays,
reductions visited nodes, and HiGHS callbacks. So a graph has the same answer on every machine, idle or busy. A limit on
processor time, more than ten times as long, is the last safety.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

OPERATIONS_PER_S = 1e9
#: Nominal seconds of work that `AllowedGap` does not count: the rest of planning takes longer.
FREE_S = 2.0
#: Nominal seconds, and calls, between two reads of the processor clock, which is slow on some systems.
_LOOK_S, _CALLS_PER_LOOK = 0.01, 64
#: Limit in processor seconds = _SAFETY * limit in nominal seconds + _SAFETY_S.
_SAFETY, _SAFETY_S = 10.0, 60.0


@dataclass(slots=True)
class _Work:
    """Shared by a deadline and its parts."""

    start: float = field(default_factory=time.thread_time)
    seconds: float = 0.0
    # At the last read of the clock, and calls since.
    _processor_s: float = 0.0
    _seen_s: float = 0.0
    _n_calls: int = 0

    def processor_s(self) -> float:
        """At the last read of the clock."""
        self._n_calls += 1
        if self._n_calls >= _CALLS_PER_LOOK or self.seconds - self._seen_s >= _LOOK_S:
            self._processor_s = time.thread_time() - self.start
            self._seen_s, self._n_calls = self.seconds, 0
        return self._processor_s


class Deadline:
    def __init__(self, limit_s: float) -> None:
        self._work, self._end_s = _Work(), limit_s
        self._safe_s = _SAFETY * limit_s + _SAFETY_S

    @property
    def left_s(self) -> float:
        left_s = self._end_s - self._work.seconds
        return left_s if left_s <= 0 or self.processor_left_s > 0 else 0.0

    @property
    def spent_s(self) -> float:
        """Of all deadlines that share the counter."""
        return self._work.seconds

    @property
    def processor_left_s(self) -> float:
        return self._safe_s - self._work.processor_s()

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0

    def spend(self, operations: float) -> None:
        self._work.seconds += operations / OPERATIONS_PER_S

    def part(self, share: float) -> Deadline:
        return self.within(share * max(0.0, self.left_s))

    def within(self, seconds: float) -> Deadline:
        part = Deadline.__new__(Deadline)
        part._work, part._end_s = self._work, self._work.seconds + seconds
        part._safe_s = min(self._safe_s, self._work.processor_s() + _SAFETY * seconds + _SAFETY_S)
        return part


class AllowedGap:
    """The gap between cost and lower bound at which a solve may end; grows with the work.

        allowed gap = max(part * |cost|, cost_per_s * (nominal seconds of work - FREE_S))

    So a solve ends when it can gain less than its work should have saved. At cost_per_s = 0.1, after 12 nominal
    seconds, choices 1.0 above the bound are good enough.
    """

    def __init__(self, part: float = 0.0, cost_per_s: float = 0.0, deadline: Deadline | None = None) -> None:
        """deadline: its counter may include earlier solves."""
        self.part = part
        self._cost_per_s, self._deadline = cost_per_s, deadline

    def of(self, cost: float) -> float:
        return max(self.part * abs(cost), self._cost_per_s * self._work_s)

    def gain_s(self, gap: float) -> float:
        """Nominal seconds of work that closing `gap` justifies; infinite without `cost_per_s`."""
        return max(FREE_S, gap / self._cost_per_s - self._work_s) if self._cost_per_s else math.inf

    @property
    def _work_s(self) -> float:
        return max(0.0, self._deadline.spent_s - FREE_S) if self._deadline is not None else 0.0


NO_GAP = AllowedGap()
