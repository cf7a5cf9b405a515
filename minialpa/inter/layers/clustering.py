"""Layer clustering: the forward equations of a step in, a layer number for each out.

Layers are runs of equations in program order. With k_1 < ... < k_(L-1) the first equations of layers 1 to L - 1:
    minimise   sum_q crossing(k_q), then sum_q flops(layer q)^2
    subject to (1 - tolerance) * total / L <= flops(layer q) <= (1 + tolerance) * total / L
An equation that is heavier than an equal share of the flops counts as one share, so that what is beside it is free.
crossing(k): bytes of the values that are produced before equation k and used at or after it, each counted once.
The upper bound grows until layers exist; then the lower one falls, to 0 in the end. See `cluster_layers`.

Alpa minimises the largest bytes that enter one layer, and the sum only to break ties (alpa.md 2.1). Here it is the sum:
the stage DP merges layers afterwards and pays for every border that it keeps, so one unavoidable large border must not
make all smaller ones free.
"""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from minialpa.errors import TraceError

Floats = NDArray[np.float64]

#: Steps of (1 + tolerance) while no layers exist.
_RELAX = 1.25
#: Factors of the least flops of a layer, until layers exist.
_LEAST = (1.0, 0.5, 0.25, 0.0)
#: Entries (layers x borders x borders in reach) that the DP looks at before borders are thinned; some seconds.
_MAX_WORK = 150_000_000


@dataclass(frozen=True, slots=True, eq=False)
class _Borders:
    """Places where a layer may begin or end, from 0 to the number of equations.

    at[c]: equations before border c. flops[c]: their flops. crossing[c]: bytes that cross, 0 at both ends.
    reach[c]: the first border from which a layer up to c is allowed.
    """

    at: NDArray[np.int64]
    flops: Floats
    crossing: Floats
    reach: NDArray[np.int64]


def cluster_layers(graph: nx.DiGraph, n_layers: int, *, tolerance: float = 0.5) -> tuple[int, ...]:
    """Layer of each equation, never falling in program order; every layer has at least one equation.

    Nodes are 0 to N - 1 in program order, with `flops`. An edge u -> v, u < v, says that v uses a value of u and has
    its `bytes`; edges of u with the same `value` are the same value, and an edge without `value` is one of its own.
    (1 + tolerance) is raised by a quarter at a time while the equations fit in no `n_layers` layers; the least flops of
    a layer are halved, twice, and then given up, while that leaves none. Of equal solutions the one with the earliest
    last borders is taken. Raises TraceError on a graph that is not like this.
    """
    _check(graph, n_layers, tolerance)
    weights = np.array([float(graph.nodes[v]["flops"]) for v in range(len(graph))])
    flops = np.concatenate(([0.0], np.cumsum(np.minimum(weights, weights.sum() / n_layers))))
    bound = (1 + tolerance) * flops[-1] / n_layers
    while _fewest_layers(borders := _borders(np.arange(len(flops)), flops, _crossing(graph), bound)) > n_layers:
        bound *= _RELAX
    borders = _thinned(borders, bound, n_layers)
    first = np.zeros(len(graph), np.int64)
    least = max(0.0, 1 - tolerance) * flops[-1] / n_layers
    cuts = next(cuts for factor in _LEAST if (cuts := _best_cuts(borders, n_layers, factor * least)) is not None)
    first[borders.at[cuts]] = 1
    return tuple(np.cumsum(first).tolist())


def _check(graph: nx.DiGraph, n_layers: int, tolerance: float) -> None:
    if not 1 <= n_layers <= len(graph):
        raise TraceError(f"{len(graph)} equations cannot make {n_layers} layers; ask for 1 to {len(graph)} layers.")
    if tolerance < 0:
        raise TraceError(f"`tolerance` cannot be negative; got {tolerance}.")
    if set(graph.nodes) != set(range(len(graph))):
        raise TraceError(f"Equations are numbered 0 to {len(graph) - 1}; got nodes {sorted(graph.nodes)[:8]}...")
    if backward := next(((u, v) for u, v in graph.edges() if u >= v), None):
        shape = "goes back in program order" if nx.is_directed_acyclic_graph(graph) else "closes a cycle"
        raise TraceError(f"The edge {backward[0]} -> {backward[1]} {shape}; a value is used after it is produced.")


