"""A cost graph while it shrinks: tables, usage rows, and the steps that lead back to the original nodes.

In: `CostGraph`. `Residual` lives inside one solve and is the one mutable thing of the solver.
Usage over time becomes rows, one for each maximal set of live nodes:
    base[r] + sum_v terms_v,r[s_v] <= limit
in whole numbers (exact.py), so that none of what follows rounds.
A row that cannot exceed the limit, or that another row implies, is dropped.           -> loosen_rows
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from minialpa.errors import InfeasibleError
from minialpa.intra.solver.cost_graph import FORBIDDEN, Bools, CostGraph, Floats, Ints
from minialpa.intra.solver.exact import Whole, WholeUsages

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
    whole: what the rows are of; None without a limit. rows[r]: the number that row r had at first.
    offset: cost of what is decided already. alive: nodes that are not decided, in order.
    """

    costs: list[Floats]
    kept: list[Ints]
    adjacent: list[dict[int, Floats]]
    terms: list[dict[Rows, Whole]]
    base: Whole
    rows: Ints
    limit: int
    whole: WholeUsages | None = None
    offset: float = 0.0
    steps: list[Step] = field(default_factory=list)
    alive: dict[int, None] = field(default_factory=dict)

    def choices(self, places: Mapping[int, int] | None = None) -> tuple[int, ...]:
        """The strategy of every node in the original graph; `places` has those of nodes that are not decided."""
        places = places or {}
        assert self.alive.keys() == places.keys(), f"{len(self.alive)} nodes are not decided, {len(places)} are given"
        chosen = [0] * len(self.costs)
        for v, i in places.items():
            chosen[v] = int(self.kept[v][i])
        for step in reversed(self.steps):
            at = (int(np.searchsorted(domain, chosen[w])) for w, domain in zip(step.scope, step.domains, strict=True))
            chosen[step.node] = int(step.best[tuple(at)])
        return tuple(chosen)

    def decide(self, node: int, scope: tuple[int, ...], best: Ints) -> None:
        """Take `node` out; `best` holds its strategy, by current place, for each choice of `scope`."""
        domains = tuple(self.kept[w] for w in scope)
        # A solve keeps all of these tables until its end: in as few bytes as their entries need.
        names = self.kept[node].astype(np.min_scalar_type(int(self.kept[node].max())))
        self.steps.append(Step(node, scope, domains, names[best]))
        for w in self.adjacent[node]:
            del self.adjacent[w][node]
        self.adjacent[node] = {}
        del self.alive[node]

    def add_edge(self, a: int, b: int, cost: Floats) -> None:
        """Add `cost[i, j]` to the edge between a and b, which may be new."""
        if b in self.adjacent[a]:
            cost = self.adjacent[a][b] + cost
        self.adjacent[a][b], self.adjacent[b][a] = cost, cost.T


def without_rows(residual: Residual) -> Residual:
    """A copy in which usage is not limited."""
    return replace(
        residual,
        costs=list(residual.costs),
        kept=list(residual.kept),
        adjacent=[dict(edges) for edges in residual.adjacent],
        terms=[{} for _ in residual.terms],
        base=np.zeros(0, np.int64),
        rows=np.zeros(0, np.int64),
        limit=0,
        steps=list(residual.steps),
        alive=dict(residual.alive),
    )


def residual_of(graph: CostGraph) -> Residual:
    """`graph` with parallel edges merged, loops folded and one usage row per maximal set of live nodes."""
    costs = [np.where(cost >= FORBIDDEN, np.inf, cost) for cost in graph.node_costs]
    n_nodes = len(costs)
    residual = Residual(
        costs=costs,
        kept=[np.arange(len(cost)) for cost in costs],
        adjacent=[{} for _ in range(n_nodes)],
        terms=[{} for _ in range(n_nodes)],
        base=np.zeros(0, np.int64),
        rows=np.zeros(0, np.int64),
        limit=0,
        alive=dict.fromkeys(range(n_nodes)),
    )
    for edge in graph.edges:
        cost = np.where(edge.cost >= FORBIDDEN, np.inf, edge.cost)
        if edge.a == edge.b:
            costs[edge.a] = costs[edge.a] + np.diagonal(cost)
        else:
            residual.add_edge(edge.a, edge.b, cost)
    if graph.whole is not None:
        _add_usage_rows(residual, graph.whole)
    return residual


