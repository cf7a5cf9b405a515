"""Layer clustering: the flops of forward equations and the bytes between them in, the layer of each equation out.

Layers are runs of equations in program order. With k_1 < ... < k_(L-1) the first equations of layers 1 to L - 1:

    minimise   sum_q crossing(k_q), then sum_q flops(layer q)^2
    subject to (1 - tolerance) * total / L <= flops(layer q) <= (1 + tolerance) * total / L

    total        flops of all equations; one equation counts at most total / L, so its layer may have others, too
    crossing(k)  bytes of the values that are produced before equation k and read at or after it, each counted once
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Factor by which the upper bound grows while no layers exist; by choice.
_RELAX = 1.25
#: Factors of the lower bound, tried in order; by choice.
_LEAST = (1.0, 0.5, 0.25, 0.0)
#: Entries of the DP (layers x borders x borders in reach) above which borders are thinned; the DP takes seconds there.
_MAX_WORK = 150_000_000
#: Rounding errors of sums of flops, as a share of all flops.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class _Borders:
    """Places where a layer may begin or end, from 0 to the number of equations.

    Attributes:
        at, flops: the number of equations before each border, and their flops.
        crossing: bytes that cross each border, 0 at both ends.
        reach: for a layer that ends at this border, the first border at which it may begin.
    """

    at: NDArray[np.int64]
    flops: Floats
    crossing: Floats
    reach: NDArray[np.int64]


def cluster_layers(
    flops: Sequence[float], values: Iterable[tuple[int, int, float]], n_layers: int, *, tolerance: float = 0.5
) -> tuple[int, ...]:
    """Layer of each of at least `n_layers` equations, never falling in program order; no layer is empty.

    values: (producing equation, last reading equation, bytes) of each value.

    While the equations do not fit in `n_layers` layers, the upper bound grows by a quarter. Then, while there is no
    solution, the lower bound becomes 1/2, 1/4 and 0 of its value. Of equal solutions, the earliest last borders win.
    """
    weights = np.array(flops, np.float64)
    done = np.concatenate(([0.0], np.cumsum(np.minimum(weights, weights.sum() / n_layers))))
    crossing = _crossing(len(weights), values)

    bound = (1 + tolerance) * done[-1] / n_layers
    while _fewest_layers(borders := _borders(np.arange(len(done)), done, crossing, bound)) > n_layers:
        bound *= _RELAX
    borders = _thinned(borders, bound, n_layers)

    least = max(0.0, 1 - tolerance) * done[-1] / n_layers
    cuts = next(cuts for factor in _LEAST if (cuts := _best_cuts(borders, n_layers, factor * least)) is not None)

    is_first = np.zeros(len(weights), np.int64)
    is_first[borders.at[cuts]] = 1
    return tuple(np.cumsum(is_first).tolist())


def _crossing(n_equations: int, values: Iterable[tuple[int, int, float]]) -> Floats:
    change = np.zeros(n_equations + 2)
    for producer, last_user, n_bytes in values:
        change[producer + 1] += n_bytes
        change[last_user + 1] -= n_bytes
    return np.cumsum(change[:-1])


def _borders(at: NDArray[np.int64], flops: Floats, crossing: Floats, bound: float) -> _Borders:
    reach = np.searchsorted(flops[at], flops[at] - bound - _ROUNDING * flops[-1], side="left")
    return _Borders(at, flops[at], crossing[at], reach)


def _fewest_layers(borders: _Borders) -> float:
    """The least number of layers, each as long as allowed; every larger number is possible as well."""
    border, n_layers = len(borders.at) - 1, 0
    while border > 0:
        if borders.reach[border] >= border:
            return np.inf
        border, n_layers = int(borders.reach[border]), n_layers + 1
    return n_layers


def _thinned(borders: _Borders, bound: float, n_layers: int) -> _Borders:
    """All borders, if the DP is fast. Else borders with no more bytes than both neighbours, or around equations above
    `bound`.
    """
    if n_layers * int((np.arange(len(borders.at)) - borders.reach).sum()) <= _MAX_WORK:
        return borders

    around = np.concatenate(([np.inf], borders.crossing[1:-1], [np.inf]))
    keep = np.ones(len(borders.at), bool)
    keep[1:-1] = (around[1:-1] <= around[:-2]) & (around[1:-1] <= around[2:])
    large = np.flatnonzero(np.diff(borders.flops) > bound)
    keep[large] = keep[large + 1] = True

    thinned = _borders(borders.at[keep], borders.flops, borders.crossing, bound)
    return thinned if _fewest_layers(thinned) <= n_layers < len(thinned.at) else borders


def _best_cuts(borders: _Borders, n_layers: int, least: float) -> list[int] | None:
    """The borders k_1, ..., k_(L-1), last one first, as places in `borders`; None if no layers have `least` flops each.

    crossed[q, c] and squares[q, c] are the two objectives of the best q layers up to border c:
        crossed[q, c] = min over b from reach[c] to c - 1 of crossed[q - 1, b] + crossing[b]
        squares[q, c] = min over the b that attain this minimum of squares[q - 1, b] + flops from b to c, squared
    previous[q, c] is the b that attains both.
    """
    shape = (n_layers + 1, len(borders.at))
    crossed, squares = np.full(shape, np.inf), np.full(shape, np.inf)
    previous = np.zeros(shape, np.int64)
    crossed[0, 0] = squares[0, 0] = 0.0

    rows = np.arange(n_layers)
    until = np.searchsorted(borders.flops, borders.flops - least + _ROUNDING * borders.flops[-1], side="right")
    for c in range(1, len(borders.at)):
        window = slice(int(borders.reach[c]), min(c, int(until[c])))
        total = crossed[:-1, window] + borders.crossing[window]
        if not total.size:
            continue

        # All numbers of layers at once; of equal bytes, the least squares.
        fewest = total.min(axis=1)
        square = squares[:-1, window] + (borders.flops[c] - borders.flops[window]) ** 2
        best = np.where(total == fewest[:, None], square, np.inf).argmin(axis=1)
        crossed[1:, c], squares[1:, c], previous[1:, c] = fewest, square[rows, best], window.start + best

    if not np.isfinite(crossed[n_layers, -1]):
        assert least > 0, f"no {n_layers} layers"
        return None
    return _traced_back(previous)


def _traced_back(previous: NDArray[np.int64]) -> list[int]:
    border = previous.shape[1] - 1
    cuts: list[int] = []
    for n_layers in range(previous.shape[0] - 1, 1, -1):
        border = int(previous[n_layers, border])
        cuts.append(border)
    return cuts
