"""Idle processors: the shape of a matrix product in, how much longer it takes because tiles come in whole rounds out.

A GPU computes a product in tiles, one on each of its processors at a time. The last round has fewer tiles than there
are processors, and those that are left wait:

    waste = processors ceil(tiles / processors) area of a tile / (rate of its kind of tile * b m n)

of the best kind of tile. A product with few tiles and a long sum is also split along the sum.
"""

from __future__ import annotations

import functools
import itertools
import math

#: (rows, columns, rate): what kernels for GPUs take. Smaller tiles read more for what they compute; by choice.
_TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.92), (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.6))
#: Parts of a sum, of at least so many summands, and what putting them together costs of the whole.
_PARTS, _LEAST_PART, _JOINING = (1, 2, 4, 8, 16), 256, 0.05


@functools.lru_cache(maxsize=65536)
def waste(b: int, m: int, n: int, k: int, n_processors: int) -> float:
    """Time of `b` products [m k] [k n], at least 1, as a multiple of what it would be without idle processors."""
    best = math.inf
    for (rows, columns, rate), parts in itertools.product(_TILES, _PARTS):
        if parts > 1 and k < parts * _LEAST_PART:
            continue
        n_tiles = b * math.ceil(m / rows) * math.ceil(n / columns) * parts
        n_rounds = math.ceil(n_tiles / n_processors)
        area = n_processors * n_rounds * rows * columns / (parts * rate)
        best = min(best, area * (1 + _JOINING * (parts > 1)))
    return max(1.0, best / (b * m * n))
