"""Seconds and bytes of each choice of each layer in, the fastest choices within a memory limit out.

Sums over the first layers that another sum beats are dropped (Nemhauser and Ullmann, 1969). The others are the Pareto
points of all prices of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class LayerCost(NamedTuple):
    n_bytes: float
    seconds: float


class Mix(NamedTuple):
    """picks: a number for each layer. n_bytes, seconds: of the stage, by the sum."""

    picks: tuple[int, ...]
    n_bytes: float
    seconds: float


def fastest_mix(alone: Sequence[LayerCost], n_layers: int, limit_bytes: float) -> Mix | None:
    """The fastest choices of equal layers; None if no choices fit. Seconds and bytes are taken as sums over layers.

    alone: of a stage with each choice in all layers.
    """
    kept, n = alone[0], n_layers
    costs = [LayerCost((one.n_bytes - kept.n_bytes) / n, (one.seconds - kept.seconds) / n) for one in alone]
    picks = fastest_choices([costs] * n_layers, limit_bytes - kept.n_bytes)
    if picks is None:
        return None
    picks = tuple(sorted(picks, key=lambda k: costs[k].n_bytes))  # values of the first layers wait longest
    n_bytes, seconds = (sum(each) for each in zip(*(costs[k] for k in picks), strict=True))
    return Mix(picks, kept.n_bytes + n_bytes, kept.seconds + seconds)


class _Picks(NamedTuple):
    n_bytes: float
    seconds: float
    choice: int
    before: _Picks | None


def fastest_choices(costs: Sequence[Sequence[LayerCost]], limit_bytes: float) -> tuple[int, ...] | None:
    """The number of the choice of each layer; None if no choices fit. costs: of each choice of each layer."""
    least_after = [0.0]
    for of_layer in reversed(costs):
        least_after.append(least_after[-1] + min(cost.n_bytes for cost in of_layer))
    least_after.reverse()

    sums = [_Picks(0.0, 0.0, -1, None)]
    for of_layer, least in zip(costs, least_after[1:], strict=True):
        longer = (
            _Picks(one.n_bytes + cost.n_bytes, one.seconds + cost.seconds, choice, one)
            for one in sums
            for choice, cost in enumerate(of_layer)
        )
        sums = _unbeaten(one for one in longer if one.n_bytes + least <= limit_bytes)
    if not sums:
        return None

    found: list[int] = []
    last: _Picks | None = min(sums, key=lambda one: (one.seconds, one.n_bytes))
    while last is not None and last.before is not None:
        found.append(last.choice)
        last = last.before
    return tuple(reversed(found))


def _unbeaten(sums: Iterable[_Picks]) -> list[_Picks]:
    kept: list[_Picks] = []
    for one in sorted(sums, key=lambda one: one[:2]):
        if not kept or one.seconds < kept[-1].seconds:
            kept.append(one)
    return kept
