"""A quick solution for when the integer program has none in time: construct or repair, then improve.

In: `Residual`, the nodes of one part of it, and perhaps choices that exceed the usage limit. Out: a strategy (by
current place) for each node, or None at a dead end. The least usage of every term is 0, so the limit alone always
leaves a way; forbidden pairs may not.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from minialpa.intra.costgraph import Bools, Floats
from minialpa.intra.elimination import Residual

#: Rounds of local improvement; few are needed, and each costs one look at every edge.
_MAX_SWEEPS = 20


def greedy_choices(residual: Residual, nodes: list[int], start: dict[int, int] | None = None) -> dict[int, int] | None:
    """The best of: `start` repaired, constructed with the cheapest first, and with the thriftiest first."""
    starts = [_repair(residual, start) if start else None]
    starts += [_construct(residual, nodes, thrifty=thrifty) for thrifty in (False, True)]
    found = [choices for choices in starts if choices]
    for choices in found:
        _improve(residual, nodes, choices)
    return min(found, key=lambda choices: cost_of(residual, choices), default=None)


def cost_of(residual: Residual, choices: Mapping[int, int]) -> float:
    """Cost of the nodes of `choices` and of the edges among them."""
    cost = sum(float(residual.costs[v][i]) for v, i in choices.items())
    for v, i in choices.items():
        cost += sum(float(edge[i, choices[w]]) for w, edge in residual.adjacent[v].items() if v < w)
    return cost


def usage_of(residual: Residual, choices: Mapping[int, int]) -> Floats:
    """Usage of every row under `choices`."""
    change = np.zeros(len(residual.base) + 1)
    for v, i in choices.items():
        for (first, end), usage in residual.terms[v].items():
            change[first] += usage[i]
            change[end] -= usage[i]
    return residual.base + np.cumsum(change[:-1])


def _repair(residual: Residual, start: dict[int, int]) -> dict[int, int] | None:
    """While a row exceeds the limit, make the change that costs least for each unit of its excess that it saves."""
    choices = dict(start)
    for _ in range(_MAX_SWEEPS * len(start)):
        used = usage_of(residual, choices)
        if used.max(initial=0.0) <= residual.limit:
            return choices
        row = int(used.argmax())
        excess = used[row] - residual.limit
        best: tuple[float, int, int] | None = None
        for v, i in choices.items():
            usage = sum((u for (first, end), u in residual.terms[v].items() if first <= row < end), np.zeros(1))
            if not usage.any():
                continue
            cost = _cost_around(residual, choices, v)
            saved = np.minimum(usage[i] - usage, excess)
            price = np.full(len(cost), np.inf)
            np.divide(cost - cost[i], saved, out=price, where=saved > 0)
            candidate = (float(price.min()), v, int(price.argmin()))
            best = candidate if best is None or candidate < best else best
        if best is None or not np.isfinite(best[0]):
            return None
        choices[best[1]] = best[2]
    return None


def _construct(residual: Residual, nodes: list[int], *, thrifty: bool) -> dict[int, int] | None:
    """One node after the other: own cost, edges to decided neighbours, and the least that the others will add."""
    base = residual.base.copy()
    paid = {v: residual.costs[v].copy() for v in nodes}
    choices: dict[int, int] = {}
    for v in nodes:
        ahead = np.where(_fits(residual, base, v), paid[v], np.inf)
        for w, edge in residual.adjacent[v].items():
            if w not in choices:
                ahead += (edge + paid[w]).min(axis=1)
        if not np.isfinite(ahead).any():
            return None
        if thrifty:
            need = sum(residual.terms[v].values(), np.zeros(len(ahead)))
            ahead[need > need[np.isfinite(ahead)].min()] = np.inf
        choices[v] = i = int(ahead.argmin())
        _use(residual, base, v, i, +1)
        for w, edge in residual.adjacent[v].items():
            if w not in choices:
                paid[w] += edge[i]
    return choices


def _improve(residual: Residual, nodes: list[int], choices: dict[int, int]) -> None:
    """Change one node at a time while that lowers the cost."""
    base = usage_of(residual, choices)
    for _ in range(_MAX_SWEEPS):
        changed = False
        for v in nodes:
            _use(residual, base, v, choices[v], -1)
            cost = np.where(_fits(residual, base, v), _cost_around(residual, choices, v), np.inf)
            if cost.min() < cost[choices[v]]:
                choices[v] = int(cost.argmin())
                changed = True
            _use(residual, base, v, choices[v], +1)
        if not changed:
            return


def _cost_around(residual: Residual, choices: Mapping[int, int], v: int) -> Floats:
    """Cost of each strategy of v and of its edges, the neighbours as chosen."""
    return residual.costs[v] + sum(edge[:, choices[w]] for w, edge in residual.adjacent[v].items())


def _fits(residual: Residual, base: Floats, v: int) -> Bools:
    fits = np.ones(len(residual.costs[v]), bool)
    for (first, end), usage in residual.terms[v].items():
        fits &= usage <= residual.limit - base[first:end].max()
    return fits


def _use(residual: Residual, base: Floats, v: int, i: int, sign: int) -> None:
    for (first, end), usage in residual.terms[v].items():
        base[first:end] += sign * usage[i]
