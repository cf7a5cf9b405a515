"""The core of a residual as flat arrays, the form that compiled loops read (trws.py, local_search.py).

In: `Residual` and the nodes to take, in the order in which messages will run. Out: `Core`, whose node k is `nodes[k]`.
A forbidden entry becomes `forbidden`, a cost above that of any allowed solution, so that sums stay finite.
Usages are whole numbers. Where int64 does not hold them, their unit is larger here; each is then rounded up and room is
rounded down, so that what fits here fits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from minialpa.intra.solver.cost_graph import Floats, Ints
from minialpa.intra.solver.exact import MOST_BITS, Whole
from minialpa.intra.solver.residual import Residual


class Core(NamedTuple):
    """Nodes 0 to n - 1. A tuple because that is the record which numba knows.

    at[v]: strategy i of node v is entry at[v] + i of `cost` and of everything else that is kept per strategy.
    links[v] to links[v + 1]: the links of v, one for each neighbour, in order; from middle[v] on to later ones.
    other[h], back[h]: where link h leads, and the same edge as a link of that node.
    table[table_at[h] + i * size of other + j]: cost of the edge for strategy i here and j there.
    message_at[h]: place of the message that comes in over link h, one entry per strategy of the node that owns it.
    segments[v] to segments[v + 1]: stretches of rows in which v uses the same: usage[usage_at[s] + i] in each of rows
    start[s] to end[s] - 1.
    room[r]: most that all nodes together may use in row r. widest: strategies of the node that has most.
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
    """`nodes` of `residual`, which no edge joins to others, in this order.

    Usages that 64 bits cannot hold are rounded up, so that what keeps to the limit here does so there; with `loose`,
    down, so that what does so there does so here: then bounds hold.
    """
    place = {v: k for k, v in enumerate(nodes)}
    near = [sorted((place[w], w) for w in residual.adjacent[v]) for v in nodes]
    links = _offsets([len(pairs) for pairs in near])
    link_of = {(k, j): int(links[k]) + n for k, pairs in enumerate(near) for n, (j, _) in enumerate(pairs)}
    tables = [residual.adjacent[v][w] for v, pairs in zip(nodes, near, strict=True) for _, w in pairs]
    cost = np.concatenate([residual.costs[v] for v in nodes])
    table = np.concatenate([np.zeros(0), *(t.ravel() for t in tables)])
    forbidden = _above_all(residual, nodes)
    segments = [_segments(residual, v) for v in nodes]
    stretches = [stretch for one in segments for stretch in one]
    usage, room = _in_int64(np.concatenate([residual.base[:0], *(u for _, _, u in stretches)]), residual, loose)
    return Core(
        at=_offsets([len(residual.costs[v]) for v in nodes]),
        cost=np.where(np.isfinite(cost), cost, forbidden),
        links=links,
        middle=np.array([links[k] + sum(j < k for j, _ in pairs) for k, pairs in enumerate(near)], np.int64),
        other=np.array([j for pairs in near for j, _ in pairs], np.int64),
        back=np.array([link_of[j, k] for k, pairs in enumerate(near) for j, _ in pairs], np.int64),
        table_at=_offsets([t.size for t in tables]),
        table=np.where(np.isfinite(table), table, forbidden),
        message_at=_offsets([t.shape[0] for t in tables]),
        segments=_offsets([len(one) for one in segments]),
        start=np.array([first for first, _, _ in stretches], np.int64),
        end=np.array([end for _, end, _ in stretches], np.int64),
        usage_at=_offsets([len(usage) for _, _, usage in stretches]),
        usage=usage,
        room=room,
        forbidden=forbidden,
        widest=max(len(residual.costs[v]) for v in nodes),
    )


def _offsets(sizes: list[int]) -> Ints:
    return np.concatenate(([0], np.cumsum(np.array(sizes, np.int64)))).astype(np.int64)


def _above_all(residual: Residual, nodes: list[int]) -> float:
    """More than any allowed solution costs above the least conceivable."""
    tables = [residual.costs[v] for v in nodes]
    tables += [edge for v in nodes for w, edge in residual.adjacent[v].items() if v < w]
    allowed = [table[np.isfinite(table)] for table in tables]
    spread = sum(float(np.ptp(values)) for values in allowed if len(values))
    largest = max((float(np.abs(values).max()) for values in allowed if len(values)), default=0.0)
    return 2 * (spread + largest) or 1.0


def _in_int64(usage: Whole, residual: Residual, loose: bool) -> tuple[Ints, Ints]:
    """Usages, and the room of each row."""
    room, shift = residual.limit - residual.base, excess_bits(residual)
    if room.dtype == np.int64:
        return usage, room
    rounded = usage >> shift if loose else -(-usage >> shift)
    return rounded.astype(np.int64), (room >> shift).astype(np.int64)


def excess_bits(residual: Residual) -> int:
    """How many bits all usages together have that 64 bits have no room for."""
    if residual.base.dtype == np.int64:
        return 0
    assert residual.whole is not None
    most = sum(int(usage.max()) for _, _, usage in residual.whole.terms)
    return max(0, most.bit_length() - MOST_BITS)


def _segments(residual: Residual, v: int) -> list[tuple[int, int, Whole]]:
    """The rows in which v uses something, cut so that its usage is the same all along a stretch."""
    terms = residual.terms[v]
    if not terms:
        return []
    cuts = np.unique(np.array(list(terms)).ravel())
    change = np.zeros((len(cuts), len(residual.costs[v])), residual.base.dtype)
    for (first, end), usage in terms.items():
        change[np.searchsorted(cuts, first)] += usage
        change[np.searchsorted(cuts, end)] -= usage
    total = np.cumsum(change, axis=0)
    pairs = zip(cuts[:-1].tolist(), cuts[1:].tolist(), total[:-1], strict=True)
    return [(first, end, usage) for first, end, usage in pairs if usage.max() > 0]
