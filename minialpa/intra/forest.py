"""Improve choices many nodes at a time: exact on random forests of the core, everything else held.

In: `Residual`, the nodes of one part, and choices. Out: choices that cost no more and use no more than the limit. Each
round takes a set of nodes that induces a forest and finds their best choices for the rest as it is, by dynamic
programming from the leaves. A round cannot make things worse, and moves half of a sparse graph at once.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from minialpa.intra.costgraph import Floats
from minialpa.intra.elimination import Residual
from minialpa.intra.greedy import cost_of, usage_of

#: Rounds after each kick, and kicks in all. A round takes a few milliseconds on a core of 300 nodes.
_ROUNDS = 12
_KICKS = 150
#: Nodes around a random one that a kick sets at random.
_KICK_SIZE = 12


def improve_on_forests(residual: Residual, nodes: list[int], choices: dict[int, int]) -> dict[int, int]:
    """Better choices, the same ones for the same input: iterated local search with forests as the neighbourhood."""
    rng = np.random.default_rng(0)
    limited = any(residual.terms[v] for v in nodes)
    best, best_cost = dict(choices), cost_of(residual, choices)
    for kick in range(_KICKS):
        found = _kicked(residual, nodes, best, rng) if kick else best
        for _ in range(_ROUNDS):
            found = _solve_forest(residual, _forest(residual, [nodes[k] for k in rng.permutation(len(nodes))]), found)
        cost = cost_of(residual, found)
        over = limited and usage_of(residual, found).max(initial=0.0) > residual.limit
        if cost <= best_cost and not over:
            best, best_cost = found, cost
    return best


def _kicked(residual: Residual, nodes: list[int], choices: dict[int, int], rng: np.random.Generator) -> dict[int, int]:
    """`choices` with those around a random node set at random."""
    ball = [nodes[int(rng.integers(len(nodes)))]]
    for v in ball:
        ball += [w for w in residual.adjacent[v] if w not in ball]
        if len(ball) >= _KICK_SIZE:
            break
    out = dict(choices)
    out.update((v, int(rng.integers(len(residual.costs[v])))) for v in ball[:_KICK_SIZE])
    return out


def _forest(residual: Residual, order: list[int]) -> set[int]:
    """Nodes, taken greedily in `order`, that close no cycle among themselves."""
    root: dict[int, int] = {}

    def find(v: int) -> int:
        while root[v] != v:
            root[v] = root[root[v]]
            v = root[v]
        return v

    for v in order:
        trees = [find(w) for w in residual.adjacent[v] if w in root]
        if len(set(trees)) == len(trees):
            root[v] = v
            root.update((tree, v) for tree in trees)
    return set(root)


def _solve_forest(residual: Residual, forest: set[int], choices: dict[int, int]) -> dict[int, int]:
    """The best choices on `forest`, with those of all other nodes held."""
    out = dict(choices)
    parents: dict[int, int | None] = {}
    for start in sorted(forest):
        if start in parents:
            continue
        parents[start] = None
        order, queue = [], deque([start])
        while queue:
            v = queue.popleft()
            order.append(v)
            for w in residual.adjacent[v]:
                if w in forest and w != parents[v]:
                    parents[w] = v
                    queue.append(w)
        _solve_tree(residual, forest, order, parents, out)
    return out


def _solve_tree(
    residual: Residual, forest: set[int], order: list[int], parents: dict[int, int | None], out: dict[int, int]
) -> None:
    """Write the best choices of one tree to `out`; `order` lists its nodes from the root down."""
    cost: dict[int, Floats] = {}
    for v in order:
        held = [edge[:, out[w]] for w, edge in residual.adjacent[v].items() if w not in forest]
        cost[v] = residual.costs[v] + sum(held) if held else residual.costs[v].copy()
    best: dict[int, np.ndarray] = {}
    for v in reversed(order):
        parent = parents[v]
        if parent is not None:
            joint = residual.adjacent[parent][v] + cost[v][None, :]
            best[v] = joint.argmin(axis=1)
            cost[parent] = cost[parent] + joint.min(axis=1)
    for v in order:
        parent = parents[v]
        out[v] = int(cost[v].argmin()) if parent is None else int(best[v][out[parent]])
