"""Which strategies of a node dominate which, compiled by numba: costs, usages and edges of the node in, what stays out.

Strategy B dominates A where B uses no more and, whatever the neighbours choose, costs no more:
    c[B] - c[A] + sum_w max_j (E_w[B, j] - E_w[A, j]) <= 0
"""

from __future__ import annotations

from functools import cache

import numpy as np

from minialpa.intra.solver.cost_graph import Bools, Floats, Ints
from minialpa.support.machine_code import compiled

#: Rounding of the bound below, in parts of what it adds up.
_ROUNDING = 1e-12


@cache
def load() -> None:
    """Compile what is compiled here, or load it, which the first call would do otherwise."""
    undominated(np.zeros(1), np.zeros((0, 1), np.int64), np.zeros((1, 0)), np.zeros(1, np.int64))


@compiled
def undominated(cost: Floats, usage: Ints, edges: Floats, ends: Ints) -> Bools:
    """Strategies that stay; of those that dominate each other, the first.

    usage[t, i]: what strategy i uses in term t, or its rank. edges[i, ends[w] : ends[w + 1]]: the edge to neighbour w.
    """
    n, n_edges = len(cost), len(ends) - 1
    least, at, size = np.empty((n, n_edges)), np.empty((n, n_edges), np.int64), np.abs(cost)
    for a in range(n):
        for w in range(n_edges):
            at[a, w] = ends[w]
            for j in range(ends[w], ends[w + 1]):
                if edges[a, j] < edges[a, at[a, w]]:
                    at[a, w] = j
            least[a, w] = edges[a, at[a, w]]
            size[a] += abs(least[a, w])
    stays = np.ones(n, np.bool_)
    for a in range(n - 1, -1, -1):  # when a strategy is judged, all later ones have been
        for b in range(n):
            if b == a or not stays[b]:
                continue
            # The excess where each neighbour suits A best is a bound that rules most pairs out.
            excess = cost[b] - cost[a]
            for w in range(n_edges):
                excess += edges[b, at[a, w]] - least[a, w]
            if not excess <= _ROUNDING * size[a] or (usage[:, b] > usage[:, a]).any():
                continue
            excess = cost[b] - cost[a]
            for w in range(n_edges):
                most = -np.inf
                for j in range(ends[w], ends[w + 1]):
                    # inf - inf: the neighbour's choice rules A out, so it cannot speak for A; NaN is never more.
                    more = edges[b, j] - edges[a, j]
                    if more > most:
                        most = more
                excess += most
            if excess <= 0:
                stays[a] = False
                break
    return stays
