"""A `CostGraph` in; a `Residual`, which reductions shrink, out, and leads back to the original choices.

Usage over time becomes rows, one for each maximal set of nodes that are live at the same time:
    base[r] + sum_v terms_v,r[s_v] <= limit                                              -> _add_usage_rows
`base` is the usage of every solution in row r; the terms are the usage of a strategy beyond it. A row that cannot
exceed the limit, or that another row implies, is dropped.                               -> loosen_rows
The maximal live sets are the maximal cliques of an interval graph, at most one per interval (Fulkerson, Gross, 1965).

Example: two nodes are live over [0, 2) and [1, 3) and use (4, 3) and (2, 5). Only the live set at time 1 is maximal, so
there is one row, with base 3 + 2 and the terms (1, 0) and (0, 3).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from minialpa.errors import InfeasibleError
from minialpa.intra.solver.cost_graph import (
    FORBIDDEN,
    MOST_USAGE,
    Bools,
    CostGraph,
    EdgeCosts,
    Floats,
    Ints,
    NodeUsage,
)
from minialpa.support.sizes import bytes_text

#: (first, end): the usage rows first, ..., end - 1.
Rows = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Elimination:
    """If each node `scope[k]` takes strategy s_k, then `node` takes `best[kinds[0][s_0], ..., kinds[n][s_n]]`.

    Strategies have their original numbers.
    """

    node: int
    scope: tuple[int, ...]
    kinds: tuple[Ints, ...]
    best: Ints


@dataclass(slots=True, eq=False, kw_only=True)
class Residual:
    """A cost graph under reduction.

    Attributes:
        costs: costs[v][i] is the cost of the i-th strategy that is left at node v.
        kept: kept[v][i] is its original number.
        adjacent: adjacent[v][w] has the costs of the edge; adjacent[w][v] is their transposed view.
        terms: terms[v][rows][i] is the usage of strategy i of v in each of `rows`, beyond `base`; its least entry is 0.
        base: in each row, of every solution.
        rows: original numbers.
        limit: of base and terms together, in a row.
        offset: cost of all decided nodes.
        alive: undecided nodes, in order.
    """

    costs: list[Floats]
    kept: list[Ints]
    adjacent: list[dict[int, EdgeCosts]]
    terms: list[dict[Rows, Ints]]
    base: Ints
    rows: Ints
    limit: int
    offset: float = 0.0
    eliminations: list[Elimination] = field(default_factory=list)
    alive: dict[int, None] = field(default_factory=dict)

    def choices(self, places: Mapping[int, int] | None = None) -> tuple[int, ...]:
        """The original number of each node's strategy; `places` has an index of `costs[v]` for each alive v."""
        places = places or {}
        assert self.alive.keys() == places.keys(), f"{len(self.alive)} nodes are not decided, {len(places)} are given"
        chosen = [0] * len(self.costs)
        for v, i in places.items():
            chosen[v] = int(self.kept[v][i])

        # Backwards: a node depends on nodes that were alive at its elimination.
        for step in reversed(self.eliminations):
            at = tuple(kinds[chosen[w]] for w, kinds in zip(step.scope, step.kinds, strict=True))
            chosen[step.node] = int(step.best[at])
        return tuple(chosen)

    def decide(self, node: int, scope: tuple[int, ...], kinds: Sequence[Ints | None], best: Ints) -> None:
        """Take `node` out; `best` holds its strategy, an index of `costs[node]`, for each choice of `scope`.

        kinds: for each strategy of a node in `scope`, the index on its axis of `best`; None for its own number.
        """
        by_original = tuple(_by_original(self.kept[other], kind) for other, kind in zip(scope, kinds, strict=True))
        original = self.kept[node].astype(np.min_scalar_type(int(self.kept[node].max())))
        self.eliminations.append(Elimination(node, scope, by_original, original[best]))

        for neighbour in self.adjacent[node]:
            del self.adjacent[neighbour][node]
        self.adjacent[node] = {}
        del self.alive[node]

    def add_edge(self, a: int, b: int, cost: EdgeCosts) -> None:
        if b in self.adjacent[a]:
            cost = self.adjacent[a][b] + cost
        self.adjacent[a][b], self.adjacent[b][a] = cost, cost.T


def _by_original(kept: Ints, kinds: Ints | None) -> Ints:
    """`kinds`, by the original numbers `kept` of strategies."""
    found = np.zeros(kept[-1] + 1, np.int64)
    found[kept] = np.arange(len(kept)) if kinds is None else kinds
    return found


