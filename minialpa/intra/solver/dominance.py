"""Costs and usages of the strategies of one node in; a mask without the dominated strategies out.

Strategy B dominates strategy A if B uses no more and costs no more for any choices of the neighbours w:
    c[B] - c[A] + sum_w max_j (E_w[B, j] - E_w[A, j]) <= 0
Source: dead-end elimination by the criterion of Goldstein (1994), with usages added.
"""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np

from minialpa.intra.solver.cost_graph import Bools, Floats, Ints
from minialpa.support.loops import compiled

#: Relative rounding error of the quick test: 4,500 float64 roundings of 2.2e-16.
_ROUNDING = 1e-12
#: NumPy serves so many calls per process before machine code is loaded. Small steps need fewer.
_MOST_CALLS = 3000
#: Most strategies times edge entries of a call for NumPy.
_MOST_ENTRIES = 1_000_000
_calls = itertools.count()


@cache
def load() -> None:
    _in_loops(np.zeros(1), np.zeros((0, 1), np.int64), np.zeros((1, 0)), np.zeros(1, np.int64))


def undominated(cost: Floats, usage: Ints, edges: Floats, ends: Ints) -> Bools:
    """A mask of the strategies to keep. Of strategies that dominate each other, the first stays.

    usage: [t, i], of strategy i in term t.
    edges: edges[i, ends[w] : ends[w + 1]] are the costs of the edge to neighbour w.

    Machine code is ten times as fast as NumPy but takes as long to load as some thousand calls. Both add in the same
    order, so they give the same bits.
    """
    is_loaded = load.cache_info().currsize > 0
    if not is_loaded and next(_calls) < _MOST_CALLS and cost.size * edges.size < _MOST_ENTRIES:
        with np.errstate(invalid="ignore"):  # inf - inf
            return _in_arrays(cost, usage, edges, ends)
    load()
    return _in_loops(cost, usage, edges, ends)


def _in_arrays(cost: Floats, usage: Ints, edges: Floats, ends: Ints) -> Bools:
    """excess[a, b]: cost of b minus cost of a."""
    n_strategies, lines = len(cost), np.arange(len(cost))
    if n_strategies < 2:
        return np.ones(n_strategies, np.bool_)

    # Quick test: each neighbour takes the strategy that is cheapest for A.
    excess, size = cost[None, :] - cost[:, None], np.abs(cost)
    parts = [edges[:, start:stop] for start, stop in itertools.pairwise(ends.tolist())]
    for part in parts:
        at = part.argmin(axis=1)
        least = part[lines, at]
        excess += part[:, at].T - least[:, None]
        size = size + np.abs(least)
    more = (usage[:, None, :] > usage[:, :, None]).any(axis=0)
    pairs = (excess <= _ROUNDING * size[:, None]) & ~more
    np.fill_diagonal(pairs, False)

    # The formula.
    first, second = np.nonzero(pairs)
    worst = cost[second] - cost[first]
    for part in parts:
        # A choice of the neighbour that forbids A and B does not count: `fmax` ignores the NaN of inf - inf.
        worst += np.fmax.reduce(part[second] - part[first], axis=1, initial=-np.inf)
    dominates = np.zeros_like(pairs)
    dominates[first, second] = worst <= 0

    stays = np.ones(n_strategies, np.bool_)
    for a in np.flatnonzero(dominates.any(axis=1))[::-1]:
        stays[a] = not (dominates[a] & stays).any()
    return stays


@compiled
def _in_loops(cost: Floats, usage: Ints, edges: Floats, ends: Ints) -> Bools:
    n_strategies, n_edges = len(cost), len(ends) - 1
    least, at, size = _least_over_edges(cost, edges, ends)

    # Backwards: of equal strategies, the first stays.
    stays = np.ones(n_strategies, np.bool_)
    for a in range(n_strategies - 1, -1, -1):
        for b in range(n_strategies):
            if b == a or not stays[b]:
                continue

            # Quick test, which rules most pairs out.
            excess = cost[b] - cost[a]
            for w in range(n_edges):
                excess += edges[b, at[a, w]] - least[a, w]
            if not excess <= _ROUNDING * size[a] or (usage[:, b] > usage[:, a]).any():
                continue

            # The formula. Inline: a call makes the loop 1.5 times as slow.
            excess = cost[b] - cost[a]
            for w in range(n_edges):
                most = -np.inf
                for j in range(ends[w], ends[w + 1]):
                    # NaN (inf - inf) is never more.
                    more = edges[b, j] - edges[a, j]
                    if more > most:
                        most = more
                excess += most
            if excess <= 0:
                stays[a] = False
                break
    return stays


@compiled
def _least_over_edges(cost: Floats, edges: Floats, ends: Ints) -> tuple[Floats, Ints, Floats]:
    """For each strategy: least cost over each edge, its column, and the sum of absolute summands."""
    n_strategies, n_edges = len(cost), len(ends) - 1
    least, at, size = np.empty((n_strategies, n_edges)), np.empty((n_strategies, n_edges), np.int64), np.abs(cost)

    for a in range(n_strategies):
        for w in range(n_edges):
            at[a, w] = ends[w]
            for j in range(ends[w], ends[w + 1]):
                if edges[a, j] < edges[a, at[a, w]]:
                    at[a, w] = j
            least[a, w] = edges[a, at[a, w]]
            size[a] += abs(least[a, w])
    return least, at, size
