"""Exact reductions of a cost graph: what is left afterwards has the same optimum and is smaller, often empty.

In: `Residual`, which they change.
    1. Arc consistency: a strategy without a finite partner over some edge is dropped.             -> _usable
    2. Dominance: strategy A is dropped when some B uses no more and, whatever the neighbours choose, costs no more:
       c[B] - c[A] + sum_w max_j (E_w[B, j] - E_w[A, j]) <= 0   (dead-end elimination, Goldstein 1994)  -> _undominated
    3. A node whose strategy follows from a neighbour's is merged into it.                         -> _merge_follower
    4. A node of degree 0, 1 or 2 outside every usage row is minimised out (min-plus):
       T[i, j] = min_s (c[s] + E_a[s, i] + E_b[s, j])                                              -> _eliminate
Each removed node leaves a `Step`, and `Residual.choices` walks the steps backwards.
"""

from __future__ import annotations

import heapq
import time

import numpy as np

from minialpa.errors import InfeasibleError
from minialpa.intra.solver.cost_graph import Bools, Floats, Ints
from minialpa.intra.solver.dominance import undominated
from minialpa.intra.solver.exact import Whole
from minialpa.intra.solver.residual import Residual, add_term, keep, loosen_rows, room_for

#: Largest min-plus table that eliminating one node of degree 2 may build.
_MAX_TABLE = 4_000_000


def reduce_graph(residual: Residual, deadline: float = np.inf) -> None:
    """Apply all reductions until none helps, or until `deadline`, a time of `time.monotonic`; exact either way.

    Raises InfeasibleError when a node or a row has no way out.
    """
    dirty = list(residual.alive)
    while dirty and time.monotonic() < deadline:
        _reduce_from(residual, dirty, deadline)
        dirty = loosen_rows(residual)


def _reduce_from(residual: Residual, dirty: list[int], deadline: float) -> None:
    """Visit `dirty` nodes, and those whose surroundings change, smallest degree first."""
    waiting = set(dirty)
    heap = [(len(residual.adjacent[v]), v) for v in dirty]
    heapq.heapify(heap)
    while heap and time.monotonic() < deadline:
        _, v = heapq.heappop(heap)
        if v in waiting and v in residual.alive:
            waiting.discard(v)
            for w in _visit(residual, v):
                if w not in waiting:
                    waiting.add(w)
                heapq.heappush(heap, (len(residual.adjacent[w]), w))


def _visit(residual: Residual, v: int) -> list[int]:
    """Reduce around v; returns the nodes whose surroundings have changed."""
    neighbours = list(residual.adjacent[v])
    usable = _usable(residual, v)
    if not usable.any():
        raise InfeasibleError(f"No strategy of node {v} is left: its cost, an edge or the usage limit forbids each.")
    changed = not usable.all()
    if changed:
        keep(residual, v, usable)
    if _can_eliminate(residual, v):
        _eliminate(residual, v)
        return neighbours
    undominated = _undominated(residual, v)
    if not undominated.all():
        changed = True
        keep(residual, v, undominated)
    changed |= _fold_separable_edges(residual, v)
    if _can_eliminate(residual, v):
        _eliminate(residual, v)
        return neighbours
    if _merge_follower(residual, v):
        return neighbours
    return neighbours if changed else []


def _usable(residual: Residual, v: int) -> Bools:
    """Strategies with a finite cost, a finite partner over every edge, and room in every usage row."""
    usable = np.isfinite(residual.costs[v]) & room_for(residual, v)
    for cost in residual.adjacent[v].values():
        usable &= np.isfinite(cost).any(axis=1)
    return usable


def _undominated(residual: Residual, v: int) -> Bools:
    """Formula 2. Of strategies that dominate each other, the first stays."""
    cost, edges = residual.costs[v], list(residual.adjacent[v].values())
    # One layout, as it is compiled for each anew.
    return undominated(
        cost,
        np.array([_ranks(usage) for usage in residual.terms[v].values()], np.int64).reshape(-1, len(cost)),
        np.ascontiguousarray(np.concatenate(edges, axis=1)) if edges else np.zeros((len(cost), 0)),
        np.cumsum([0, *(edge.shape[1] for edge in edges)]),
    )


def _ranks(usage: Whole) -> Ints:
    """What compares as `usage` does: itself, where int64 holds it."""
    return usage if usage.dtype == np.int64 else np.unique(usage, return_inverse=True)[1].astype(np.int64)


def _fold_separable_edges(residual: Residual, v: int) -> bool:
    """Replace edges with E[i, j] = f[i] + g[j] by node costs; always so where one side has a single strategy."""
    folded = False
    for w, cost in list(residual.adjacent[v].items()):
        if not np.isfinite(cost).all():
            continue
        f, g = cost[:, 0] - cost[0, 0], cost[0, :]
        if (cost == f[:, None] + g).all():
            residual.costs[v] = residual.costs[v] + f
            residual.costs[w] = residual.costs[w] + g
            del residual.adjacent[v][w], residual.adjacent[w][v]
            folded = True
    return folded


def _merge_follower(residual: Residual, v: int) -> bool:
    """Merge v into a neighbour b when each strategy of b leaves v only one: then v's costs, edges and usage are b's.

    Only where the tables do not grow: b has as many strategies, or v has at most one other edge.
    """
    b = next((w for w, cost in residual.adjacent[v].items() if _follows(cost, len(residual.adjacent[v]))), None)
    if b is None:
        return False
    cost = residual.adjacent[v][b]
    follows = np.isfinite(cost).argmax(axis=0)
    residual.costs[b] = residual.costs[b] + residual.costs[v][follows] + cost[follows, np.arange(cost.shape[1])]
    for w, other in residual.adjacent[v].items():
        if w != b:
            residual.add_edge(b, w, other[follows])
    for rows, usage in residual.terms[v].items():
        add_term(residual, b, rows, usage[follows])
    residual.terms[v] = {}
    residual.decide(v, (b,), follows)
    return True


def _follows(cost: Floats, degree: int) -> bool:
    single = bool((np.isfinite(cost).sum(axis=0) == 1).all())
    return single and (cost.shape[0] == cost.shape[1] or degree <= 2)


def _can_eliminate(residual: Residual, v: int) -> bool:
    neighbours = residual.adjacent[v]
    if residual.terms[v] or len(neighbours) > 2:
        return False
    size = len(residual.costs[v])
    for w in neighbours:
        size *= len(residual.costs[w])
    return len(neighbours) < 2 or size <= _MAX_TABLE


def _eliminate(residual: Residual, v: int) -> None:
    """Formula 4, for degree 0, 1 and 2."""
    scope = tuple(residual.adjacent[v])
    table = residual.costs[v]
    for w in scope:
        table = table[..., None] + residual.adjacent[v][w].reshape(-1, *(1,) * (table.ndim - 1), len(residual.costs[w]))
    best = table.argmin(axis=0)
    least = np.take_along_axis(table, best[None], axis=0)[0]
    residual.decide(v, scope, best)
    match scope:
        case ():
            residual.offset += float(least)
        case (a,):
            residual.costs[a] = residual.costs[a] + least
        case (a, b):
            residual.add_edge(a, b, least)
