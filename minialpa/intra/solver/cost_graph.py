"""The problem (`CostGraph`) and the answer (`GraphSolution`) of the solver: one strategy s_v for each node v.

    minimise   sum_v c_v[s_v] + sum_(a,b) E_ab[s_a, s_b]
    subject to sum_{v live at t} u_v[s_v] <= usage_limit   at every time t

Costs of `FORBIDDEN` or more rule a choice out. Usages are integers, so their sums are exact. Source: the intra-operator
parallelism contest (ASPLOS 2025, github.com/google/iopddl).

Example: two nodes with costs (0, 1), an edge that costs 5 if their strategies differ, usages (2, 1) at the same time
and a limit of 3. The choices (0, 0) use 4, too much; (0, 1) cost 6; (1, 1) cost 2 and use 2, the optimum.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minialpa.errors import ShardingError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
#: A node, the half-open interval in which it is live, and the usage of each strategy.
NodeUsage = tuple[int, tuple[int, int], Ints]

#: Costs from here on mean "not allowed", by the convention of the contest.
FORBIDDEN = 1e18
#: The largest usages of all nodes sum to less than this: sums with the limit fit in int64.
MOST_USAGE = 2**60


@dataclass(frozen=True, slots=True, eq=False)
class EdgeCosts:
    """The costs of the pairs of strategies of two nodes, as a small table.

        cost[i, j] = table[rows[i], columns[j]]

    An edge reshards one array, and strategies with the same spec of this array are of one *kind*: they share a row or
    column. On a mesh of three axes, a node has a thousand strategies, and an array a hundred specs. Each row and column
    has a strategy.
    """

    table: Floats
    rows: Ints
    columns: Ints

    @staticmethod
    def of(matrix: Floats) -> EdgeCosts:
        return EdgeCosts(matrix, *map(np.arange, matrix.shape))

    @property
    def shape(self) -> tuple[int, int]:
        """Strategies of both nodes."""
        return len(self.rows), len(self.columns)

    @property
    def T(self) -> EdgeCosts:
        return EdgeCosts(self.table.T, self.columns, self.rows)

    def at(self, i: int, j: int) -> float:
        return float(self.table[self.rows[i], self.columns[j]])

    def dense(self) -> Floats:
        """[strategy, strategy]."""
        return self.table[self.rows[:, None], self.columns]

    def take(self, numbers: Ints | Bools) -> EdgeCosts:
        """With the strategies `numbers` of the first node: a mask, or numbers in any order."""
        rows = self.rows[numbers]
        used = np.zeros(len(self.table), np.bool_)
        used[rows] = True
        if used.all():
            return EdgeCosts(self.table, rows, self.columns)
        return EdgeCosts(self.table[used], (np.cumsum(used) - 1)[rows], self.columns)

    def __add__(self, other: EdgeCosts) -> EdgeCosts:
        rows, mine, theirs = _joint(self.rows, other.rows)
        columns, of_mine, of_theirs = _joint(self.columns, other.columns)
        return EdgeCosts(self.table[mine[:, None], of_mine] + other.table[theirs[:, None], of_theirs], rows, columns)


def _joint(first: Ints, second: Ints) -> tuple[Ints, Ints, Ints]:
    """The kinds of strategies that differ in `first` or `second`, and the entry of both for each kind."""
    if first is second:
        kinds = np.arange(first.max() + 1)
        return first, kinds, kinds
    width = int(second.max()) + 1
    kinds, joint = np.unique(first * width + second, return_inverse=True)
    return joint, kinds // width, kinds % width


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """`cost` is paid by the strategies of `a` and `b`, its rows and columns."""

    a: int
    b: int
    cost: EdgeCosts


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CostGraph:
    """The problem. Raises ShardingError for wrong shapes, NaN, or usages that are not integers of zero or more.

    Attributes:
        edges: parallel edges add up; an edge from a node to itself adds its diagonal.
        usages: any number per node.
        usage_limit: at any time; None for no limit.
    """

    node_costs: tuple[Floats, ...]
    edges: tuple[Edge, ...]
    usages: tuple[NodeUsage, ...] = ()
    usage_limit: int | None = None

    def __post_init__(self) -> None:
        costs = tuple(_as_array(cost, f"`node_costs[{v}]`", 1) for v, cost in enumerate(self.node_costs))
        sizes = [len(cost) for cost in costs]
        if 0 in sizes:
            raise ShardingError(f"`node_costs[{sizes.index(0)}]` is empty. Give each node at least one strategy.")

        object.__setattr__(self, "node_costs", costs)
        edges = tuple(_checked_edge(number, edge, sizes) for number, edge in enumerate(self.edges))
        object.__setattr__(self, "edges", edges)

        if self.usage_limit is not None and self.usage_limit < 0:
            raise ShardingError(f"`usage_limit` must be 0 or more; got {self.usage_limit}.")
        object.__setattr__(self, "usages", _checked_usages(self.usages, sizes))

    @property
    def n_nodes(self) -> int:
        return len(self.node_costs)

    def cost_of(self, choices: tuple[int, ...]) -> float:
        """Infinite if any summand is forbidden."""
        nodes = [float(cost[i]) for cost, i in zip(self.node_costs, choices, strict=True)]
        edges = [edge.cost.at(choices[edge.a], choices[edge.b]) for edge in self.edges]
        return sum(nodes) + sum(edges) if max(nodes + edges, default=0.0) < FORBIDDEN else np.inf

    def peak_usage(self, choices: tuple[int, ...]) -> int:
        change: dict[int, int] = {}
        for node, (start, end), usage in self.usages:
            used = int(usage[choices[node]])
            change[start] = change.get(start, 0) + used
            change[end] = change.get(end, 0) - used
        return max(itertools.accumulate((change[time] for time in sorted(change)), initial=0))

    def fits(self, choices: tuple[int, ...]) -> bool:
        return self.usage_limit is None or self.peak_usage(choices) <= self.usage_limit


@dataclass(frozen=True, slots=True)
class GraphSolution:
    """One strategy for each node; no solution costs less than `lower_bound`."""

    choices: tuple[int, ...]
    cost: float
    lower_bound: float
    optimal: bool

    @property
    def gap(self) -> float:
        """(cost - lower_bound) / |cost|; infinite if the cost is 0 and the bound is negative."""
        if self.cost <= self.lower_bound:
            return 0.0
        return (self.cost - self.lower_bound) / abs(self.cost) if self.cost else np.inf


def _as_array(values: Any, name: str, ndim: int) -> Floats:
    array = np.array(values, np.float64)
    if array.ndim != ndim:
        raise ShardingError(f"{name} must have {ndim} dimension{'s' * (ndim > 1)}; got shape {array.shape}.")
    if np.isnan(array).any() or np.isneginf(array).any():
        raise ShardingError(f"{name} has a value NaN or -inf. Use `np.inf` to forbid a choice.")
    array.flags.writeable = False
    return array


def _checked_edge(number: int, edge: Edge, sizes: list[int]) -> Edge:
    if not (0 <= edge.a < len(sizes) and 0 <= edge.b < len(sizes)):
        raise ShardingError(
            f"`edges[{number}]` joins the nodes {edge.a} and {edge.b}. Use nodes from 0 to {len(sizes) - 1}."
        )
    table, shape = _as_array(edge.cost.table, f"`edges[{number}].cost`", 2), edge.cost.shape
    if shape != (sizes[edge.a], sizes[edge.b]):
        raise ShardingError(
            f"`edges[{number}]` joins nodes with {sizes[edge.a]} and {sizes[edge.b]} strategies, but its cost has the "
            f"shape {shape}. Give a cost of shape {(sizes[edge.a], sizes[edge.b])}."
        )
    return Edge(edge.a, edge.b, replace(edge.cost, table=table))


def _checked_usages(usages: tuple[NodeUsage, ...], sizes: list[int]) -> tuple[NodeUsage, ...]:
    """The live and positive usages, as int64."""
    checked: list[NodeUsage] = []
    for node, (start, end), values in usages:
        if not 0 <= node < len(sizes):
            raise ShardingError(f"`usages` has the node {node}. Use nodes from 0 to {len(sizes) - 1}.")
        usage = np.array(values)
        if usage.dtype.kind not in "iu" or usage.shape != (sizes[node],) or usage.min() < 0:
            raise ShardingError(
                f"`usages` has {values} for node {node}. Give {sizes[node]} integers of 0 or more, one for each "
                "strategy."
            )
        if start < end and usage.any():
            checked.append((node, (start, end), usage))

    most = sum(int(usage.max()) for _, _, usage in checked)
    if most >= MOST_USAGE:
        raise ShardingError(
            f"The largest values of `usages` add up to {most:.3g}, but the solver takes sums below {MOST_USAGE:.3g}. "
            "Give `usages` and `usage_limit` in a larger unit, such as MiB instead of bytes."
        )
    return tuple((node, interval, usage.astype(np.int64)) for node, interval, usage in checked)
