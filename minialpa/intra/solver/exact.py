"""Usages and their limit as integers, so that the solver compares them without rounding.

    integer usage = usage * units,   integer limit = floor(limit * units)

`units` is the least number for which every usage becomes an integer. Every float is an integer divided by a power of
two, so such a number always exists. Sums of integers do not round: wherever the solver checks the limit, a solution
that exceeds it by a single unit is told apart from one that just keeps to it.

Example: usages 0.5 and 0.75 with a limit of 1.3 become 2 and 3 with a limit of 5, in units of 1/4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minialpa.errors import ShardingError

#: Integer arrays: int64 where all sums stay below 2**MOST_BITS, else objects (Python's integers of any size).
Integers = NDArray[Any]
#: Bits that a sum of int64 usages may take. int64 has 63; the solver also adds sums to the limit.
MOST_BITS = 60
#: From here on, not every integer is a float64, which has 53 bits of precision.
_EXACT_FLOATS = 2**53


@dataclass(frozen=True, slots=True, eq=False)
class IntegerUsages:
    """Everything that uses something at some time, in integers.

    Attributes:
        terms: (node, live interval, usage by strategy), in units.
        limit: most usage at any time, in units; never more than all terms can use together.
        units: how many units make one of the numbers that the caller gave.
        given_limit: the limit as the caller gave it, for messages.
    """

    terms: tuple[tuple[int, tuple[int, int], Integers], ...]
    limit: int
    units: int
    given_limit: float

    def text(self, n_units: int) -> str:
        """`n_units` in the caller's numbers, for messages."""
        quotient, rest = divmod(n_units, self.units)
        return f"{quotient:,}" if rest == 0 else repr(n_units / self.units)


def usage_array(values: Any, name: str, size: int) -> NDArray[Any]:
    """`values` unchanged: integers of any size stay integers, all else becomes float64. Raises ShardingError."""
    array = np.array(values)
    integral = array.dtype.kind in "iu" or (array.dtype == object and all(isinstance(x, int) for x in array.flat))

    # uint64 does not mix with int64 without loss, so unsigned integers become Python's.
    if array.dtype.kind == "u" or not integral:
        array = array.astype(object if integral else np.float64)
    finite = integral or bool(np.isfinite(array).all())
    if array.shape != (size,) or not finite or array.min() < 0:
        raise ShardingError(f"{name} needs {size} finite values of zero or more; got {values}.")

    array.flags.writeable = False
    return array


def integer_usages(terms: Iterable[tuple[int, tuple[int, int], NDArray[Any]]], limit: float) -> IntegerUsages:
    """`terms` and `limit` in units in which each usage is an integer. Leaves out terms that are never live."""
    live = [(node, interval, usage) for node, interval, usage in terms if interval[1] > interval[0] and usage.max() > 0]
    units = _common_units([usage for _, _, usage in live])
    integral = [(node, interval, _times(usage, units)) for node, interval, usage in live]

    # One dtype for all, by what all nodes can use together: no sum of some of them is larger.
    most = sum(int(usage.max()) for _, _, usage in integral)
    dtype: np.dtype[Any] = np.dtype(np.int64 if most < 2**MOST_BITS else object)
    typed = tuple((node, interval, usage.astype(dtype)) for node, interval, usage in integral)
    return IntegerUsages(typed, _integer_limit(limit, units, most), units, limit)


def _common_units(usages: list[NDArray[Any]]) -> int:
    """The least number that makes an integer of each usage when they are multiplied by it."""
    if all(_is_integral(usage) for usage in usages):
        return 1
    distinct = {value for usage in usages for value in usage.tolist()}
    return math.lcm(*(value.as_integer_ratio()[1] for value in distinct))


def _integer_limit(limit: float, units: int, most: int) -> int:
    """floor(limit * units), or `most`, which never binds, where the limit is larger."""
    if limit == math.inf:
        return most
    numerator, denominator = (limit.item() if isinstance(limit, np.generic) else limit).as_integer_ratio()
    return min(numerator * units // denominator, most)


def _is_integral(usage: NDArray[Any]) -> bool:
    """Whether `usage` has integers, or floats that int64 can hold without loss."""
    if usage.dtype != np.float64:
        return True
    return bool((usage == np.floor(usage)).all()) and usage.max() < _EXACT_FLOATS


def _times(usage: NDArray[Any], units: int) -> Integers:
    """`usage * units`, exactly."""
    if units == 1 and _is_integral(usage):
        return usage if usage.dtype != np.float64 else usage.astype(np.int64)
    ratios = (value.as_integer_ratio() for value in usage.tolist())
    return np.array([numerator * (units // denominator) for numerator, denominator in ratios], object)
