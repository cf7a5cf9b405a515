"""The problem that the solver solves: one strategy for each node, at the least cost, within a usage limit.

    minimise   sum_v c_v[s_v] + sum_(a,b) E_ab[s_a, s_b]
    subject to sum_{v live at t} u_v[s_v] <= usage_limit   at every time t

`CostGraph` holds the costs c and E and the usages u; `GraphSolution` holds the strategies s. A cost of `FORBIDDEN` or
more, np.inf for instance, rules a choice out. The limit is exact (exact.py). This is the problem of the intra-operator
parallelism contest (ASPLOS 2025, github.com/google/iopddl).

Example: two nodes with costs (0, 1), an edge that costs 5 where they differ, usages (2, 1) at the same time and a limit
of 3. The choices (0, 0) use 4, which is too much; (0, 1) cost 6; (1, 1) cost 2 and use 2, the optimum.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minialpa.errors import ShardingError
from minialpa.intra.solver.exact import IntegerUsages, integer_usages, usage_array

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

#: Costs from here on mean "not allowed", by the convention of the contest.
FORBIDDEN = 1e18
#: Usages by strategy as the caller gave them: float64, int64, or objects that are integers of any size.
Usages = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """A solution pays `cost[i, j]` when node `a` takes strategy i and node `b` strategy j."""

    a: int
    b: int
    cost: Floats


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CostGraph:
    """Nodes with strategies, and what each combination of strategies costs and uses.

    Attributes:
        node_costs: for each node, the cost of each of its strategies.
        edges: costs of pairs of strategies. Parallel edges add up; an edge from a node to itself adds its diagonal.
        usages: for each node, what each strategy uses while the node is live, never negative; or empty.
        intervals: for each node, its half-open live interval; or empty.
        usage_limit: most usage at any time. None: not limited. A limit needs `usages` or `extra_usages`.
        extra_usages: (node, interval, usage by strategy), further usages; a node may have any number of them.
        integer_usages: all usages and the limit as integers; None without a limit.
    """

    node_costs: tuple[Floats, ...]
    edges: tuple[Edge, ...]
    usages: tuple[Usages, ...] = ()
    intervals: tuple[tuple[int, int], ...] = ()
    usage_limit: float | None = None
    extra_usages: tuple[tuple[int, tuple[int, int], Usages], ...] = ()
    integer_usages: IntegerUsages | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        costs = tuple(_as_array(cost, f"`node_costs[{v}]`", 1) for v, cost in enumerate(self.node_costs))
        sizes = [len(cost) for cost in costs]
        if 0 in sizes:
            raise ShardingError(f"Node {sizes.index(0)} has no strategies; give every node at least one.")

        object.__setattr__(self, "node_costs", costs)
        edges = tuple(_checked_edge(number, edge, sizes) for number, edge in enumerate(self.edges))
        object.__setattr__(self, "edges", edges)

        self._check_limit()
        object.__setattr__(self, "usages", self._checked_usages(sizes))
        object.__setattr__(self, "extra_usages", self._checked_extra_usages(sizes))
        in_integers = None if self.usage_limit is None else integer_usages(self.usage_terms(), self.usage_limit)
        object.__setattr__(self, "integer_usages", in_integers)

    def _check_limit(self) -> None:
        if self.usage_limit is None:
            return
        if not self.usage_limit >= 0:
            raise ShardingError(f"`usage_limit` cannot be negative; got {self.usage_limit}.")

        only_extra = self.extra_usages and not self.usages and not self.intervals
        if not only_extra and (len(self.usages) != self.n_nodes or len(self.intervals) != self.n_nodes):
            raise ShardingError(
                "A `usage_limit` needs one usage and one interval per node; got "
                f"{len(self.usages)} usages and {len(self.intervals)} intervals for {self.n_nodes} nodes."
            )

    def _checked_usages(self, sizes: list[int]) -> tuple[Usages, ...]:
        if len(self.usages) not in (0, len(sizes)):
            raise ShardingError(f"Usages are of all nodes or of none; got {len(self.usages)} for {len(sizes)} nodes.")
        return tuple(usage_array(usage, f"`usages[{v}]`", sizes[v]) for v, usage in enumerate(self.usages))

    def _checked_extra_usages(self, sizes: list[int]) -> tuple[tuple[int, tuple[int, int], Usages], ...]:
        extras = []
        for node, interval, usage in self.extra_usages:
            if not 0 <= node < len(sizes):
                raise ShardingError(f"An extra usage is of node {node}; nodes are 0 to {len(sizes) - 1}.")
            extras.append((node, interval, usage_array(usage, f"An extra usage of node {node}", sizes[node])))
        return tuple(extras)

    @property
    def n_nodes(self) -> int:
        return len(self.node_costs)

    def usage_terms(self) -> Iterator[tuple[int, tuple[int, int], Usages]]:
        """(node, interval, usage by strategy) of `usages` and `extra_usages`."""
        yield from zip(range(len(self.usages)), self.intervals, self.usages, strict=False)
        yield from self.extra_usages

    def cost_of(self, choices: tuple[int, ...]) -> float:
        """Objective of one strategy per node; np.inf where any part of it is forbidden."""
        nodes = [float(cost[i]) for cost, i in zip(self.node_costs, choices, strict=True)]
        edges = [float(edge.cost[choices[edge.a], choices[edge.b]]) for edge in self.edges]
        return sum(nodes) + sum(edges) if max(nodes + edges, default=0.0) < FORBIDDEN else np.inf

    def peak_usage(self, choices: tuple[int, ...]) -> float:
        """Most usage at any time; 0 where usage is not limited."""
        return self._peak_units(choices) / self.integer_usages.units if self.integer_usages else 0.0

    def fits(self, choices: tuple[int, ...]) -> bool:
        """Whether the usage stays within the limit at every time, exactly."""
        return self.integer_usages is None or self._peak_units(choices) <= self.integer_usages.limit

    def _peak_units(self, choices: tuple[int, ...]) -> int:
        """Most usage at any time, in the units of `integer_usages`."""
        assert self.integer_usages is not None
        change: dict[int, int] = {}
        for node, (start, end), usage in self.integer_usages.terms:
            used = int(usage[choices[node]])
            change[start] = change.get(start, 0) + used
            change[end] = change.get(end, 0) - used
        return max(itertools.accumulate((change[time] for time in sorted(change)), initial=0))


@dataclass(frozen=True, slots=True)
class GraphSolution:
    """One strategy for each node, and what is known about it.

    Attributes:
        choices: the strategy of each node.
        cost: the objective of `choices`.
        lower_bound: no solution costs less.
        optimal: whether `cost` is proven to be the least.
    """

    choices: tuple[int, ...]
    cost: float
    lower_bound: float
    optimal: bool

    @property
    def gap(self) -> float:
        """(cost - lower_bound) / |cost|: 0 is optimal. Infinite when the cost is 0 and the bound is not."""
        if self.cost <= self.lower_bound:
            return 0.0
        return (self.cost - self.lower_bound) / abs(self.cost) if self.cost else np.inf


def _as_array(values: Any, name: str, ndim: int) -> Floats:
    array = np.array(values, np.float64)
    if array.ndim != ndim:
        raise ShardingError(f"{name} needs {ndim} dimension{'s' * (ndim > 1)}; got shape {array.shape}.")
    if np.isnan(array).any() or np.isneginf(array).any():
        raise ShardingError(f"{name} holds NaN or -inf; forbid a choice with `np.inf`.")
    array.flags.writeable = False
    return array


def _checked_edge(number: int, edge: Edge, sizes: list[int]) -> Edge:
    if not (0 <= edge.a < len(sizes) and 0 <= edge.b < len(sizes)):
        raise ShardingError(f"Edge {number} joins nodes {edge.a} and {edge.b}; nodes are 0 to {len(sizes) - 1}.")
    cost = _as_array(edge.cost, f"The cost of edge {number}", 2)
    if cost.shape != (sizes[edge.a], sizes[edge.b]):
        raise ShardingError(
            f"Edge {number} joins nodes with {sizes[edge.a]} and {sizes[edge.b]} strategies; "
            f"its cost has shape {cost.shape}."
        )
    return Edge(edge.a, edge.b, cost)