def _crossing(graph: nx.DiGraph) -> Floats:
    """Bytes that cross each border; a value crosses those from its producer to its last user."""
    last: dict[tuple[int, object], tuple[int, float]] = {}
    for u, v, data in graph.edges(data=True):
        key = (u, data.get("value", ("own", v)))
        until, size = last.get(key, (u, 0.0))
        last[key] = (max(until, v), max(size, float(data["bytes"])))
    change = np.zeros(len(graph) + 2)
    for (u, _), (until, size) in last.items():
        change[u + 1] += size
        change[until + 1] -= size
    return np.cumsum(change[:-1])


def _borders(at: NDArray[np.int64], flops: Floats, crossing: Floats, bound: float) -> _Borders:
    """`flops` and `crossing` have an entry per equation border; those `at` the given places are kept."""
    # Sums of flops carry rounding errors of their own size.
    reach = np.searchsorted(flops[at], flops[at] - bound - 1e-12 * flops[-1], side="left")
    return _Borders(at, flops[at], crossing[at], reach)


def _fewest_layers(borders: _Borders) -> float:
    """Least number of layers, by making each as long as is allowed; every larger number is possible as well."""
    c, n_layers = len(borders.at) - 1, 0
    while c > 0:
        if borders.reach[c] >= c:
            return np.inf
        c, n_layers = int(borders.reach[c]), n_layers + 1
    return n_layers


def _thinned(borders: _Borders, bound: float, n_layers: int) -> _Borders:
    """Where the DP would be slow, only borders that nothing beside them undercuts, and those around large equations."""
    if n_layers * int((np.arange(len(borders.at)) - borders.reach).sum()) <= _MAX_WORK:
        return borders
    around = np.concatenate(([np.inf], borders.crossing[1:-1], [np.inf]))
    keep = np.ones(len(borders.at), bool)
    keep[1:-1] = (around[1:-1] <= around[:-2]) & (around[1:-1] <= around[2:])
    large = np.flatnonzero(np.diff(borders.flops) > bound)
    keep[large] = keep[large + 1] = True
    thin = _borders(borders.at[keep], borders.flops, borders.crossing, bound)
    return thin if _fewest_layers(thin) <= n_layers < len(thin.at) else borders


def _best_cuts(borders: _Borders, n_layers: int, least: float) -> list[int] | None:
    """The borders k_1, ..., k_(L-1), as places in `borders`; None if not every layer can have the `least` flops.

    bytes_[q, c], squares[q, c]: the objective for q layers up to border c, with
        bytes_[q, c] = min over b from reach[c] to c - 1 of bytes_[q - 1, b] + crossing[b]
    and squares likewise among the b that attain this minimum.
    """
    n = len(borders.at)
    bytes_, squares = np.full((n_layers + 1, n), np.inf), np.full((n_layers + 1, n), np.inf)
    bytes_[0, 0] = squares[0, 0] = 0.0
    before = np.zeros((n_layers + 1, n), np.int64)
    q = np.arange(n_layers)
    # Sums of flops carry rounding errors of their own size.
    until = np.searchsorted(borders.flops, borders.flops - least + 1e-12 * borders.flops[-1], side="right")
    for c in range(1, n):
        window = slice(int(borders.reach[c]), min(c, int(until[c])))
        total = bytes_[:-1, window] + borders.crossing[window]
        if not total.size:
            continue
        fewest = total.min(axis=1)
        square = squares[:-1, window] + (borders.flops[c] - borders.flops[window]) ** 2
        pick = np.where(total == fewest[:, None], square, np.inf).argmin(axis=1)
        bytes_[1:, c], squares[1:, c], before[1:, c] = fewest, square[q, pick], window.start + pick
    if not np.isfinite(bytes_[n_layers, -1]):
        assert least > 0, f"no {n_layers} layers"
        return None
    cuts, c = [], n - 1
    for layer in range(n_layers, 1, -1):
        c = int(before[layer, c])
        cuts.append(c)
    return cuts
