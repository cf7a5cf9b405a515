"""How much of its time a solve has used, in counted work that any machine agrees on.

In: what the phases of a solve say that they did, in operations. Out: the nominal seconds left, by a fixed rate,

    seconds = operations / 1e9

an operation being about what it takes to read an entry of a table and to add it up. Compiled loops count what their
arrays say, reductions the nodes that they visit, and HiGHS the points at which it asks whether to go on. So the same
graph gets the same work whatever else the machine does, and the same answer; the processor's clock is a last safety,
far beyond.

Example: with a limit of 5 nominal seconds, passes of 10^7 operations end after 500 of them, be it on an idle
machine or on a busy one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

#: Operations in a nominal second.
OPERATIONS_PER_S = 1e9
#: Work ends after so many times its limit in seconds of the processor, and so many seconds more.
_SAFETY, _SAFETY_S = 10.0, 60.0


@dataclass(slots=True)
class _Work:
    """What was counted since `start`, a time of the processor."""

    start: float = field(default_factory=time.thread_time)
    seconds: float = 0.0


class Deadline:
    """The end of a solve, or of a part of it; a class because work is counted from call to call."""

    def __init__(self, limit_s: float) -> None:
        """In `limit_s` nominal seconds from now."""
        self._work, self._end_s = _Work(), limit_s
        self._safe_s = _SAFETY * limit_s + _SAFETY_S

    @property
    def left_s(self) -> float:
        """Seconds left; less than 0 when it is over."""
        left_s = self._end_s - self._work.seconds
        return left_s if left_s <= 0 or self.processor_left_s > 0 else 0.0

    @property
    def processor_left_s(self) -> float:
        """Seconds of the processor after which it is over in any case."""
        return self._safe_s - (time.thread_time() - self._work.start)

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0

    def spend(self, operations: float) -> None:
        """Count work."""
        self._work.seconds += operations / OPERATIONS_PER_S

    def part(self, share: float) -> Deadline:
        """An earlier deadline, after `share` of the seconds left, or none where less than 0 are left."""
        return self.within(share * max(0.0, self.left_s))

    def within(self, seconds: float) -> Deadline:
        """A deadline in so many seconds from now, that counts the same work."""
        part = Deadline.__new__(Deadline)
        part._work, part._end_s, part._safe_s = self._work, self._work.seconds + seconds, self._safe_s
        return part
