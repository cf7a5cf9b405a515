"""Hill climbing over the choices of a plan: a start and the neighbours of a choice in, the best choice found out.

The climb tries neighbours in order and moves to the first better one. A choice costs seconds of planning, so a climb
ends after at most `most` choices. Of two choices that do not fit in memory, the one that needs fewer bytes is better.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from minialpa import MinialpaError, Plan

Choice = TypeVar("Choice", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one call of the planner: `plan`, or the reason `failure`.

    needed_bytes: bytes per device that a plan needs; 0 unless memory is the reason.
    """

    label: str
    plan: Plan | None
    failure: str = ""
    needed_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        return self.plan.cost.total_s if self.plan else math.inf

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key: the smallest is the best."""
        return self.seconds, 0.0 if self.plan else self.needed_bytes or math.inf


@dataclass(frozen=True, slots=True)
class Climb:
    """The best of `n_solved` outcomes."""

    best: Outcome
    n_solved: int


def outcome(label: str, solve: Callable[[], Plan]) -> Outcome:
    try:
        return Outcome(label, solve())
    except MinialpaError as error:
        what = str(error).splitlines()[0]
        needed = re.search(r"needs (?:at least )?([\d.e+]+) (B|kB|MB|GB)", what)
        if needed is None:
            return Outcome(label, None, f"fails: {what}")
        n_bytes = float(needed[1]) * {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}[needed[2]]
        return Outcome(label, None, f"does not fit: needs {n_bytes / 1e9:.1f} GB", n_bytes)


def climb(
    starts: Sequence[Choice], near: Callable[[Choice], Iterable[Choice]], solve: Callable[[Choice], Outcome], most: int
) -> Climb:
    """Climb from the best of `starts`."""
    solved = {choice: solve(choice) for choice in starts[:most]}
    at, moved = min(solved, key=lambda choice: solved[choice].rank), True
    while moved and len(solved) < most:
        moved = False
        for choice in near(at):
            if choice in solved or len(solved) >= most:
                continue
            solved[choice] = solve(choice)
            if solved[choice].rank < solved[at].rank:
                at, moved = choice, True
                break
    return Climb(solved[at], len(solved))
