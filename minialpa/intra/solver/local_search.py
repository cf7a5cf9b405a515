"""Choices that keep to the usage limit: rounding by messages, and local search on trees, compiled by numba.

In: `Core`, costs with prices on usage, messages. Out: `x`, a strategy for each node.
    1. Round: node after node, the strategy that costs least with earlier nodes as chosen and later ones by their
       messages, among those that still fit.                                                       -> round_choices
    2. Improve: take a random tree of nodes, all others held, and find its best strategies by dynamic programming
       from the leaves up, among those that fit one by one. Keep them if they fit together.        -> improve_on_trees
A row that is exceeded to start with is not exceeded further.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from minialpa.intra.solver.cost_graph import Floats, Ints
from minialpa.intra.solver.csr_graph import Core
from minialpa.intra.solver.exact import MOST_BITS
from minialpa.support.machine_code import compiled

#: Most nodes of a tree.
_LARGEST_TREE = 50
#: A node that could join the tree is left out with this probability, for variety.
_LEAVE_OUT = 0.2
#: More than all nodes use together.
_UNLIMITED = 2 ** (MOST_BITS + 1)


class _Tree(NamedTuple):
    """Places of a tree, root first, each after its parent.

    nodes[k]: the node at place k; parent[k]: the place of its parent; link[k]: the link that leads from there to it.
    place[v]: where node v is, or -1. cost[k, i]: cost of strategy i at place k and the best below it; best[k, i]: the
    strategy at k for strategy i of its parent. old[k], new[k]: strategies.
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
    """Usage of every row."""
    used = np.zeros(len(core.room), np.int64)
    for v in range(len(core.at) - 1):
        _use(core, used, v, x[v], 1)
    return used


@compiled
def cost_of(core: Core, x: Ints) -> float:
    """Cost without prices; inf where something is forbidden."""
    total = 0.0
    for v in range(len(core.at) - 1):
        cost = core.cost[core.at[v] + x[v]]
        total += cost if cost < core.forbidden else np.inf
        for h in range(core.middle[v], core.links[v + 1]):
            w = core.other[h]
            cost = core.table[core.table_at[h] + x[v] * (core.at[w + 1] - core.at[w]) + x[w]]
            total += cost if cost < core.forbidden else np.inf
    return total


@compiled
def round_choices(core: Core, priced: Floats, messages: Floats, forward: bool, x: Ints) -> None:
    """Formula 1, in node order or backwards. Where nothing fits, the usage limit is exceeded."""
    n_nodes = len(core.at) - 1
    used = np.zeros(len(core.room), np.int64)
    ahead = np.empty(core.widest)
    for step in range(n_nodes):
        v = step if forward else n_nodes - 1 - step
        a, size = core.at[v], core.at[v + 1] - core.at[v]
        for i in range(size):
            ahead[i] = priced[a + i]
        for h in range(core.links[v], core.links[v + 1]):
            m, t = core.message_at[h], core.table_at[core.back[h]] + x[core.other[h]] * size
            visited = (h < core.middle[v]) == forward
            for i in range(size):
                ahead[i] += core.table[t + i] if visited else messages[m + i]
        _forbid_full(core, used, v, -1, ahead)
        x[v] = _least(ahead, size)
        _use(core, used, v, x[v], 1)


@compiled
def improve_on_trees(core: Core, priced: Floats, x: Ints, n_trees: int, seed: int) -> int:
    """Formula 2 for `n_trees` trees; `x` changes. Returns how many were changed."""
    np.random.seed(seed)
    n_nodes = len(core.at) - 1
    places = np.empty((5, _LARGEST_TREE), np.int64)
    cost = np.empty((_LARGEST_TREE, core.widest))
    best = np.empty((_LARGEST_TREE, core.widest), np.int64)
    tree = _Tree(places[0], places[1], places[2], np.full(n_nodes, -1), cost, best, places[3], places[4])
    used = usage_of(core, x)
    n_changed = 0
    for _ in range(n_trees):
        count = _grow(core, tree, np.random.randint(n_nodes), np.random.randint(1, _LARGEST_TREE + 1))
        _solve(core, tree, count, priced, used, x)
        moves = _gain(core, tree, count, priced, x) > 0 and _move(core, tree, count, used)
        n_changed += moves
        for k in range(count):
            tree.place[tree.nodes[k]] = -1
            if moves:
                x[tree.nodes[k]] = tree.new[k]
    return n_changed


@compiled
def _grow(core: Core, tree: _Tree, root: int, limit: int) -> int:
    """Fill the tree breadth first with nodes that close no cycle; returns their number."""
    tree.nodes[0], tree.parent[0], tree.place[root] = root, -1, 0
    count, k = 1, 0
    while k < count and count < limit:
        first = core.links[tree.nodes[k]]
        degree = core.links[tree.nodes[k] + 1] - first
        turn = np.random.randint(max(degree, 1))
        for step in range(degree):
            h = first + (step + turn) % degree
            w = core.other[h]
            if count < limit and tree.place[w] < 0 and np.random.random() > _LEAVE_OUT and _joins_once(core, tree, w):
                tree.nodes[count], tree.parent[count], tree.link[count], tree.place[w] = w, k, h, count
                count += 1
        k += 1
    return count


