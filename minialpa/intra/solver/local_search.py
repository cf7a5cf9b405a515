"""Costs and messages of a `Core` in; choices within the usage limit out. Compiled by numba.

    1. One node after the other takes the cheapest strategy that still fits, by the choices of visited nodes and the
       messages of the others.                                                                    -> round_choices
    2. Dynamic programming finds the best strategies of a random tree, among strategies that fit one by one, while all
       other nodes stay. They are kept if they cost less and fit together.                        -> improve_on_trees
No step exceeds a row further than before, unless rounding finds no strategy that fits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from minialpa.intra.solver.cost_graph import MOST_USAGE, Floats, Ints
from minialpa.intra.solver.csr_graph import Core, line_of
from minialpa.support.loops import compiled

LARGEST_TREE = 50
#: Probability that a node does not join the tree.
_LEAVE_OUT = 0.2
_UNLIMITED = 2 * MOST_USAGE


class Tree(NamedTuple):
    """Buffers for one or a few trees. Place k has a node, after its parent.

    Attributes:
        parent: a place; -1 for a root.
        link: from the parent.
        place: the inverse of `nodes`; -1 for nodes outside of the tree.
        cost: cost[k, i] is the cost of strategy i with the best strategies below.
        best: best[k, i] is the best strategy if the parent takes strategy i.
        old, new: strategy at place k before and after the search.
    """

    nodes: Ints
    parent: Ints
    link: Ints
    place: Ints
    cost: Floats
    best: Ints
    old: Ints
    new: Ints


@compiled
def usage_of(core: Core, x: Ints) -> Ints:
    """x: the strategy of each node."""
    used = np.zeros(len(core.slack), np.int64)
    for v in range(len(core.at) - 1):
        _add_usage(core, used, v, x[v], 1)
    return used


@compiled
def cost_of(core: Core, x: Ints) -> float:
    """Without prices; infinite for a forbidden entry."""
    total = 0.0
    for v in range(len(core.at) - 1):
        cost = core.cost[core.at[v] + x[v]]
        total += cost if cost < core.forbidden else np.inf
        # Each edge counts once.
        for link in range(core.middle[v], core.links[v + 1]):
            cost = edge_cost(core, link, x[v], x[core.other[link]])
            total += cost if cost < core.forbidden else np.inf
    return total


@compiled
def edge_cost(core: Core, link: int, here: int, there: int) -> float:
    return float(core.table[line_of(core, link, here) + core.kind[core.message_at[core.back[link]] + there]])


@compiled
def round_choices(core: Core, priced: Floats, messages: Floats, forward: bool, x: Ints) -> None:
    """Step 1, forward or backwards; writes `x`."""
    n_nodes = len(core.at) - 1
    used = np.zeros(len(core.slack), np.int64)
    ahead = np.empty(core.widest)
    for step in range(n_nodes):
        node = step if forward else n_nodes - 1 - step
        offset, size = core.at[node], core.at[node + 1] - core.at[node]
        for i in range(size):
            ahead[i] = priced[offset + i]

        for link in range(core.links[node], core.links[node + 1]):
            message, line = core.message_at[link], line_of(core, core.back[link], x[core.other[link]])
            visited = (link < core.middle[node]) == forward
            for i in range(size):
                ahead[i] += core.table[line + core.kind[message + i]] if visited else messages[message + i]

        forbid_full(core, used, node, -1, ahead)
        x[node] = _cheapest_strategy(ahead, size)
        _add_usage(core, used, node, x[node], 1)


@compiled
def improve_on_trees(core: Core, priced: Floats, x: Ints, n_trees: int, seed: int) -> int:
    """Step 2; changes `x` and returns the number of changed trees."""
    np.random.seed(seed)
    n_nodes = len(core.at) - 1

    tree = empty_tree(core)
    used = usage_of(core, x)
    n_changed = 0
    for _ in range(n_trees):
        root = np.random.randint(n_nodes)
        count = grow(core, tree, 0, root, np.random.randint(1, LARGEST_TREE + 1))
        node_costs(core, tree, count, priced, x)
        for k in range(count):
            forbid_full(core, used, tree.nodes[k], tree.old[k], tree.cost[k])
        descend(core, tree, count)
        moves = gain(core, tree, count, priced, x) > 0 and _move(core, tree, count, used)
        n_changed += moves

        for k in range(count):
            tree.place[tree.nodes[k]] = -1
            if moves:
                x[tree.nodes[k]] = tree.new[k]
    return n_changed


@compiled
def empty_tree(core: Core) -> Tree:
    places = np.empty((5, LARGEST_TREE), np.int64)
    cost = np.empty((LARGEST_TREE, core.widest))
    best = np.empty((LARGEST_TREE, core.widest), np.int64)
    n_nodes = len(core.at) - 1
    return Tree(places[0], places[1], places[2], np.full(n_nodes, -1), cost, best, places[3], places[4])


@compiled
def grow(core: Core, tree: Tree, first: int, root: int, limit: int) -> int:
    """Add a tree, breadth first, at the places from `first` to `limit` - 1; returns the place after its last node.

    `root` must be outside of `tree`. The new tree has no cycle and no link to earlier trees.
    """
    tree.nodes[first], tree.parent[first], tree.place[root] = root, -1, first
    count, k = first + 1, first
    while k < count and count < limit:
        link_0 = core.links[tree.nodes[k]]
        degree = core.links[tree.nodes[k] + 1] - link_0

        # From a random link on.
        shift = np.random.randint(max(degree, 1))
        for step in range(degree):
            link = link_0 + (step + shift) % degree
            node = core.other[link]
            if (
                count < limit
                and tree.place[node] < 0
                and np.random.random() > _LEAVE_OUT
                and n_joined(core, tree, node) <= 1
            ):
                tree.nodes[count], tree.parent[count], tree.link[count], tree.place[node] = node, k, link, count
                count += 1
        k += 1
    return count


@compiled
def n_joined(core: Core, tree: Tree, node: int) -> int:
    """Neighbours of `node` in the tree, counted up to 2: with two, `node` would close a cycle."""
    joined = 0
    for link in range(core.links[node], core.links[node + 1]):
        joined += tree.place[core.other[link]] >= 0
        if joined > 1:
            break
    return joined


@compiled
def node_costs(core: Core, tree: Tree, count: int, priced: Floats, x: Ints) -> None:
    """Write `old`, and `cost` with the edges to nodes outside of the tree."""
    for k in range(count):
        node = tree.nodes[k]
        offset, size = core.at[node], core.at[node + 1] - core.at[node]
        cost = tree.cost[k]
        for i in range(size):
            cost[i] = priced[offset + i]
        for link in range(core.links[node], core.links[node + 1]):
            if tree.place[core.other[link]] < 0:
                message, line = core.message_at[link], line_of(core, core.back[link], x[core.other[link]])
                for i in range(size):
                    cost[i] += core.table[line + core.kind[message + i]]
        tree.old[k] = x[node]


@compiled
def descend(core: Core, tree: Tree, count: int) -> None:
    """Write `new` by dynamic programming, and add the nodes below to `cost`."""
    # From the leaves up: the best strategy j of a child for strategy i of its parent.
    for k in range(count - 1, 0, -1):
        if tree.parent[k] < 0:
            continue
        link = tree.link[k]
        at_parent, at_child = core.message_at[link], core.message_at[core.back[link]]
        size = core.message_at[core.back[link] + 1] - at_child
        best, least = np.empty(core.n_kinds[link], np.int64), np.empty(core.n_kinds[link])
        for kind in range(core.n_kinds[link]):
            line = core.table_at[link] + kind * core.n_kinds[core.back[link]]
            best[kind], least[kind] = 0, np.inf
            for j in range(size):
                cost_j = core.table[line + core.kind[at_child + j]] + tree.cost[k, j]
                if cost_j < least[kind]:
                    best[kind], least[kind] = j, cost_j
        for i in range(core.message_at[link + 1] - at_parent):
            kind = core.kind[at_parent + i]
            tree.best[k, i] = best[kind]
            tree.cost[tree.parent[k], i] += least[kind]

    for k in range(count):
        if tree.parent[k] < 0:
            root = tree.nodes[k]
            tree.new[k] = _cheapest_strategy(tree.cost[k], core.at[root + 1] - core.at[root])
        else:
            tree.new[k] = tree.best[k, tree.new[tree.parent[k]]]


@compiled
def gain(core: Core, tree: Tree, count: int, priced: Floats, x: Ints) -> float:
    """Cost of `old` minus cost of `new`; sums small differences, for little rounding."""
    total = 0.0
    for k in range(count):
        v, old, new = tree.nodes[k], tree.old[k], tree.new[k]
        total += priced[core.at[v] + old] - priced[core.at[v] + new]

        # Edges of the tree count once, at their later place.
        for link in range(core.links[v], core.links[v + 1]):
            w = core.other[link]
            if tree.place[w] < 0:
                total += edge_cost(core, link, old, x[w]) - edge_cost(core, link, new, x[w])
            elif tree.place[w] < k:
                total += edge_cost(core, link, old, x[w]) - edge_cost(core, link, new, tree.new[tree.place[w]])
    return total


@compiled
def _move(core: Core, tree: Tree, count: int, used: Ints) -> bool:
    """Change `used` from `old` to `new`, or undo it if that exceeds a row with more usage."""
    swap_usage(core, tree, count, used, 1)

    for k in range(count):
        node = tree.nodes[k]
        for segment in range(core.segments[node], core.segments[node + 1]):
            usage_at = core.usage_at[segment]
            if core.usage[usage_at + tree.new[k]] > core.usage[usage_at + tree.old[k]]:
                for row in range(core.start[segment], core.end[segment]):
                    if used[row] > core.slack[row]:
                        swap_usage(core, tree, count, used, -1)
                        return False
    return True


@compiled
def swap_usage(core: Core, tree: Tree, count: int, used: Ints, sign: int) -> None:
    """sign: -1 to go back."""
    for k in range(count):
        if tree.new[k] != tree.old[k]:
            _add_usage(core, used, tree.nodes[k], tree.old[k], -sign)
            _add_usage(core, used, tree.nodes[k], tree.new[k], sign)


@compiled
def _add_usage(core: Core, used: Ints, node: int, i: int, sign: int) -> None:
    for segment in range(core.segments[node], core.segments[node + 1]):
        usage = sign * core.usage[core.usage_at[segment] + i]
        if usage != 0:
            for row in range(core.start[segment], core.end[segment]):
                used[row] += usage


@compiled
def forbid_full(core: Core, used: Ints, node: int, i: int, cost: Floats) -> None:
    """Add `forbidden` to strategies of `node` that do not fit while all others stay. i: included in `used`, or -1."""
    for segment in range(core.segments[node], core.segments[node + 1]):
        usage_at = core.usage_at[segment]
        slack = _UNLIMITED
        for row in range(core.start[segment], core.end[segment]):
            slack = min(slack, core.slack[row] - used[row])
        slack = max(slack, 0) + (core.usage[usage_at + i] if i >= 0 else 0)
        for k in range(core.at[node + 1] - core.at[node]):
            if core.usage[usage_at + k] > slack:
                cost[k] += core.forbidden


@compiled
def _cheapest_strategy(cost: Floats, size: int) -> int:
    best = 0
    for i in range(1, size):
        if cost[i] < cost[best]:
            best = i
    return best
