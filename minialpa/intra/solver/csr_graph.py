"""The undecided nodes of a `Residual` in; a `Core` of flat arrays for the compiled loops out.

As in a compressed sparse row (CSR) matrix, one array has the entries of all nodes, and offsets mark the first entry of
each node. Nodes with costs (3, 4) and (5, 6, 7) are
    at = [0, 2, 5],   cost = [3, 4, 5, 6, 7],   cost of strategy i of node v = cost[at[v] + i]
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Any, NamedTuple

import numpy as np

from minialpa.intra.solver.cost_graph import Floats, Ints
from minialpa.intra.solver.residual import Residual
from minialpa.support.loops import compiled


class Core(NamedTuple):
    """A graph with nodes 0 to n - 1; a NamedTuple because numba compiles these.

    A link h is an edge in one of its two directions, from "here" to "there". A segment s is a range of usage rows in
    which the usage of a node is constant.

    Attributes:
        at: strategy i of node v is entry at[v] + i of every array with an entry per strategy.
        links: node v has links links[v] to links[v + 1] - 1, sorted by neighbour.
        middle: the links of v from middle[v] on lead to later nodes.
        other: the node there.
        back: the link in the other direction.
        kind, n_kinds: for link h, strategies of one of n_kinds[h] kinds cost the same; strategy i here is of the kind
            kind[message_at[h] + i].
        table_at, table: table[table_at[h] + k * n_kinds[back[h]] + l] is the cost of the kinds k here and l there.
        message_at: start of the message that comes in over link h, with one entry per strategy here.
        segments: node v has segments segments[v] to segments[v + 1] - 1.
        start, end: segment s is the rows start[s] to end[s] - 1.
        usage_at, usage: strategy i uses usage[usage_at[s] + i] in each row of segment s.
        slack: most usage of all nodes together in each row, beyond `Residual.base`.
        forbidden: finite cost of a forbidden entry, above any allowed solution.
        n_pairs: of strategies here and there, of all links.
    """

    at: Ints
    cost: Floats
    links: Ints
    middle: Ints
    other: Ints
    back: Ints
    kind: Ints
    n_kinds: Ints
    table_at: Ints
    table: Floats
    message_at: Ints
    segments: Ints
    start: Ints
    end: Ints
    usage_at: Ints
    usage: Ints
    slack: Ints
    forbidden: float
    widest: int
    n_pairs: int

    @property
    def n_nodes(self) -> int:
        return len(self.at) - 1


@compiled
def line_of(core: Core, link: int, i: int) -> int:
    """Where the costs of strategy i here start in `table`, one for each kind there."""
    return int(core.table_at[link] + core.kind[core.message_at[link] + i] * core.n_kinds[core.back[link]])


def flatten(residual: Residual, nodes: list[int]) -> Core:
    """The core whose node k is `nodes[k]`; messages visit the nodes in this order.

    No edge may join `nodes` to another node of `residual`.
    """
    costs = [residual.costs[v] for v in nodes]
    sizes = [len(cost) for cost in costs]
    forbidden = _forbidden_cost(residual, nodes)
    return Core(
        at=_offsets(sizes),
        cost=_finite_costs(np.concatenate(costs), forbidden),
        **_link_fields(residual, nodes, forbidden),
        **_usage_fields(residual, nodes),
        forbidden=forbidden,
        widest=max(sizes),
    )


def _link_fields(residual: Residual, nodes: list[int], forbidden: float) -> dict[str, Any]:
    place = {v: k for k, v in enumerate(nodes)}
    neighbours = [sorted(place[w] for w in residual.adjacent[v]) for v in nodes]
    pairs = [(here, there) for here, near in enumerate(neighbours) for there in near]
    edges = [residual.adjacent[nodes[here]][nodes[there]] for here, there in pairs]

    links = _offsets([len(near) for near in neighbours])
    n_earlier = [bisect_left(near, here) for here, near in enumerate(neighbours)]
    number = {pair: link for link, pair in enumerate(pairs)}
    return {
        "links": links,
        "middle": links[:-1] + np.array(n_earlier, np.int64),
        "other": np.array([there for _, there in pairs], np.int64),
        "back": np.array([number[there, here] for here, there in pairs], np.int64),
        "kind": np.concatenate([links[:0], *(edge.rows for edge in edges)]),
        "n_kinds": np.array([len(edge.table) for edge in edges], np.int64),
        "table_at": _offsets([edge.table.size for edge in edges]),
        "table": _finite_costs(np.concatenate([np.zeros(0), *(edge.table.ravel() for edge in edges)]), forbidden),
        "message_at": _offsets([len(edge.rows) for edge in edges]),
        "n_pairs": sum(math.prod(edge.shape) for edge in edges),
    }


def _usage_fields(residual: Residual, nodes: list[int]) -> dict[str, Any]:
    by_node = [_segments(residual, v) for v in nodes]
    segments = [segment for of_node in by_node for segment in of_node]
    return {
        "segments": _offsets([len(of_node) for of_node in by_node]),
        "start": np.array([first for first, _, _ in segments], np.int64),
        "end": np.array([end for _, end, _ in segments], np.int64),
        "usage_at": _offsets([len(by_strategy) for _, _, by_strategy in segments]),
        "usage": np.concatenate([residual.base[:0], *(usage for _, _, usage in segments)]),
        "slack": residual.limit - residual.base,
    }


def _finite_costs(cost: Floats, forbidden: float) -> Floats:
    return np.where(np.isfinite(cost), cost, forbidden)


def _offsets(sizes: list[int]) -> Ints:
    return np.concatenate(([0], np.cumsum(np.array(sizes, np.int64)))).astype(np.int64)


def _forbidden_cost(residual: Residual, nodes: list[int]) -> float:
    """`Core.forbidden`: 2 * (sum over all tables of (largest - least allowed entry) + largest absolute entry)."""
    tables = [residual.costs[v] for v in nodes]
    tables += [edge.table for v in nodes for w, edge in residual.adjacent[v].items() if v < w]
    allowed = [table[np.isfinite(table)] for table in tables]
    spread = sum(float(np.ptp(values)) for values in allowed if len(values))
    largest = max((float(np.abs(values).max()) for values in allowed if len(values)), default=0.0)
    return 2 * (spread + largest) or 1.0


def _segments(residual: Residual, v: int) -> list[tuple[int, int, Ints]]:
    """(first row, row after the last, usage of each strategy) for each segment of v."""
    terms = residual.terms[v]
    if not terms:
        return []

    # Terms may overlap.
    ends = np.unique(np.array(list(terms)).ravel())
    change = np.zeros((len(ends), len(residual.costs[v])), np.int64)
    for (first, end), usage in terms.items():
        change[np.searchsorted(ends, first)] += usage
        change[np.searchsorted(ends, end)] -= usage
    total = np.cumsum(change, axis=0)

    stretches = zip(ends[:-1].tolist(), ends[1:].tolist(), total[:-1], strict=True)
    return [(first, end, usage) for first, end, usage in stretches if usage.max() > 0]
