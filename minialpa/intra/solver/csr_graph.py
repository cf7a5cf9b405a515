"""The core of a residual as flat arrays, in the layout that the compiled loops read (trws.py, local_search.py).

The core is what elimination leaves. As in a matrix in compressed sparse rows (CSR), the entries of all nodes follow
each other in one array, and an array of offsets says where those of each node start:
    cost of strategy i at node v = cost[at[v] + i],   links of node v = links[v], ..., links[v + 1] - 1
Messages visit the nodes in the order of the core: node k is `nodes[k]` of the residual.                  -> flatten

A forbidden entry becomes `forbidden`, a cost above that of any allowed solution: sums stay finite.       -> _above_all
Usages are integers. Where int64 cannot hold them, the core counts in units of 2**excess_bits.           -> _in_int64

Example: nodes 0 and 1 with 2 and 3 strategies and an edge. `at` is (0, 2, 5); link 0 leads from node 0 to node 1 and
link 1 back, so `links` is (0, 1, 2), `other` (1, 0), `back` (1, 0), and `table` has the 2 x 3 costs, then the 3 x 2.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minialpa.intra.solver.cost_graph import Floats, Ints
from minialpa.intra.solver.exact import MOST_BITS, Integers
from minialpa.intra.solver.residual import Residual


class Core(NamedTuple):
    """A graph with nodes 0 to n - 1. A tuple, because that is the record which numba knows.

    A link is an edge as one of its nodes sees it; a segment is a stretch of rows in which a node uses the same.

    Attributes:
        at: strategy i of node v is entry at[v] + i of `cost` and of all other arrays with an entry per strategy.
        cost: costs of the strategies.
        links: node v has the links links[v] to links[v + 1] - 1, one for each neighbour, in the order of neighbours.
        middle: links of v from middle[v] on lead to later nodes.
        other: the node that a link leads to.
        back: the link of that node for the same edge.
        table_at: link h has its table at table_at[h], with one line for each strategy here and one entry in it for
            each strategy there.
        table: costs of the edges, once for each direction.
        message_at: the message that comes in over link h starts here, with one entry for each strategy of the owner.
        segments: node v has the segments segments[v] to segments[v + 1] - 1.
        start: first row of a segment.
        end: the row after the last one of a segment.
        usage_at: strategy i uses usage[usage_at[s] + i] in each row of segment s.
        usage: usages by segment and strategy.
        room: for each row, the most that all nodes together may use.
        forbidden: cost of a forbidden entry.
        widest: largest number of strategies of any node.
    """

    at: Ints
    cost: Floats
    links: Ints
    middle: Ints
    other: Ints
    back: Ints
    table_at: Ints
    table: Floats
    message_at: Ints
    segments: Ints
    start: Ints
    end: Ints
    usage_at: Ints
    usage: Ints
    room: Ints
    forbidden: float
    widest: int

    @property
    def n_nodes(self) -> int:
        return len(self.at) - 1


def flatten(residual: Residual, nodes: list[int], *, loose: bool = False) -> Core:
    """The core of `nodes` in this order; no edge may join them to other nodes of `residual`.

    `loose` decides how usages that int64 cannot hold are rounded. By default up: choices that keep to the limit of the
    core keep to that of the residual. With `loose`, down: every choice that keeps to the limit of the residual keeps to
    that of the core, so a lower bound for the core is one for the residual.
    """
    costs = [residual.costs[v] for v in nodes]
    sizes = [len(cost) for cost in costs]
    forbidden = _above_all(residual, nodes)
    return Core(
        at=_offsets(sizes),
        cost=_finite(np.concatenate(costs), forbidden),
        **_link_fields(residual, nodes, forbidden),
        **_usage_fields(residual, nodes, loose),
        forbidden=forbidden,
        widest=max(sizes),
    )


def _link_fields(residual: Residual, nodes: list[int], forbidden: float) -> dict[str, NDArray[Any]]:
    """The fields of `Core` from `links` to `message_at`."""
    place = {v: k for k, v in enumerate(nodes)}
    neighbours = [sorted(place[w] for w in residual.adjacent[v]) for v in nodes]
    pairs = [(here, there) for here, near in enumerate(neighbours) for there in near]
    tables = [residual.adjacent[nodes[here]][nodes[there]] for here, there in pairs]

    links = _offsets([len(near) for near in neighbours])
    n_earlier = [bisect_left(near, here) for here, near in enumerate(neighbours)]
    number = {pair: link for link, pair in enumerate(pairs)}
    return {
        "links": links,
        "middle": links[:-1] + np.array(n_earlier, np.int64),
        "other": np.array([there for _, there in pairs], np.int64),
        "back": np.array([number[there, here] for here, there in pairs], np.int64),
        "table_at": _offsets([table.size for table in tables]),
        "table": _finite(np.concatenate([np.zeros(0), *(table.ravel() for table in tables)]), forbidden),
        "message_at": _offsets([table.shape[0] for table in tables]),
    }


def _usage_fields(residual: Residual, nodes: list[int], loose: bool) -> dict[str, NDArray[Any]]:
    """The fields of `Core` from `segments` to `room`."""
    by_node = [_segments(residual, v) for v in nodes]
    segments = [segment for of_node in by_node for segment in of_node]
    joined = np.concatenate([residual.base[:0], *(usage for _, _, usage in segments)])
    usage, room = _in_int64(joined, residual, loose)

    return {
        "segments": _offsets([len(of_node) for of_node in by_node]),
        "start": np.array([first for first, _, _ in segments], np.int64),
        "end": np.array([end for _, end, _ in segments], np.int64),
        "usage_at": _offsets([len(by_strategy) for _, _, by_strategy in segments]),
        "usage": usage,
        "room": room,
    }


def _finite(cost: Floats, forbidden: float) -> Floats:
    return np.where(np.isfinite(cost), cost, forbidden)


def _offsets(sizes: list[int]) -> Ints:
    """Where each of arrays with `sizes` starts when they follow each other, and where the last one ends."""
    return np.concatenate(([0], np.cumsum(np.array(sizes, np.int64)))).astype(np.int64)


def _above_all(residual: Residual, nodes: list[int]) -> float:
    """A cost by which any allowed solution is surely cheaper than one with a forbidden entry.

    Twice the sum of (largest - least allowed entry) over all tables, plus twice the largest absolute entry.
    """
    tables = [residual.costs[v] for v in nodes]
    tables += [edge for v in nodes for w, edge in residual.adjacent[v].items() if v < w]
    allowed = [table[np.isfinite(table)] for table in tables]
    spread = sum(float(np.ptp(values)) for values in allowed if len(values))
    largest = max((float(np.abs(values).max()) for values in allowed if len(values)), default=0.0)
    return 2 * (spread + largest) or 1.0


def _in_int64(usage: Integers, residual: Residual, loose: bool) -> tuple[Ints, Ints]:
    """`usage` and the room of each row, in units of 2**excess_bits; room is rounded down."""
    room, shift = residual.limit - residual.base, excess_bits(residual)
    if room.dtype == np.int64:
        return usage, room
    rounded = usage >> shift if loose else -(-usage >> shift)
    return rounded.astype(np.int64), (room >> shift).astype(np.int64)


def excess_bits(residual: Residual) -> int:
    """By how many bits the usages of all nodes together exceed `MOST_BITS`."""
    if residual.base.dtype == np.int64:
        return 0
    assert residual.integer_usages is not None
    most = sum(int(usage.max()) for _, _, usage in residual.integer_usages.terms)
    return max(0, most.bit_length() - MOST_BITS)


def _segments(residual: Residual, v: int) -> list[tuple[int, int, Integers]]:
    """(first row, row after the last, usage by strategy) of each segment in which v uses something."""
    terms = residual.terms[v]
    if not terms:
        return []

    # The terms of a node may overlap: between two of their ends, its usage is the sum of those that are open.
    ends = np.unique(np.array(list(terms)).ravel())
    change = np.zeros((len(ends), len(residual.costs[v])), residual.base.dtype)
    for (first, end), usage in terms.items():
        change[np.searchsorted(ends, first)] += usage
        change[np.searchsorted(ends, end)] -= usage
    total = np.cumsum(change, axis=0)

    stretches = zip(ends[:-1].tolist(), ends[1:].tolist(), total[:-1], strict=True)
    return [(first, end, usage) for first, end, usage in stretches if usage.max() > 0]
