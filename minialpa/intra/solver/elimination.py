"""A `Residual` in; a smaller one with the same optimum out, often without nodes.

    1. Arc consistency: drop a strategy without a finite partner over some edge, or above the limit.  -> _usable_mask
    2. Dominance: drop strategy A if some B uses no more and never costs more.                        -> _undominated
    3. Merge a node into a neighbour whose strategy decides the strategy of the node.              -> _merge_follower
    4. Minimise out a node without usage terms that has at most two neighbours a, b (min-plus elimination):
       T[i, j] = min_s (c[s] + E_a[s, i] + E_b[s, j])                                                   -> _eliminate
    5. Replace an edge E[i, j] = f[i] + g[j] by node costs, which lowers degrees.            -> _fold_separable_edges

Source: weighted constraint satisfaction and PBQP (Scholz and Eckstein, 2002).
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from minialpa.errors import InfeasibleError
from minialpa.intra.solver.clock import Deadline
from minialpa.intra.solver.cost_graph import Bools, EdgeCosts
from minialpa.intra.solver.dominance import undominated
from minialpa.intra.solver.residual import Residual, add_term, keep, loosen_rows, room_for

#: Operations per visit of a node, about.
_OPERATIONS = 2e5
#: Most entries of a table over a node and two neighbours: 32 MB of float64.
_MAX_TABLE = 4_000_000


def reduce_graph(residual: Residual, deadline: Deadline | None = None) -> None:
    """Apply all reductions in place until the graph stops changing, or until `deadline`.

    Raises InfeasibleError if a node has no strategy left, or if the least memory of all nodes that are live together
    exceeds the limit.
    """
    dirty = list(residual.alive)
    deadline = deadline or Deadline(limit_s=np.inf)
    while dirty and not deadline.is_over:
        _reduce_from(residual, dirty, deadline)
        # Drops memory limits that always hold or that others imply.
        dirty = loosen_rows(residual)


def _reduce_from(residual: Residual, dirty: list[int], deadline: Deadline) -> None:
    """Smallest degree first."""
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
                # Also if it waits: its degree may be smaller.
                heapq.heappush(heap, (len(residual.adjacent[changed]), changed))


def _visit(residual: Residual, v: int) -> list[int]:
    """The other nodes whose tables or neighbours changed."""
    neighbours = list(residual.adjacent[v])

    usable = _usable_mask(residual, v)
    if not usable.any():
        raise InfeasibleError(
            "No sharding satisfies all options and constraints of the step together. Remove a "
            "`with_sharding_constraint`, a spec of `fixed_specs`, or an option that forbids shardings."
        )
    changed = not usable.all()
    if changed:
        keep(residual, v, usable)

    # First, as dominance takes longer.
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


def _usable_mask(residual: Residual, v: int) -> Bools:
    """Reduction 1."""
    usable = np.isfinite(residual.costs[v]) & room_for(residual, v)
    for cost in residual.adjacent[v].values():
        usable &= np.isfinite(cost.table.min(axis=1)[cost.rows])
    return usable


def _undominated(residual: Residual, v: int) -> Bools:
    """Reduction 2."""
    # A kind of strategies of the neighbour is compared once.
    cost, edges = residual.costs[v], [edge.table[edge.rows] for edge in residual.adjacent[v].values()]
    # One memory layout: numba compiles anew for each layout.
    return undominated(
        cost,
        np.array(list(residual.terms[v].values()), np.int64).reshape(-1, len(cost)),
        np.ascontiguousarray(np.concatenate(edges, axis=1)) if edges else np.zeros((len(cost), 0)),
        np.cumsum([0, *(edge.shape[1] for edge in edges)]),
    )


def _fold_separable_edges(residual: Residual, v: int) -> bool:
    """Reduction 5; returns whether an edge went."""
    folded = False
    for w, cost in list(residual.adjacent[v].items()):
        # A forbidden pair is no sum of finite costs.
        table, row, column = cost.table, cost.rows[0], cost.columns[0]
        if not np.isfinite(table).all():
            continue

        f, g = table[:, column] - table[row, column], table[row]
        if (table == f[:, None] + g).all():
            residual.costs[v] = residual.costs[v] + f[cost.rows]
            residual.costs[w] = residual.costs[w] + g[cost.columns]
            del residual.adjacent[v][w], residual.adjacent[w][v]
            folded = True
    return folded


def _merge_follower(residual: Residual, v: int) -> bool:
    """Reduction 3; returns whether v follows a neighbour."""
    degree = len(residual.adjacent[v])
    leader = next((w for w, cost in residual.adjacent[v].items() if _follows(cost, degree)), None)
    if leader is None:
        return False

    # follows[j]: the strategy of v when the leader takes strategy j.
    cost = residual.adjacent[v][leader].dense()
    follows = np.isfinite(cost).argmax(axis=0)
    residual.costs[leader] = (
        residual.costs[leader] + residual.costs[v][follows] + cost[follows, np.arange(cost.shape[1])]
    )
    for w, other in residual.adjacent[v].items():
        if w != leader:
            residual.add_edge(leader, w, other.take(follows))
    for rows, usage in residual.terms[v].items():
        add_term(residual, leader, rows, usage[follows])

    residual.terms[v] = {}
    residual.decide(v, (leader,), [None], follows)
    return True


def _follows(cost: EdgeCosts, degree: int) -> bool:
    """Whether each strategy of the neighbour leaves v one strategy, and merging makes no table larger.

    cost: [strategy of v, strategy of the neighbour].
    """
    single = bool((np.bincount(cost.rows) @ np.isfinite(cost.table) == 1).all())
    return single and (cost.shape[0] == cost.shape[1] or degree <= 2)


def _can_eliminate(residual: Residual, v: int) -> bool:
    neighbours = residual.adjacent[v]
    if residual.terms[v] or len(neighbours) > 2:
        return False
    size = len(residual.costs[v]) * math.prod(len(residual.costs[w]) for w in neighbours)
    return len(neighbours) < 2 or size <= _MAX_TABLE


def _eliminate(residual: Residual, v: int) -> None:
    """Reduction 4; the least costs go to the neighbours."""
    scope, edges = tuple(residual.adjacent[v]), list(residual.adjacent[v].values())
    # Axis 0 is the strategy of v; then one axis per neighbour, over the kinds of its strategies.
    table = residual.costs[v]
    for edge in edges:
        of_strategy = edge.table[edge.rows]
        table = table[..., None] + of_strategy.reshape(-1, *(1,) * (table.ndim - 1), of_strategy.shape[1])

    best = table.argmin(axis=0)
    least = np.take_along_axis(table, best[None], axis=0)[0]
    kinds = [edge.columns for edge in edges]
    residual.decide(v, scope, kinds, best)

    match scope:
        case ():
            residual.offset += float(least)
        case (a,):
            residual.costs[a] = residual.costs[a] + least[kinds[0]]
        case (a, b):
            residual.add_edge(a, b, EdgeCosts(least, *kinds))
