"""Usages as whole numbers: usages and a limit as they came in, the same in units small enough for each to be whole out.

    usage * units, limit * units   with the least `units` for which every usage is whole; the limit is rounded down

Sums of whole numbers have no rounding, so a solution that exceeds the limit by one unit is told from one that just
keeps to it, wherever in the solver that is asked. Floats are fractions of powers of two, and have such units, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minialpa.errors import ShardingError

#: Whole numbers: int64 where all sums stay below 2**`MOST_BITS`, objects (Python's integers) where they do not.
Whole = NDArray[Any]
MOST_BITS = 60
#: Floats that are whole, and sums of them, are exact up to here.
_EXACT_FLOATS = 2**53


@dataclass(frozen=True, slots=True, eq=False)
class WholeUsages:
    """terms: (node, interval, usage by strategy) of what uses something at some time. One is `units` of these.

    limit: no more than all terms can use together. given_limit: as it came in.
    """

    terms: tuple[tuple[int, tuple[int, int], Whole], ...]
    limit: int
    units: int
    given_limit: float

    def text(self, n: int) -> str:
        """`n` units in the numbers that came in, for messages."""
        whole, rest = divmod(n, self.units)
        return f"{whole:,}" if rest == 0 else repr(n / self.units)


def usage_array(values: Any, name: str, size: int) -> NDArray[Any]:
    """`values` as they are: integers of any size stay integers, all else is float64. Raises ShardingError."""
    array = np.array(values)
    integral = array.dtype.kind in "iu" or (array.dtype == object and all(isinstance(x, int) for x in array.flat))
    if array.dtype.kind == "u" or not integral:
        array = array.astype(object if integral else np.float64)
    finite = integral or bool(np.isfinite(array).all())
    if array.shape != (size,) or not finite or array.min() < 0:
        raise ShardingError(f"{name} needs {size} finite values of zero or more; got {values}.")
    array.flags.writeable = False
    return array


def whole_usages(terms: Iterable[tuple[int, tuple[int, int], NDArray[Any]]], limit: float) -> WholeUsages:
    """`terms` and `limit` in units in which each usage is whole. Terms that are never live are left out."""
    live = [(v, interval, usage) for v, interval, usage in terms if interval[1] > interval[0] and usage.max() > 0]
    units = 1
    if not all(_is_whole(usage) for _, _, usage in live):
        distinct = {x for _, _, usage in live for x in usage.tolist()}
        units = math.lcm(*(x.as_integer_ratio()[1] for x in distinct))
    whole = [(v, interval, _times(usage, units)) for v, interval, usage in live]
    most = sum(int(usage.max()) for _, _, usage in whole)
    if most < 2**MOST_BITS:
        whole = [(v, interval, usage.astype(np.int64)) for v, interval, usage in whole]
    else:
        whole = [(v, interval, usage.astype(object)) for v, interval, usage in whole]
    return WholeUsages(tuple(whole), _whole_limit(limit, units, most), units, limit)


def _whole_limit(limit: float, units: int, most: int) -> int:
    if limit == math.inf:
        return most
    numerator, denominator = (limit.item() if isinstance(limit, np.generic) else limit).as_integer_ratio()
    return min(numerator * units // denominator, most)


def _is_whole(usage: NDArray[Any]) -> bool:
    """Whether int64 holds each of `usage`, or they are integers already."""
    if usage.dtype != np.float64:
        return True
    return bool((usage == np.floor(usage)).all()) and usage.max() < _EXACT_FLOATS


def _times(usage: NDArray[Any], units: int) -> Whole:
    if units == 1 and _is_whole(usage):
        return usage if usage.dtype != np.float64 else usage.astype(np.int64)
    ratios = (x.as_integer_ratio() for x in usage.tolist())
    return np.array([numerator * (units // denominator) for numerator, denominator in ratios], object)
