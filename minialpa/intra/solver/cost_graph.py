"""The problem that picks one strategy per node: node costs, edge costs and a limit on usage over time.

    minimise   sum_v c_v[s_v] + sum_(a,b) E_ab[s_a, s_b]
    subject to sum_{v live at t} u_v[s_v] <= usage_limit   at every time t

`CostGraph` holds c, E and u, `GraphSolution` holds s. Costs of `FORBIDDEN` and above, np.inf among them, rule a choice
out. The limit is exact: see exact.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minialpa.errors import ShardingError
from minialpa.intra.solver.exact import WholeUsages, usage_array, whole_usages

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

#: Costs from here on mean "not allowed" (the convention of the intra-operator parallelism contest).
FORBIDDEN = 1e18
#: Usages by strategy as they came in: float64, int64, or objects that are integers of any size.
Usages = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """`cost[i, j]` is paid when node `a` takes strategy i and node `b` strategy j."""

    a: int
    b: int
    cost: Floats


@dataclass(frozen=True, slots=True, eq=False)
class CostGraph:
    """Nodes with strategies, and what combinations of them cost.

    node_costs[v][i]: cost of strategy i of node v. Parallel edges add up; an edge from a node to itself adds its
    diagonal.
    usages[v][i]: what strategy i uses while v is live, never negative; intervals[v]: half-open live interval of v.
    Both are empty, or have one entry per node. `usage_limit=None` means that usage is not limited; a limit needs
    usages, or `extra_usages`.
    extra_usages: (node, interval, usage by strategy), more of the same; a node may have any number of them.
    whole: all of that in whole numbers, where there is a limit.
    """

    node_costs: tuple[Floats, ...]
    edges: tuple[Edge, ...]
    usages: tuple[Usages, ...] = ()
    intervals: tuple[tuple[int, int], ...] = ()
    usage_limit: float | None = None
    extra_usages: tuple[tuple[int, tuple[int, int], Usages], ...] = ()
    whole: WholeUsages | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        costs = tuple(_as_array(cost, f"`node_costs[{v}]`", 1) for v, cost in enumerate(self.node_costs))
        sizes = [len(cost) for cost in costs]
        if 0 in sizes:
            raise ShardingError(f"Node {sizes.index(0)} has no strategies; give every node at least one.")
        object.__setattr__(self, "node_costs", costs)
        object.__setattr__(self, "edges", tuple(_checked_edge(e, edge, sizes) for e, edge in enumerate(self.edges)))
        self._check_usages(sizes)
        whole = None if self.usage_limit is None else whole_usages(self.usage_terms(), self.usage_limit)
        object.__setattr__(self, "whole", whole)

    def _check_usages(self, sizes: list[int]) -> None:
        n_nodes = len(sizes)
        if self.usage_limit is not None:
            if not self.usage_limit >= 0:
                raise ShardingError(f"`usage_limit` cannot be negative; got {self.usage_limit}.")
            only_extra = self.extra_usages and not self.usages and not self.intervals
            if not only_extra and (len(self.usages) != n_nodes or len(self.intervals) != n_nodes):
                raise ShardingError(
                    "A `usage_limit` needs one usage and one interval per node; got "
                    f"{len(self.usages)} usages and {len(self.intervals)} intervals for {n_nodes} nodes."
                )
        if len(self.usages) not in (0, n_nodes):
            raise ShardingError(f"Usages are of all nodes or of none; got {len(self.usages)} for {n_nodes} nodes.")
        usages = tuple(usage_array(usage, f"`usages[{v}]`", sizes[v]) for v, usage in enumerate(self.usages))
        object.__setattr__(self, "usages", usages)
        extras = []
        for v, interval, usage in self.extra_usages:
            if not 0 <= v < n_nodes:
                raise ShardingError(f"An extra usage is of node {v}; nodes are 0 to {n_nodes - 1}.")
            extras.append((v, interval, usage_array(usage, f"An extra usage of node {v}", sizes[v])))
        object.__setattr__(self, "extra_usages", tuple(extras))

    @property
    def n_nodes(self) -> int:
        return len(self.node_costs)

    def usage_terms(self) -> Iterator[tuple[int, tuple[int, int], Usages]]:
        """(node, interval, usage by strategy) of everything that uses something."""
        yield from zip(range(len(self.usages)), self.intervals, self.usages, strict=False)
        yield from self.extra_usages

    def cost_of(self, choices: tuple[int, ...]) -> float:
        """Objective of one strategy per node; np.inf where any part of it is forbidden."""
        nodes = [float(c[i]) for c, i in zip(self.node_costs, choices, strict=True)]
        edges = [float(edge.cost[choices[edge.a], choices[edge.b]]) for edge in self.edges]
        return sum(nodes) + sum(edges) if max(nodes + edges, default=0.0) < FORBIDDEN else np.inf

    def peak_usage(self, choices: tuple[int, ...]) -> float:
        """Most usage at any time; 0 where usage is not limited."""
        return self._peak(choices) / self.whole.units if self.whole else 0.0

    def _peak(self, choices: tuple[int, ...]) -> int:
        """Most usage at any time, in the units of `whole`."""
        assert self.whole is not None
        change: dict[int, int] = {}
        for v, (start, end), usage in self.whole.terms:
            n = int(usage[choices[v]])
            change[start] = change.get(start, 0) + n
            change[end] = change.get(end, 0) - n
        return max(itertools.accumulate((change[time] for time in sorted(change)), initial=0))

    def fits(self, choices: tuple[int, ...]) -> bool:
        """Whether the usage stays within the limit at every time, exactly."""
        return self.whole is None or self._peak(choices) <= self.whole.limit


@dataclass(frozen=True, slots=True)
class GraphSolution:
    """One strategy per node, its cost, and a bound that no solution can be below; `optimal` when it is proven."""

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


def _checked_edge(e: int, edge: Edge, sizes: list[int]) -> Edge:
    if not (0 <= edge.a < len(sizes) and 0 <= edge.b < len(sizes)):
        raise ShardingError(f"Edge {e} joins nodes {edge.a} and {edge.b}; nodes are 0 to {len(sizes) - 1}.")
    cost = _as_array(edge.cost, f"The cost of edge {e}", 2)
    if cost.shape != (sizes[edge.a], sizes[edge.b]):
        raise ShardingError(
            f"Edge {e} joins nodes with {sizes[edge.a]} and {sizes[edge.b]} strategies; "
            f"its cost has shape {cost.shape}."
        )
    return Edge(edge.a, edge.b, cost)
