"""Collectives by kind: their number in compiled programs, and their bytes in plans."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from minialpa import Plan, hlo


def collectives(texts: Iterable[str], *, ignore_scalars: bool = True) -> Counter[str]:
    """Number of collectives of each kind; `ignore_scalars` leaves out collectives of only scalars."""
    found = (one for text in texts for one in hlo.collectives(text))
    return Counter(one.kind for one in found if one.n_elements > 1 or not ignore_scalars)


def planned_bytes(plan: Plan) -> dict[str, float]:
    """Bytes of the collectives of each kind in a step, by the plan."""
    total = defaultdict[str, float](float)
    for one in plan.collectives:
        total[one.kind] += one.n_bytes * one.times_per_step
    return dict(total)
