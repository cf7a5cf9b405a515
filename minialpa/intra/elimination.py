"""Exact reductions of a cost graph: what is left afterwards has the same optimum and is smaller, often empty.

In: `CostGraph`. `Residual` is the graph while it shrinks; it lives inside one solve and is the one mutable thing here.
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
import itertools
from dataclasses import dataclass, field

import numpy as np

from minialpa.errors import InfeasibleError
from minialpa.intra.costgraph import FORBIDDEN, USAGE_SLACK, Bools, CostGraph, Floats, Ints

#: Largest min-plus table that eliminating one node of degree 2 may build.
_MAX_TABLE = 4_000_000


#: Usage rows `first` to `end - 1`.
Rows = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """How `node` was decided: strategy `best[p_1, ..., p_n]`, where p_i is the place in `domains[i]` of what
    `scope[i]` chose. Strategies in `best` and `domains` are those of the original graph."""

    node: int
    scope: tuple[int, ...]
    domains: tuple[Ints, ...]
    best: Ints


@dataclass(slots=True, eq=False)
class Residual:
    """A cost graph under reduction.

    costs[v], kept[v]: costs and original numbers of the strategies that are left at node v.
    adjacent[v][w][i, j]: cost of the edge; `adjacent[w][v]` is its transposed view.
    terms[v][rows][i]: what strategy i of v uses in each of these rows, above the least, which `base` holds: a term is 0
        somewhere and positive elsewhere. In row r, base[r] and the terms of all nodes may not exceed `limit`.
    offset: cost of what is decided already. alive: nodes that are not decided, in order.
    """

    costs: list[Floats]
    kept: list[Ints]
    adjacent: list[dict[int, Floats]]
    terms: list[dict[Rows, Floats]]
    base: Floats
    limit: float
    offset: float = 0.0
    steps: list[Step] = field(default_factory=list)
    alive: dict[int, None] = field(default_factory=dict)

    def choices(self) -> tuple[int, ...]:
        """The strategy of every node in the original graph; every node must be decided."""
        assert not self.alive, f"{len(self.alive)} nodes are not decided"
        chosen = [0] * len(self.costs)
        for step in reversed(self.steps):
            at = (int(np.searchsorted(domain, chosen[w])) for w, domain in zip(step.scope, step.domains, strict=True))
            chosen[step.node] = int(step.best[tuple(at)])
        return tuple(chosen)

    def decide(self, node: int, scope: tuple[int, ...], best: Ints) -> None:
        """Take `node` out; `best` holds its strategy, by current place, for each choice of `scope`."""
        domains = tuple(self.kept[w] for w in scope)
        self.steps.append(Step(node, scope, domains, self.kept[node][best]))
        for w in self.adjacent[node]:
            del self.adjacent[w][node]
        self.adjacent[node] = {}
        del self.alive[node]

    def add_edge(self, a: int, b: int, cost: Floats) -> None:
        """Add `cost[i, j]` to the edge between a and b, which may be new."""
        if b in self.adjacent[a]:
            cost = self.adjacent[a][b] + cost
        self.adjacent[a][b], self.adjacent[b][a] = cost, cost.T


def residual_of(graph: CostGraph, *, with_usage: bool) -> Residual:
    """`graph` with parallel edges merged, loops folded and one usage row per maximal set of live nodes."""
    costs = [np.where(cost >= FORBIDDEN, np.inf, cost) for cost in graph.node_costs]
    n_nodes = len(costs)
    residual = Residual(
        costs=costs,
        kept=[np.arange(len(cost)) for cost in costs],
        adjacent=[{} for _ in range(n_nodes)],
        terms=[{} for _ in range(n_nodes)],
        base=np.zeros(0),
        limit=np.inf,
        alive=dict.fromkeys(range(n_nodes)),
    )
    for edge in graph.edges:
        cost = np.where(edge.cost >= FORBIDDEN, np.inf, edge.cost)
        if edge.a == edge.b:
            costs[edge.a] = costs[edge.a] + np.diagonal(cost)
        else:
            residual.add_edge(edge.a, edge.b, cost)
    if with_usage and graph.usage_limit is not None:
        residual.limit = graph.usage_limit * (1 + USAGE_SLACK)
        _add_usage_rows(residual, graph)
    return residual


def reduce_graph(residual: Residual) -> None:
    """Apply all reductions until none helps. Raises InfeasibleError when a node or a row has no way out."""
    dirty = list(residual.alive)
    while dirty:
        _reduce_from(residual, dirty)
        dirty = _loosen_rows(residual)


def _add_usage_rows(residual: Residual, graph: CostGraph) -> None:
    """One row for each time after a start and before the next end: its live set contains that of its neighbours."""
    live = [term for term in graph.usage_terms() if term[1][1] > term[1][0] and term[2].max() > 0]
    events = sorted({(start, 1) for _, (start, _), _ in live} | {(end, 0) for _, (_, end), _ in live})
    starts = np.array([time for (time, kind), after in itertools.pairwise(events) if kind == 1 and after[1] == 0])
    residual.base = np.zeros(len(starts))
    for v, interval, usage in live:
        first, end = np.searchsorted(starts, interval)
        _add_term(residual, v, (int(first), int(end)), usage)
    _check_base(residual)


def _reduce_from(residual: Residual, dirty: list[int]) -> None:
    """Visit `dirty` nodes, and those whose surroundings change, smallest degree first."""
    waiting = set(dirty)
    heap = [(len(residual.adjacent[v]), v) for v in dirty]
    heapq.heapify(heap)
    while heap:
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
        _keep(residual, v, usable)
    if _can_eliminate(residual, v):
        _eliminate(residual, v)
        return neighbours
    undominated = _undominated(residual, v)
    if not undominated.all():
        changed = True
        _keep(residual, v, undominated)
    changed |= _fold_separable_edges(residual, v)
    if _can_eliminate(residual, v):
        _eliminate(residual, v)
        return neighbours
    if _merge_follower(residual, v):
        return neighbours
    return neighbours if changed else []


def _usable(residual: Residual, v: int) -> Bools:
    """Strategies with a finite cost, a finite partner over every edge, and room in every usage row."""
    usable = np.isfinite(residual.costs[v])
    for cost in residual.adjacent[v].values():
        usable &= np.isfinite(cost).any(axis=1)
    for (first, end), usage in residual.terms[v].items():
        usable &= usage <= residual.limit - residual.base[first:end].max()
    return usable


def _undominated(residual: Residual, v: int) -> Bools:
    """Formula 2. Of strategies that dominate each other, the first stays."""
    cost = residual.costs[v]
    excess = cost[:, None] - cost[None, :]  # [B, A]
    with np.errstate(invalid="ignore"):
        for edge in residual.adjacent[v].values():
            # inf - inf: the neighbour's choice rules A out, so it cannot speak for A; fmax skips the NaN.
            excess += np.fmax.reduce(edge[:, None, :] - edge[None, :, :], axis=2)
    dominates = excess <= 0
    for usage in residual.terms[v].values():
        dominates &= usage[:, None] <= usage[None, :]
    np.fill_diagonal(dominates, False)
    stays = np.ones(len(cost), bool)
    if dominates.any():
        for a in reversed(range(len(cost))):
            stays[a] = not (dominates[:, a] & stays).any()
    return stays


def _keep(residual: Residual, v: int, mask: Bools) -> None:
    residual.costs[v] = residual.costs[v][mask]
    residual.kept[v] = residual.kept[v][mask]
    for w, cost in residual.adjacent[v].items():
        residual.adjacent[v][w] = cost[mask]
        residual.adjacent[w][v] = residual.adjacent[v][w].T
    terms, residual.terms[v] = residual.terms[v], {}
    for rows, usage in terms.items():
        _add_term(residual, v, rows, usage[mask])


def _add_term(residual: Residual, v: int, rows: Rows, usage: Floats) -> None:
    """Let v use `usage` more in `rows`: the least of it goes to `base`, the rest, if any, stays a term."""
    if rows in residual.terms[v]:
        usage = usage + residual.terms[v].pop(rows)
    least = usage.min()
    if least > 0:
        residual.base[rows[0] : rows[1]] += least
        usage = usage - least
    if usage.any():
        residual.terms[v][rows] = usage


def _check_base(residual: Residual) -> None:
    least = residual.base.max(initial=0.0)
    if least > residual.limit:
        raise InfeasibleError(
            f"Even the thriftiest strategies need a usage of {least:.6g} at some time and the limit is "
            f"{residual.limit:.6g}. Raise `usage_limit`, or offer strategies that use less."
        )


def _loosen_rows(residual: Residual) -> list[int]:
    """Drop rows that can no longer exceed the limit, and terms that lie in none of the others.

    Returns the nodes that deserve a new visit: they lost a term, or have a strategy without room left.
    """
    _check_base(residual)
    binds = _peak(residual) > residual.limit
    rows_before = np.concatenate(([0], np.cumsum(binds)))
    residual.base = residual.base[binds]
    most_base = residual.base.max(initial=0.0)
    dirty = []
    for v in residual.alive:
        terms, residual.terms[v] = residual.terms[v], {}
        for (first, end), usage in terms.items():
            if rows_before[first] < rows_before[end]:
                _add_term(residual, v, (int(rows_before[first]), int(rows_before[end])), usage)
        left = residual.terms[v]
        may_lack_room = any(usage.max() > residual.limit - most_base for usage in left.values())
        if len(left) < len(terms) or (may_lack_room and not _usable(residual, v).all()):
            dirty.append(v)
    return dirty


def _peak(residual: Residual) -> Floats:
    """Usage of each row if every node took its most."""
    change = np.zeros(len(residual.base) + 1)
    for v in residual.alive:
        for (first, end), usage in residual.terms[v].items():
            change[first] += usage.max()
            change[end] -= usage.max()
    return residual.base + np.cumsum(change[:-1])


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
        _add_term(residual, b, rows, usage[follows])
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
