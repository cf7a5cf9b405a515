"""Local search on forests: nodes that share a scarce row trade capacity with each other. Compiled by numba.

A tree of minialpa/intra/solver/local_search.py changes strategies one by one, and each change must fit. Where rows are
full, a node can use more of a row only if another node, often far away in the graph, uses less of it. So this search
grows some trees around nodes that use one random scarce row, holds all other nodes, and finds the best strategies of
the whole forest by dynamic programming, at first without limits. If they exceed a row r, the row gets a price within
the forest, and the forest is solved for this price. It is near the price at which new and old strategies cost the same:
                                                                                                             -> _trade
    price_r <- price_r + m (c_p(old) - c_p(new)) / (u_r(new) - u_r(old)),   m random, 1/4 to 5/4
with c_p the cost under the present prices. For one row this is the secant step to the best price (the Lagrange dual of
one constraint), so that few solutions are needed.

Costs have noise, -t log(-log U) for U uniform in (0, 1). The best strategies are then samples of about the Boltzmann
distribution at temperature t (perturb and MAP; Papandreou and Yuille, 2011). Strategies that fit are taken if they cost
no more, or with probability exp(-increase / t) (annealing; Kirkpatrick et al., 1983).              -> anneal_forests

Example: a row has capacity 3, and two nodes use (2, 1) at costs (0, 1) and (0, 5). From the choices (0, 1) no single
node can change. A forest of both finds (1, 0), with the same usage and a cost that is 4 lower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np

from minialpa.intra.solver import local_search
from minialpa.intra.solver.cost_graph import Floats, Ints
from minialpa.intra.solver.csr_graph import Core
from minialpa.intra.solver.local_search import LARGEST_TREE, Tree

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """`function` as machine code of this process only: minialpa's machine code files have only minialpa's loops."""
    return cast(_Function, numba.njit(function))


def _dispatcher(loop: _Function) -> _Function:
    """The machine code of a loop of minialpa, which is all that other compiled functions call."""
    return cast(_Function, cast(Any, loop).dispatcher)


descend, empty_tree = _dispatcher(local_search.descend), _dispatcher(local_search.empty_tree)
edge_cost, gain = _dispatcher(local_search.edge_cost), _dispatcher(local_search.gain)
grow = _dispatcher(local_search.grow)
n_joined, node_costs = _dispatcher(local_search.n_joined), _dispatcher(local_search.node_costs)
swap_usage, usage_of = _dispatcher(local_search.swap_usage), _dispatcher(local_search.usage_of)
#: Most trees of a forest.
_MOST_TREES = 8
#: Random nodes that are tried in the search for a user of the row.
_LOOKS = 30
#: Solutions of one forest.
_TRIES = 5


class Scarce(NamedTuple):
    """The rows and nodes around which forests grow.

    Attributes:
        rows: the rows with scarce capacity.
        users: the nodes that use any row.
    """

    rows: Ints
    users: Ints


def scarce_rows(core: Core, prices: Floats, x: Ints, nearly: float) -> Scarce:
    """Rows that have a price, or of which `x` leaves at most the fraction `nearly`; and all nodes with usage."""
    left = core.slack - usage_of(core, x)
    rows = np.flatnonzero((prices > 0) | (left <= nearly * core.slack))
    return Scarce(rows, np.flatnonzero(np.diff(core.segments)))


@compiled
def anneal_forests(
    core: Core, scarce: Scarce, x: Ints, best: Ints, n_forests: int, hot: float, cold: float, seed: int
) -> float:
    """Solve `n_forests` forests by the formulas above, and change `x`; temperatures fall from `hot` to `cold`.

    If any choices on the way cost less than the first, `best` becomes the cheapest of them. Returns the saved cost.
    """
    np.random.seed(seed)
    tree, own = empty_tree(core), np.empty((LARGEST_TREE, core.widest))
    used = usage_of(core, x)
    saved, most_saved = 0.0, 0.0
    for n in range(n_forests):
        temperature = hot * (cold / hot) ** (n / n_forests) if hot > 0 else 0.0
        count = _plant(core, tree, scarce)
        node_costs(core, tree, count, core.cost, x)
        _add_noise(core, tree, count, temperature)
        gained = _trade(core, tree, own, count, used, x, temperature)

        for k in range(count):
            tree.place[tree.nodes[k]] = -1
            x[tree.nodes[k]] = tree.new[k]
        saved += gained
        if saved > most_saved:
            most_saved = saved
            best[:] = x
    return most_saved


@compiled
def _plant(core: Core, tree: Tree, scarce: Scarce) -> int:
    """Grow trees around nodes that use a random scarce row, or one tree anywhere; returns the number of nodes."""
    n_nodes = len(core.at) - 1
    limit = np.random.randint(1, LARGEST_TREE + 1)
    if not len(scarce.rows) or not len(scarce.users) or np.random.random() < 0.3:
        return grow(core, tree, 0, np.random.randint(n_nodes), limit)

    row, n_trees = scarce.rows[np.random.randint(len(scarce.rows))], np.random.randint(2, _MOST_TREES + 1)
    count = 0
    for k in range(n_trees):
        root = _user_of(core, scarce, row)
        if count < limit and root >= 0 and tree.place[root] < 0 and n_joined(core, tree, root) == 0:
            count = grow(core, tree, count, root, min(limit, count + 1 + (limit - count) // (n_trees - k)))
    return count


@compiled
def _user_of(core: Core, scarce: Scarce, row: int) -> int:
    """A random node that uses `row`; -1 after `_LOOKS` tries without success."""
    for _ in range(_LOOKS):
        node = scarce.users[np.random.randint(len(scarce.users))]
        if _segment_of(core, node, row) >= 0:
            return int(node)
    return -1


@compiled
def _segment_of(core: Core, node: int, row: int) -> int:
    """The segment of `node` that covers `row`; -1 if there is no such segment."""
    for segment in range(core.segments[node], core.segments[node + 1]):
        if core.start[segment] <= row < core.end[segment]:
            return segment
    return -1


@compiled
def _add_noise(core: Core, tree: Tree, count: int, temperature: float) -> None:
    """Subtract the noise -t log(-log U) from the cost of each strategy."""
    if temperature > 0:
        for k in range(count):
            for i in range(core.at[tree.nodes[k] + 1] - core.at[tree.nodes[k]]):
                tree.cost[k, i] += temperature * np.log(-np.log(np.random.random() + 1e-300) + 1e-300)


@compiled
def _trade(core: Core, tree: Tree, own: Floats, count: int, used: Ints, x: Ints, temperature: float) -> float:
    """Write the new strategies of the forest to `new`, and their usage to `used`; returns the saved cost."""
    own[:count] = tree.cost[:count]
    for _ in range(_TRIES):
        tree.cost[:count] = own[:count]
        descend(core, tree, count)
        if not _differs(tree, count):
            return 0.0

        swap_usage(core, tree, count, used, 1)
        row = _worst_row(core, tree, count, used)
        if row < 0:
            saved = gain(core, tree, count, core.cost, x)
            if saved >= 0 or np.random.random() * temperature < temperature * np.exp(saved / max(temperature, 1e-300)):
                return saved
        swap_usage(core, tree, count, used, -1)
        if row < 0 or not _raise_price(core, tree, own, count, row):
            break
    tree.new[:count] = tree.old[:count]
    return 0.0


@compiled
def _differs(tree: Tree, count: int) -> bool:
    """Whether any strategy is new."""
    return bool((tree.new[:count] != tree.old[:count]).any())


@compiled
def _worst_row(core: Core, tree: Tree, count: int, used: Ints) -> int:
    """The most exceeded row among the rows that some node uses more than before; -1 if there is no such row."""
    worst, most = -1, 0
    for k in range(count):
        node = tree.nodes[k]
        for segment in range(core.segments[node], core.segments[node + 1]):
            usage_at = core.usage_at[segment]
            if core.usage[usage_at + tree.new[k]] > core.usage[usage_at + tree.old[k]]:
                for row in range(core.start[segment], core.end[segment]):
                    if used[row] - core.slack[row] > most:
                        worst, most = row, used[row] - core.slack[row]
    return worst


@compiled
def _raise_price(core: Core, tree: Tree, own: Floats, count: int, row: int) -> bool:
    """Add the secant step of `row` to the costs `own`; returns whether the step is defined."""
    more, cheaper = 0, 0.0
    for k in range(count):
        segment, node = _segment_of(core, tree.nodes[k], row), tree.nodes[k]
        if segment >= 0:
            usage_at = core.usage_at[segment]
            more += core.usage[usage_at + tree.new[k]] - core.usage[usage_at + tree.old[k]]
        cheaper += own[k, tree.old[k]] - own[k, tree.new[k]]
        if tree.parent[k] >= 0:
            above = tree.parent[k]
            cheaper += edge_cost(core, tree.link[k], tree.old[above], tree.old[k])
            cheaper -= edge_cost(core, tree.link[k], tree.new[above], tree.new[k])
    if more <= 0:
        return False

    price = max(cheaper, 0.0) / more * (0.25 + np.random.random())
    for k in range(count):
        segment, node = _segment_of(core, tree.nodes[k], row), tree.nodes[k]
        if segment >= 0:
            for i in range(core.at[node + 1] - core.at[node]):
                own[k, i] += price * core.usage[core.usage_at[segment] + i]
    return price > 0
