"""Deadlines in counted work, which is the same on any machine.

    nominal seconds = operations / 1e9

An operation takes about as long as to read an entry of a table and to add it up. Compiled loops count by the sizes of
their arrays, reductions by the nodes that they visit, and HiGHS by its callbacks. So the same graph has the same answer
on a busy machine. The clock of the processor is a last safety, far beyond.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

#: Operations in a nominal second.
OPERATIONS_PER_S = 1e9
#: Nominal seconds of work that need not pay, as the rest of planning takes longer.
FREE_S = 2.0
#: Nominal seconds, and calls, between two looks at the clock of the processor, which some systems read slowly.
_LOOK_S, _CALLS_PER_LOOK = 0.01, 64
#: Work ends after so many times its limit in seconds of the processor, and so many seconds more.
_SAFETY, _SAFETY_S = 10.0, 60.0


@dataclass(slots=True)
class _Work:
    """Work since `start`, a time of the processor."""

    start: float = field(default_factory=time.thread_time)
    seconds: float = 0.0
    # Of the last look at the clock: seconds of the processor since `start`, work until then, and calls since then.
    _processor_s: float = 0.0
    _seen_s: float = 0.0
    _n_calls: int = 0

    def processor_s(self) -> float:
        """Seconds of the processor since `start`, up to a little."""
        self._n_calls += 1
        if self._n_calls >= _CALLS_PER_LOOK or self.seconds - self._seen_s >= _LOOK_S:
            self._processor_s = time.thread_time() - self.start
            self._seen_s, self._n_calls = self.seconds, 0
        return self._processor_s


class Deadline:
    """The end of a solve, or of a part of it; a class because work is counted from call to call."""

    def __init__(self, limit_s: float) -> None:
        self._work, self._end_s = _Work(), limit_s
        self._safe_s = _SAFETY * limit_s + _SAFETY_S

    @property
    def left_s(self) -> float:
        left_s = self._end_s - self._work.seconds
        return left_s if left_s <= 0 or self.processor_left_s > 0 else 0.0

    @property
    def spent_s(self) -> float:
        """Nominal seconds of work so far, of all deadlines that count the same work."""
        return self._work.seconds

    @property
    def processor_left_s(self) -> float:
        """Seconds of the processor after which it is over in any case."""
        return self._safe_s - self._work.processor_s()

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0

    def spend(self, operations: float) -> None:
        self._work.seconds += operations / OPERATIONS_PER_S

    def part(self, share: float) -> Deadline:
        """A deadline after `share` of the seconds left."""
        return self.within(share * max(0.0, self.left_s))

    def within(self, seconds: float) -> Deadline:
        """A deadline in so many seconds from now, which counts the same work."""
        part = Deadline.__new__(Deadline)
        part._work, part._end_s = self._work, self._work.seconds + seconds
        part._safe_s = min(self._safe_s, self._work.processor_s() + _SAFETY * seconds + _SAFETY_S)
        return part


class AllowedGap:
    """How much more than the cheapest choices the answer of a solve may cost; a class because it grows with the work.

    It is a part of the cost, or the cost that the work so far would have had to save, if that is more. So a solve ends
    when all that is left to gain is worth less than the work already done.
    """

    def __init__(self, part: float = 0.0, cost_per_s: float = 0.0, deadline: Deadline | None = None) -> None:
        """cost_per_s: what a nominal second of work has to save. deadline: counts the work, of earlier solves too."""
        self.part = part
        self._cost_per_s, self._deadline = cost_per_s, deadline

    def of(self, cost: float) -> float:
        """The allowed gap of choices of this cost."""
        return max(self.part * abs(cost), self._cost_per_s * self._work_s)

    def gain_s(self, gap: float) -> float:
        """Nominal seconds of more work that may be spent to close a gap."""
        return max(FREE_S, gap / self._cost_per_s - self._work_s) if self._cost_per_s else math.inf

    @property
    def _work_s(self) -> float:
        return max(0.0, self._deadline.spent_s - FREE_S) if self._deadline is not None else 0.0


#: Only the cheapest choices will do.
NO_GAP = AllowedGap()
