"""How much of its time a solve has used: in seconds of the processor, or in counted work that any machine agrees on.

In: what the phases of a solve say that they did, in operations. Out: the seconds left. A deadline in counted work turns
operations into nominal seconds by a fixed rate,

    seconds = operations / 1e9

an operation being about what it takes to read an entry of a table and to add it up. Compiled loops count what their
arrays say, reductions the nodes that they visit, and HiGHS the points at which it asks whether to go on. So the same
graph gets the same work whatever else the machine does, and the same answer; the processor's clock is a last safety,
far beyond. A deadline in seconds of the processor looks at that clock and ignores the counts.

Example: with a limit of 5 nominal seconds, passes of 10^7 operations end after 500 of them, be it on an idle
machine or on a busy one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

#: Operations in a nominal second.
OPERATIONS_PER_S = 1e9
#: Counted work ends after so many times its limit in seconds of the processor, and so many seconds more.
_SAFETY, _SAFETY_S = 10.0, 60.0


@dataclass(slots=True)
class _Clock:
    """Seconds since `start`; `work_s` are those of counted work."""

    counts_work: bool
    start: float = field(default_factory=time.thread_time)
    work_s: float = 0.0

    @property
    def processor_s(self) -> float:
        return time.thread_time() - self.start


class Deadline:
    """The end of a solve, or of a part of it; a class because work is counted from call to call."""

    def __init__(self, limit_s: float, *, counts_work: bool = False) -> None:
        """In `limit_s` seconds from now: of the processor, or of counted work."""
        self._clock, self._end_s = _Clock(counts_work), limit_s
        self._safe_s = _SAFETY * limit_s + _SAFETY_S

    @property
    def counts_work(self) -> bool:
        return self._clock.counts_work

    @property
    def left_s(self) -> float:
        """Seconds left; less than 0 when it is over."""
        clock = self._clock
        if not clock.counts_work:
            return self._end_s - clock.processor_s
        left_s = self._end_s - clock.work_s
        return left_s if left_s <= 0 or clock.processor_s < self._safe_s else 0.0

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0

    def spend(self, operations: float) -> None:
        """Count work."""
        self._clock.work_s += operations / OPERATIONS_PER_S

    def charge(self, seconds: float) -> None:
        """Count seconds that another process took for this one."""
        self._clock.work_s += seconds
        self._clock.start -= seconds

    def extend(self, seconds: float) -> None:
        """Allow so many seconds of the processor more: what loading code takes is not work."""
        self._safe_s += seconds
        if not self.counts_work:
            self._end_s += seconds

    def part(self, share: float) -> Deadline:
        """An earlier deadline, after `share` of the seconds left, or none where less than 0 are left."""
        return self.within(share * max(0.0, self.left_s))

    def within(self, seconds: float) -> Deadline:
        """A deadline in so many seconds from now, that counts the same work."""
        part = Deadline.__new__(Deadline)
        used_s = self._clock.work_s if self.counts_work else self._clock.processor_s
        part._clock, part._end_s, part._safe_s = self._clock, used_s + seconds, self._safe_s
        return part