@compiled
def _joins_once(core: Core, tree: _Tree, w: int) -> bool:
    joined = 0
    for h in range(core.links[w], core.links[w + 1]):
        joined += tree.place[core.other[h]] >= 0
        if joined > 1:
            return False
    return True


@compiled
def _solve(core: Core, tree: _Tree, count: int, priced: Floats, used: Ints, x: Ints) -> None:
    """Write the strategies that the tree has to `old` and the best ones to `new`."""
    for k in range(count):
        v = tree.nodes[k]
        a, size = core.at[v], core.at[v + 1] - core.at[v]
        cost = tree.cost[k]
        for i in range(size):
            cost[i] = priced[a + i]
        for h in range(core.links[v], core.links[v + 1]):
            if tree.place[core.other[h]] < 0:
                t = core.table_at[core.back[h]] + x[core.other[h]] * size
                for i in range(size):
                    cost[i] += core.table[t + i]
        _forbid_full(core, used, v, x[v], cost)
        tree.old[k] = x[v]
    for k in range(count - 1, 0, -1):
        v, above = tree.nodes[k], tree.nodes[tree.parent[k]]
        size = core.at[v + 1] - core.at[v]
        t = core.table_at[tree.link[k]]
        for i in range(core.at[above + 1] - core.at[above]):
            best, least = 0, np.inf
            for j in range(size):
                cost_j = core.table[t + j] + tree.cost[k, j]
                if cost_j < least:
                    best, least = j, cost_j
            tree.best[k, i] = best
            tree.cost[tree.parent[k], i] += least
            t += size
    root = tree.nodes[0]
    tree.new[0] = _least(tree.cost[0], core.at[root + 1] - core.at[root])
    for k in range(1, count):
        tree.new[k] = tree.best[k, tree.new[tree.parent[k]]]


@compiled
def _gain(core: Core, tree: _Tree, count: int, priced: Floats, x: Ints) -> float:
    """What `new` costs less than `old`: summed difference by difference, which rounding hardly touches."""
    gain = 0.0
    for k in range(count):
        v, old, new = tree.nodes[k], tree.old[k], tree.new[k]
        size = core.at[v + 1] - core.at[v]
        gain += priced[core.at[v] + old] - priced[core.at[v] + new]
        for h in range(core.links[v], core.links[v + 1]):
            w = core.other[h]
            t = core.table_at[core.back[h]]
            if tree.place[w] < 0:
                gain += core.table[t + x[w] * size + old] - core.table[t + x[w] * size + new]
            elif tree.place[w] < k:
                gain += core.table[t + x[w] * size + old] - core.table[t + tree.new[tree.place[w]] * size + new]
    return gain


@compiled
def _move(core: Core, tree: _Tree, count: int, used: Ints) -> bool:
    """Let `used` go from `old` to `new`; if a row that gains is then exceeded, undo that and return False."""
    for k in range(count):
        if tree.new[k] != tree.old[k]:
            _use(core, used, tree.nodes[k], tree.old[k], -1)
            _use(core, used, tree.nodes[k], tree.new[k], 1)
    for k in range(count):
        v = tree.nodes[k]
        for s in range(core.segments[v], core.segments[v + 1]):
            u = core.usage_at[s]
            if core.usage[u + tree.new[k]] > core.usage[u + tree.old[k]]:
                for r in range(core.start[s], core.end[s]):
                    if used[r] > core.room[r]:
                        _undo(core, tree, count, used)
                        return False
    return True


@compiled
def _undo(core: Core, tree: _Tree, count: int, used: Ints) -> None:
    for k in range(count):
        if tree.new[k] != tree.old[k]:
            _use(core, used, tree.nodes[k], tree.new[k], -1)
            _use(core, used, tree.nodes[k], tree.old[k], 1)


@compiled
def _use(core: Core, used: Ints, v: int, i: int, sign: int) -> None:
    """Add to `used`, or with sign -1 take off, what strategy i of v uses."""
    for s in range(core.segments[v], core.segments[v + 1]):
        usage = sign * core.usage[core.usage_at[s] + i]
        if usage != 0:
            for r in range(core.start[s], core.end[s]):
                used[r] += usage


@compiled
def _forbid_full(core: Core, used: Ints, v: int, i: int, cost: Floats) -> None:
    """Add `forbidden` to strategies of v that do not fit when v leaves i (-1: it has none) and all else stays."""
    for s in range(core.segments[v], core.segments[v + 1]):
        u = core.usage_at[s]
        room = _UNLIMITED
        for r in range(core.start[s], core.end[s]):
            room = min(room, core.room[r] - used[r])
        room = max(room, 0) + (core.usage[u + i] if i >= 0 else 0)
        for k in range(core.at[v + 1] - core.at[v]):
            if core.usage[u + k] > room:
                cost[k] += core.forbidden


@compiled
def _least(cost: Floats, size: int) -> int:
    """The first place of the least among the first `size` entries."""
    best = 0
    for i in range(1, size):
        if cost[i] < cost[best]:
            best = i
    return best
