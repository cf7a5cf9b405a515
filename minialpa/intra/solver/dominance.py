"""Which strategies of a node can be dropped because another one dominates them; compiled by numba.

Strategy B dominates strategy A if B uses no more and, whatever the neighbours w choose, costs no more:
    c[B] - c[A] + sum_w max_j (E_w[B, j] - E_w[A, j]) <= 0                                           -> undominated
This is dead-end elimination by the criterion of Goldstein (1994), with usages.

Example: costs (1, 4) and one edge with the lines (0, 2) and (0, 0). Strategy 0 costs at most 1 - 4 + max(0, 2) = -1
more than strategy 1, so it dominates; the other way round, 4 - 1 + max(0, -2) = 3, it does not.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from minialpa.intra.solver.cost_graph import Bools, Floats, Ints
from minialpa.support.machine_code import compiled

#: Rounding error of the quick test, as a part of what it adds up: 4,500 float64 roundings of 2.2e-16.
_ROUNDING = 1e-12


@cache
def load() -> None:
    """Load the compiled functions, or compile them, ahead of the first call that is timed."""
    undominated(np.zeros(1), np.zeros((0, 1), np.int64), np.zeros((1, 0)), np.zeros(1, np.int64))


@compiled
def undominated(cost: Floats, usage: Ints, edges: Floats, ends: Ints) -> Bools:
    """A mask of the strategies to keep; of strategies that dominate each other, it keeps the first.

    usage[t, i]: what strategy i uses in term t, or the rank of that among all strategies.
    edges[i, ends[w] : ends[w + 1]]: costs of the edge to neighbour w.
    """
    n_strategies, n_edges = len(cost), len(ends) - 1
    least, at, size = _least_over_edges(cost, edges, ends)

    # Backwards, so that of equal strategies the first stays: when a strategy is judged, all later ones have been.
    stays = np.ones(n_strategies, np.bool_)
    for a in range(n_strategies - 1, -1, -1):
        for b in range(n_strategies):
            if b == a or not stays[b]:
                continue

            # A quick test that rules most pairs out: the excess where each neighbour chooses what suits A best.
            excess = cost[b] - cost[a]
            for w in range(n_edges):
                excess += edges[b, at[a, w]] - least[a, w]
            if not excess <= _ROUNDING * size[a] or (usage[:, b] > usage[:, a]).any():
                continue

            # The formula: the excess where each neighbour chooses what suits B worst. Here, as a function of its own
            # makes the loop slower by half.
            excess = cost[b] - cost[a]
            for w in range(n_edges):
                most = -np.inf
                for j in range(ends[w], ends[w + 1]):
                    # inf - inf is NaN, which is never more: a choice that rules A out says nothing for A.
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
    """For each strategy: its least cost over each edge, the column with it, and the size of the numbers to add up."""
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
