"""Bucket elimination: exact min-plus elimination with tables over any number of nodes, where the tables stay small.

In: a `Residual` whose nodes of degree 0 to 2 are gone. Out: the same without those connected components that have no
usage rows and a narrow elimination order (Dechter, 1999). Eliminating v replaces all tables over v by
    T[neighbours] = min_s sum of the tables at v = s.
A component is taken whole or left whole, so that what goes to the ILP still has edges between two nodes only.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import networkx as nx
import numpy as np

from minialpa.intra.solver.cost_graph import Floats
from minialpa.intra.solver.residual import Residual

#: Largest joint table, and entries of all joint tables of one component together (about a second of numpy).
_MAX_TABLE = 1_000_000
_MAX_WORK = 100_000_000


@dataclass(frozen=True, slots=True, eq=False)
class _Factor:
    """`table` has one axis for each node of `scope`; a scope is sorted by elimination order."""

    scope: tuple[int, ...]
    table: Floats


def eliminate_narrow_components(residual: Residual) -> None:
    """Decide every component without usage terms for which an elimination order with small tables is found."""
    for component in components(residual):
        if not any(residual.terms[v] for v in component):
            order = _narrow_order(residual, component)
            if order is not None:
                _eliminate_in_order(residual, order)


def components(residual: Residual) -> list[list[int]]:
    """Connected components of the nodes that are left, each in node order."""
    graph = nx.Graph()
    graph.add_nodes_from(residual.alive)
    graph.add_edges_from((v, w) for v in residual.alive for w in residual.adjacent[v])
    return sorted(sorted(component) for component in nx.connected_components(graph))


def _narrow_order(residual: Residual, component: list[int]) -> list[int] | None:
    """Greedy order, smallest joint table first; None when a table or the sum of them passes the limits above."""
    near = {v: set(residual.adjacent[v]) for v in component}
    heap = [(_joint_size(residual, v, near[v]), v) for v in component]
    heapq.heapify(heap)
    order: list[int] = []
    work = 0
    while heap:
        size, v = heapq.heappop(heap)
        if v not in near or size != _joint_size(residual, v, near[v]):
            continue  # an entry from before v or its neighbourhood changed
        work += size
        if size > _MAX_TABLE or work > _MAX_WORK:
            return None
        order.append(v)
        clique = near.pop(v)
        for w in clique:
            near[w] = (near[w] | clique) - {v, w}
            heapq.heappush(heap, (_joint_size(residual, w, near[w]), w))
    return order


def _joint_size(residual: Residual, v: int, near: set[int]) -> int:
    return math.prod(len(residual.costs[w]) for w in (v, *near))


def _eliminate_in_order(residual: Residual, order: list[int]) -> None:
    """Each factor waits in the bucket of the first of its nodes to be eliminated."""
    place = {v: at for at, v in enumerate(order)}
    buckets = {v: [_Factor((v,), residual.costs[v])] for v in order}
    for v in order:
        buckets[v] += [_Factor((v, w), cost) for w, cost in residual.adjacent[v].items() if place[v] < place[w]]
    for v in order:
        scope = tuple(sorted({w for factor in buckets[v] for w in factor.scope}, key=place.__getitem__))
        joint = _join(buckets.pop(v), scope)
        best = joint.argmin(axis=0)
        least = np.take_along_axis(joint, best[None], axis=0)[0]
        residual.decide(v, scope[1:], best)
        if scope[1:]:
            buckets[scope[1]].append(_Factor(scope[1:], least))
        else:
            residual.offset += float(least)


def _join(factors: list[_Factor], scope: tuple[int, ...]) -> Floats:
    """Sum of `factors` as one table over `scope`, whose first node all of them share."""
    joint: Floats = np.zeros((1,) * len(scope))
    for factor in factors:
        sizes = dict(zip(factor.scope, factor.table.shape, strict=True))
        joint = joint + factor.table.reshape(tuple(sizes.get(w, 1) for w in scope))
    return joint