def without_rows(residual: Residual) -> Residual:
    # Reductions change no array in place, so arrays are shared.
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
    """`graph` with merged parallel edges, folded self-loops and one usage row per maximal live set.

    Raises InfeasibleError if the least usages exceed the limit.
    """
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
        table = np.where(edge.cost.table >= FORBIDDEN, np.inf, edge.cost.table)
        if edge.a == edge.b:
            costs[edge.a] = costs[edge.a] + table[edge.cost.rows, edge.cost.columns]
        else:
            residual.add_edge(edge.a, edge.b, replace(edge.cost, table=table))

    if graph.usage_limit is not None:
        residual.limit = min(graph.usage_limit, MOST_USAGE)
        _add_usage_rows(residual, graph.usages)
    return residual


def _add_usage_rows(residual: Residual, usages: Sequence[NodeUsage]) -> None:
    """At each start that an end follows: its live set is maximal."""
    # Ends (0) sort before starts (1): intervals are half open.
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
        residual.adjacent[v][w] = cost.take(mask)
        residual.adjacent[w][v] = residual.adjacent[v][w].T

    # Added anew: their least usage may be larger.
    terms, residual.terms[v] = residual.terms[v], {}
    for rows, usage in terms.items():
        add_term(residual, v, rows, usage[mask])


def add_term(residual: Residual, v: int, rows: Rows, usage: Ints) -> None:
    """The minimum of `usage`, by strategy of v, goes to `base`, the rest to a term."""
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
            f"The smallest shardings need {bytes_text(least)} per device at some time, "
            f"{bytes_text(least - residual.limit)} above the limit of {bytes_text(residual.limit)}. Use more devices "
            "or micro-batches, or raise `memory_limit_bytes`."
        )


def room_for(residual: Residual, v: int) -> Bools:
    """The strategies of v that fit in all rows if the other nodes use their least."""
    fits = np.ones(len(residual.costs[v]), bool)
    for (first, end), usage in residual.terms[v].items():
        fits &= usage <= residual.limit - residual.base[first:end].max()
    return fits


def loosen_rows(residual: Residual) -> list[int]:
    """Drop the rows that cannot exceed the limit or that another row implies, with their terms.

    Returns the nodes to revisit, which lost a term or have a strategy above the limit.
    """
    check_base(residual)
    starting, ending = _term_changes(residual)
    peak = residual.base + np.cumsum(starting - ending)[:-1]
    binds = (peak > residual.limit) & _essential_rows(residual.base, starting, ending)

    # The new number of row r is n_before[r].
    n_before = np.concatenate(([0], np.cumsum(binds)))
    residual.base, residual.rows = residual.base[binds], residual.rows[binds]
    most_base = residual.base.max(initial=0)

    return [node for node in residual.alive if _renumber_terms(residual, node, n_before, most_base)]


def _renumber_terms(residual: Residual, node: int, n_before: Ints, most_base: int) -> bool:
    """Whether to revisit `node`."""
    terms, residual.terms[node] = residual.terms[node], {}
    for (first, end), usage in terms.items():
        if n_before[first] < n_before[end]:
            add_term(residual, node, (int(n_before[first]), int(n_before[end])), usage)

    left = residual.terms[node]
    # A cheaper test than `room_for`.
    may_lack_room = any(usage.max() > residual.limit - most_base for usage in left.values())
    return len(left) < len(terms) or (may_lack_room and not room_for(residual, node).all())


def _term_changes(residual: Residual) -> tuple[Ints, Ints]:
    """Most usage of the terms that start at each row, and that end before it."""
    starting, ending = np.zeros((2, len(residual.base) + 1), np.int64)
    for node in residual.alive:
        for (first, end), usage in residual.terms[node].items():
            most = usage.max()
            starting[first] += most
            ending[end] += most
    return starting, ending


def _essential_rows(base: Ints, starting: Ints, ending: Ints) -> Bools:
    """A mask of the rows that no other row implies.

    Row r implies row s if base[s] + U <= base[r], where U is the most usage of terms in row s but not in row r.
    """
    # (kept row, usage that starts, usage that ends) since the previous one.
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
            stack.pop()
            more, less = more + more_before, less + less_before

        if not implied:
            stack.append((row, more, less))
            more = less = 0

    essential = np.zeros(len(base), bool)
    essential[[row for row, _, _ in stack]] = True
    return essential