def _add_usage_rows(residual: Residual, whole: WholeUsages) -> None:
    """One row for each time after a start and before the next end: its live set contains that of its neighbours."""
    residual.whole, residual.limit, live = whole, whole.limit, whole.terms
    events = sorted({(start, 1) for _, (start, _), _ in live} | {(end, 0) for _, (_, end), _ in live})
    starts = np.array([time for (time, kind), after in itertools.pairwise(events) if kind == 1 and after[1] == 0])
    residual.base = np.zeros(len(starts), live[0][2].dtype if live else np.int64)
    residual.rows = np.arange(len(starts))
    for v, interval, usage in live:
        first, end = np.searchsorted(starts, interval)
        add_term(residual, v, (int(first), int(end)), usage)
    check_base(residual)


def keep(residual: Residual, v: int, mask: Bools) -> None:
    """Leave node v only the strategies in `mask`."""
    residual.costs[v] = residual.costs[v][mask]
    residual.kept[v] = residual.kept[v][mask]
    for w, cost in residual.adjacent[v].items():
        residual.adjacent[v][w] = cost[mask]
        residual.adjacent[w][v] = residual.adjacent[v][w].T
    terms, residual.terms[v] = residual.terms[v], {}
    for rows, usage in terms.items():
        add_term(residual, v, rows, usage[mask])


def add_term(residual: Residual, v: int, rows: Rows, usage: Whole) -> None:
    """Let v use `usage` more in `rows`: the least of it goes to `base`, the rest, if any, stays a term."""
    if rows in residual.terms[v]:
        usage = usage + residual.terms[v].pop(rows)
    least = usage.min()
    if least > 0:
        residual.base[rows[0] : rows[1]] += least
        usage = usage - least
    if usage.any():
        residual.terms[v][rows] = usage


def check_base(residual: Residual) -> None:
    least = residual.base.max(initial=0)
    if least > residual.limit:
        assert residual.whole is not None
        raise InfeasibleError(
            f"Even the thriftiest strategies need a usage of {residual.whole.text(int(least))} at some time and the "
            f"limit is {residual.whole.given_limit:,}. Raise `usage_limit`, or offer strategies that use less."
        )


def room_for(residual: Residual, v: int) -> Bools:
    """Strategies of v that fit in every usage row if all other nodes use their least."""
    fits = np.ones(len(residual.costs[v]), bool)
    for (first, end), usage in residual.terms[v].items():
        fits &= usage <= residual.limit - residual.base[first:end].max()
    return fits


def loosen_rows(residual: Residual) -> list[int]:
    """Drop rows that can no longer exceed the limit or that another implies, and terms that lie in none of the others.

    Returns the nodes that deserve a new visit: they lost a term, or have a strategy without room left.
    """
    check_base(residual)
    starting, ending = _term_changes(residual)
    peak = residual.base + np.cumsum(starting - ending)[:-1]
    binds = (peak > residual.limit) & _essential(residual.base, starting, ending)
    rows_before = np.concatenate(([0], np.cumsum(binds)))
    residual.base, residual.rows = residual.base[binds], residual.rows[binds]
    most_base = residual.base.max(initial=0)
    dirty = []
    for v in residual.alive:
        terms, residual.terms[v] = residual.terms[v], {}
        for (first, end), usage in terms.items():
            if rows_before[first] < rows_before[end]:
                add_term(residual, v, (int(rows_before[first]), int(rows_before[end])), usage)
        left = residual.terms[v]
        may_lack_room = any(usage.max() > residual.limit - most_base for usage in left.values())
        if len(left) < len(terms) or (may_lack_room and not room_for(residual, v).all()):
            dirty.append(v)
    return dirty


def _term_changes(residual: Residual) -> tuple[Whole, Whole]:
    """The most that terms which start at each row use, and that terms which end before it used."""
    starting, ending = np.zeros((2, len(residual.base) + 1), residual.base.dtype)
    for v in residual.alive:
        for (first, end), usage in residual.terms[v].items():
            most = usage.max()
            starting[first] += most
            ending[end] += most
    return starting, ending


def _essential(base: Whole, starting: Whole, ending: Whole) -> Bools:
    """Rows that no earlier and no later row implies.

    Row r implies s where base[s] and the most that terms of s, not of r, use is at most base[r].
    """
    stack: list[tuple[int, int, int]] = []  # rows that stay; what starts and what ends since the one before
    more = less = 0
    for r, (b, start, end) in enumerate(zip(base.tolist(), starting.tolist(), ending.tolist(), strict=False)):
        more, less = more + start, less + end
        implied = False
        while stack:
            last, more_before, less_before = stack[-1]
            implied = b + more <= base[last]
            if implied or base[last] + less > b:
                break
            stack.pop()
            more, less = more + more_before, less + less_before
        if not implied:
            stack.append((r, more, less))
            more = less = 0
    essential = np.zeros(len(base), bool)
    essential[[r for r, _, _ in stack]] = True
    return essential
