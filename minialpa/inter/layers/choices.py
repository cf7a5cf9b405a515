"""Seconds and bytes of each choice of each layer in, the fastest choices within a memory limit out.

Sums over the first layers that take as many bytes and seconds as another sum, or more, are dropped, which loses no
optimum (Nemhauser and Ullmann, 1969). The sums that remain are the Pareto points of all prices of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class LayerCost(NamedTuple):
    """Of one choice of a layer."""

    n_bytes: float
    seconds: float


class _Sum(NamedTuple):
    """The choices of some first layers: sums, the last choice, and the choices before."""

    n_bytes: float
    seconds: float
    choice: int
    before: _Sum | None


def fastest_choices(costs: Sequence[Sequence[LayerCost]], limit_bytes: float) -> tuple[int, ...] | None:
    """The number of the choice of each layer, for the least total seconds within the limit.

    costs: of each choice of each layer. None if nothing fits. Of equally fast choices, the smaller ones count.
    """
    least_after = [0.0]
    for of_layer in reversed(costs):
        least_after.append(least_after[-1] + min(cost.n_bytes for cost in of_layer))
    least_after.reverse()

    sums = [_Sum(0.0, 0.0, -1, None)]
    for of_layer, least in zip(costs, least_after[1:], strict=True):
        longer = (
            _Sum(one.n_bytes + cost.n_bytes, one.seconds + cost.seconds, choice, one)
            for one in sums
            for choice, cost in enumerate(of_layer)
        )
        sums = _unbeaten(one for one in longer if one.n_bytes + least <= limit_bytes)
    if not sums:
        return None

    found: list[int] = []
    last: _Sum | None = min(sums, key=lambda one: (one.seconds, one.n_bytes))
    while last is not None and last.before is not None:
        found.append(last.choice)
        last = last.before
    return tuple(reversed(found))


def _unbeaten(sums: Iterable[_Sum]) -> list[_Sum]:
    """Without sums that take as many bytes and seconds as another or more."""
    kept: list[_Sum] = []
    for one in sorted(sums, key=lambda one: one[:2]):
        if not kept or one.seconds < kept[-1].seconds:
            kept.append(one)
    return kept
