"""Exact reductions of a cost graph: the rest has the same optimum and is smaller, often empty.

    1. Arc consistency: drop a strategy that has no finite partner over some edge, or no room.       -> _usable
    2. Dominance: drop strategy A if some B uses no more and never costs more (dominance.py).        -> _undominated
    3. Merge a node into a neighbour whose strategy decides the node's.                              -> _merge_follower
    4. Minimise out a node of degree 0, 1 or 2 that is in no usage row (min-plus elimination):
       T[i, j] = min_s (c[s] + E_a[s, i] + E_b[s, j])                                                -> _eliminate
    5. Replace an edge with E[i, j] = f[i] + g[j] by node costs, which lowers degrees.     -> _fold_separable_edges
Each eliminated node leaves an `Elimination`, and `Residual.choices` walks these backwards.

Source: weighted constraint satisfaction and PBQP (Scholz and Eckstein, 2002).
"""

from __future__ import annotations

import heapq

import numpy as np

from minialpa.errors import InfeasibleError
from minialpa.intra.solver.clock import Deadline
from minialpa.intra.solver.cost_graph import Bools, Floats
from minialpa.intra.solver.dominance import undominated
from minialpa.intra.solver.residual import Residual, add_term, keep, loosen_rows, room_for

#: Operations of a visit to a node, about.
_OPERATIONS = 2e5
#: Most entries of the table that eliminating one node of degree 2 may build: 32 MB of float64.
_MAX_TABLE = 4_000_000


def reduce_graph(residual: Residual, deadline: Deadline | None = None) -> None:
    """Apply all reductions to `residual` until none helps, or until `deadline`.

    Raises InfeasibleError when a node has no strategy left, or when the least usage of all nodes exceeds the limit.
    """
    dirty = list(residual.alive)  # nodes to visit
    deadline = deadline or Deadline(np.inf)
    while dirty and not deadline.is_over:
        _reduce_from(residual, dirty, deadline)
        dirty = loosen_rows(residual)


def _reduce_from(residual: Residual, dirty: list[int], deadline: Deadline) -> None:
    """Visit the `dirty` nodes, and nodes whose tables or neighbours change, smallest degree first."""
    waiting = set(dirty)
    heap = [(len(residual.adjacent[v]), v) for v in dirty]
    heapq.heapify(heap)

    while heap and not deadline.is_over:
        _, node = heapq.heappop(heap)
        if node in waiting and node in residual.alive:
            waiting.discard(node)
            deadline.spend(_OPERATIONS)
            for changed in _visit(residual, node):
                waiting.add(changed)
                # Even if it waits already: its degree may be smaller now.
                heapq.heappush(heap, (len(residual.adjacent[changed]), changed))


def _visit(residual: Residual, v: int) -> list[int]:
    """Reduce around v; returns the nodes whose tables or neighbours changed, other than v."""
    neighbours = list(residual.adjacent[v])

    usable = _usable(residual, v)
    if not usable.any():
        raise InfeasibleError(f"No strategy of node {v} is left: its cost, an edge or the usage limit forbids each.")
    changed = not usable.all()
    if changed:
        keep(residual, v, usable)

    # Before dominance, which takes longer.
    if _can_eliminate(residual, v):
        _eliminate(residual, v)
        return neighbours

    undominated = _undominated(residual, v)
    if not undominated.all():
        changed = True
        keep(residual, v, undominated)
    changed |= _fold_separable_edges(residual, v)

    # Fewer strategies make smaller tables, and fewer edges a lower degree.
    if _can_eliminate(residual, v):
        _eliminate(residual, v)
        return neighbours

    if _merge_follower(residual, v):
        return neighbours
    return neighbours if changed else []


def _usable(residual: Residual, v: int) -> Bools:
    usable = np.isfinite(residual.costs[v]) & room_for(residual, v)
    for cost in residual.adjacent[v].values():
        usable &= np.isfinite(cost).any(axis=1)
    return usable


def _undominated(residual: Residual, v: int) -> Bools:
    """Formula 2: a mask of the strategies to keep."""
    cost, edges = residual.costs[v], list(residual.adjacent[v].values())
    # Always in the same memory layout: numba compiles a function anew for each layout.
    return undominated(
        cost,
        np.array(list(residual.terms[v].values()), np.int64).reshape(-1, len(cost)),
        np.ascontiguousarray(np.concatenate(edges, axis=1)) if edges else np.zeros((len(cost), 0)),
        np.cumsum([0, *(edge.shape[1] for edge in edges)]),
    )


def _fold_separable_edges(residual: Residual, v: int) -> bool:
    """Formula 5; whether there was such an edge. An edge of a node with a single strategy always is one."""
    folded = False
    for w, cost in list(residual.adjacent[v].items()):
        # A forbidden pair cannot be written as a sum, unless it forbids a strategy altogether.
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
    """Merge v, with its costs, edges and usages, into a neighbour that it follows; whether there is one."""
    degree = len(residual.adjacent[v])
    leader = next((w for w, cost in residual.adjacent[v].items() if _follows(cost, degree)), None)
    if leader is None:
        return False

    # follows[j]: the strategy of v when the leader takes strategy j.
    cost = residual.adjacent[v][leader]
    follows = np.isfinite(cost).argmax(axis=0)
    residual.costs[leader] = (
        residual.costs[leader] + residual.costs[v][follows] + cost[follows, np.arange(cost.shape[1])]
    )
    for w, other in residual.adjacent[v].items():
        if w != leader:
            residual.add_edge(leader, w, other[follows])
    for rows, usage in residual.terms[v].items():
        add_term(residual, leader, rows, usage[follows])

    residual.terms[v] = {}
    residual.decide(v, (leader,), follows)
    return True


def _follows(cost: Floats, degree: int) -> bool:
    """Whether the edge `cost` leaves v one strategy for each of the neighbour's, and merging makes no table larger.

    Tables stay as small if both have as many strategies, or v has at most one other edge.
    """
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
    scope = tuple(residual.adjacent[v])
    # Axis 0 is the strategy of v; each neighbour adds an axis of its own at the end.
    table = residual.costs[v]
    for w in scope:
        edge = residual.adjacent[v][w]
        table = table[..., None] + edge.reshape(-1, *(1,) * (table.ndim - 1), len(residual.costs[w]))

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
