"""A `Residual` in and out; its small connected components without usage terms are decided exactly.

Bucket elimination (Dechter, 1999) removes nodes with any number of neighbours, where elimination.py stops at two. It
replaces all tables over node v by one table over its neighbours:
    T[neighbours] = min_s (sum of the tables over v, at v = s)
A component is decided if a greedy order keeps all tables small. So small steps are planned without loading the compiled
loops or HiGHS, which takes half a second.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from minialpa.intra.solver.cost_graph import Floats
from minialpa.intra.solver.residual import Residual

#: Most entries of one joint table: 8 MB of float64.
_MAX_TABLE = 1_000_000
#: Most entries of all joint tables of one component: about a second of NumPy.
_MAX_WORK = 100_000_000


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """`table` has one axis per node of `scope`, which is in elimination order."""

    scope: tuple[int, ...]
    table: Floats


def eliminate_narrow_components(residual: Residual) -> None:
    for component in components(residual):
        if not any(residual.terms[node] for node in component):
            order = _narrow_order(residual, component)
            if order is not None:
                _eliminate_in_order(residual, order)


def components(residual: Residual) -> list[list[int]]:
    found: list[list[int]] = []
    seen: set[int] = set()
    for first in sorted(residual.alive):
        if first in seen:
            continue
        seen.add(first)
        component = [first]
        for node in component:  # grows
            new = [neighbour for neighbour in residual.adjacent[node] if neighbour not in seen]
            seen.update(new)
            component += new
        found.append(sorted(component))
    return found


def _narrow_order(residual: Residual, component: list[int]) -> list[int] | None:
    """Greedy elimination order, smallest joint table first; None if tables are too large."""
    near = {v: set(residual.adjacent[v]) for v in component}
    heap = [(_joint_size(residual, v, near[v]), v) for v in component]
    heapq.heapify(heap)

    order: list[int] = []
    work = 0
    while heap:
        size, node = heapq.heappop(heap)
        # Outdated: the heap has a newer entry.
        if node not in near or size != _joint_size(residual, node, near[node]):
            continue

        work += size
        if size > _MAX_TABLE or work > _MAX_WORK:
            return None
        order.append(node)

        clique = near.pop(node)
        for w in clique:
            near[w] = (near[w] | clique) - {node, w}
            heapq.heappush(heap, (_joint_size(residual, w, near[w]), w))
    return order


def _joint_size(residual: Residual, v: int, near: set[int]) -> int:
    return math.prod(len(residual.costs[w]) for w in (v, *near))


def _eliminate_in_order(residual: Residual, order: list[int]) -> None:
    """The cost of the nodes goes to `offset`."""
    # The bucket of a node has the tables that lose it first.
    place = {node: at for at, node in enumerate(order)}
    buckets = {node: [_Table((node,), residual.costs[node])] for node in order}
    for node in order:
        buckets[node] += [
            _Table((node, other), cost.dense())
            for other, cost in residual.adjacent[node].items()
            if place[node] < place[other]
        ]

    for node in order:
        factors = buckets.pop(node)
        scope = tuple(sorted({w for factor in factors for w in factor.scope}, key=place.__getitem__))
        joint = _joint_table(factors, scope)
        best = joint.argmin(axis=0)
        least = np.take_along_axis(joint, best[None], axis=0)[0]

        residual.decide(node, scope[1:], [None] * len(scope[1:]), best)
        if scope[1:]:
            buckets[scope[1]].append(_Table(scope[1:], least))
        else:
            residual.offset += float(least)


def _joint_table(factors: list[_Table], scope: tuple[int, ...]) -> Floats:
    joint: Floats = np.zeros((1,) * len(scope))
    for factor in factors:
        sizes = dict(zip(factor.scope, factor.table.shape, strict=True))
        joint = joint + factor.table.reshape(tuple(sizes.get(w, 1) for w in scope))
    return joint
