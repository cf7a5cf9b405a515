"""A cost graph under reduction: tables, usage rows, and the eliminations that lead back to the original nodes.

Usage over time becomes rows. A row stands for a maximal set of nodes that are live at the same time:
    base[r] + sum_v terms_v,r[s_v] <= limit                                              -> _add_usage_rows
`base` is the usage of every solution in row r, the terms are the usage of a strategy beyond that. A row that cannot
exceed the limit, or that another row implies, is dropped.                               -> loosen_rows
The maximal live sets are the maximal cliques of an interval graph, of which there are at most as many as intervals
(Fulkerson and Gross, 1965).

Example: two nodes are live over [0, 2) and [1, 3) and use (4, 3) and (2, 5). Only the live set at time 1 is maximal, so
there is one row, with base 3 + 2 and the terms (1, 0) and (0, 3).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from minialpa.errors import InfeasibleError
from minialpa.intra.solver.cost_graph import FORBIDDEN, MOST_USAGE, Bools, CostGraph, Floats, Ints, NodeUsage

#: Usage rows `first` to `end - 1`.
Rows = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Elimination:
    """The strategy of an eliminated node, by the choices of others.

    Strategies in `domains` and `best` have their numbers of the original graph. Where node `scope[i]` chose the
    strategy at place p_i of `domains[i]`, `node` takes `best[p_1, ..., p_n]`.
    """

    node: int
    scope: tuple[int, ...]
    domains: tuple[Ints, ...]
    best: Ints


@dataclass(slots=True, eq=False, kw_only=True)
class Residual:
    """A cost graph under reduction.

    Attributes:
        costs: costs[v] has the costs of the strategies that are left at node v.
        kept: kept[v] has the original numbers of these strategies.
        adjacent: adjacent[v][w][i, j] is the cost of the edge; adjacent[w][v] is its transposed view.
        terms: terms[v][rows][i] is the usage of strategy i of v in each of these rows, without its part in `base`:
            0 for some strategy and positive for another.
        base: for each row, the usage of every solution.
        rows: for each row, the number that it had at first.
        limit: of base and all terms together, in each row.
        offset: cost of all decided nodes.
        eliminations: of the eliminated nodes, in the order in which they went.
        alive: nodes that are not decided, in order.
    """

    costs: list[Floats]
    kept: list[Ints]
    adjacent: list[dict[int, Floats]]
    terms: list[dict[Rows, Ints]]
    base: Ints
    rows: Ints
    limit: int
    offset: float = 0.0
    eliminations: list[Elimination] = field(default_factory=list)
    alive: dict[int, None] = field(default_factory=dict)

    def choices(self, places: Mapping[int, int] | None = None) -> tuple[int, ...]:
        """The strategy of every node in the original graph; `places`: of the nodes that are not decided."""
        places = places or {}
        assert self.alive.keys() == places.keys(), f"{len(self.alive)} nodes are not decided, {len(places)} are given"
        chosen = [0] * len(self.costs)
        for v, i in places.items():
            chosen[v] = int(self.kept[v][i])

        # Backwards: a node depends only on nodes that were there when it went.
        for step in reversed(self.eliminations):
            at = (int(np.searchsorted(domain, chosen[w])) for w, domain in zip(step.scope, step.domains, strict=True))
            chosen[step.node] = int(step.best[tuple(at)])
        return tuple(chosen)

    def decide(self, node: int, scope: tuple[int, ...], best: Ints) -> None:
        """Take `node` out; `best` holds its strategy, by current place, for each choice of `scope`."""
        domains = tuple(self.kept[other] for other in scope)
        # A solve keeps all of these tables until its end: in as few bytes as their entries need.
        original = self.kept[node].astype(np.min_scalar_type(int(self.kept[node].max())))
        self.eliminations.append(Elimination(node, scope, domains, original[best]))

        for neighbour in self.adjacent[node]:
            del self.adjacent[neighbour][node]
        self.adjacent[node] = {}
        del self.alive[node]

    def add_edge(self, a: int, b: int, cost: Floats) -> None:
        if b in self.adjacent[a]:
            cost = self.adjacent[a][b] + cost
        self.adjacent[a][b], self.adjacent[b][a] = cost, cost.T


def without_rows(residual: Residual) -> Residual:
    # Reductions change the lists and dicts, but never an array in place, so the arrays are shared.
    return replace(
        residual,
        costs=list(residual.costs),
        kept=list(residual.kept),
        adjacent=[dict(edges) for edges in residual.adjacent],
        terms=[{} for _ in residual.terms],
        base=np.zeros(0, np.int64),
        rows=np.zeros(0, np.int64),
        limit=0,
        eliminations=list(residual.eliminations),
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

    if graph.usage_limit is not None:
        residual.limit = min(graph.usage_limit, MOST_USAGE)
        _add_usage_rows(residual, graph.usages)
    return residual


def _add_usage_rows(residual: Residual, usages: Sequence[NodeUsage]) -> None:
    """One row for each time after a start and before the next end: the live set is maximal there."""
    # At equal times ends (0) sort before starts (1), as intervals are half open.
    events = sorted({(start, 1) for _, (start, _), _ in usages} | {(end, 0) for _, (_, end), _ in usages})
    row_starts = np.array([time for (time, kind), after in itertools.pairwise(events) if kind == 1 and after[1] == 0])

    residual.base = np.zeros(len(row_starts), np.int64)
    residual.rows = np.arange(len(row_starts))
    for node, interval, usage in usages:
        first, end = np.searchsorted(row_starts, interval)
        add_term(residual, node, (int(first), int(end)), usage)
    check_base(residual)


def keep(residual: Residual, v: int, mask: Bools) -> None:
    residual.costs[v] = residual.costs[v][mask]
    residual.kept[v] = residual.kept[v][mask]
    for w, cost in residual.adjacent[v].items():
        residual.adjacent[v][w] = cost[mask]
        residual.adjacent[w][v] = residual.adjacent[v][w].T

    # Added anew, because the least usage of the strategies that stay may be larger.
    terms, residual.terms[v] = residual.terms[v], {}
    for rows, usage in terms.items():
        add_term(residual, v, rows, usage[mask])


def add_term(residual: Residual, v: int, rows: Rows, usage: Ints) -> None:
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
        raise InfeasibleError(
            f"Even the strategies that use least need a usage of {least:,} at some time and the limit is "
            f"{residual.limit:,}. Raise `usage_limit`, or offer strategies that use less."
        )


def room_for(residual: Residual, v: int) -> Bools:
    """Strategies of v that fit in every usage row if all other nodes use their least."""
    fits = np.ones(len(residual.costs[v]), bool)
    for (first, end), usage in residual.terms[v].items():
        fits &= usage <= residual.limit - residual.base[first:end].max()
    return fits


def loosen_rows(residual: Residual) -> list[int]:
    """Drop the rows that can no longer exceed the limit or that another row implies, and terms without a row.

    Returns the nodes to revisit: they lost a term, or have a strategy without room left.
    """
    check_base(residual)
    starting, ending = _term_changes(residual)
    peak = residual.base + np.cumsum(starting - ending)[:-1]
    binds = (peak > residual.limit) & _essential(residual.base, starting, ending)

    # Row r becomes row n_before[r], the number of rows before it that stay.
    n_before = np.concatenate(([0], np.cumsum(binds)))
    residual.base, residual.rows = residual.base[binds], residual.rows[binds]
    most_base = residual.base.max(initial=0)

    return [node for node in residual.alive if _renumber_terms(residual, node, n_before, most_base)]


def _renumber_terms(residual: Residual, node: int, n_before: Ints, most_base: int) -> bool:
    """Move the terms of `node` to the new row numbers; whether to revisit the node."""
    terms, residual.terms[node] = residual.terms[node], {}
    for (first, end), usage in terms.items():
        if n_before[first] < n_before[end]:
            add_term(residual, node, (int(n_before[first]), int(n_before[end])), usage)

    left = residual.terms[node]
    # Cheaper than `room_for`, and rules most nodes out.
    may_lack_room = any(usage.max() > residual.limit - most_base for usage in left.values())
    return len(left) < len(terms) or (may_lack_room and not room_for(residual, node).all())


def _term_changes(residual: Residual) -> tuple[Ints, Ints]:
    """For each row, the most usage of the terms that start there, and of the terms that end before it."""
    starting, ending = np.zeros((2, len(residual.base) + 1), np.int64)
    for node in residual.alive:
        for (first, end), usage in residual.terms[node].items():
            most = usage.max()
            starting[first] += most
            ending[end] += most
    return starting, ending


def _essential(base: Ints, starting: Ints, ending: Ints) -> Bools:
    """Rows that no earlier and no later row implies.

    Row r implies row s if base[s] + U <= base[r], where U is the most usage of terms that are in row s but not in r.
    """
    # (row, usage that starts, usage that ends) of the rows that stay so far, counted since the row before on the stack.
    stack: list[tuple[int, int, int]] = []
    more = less = 0
    for row, (row_base, start, end) in enumerate(zip(base.tolist(), starting.tolist(), ending.tolist(), strict=False)):
        more, less = more + start, less + end

        implied = False
        while stack:
            last, more_before, less_before = stack[-1]
            implied = row_base + more <= base[last]
            if implied or base[last] + less > row_base:
                break
            # This row implies the last one of the stack, so it is compared with the one before.
            stack.pop()
            more, less = more + more_before, less + less_before

        if not implied:
            stack.append((row, more, less))
            more = less = 0

    essential = np.zeros(len(base), bool)
    essential[[row for row, _, _ in stack]] = True
    return essential
