"""Integer arrays whose elements are affine in their position: x[i, j, ...] = offset + s_i i + s_j j + ...

`jnp.arange(4)` is `Affine(0, (1,), (4,))`; booleans count as 0 and 1. `affine_rules` has a rule for each primitive,
`affine_programs` follows the equations of a program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

#: Larger constants are not compared with affine functions.
_MOST_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Affine:
    """An array of `shape` with the element offset + sum over d of strides[d] * i_d at position i."""

    offset: int
    strides: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def bounds(self) -> tuple[int, int]:
        ends = [stride * (size - 1) for stride, size in zip(self.strides, self.shape, strict=True)]
        return self.offset + sum(min(0, end) for end in ends), self.offset + sum(max(0, end) for end in ends)

    @property
    def constant(self) -> int | None:
        """The value of all elements if they are equal."""
        low, high = self.bounds
        return low if low == high else None

    @property
    def dim(self) -> int | None:
        """The dimension d with x[i] = i_d, as `iota` has; None without one."""
        moving = [d for d, (s, n) in enumerate(zip(self.strides, self.shape, strict=True)) if s and n > 1]
        return moving[0] if len(moving) == 1 and not self.offset and self.strides[moving[0]] == 1 else None


@dataclass(frozen=True, slots=True)
class At:
    """One position along one dimension. The slice of an array there keeps this dimension, with length 1."""

    dim: int
    position: int


def fits(found: Affine, dtype: Any) -> bool:
    """Whether no element overflows the dtype."""
    low, high = found.bounds
    if dtype == np.bool_:
        return low >= 0 and high <= 1
    return int(jnp.iinfo(dtype).min) <= low and high <= int(jnp.iinfo(dtype).max)


def of_value(value: Any, at: At | None) -> Affine | None:
    """A captured array as an affine function; None if it is not one, or cannot be read."""
    if isinstance(value, jax.Array):
        if jnp.issubdtype(value.dtype, jax.dtypes.extended) or not value.is_fully_addressable:
            return None
    elif not isinstance(value, np.ndarray | np.generic | int):
        return None
    return of_constant(np.asarray(value), np.shape(value), at)


def of_constant(value: np.ndarray, shape: Sequence[int], at: At | None) -> Affine | None:
    """A constant, broadcast to `shape` and sliced at `at`, as an affine function; None if it is not one."""
    if value.size == 0 or value.size > _MOST_ELEMENTS:
        return None
    value = np.broadcast_to(value, shape)
    if at is not None:
        value = np.take(value, [at.position], at.dim)

    origin = (0,) * value.ndim
    offset = int(value[origin])
    strides = tuple(
        int(value[(*origin[:d], 1, *origin[d + 1 :])]) - offset if size > 1 else 0 for d, size in enumerate(value.shape)
    )

    # The comparison below uses int64, and a uint64 may be larger.
    found = Affine(offset, strides, value.shape)
    low, high = found.bounds
    if value.dtype != np.bool_ and not (np.iinfo(np.int64).min <= low and high <= np.iinfo(np.int64).max):
        return None
    expected = np.full(value.shape, offset, np.int64)
    for d, stride in enumerate(strides):
        along = np.arange(value.shape[d], dtype=np.int64) * stride
        expected += along.reshape((-1,) + (1,) * (value.ndim - d - 1))
    return found if np.array_equal(expected, value.astype(np.int64)) else None


def stretched(x: Affine, shape: tuple[int, ...]) -> Affine:
    """`x`, a scalar or with length 1 in some dimensions, broadcast to `shape`."""
    if not x.shape:
        return filled(shape, x.offset)
    strides = tuple(stride if size > 1 else 0 for stride, size in zip(x.strides, x.shape, strict=True))
    return Affine(x.offset, strides, shape)


def combined(x: Affine, y: Affine, factor: int) -> Affine:
    """x + factor * y."""
    strides = tuple(s + factor * t for s, t in zip(x.strides, y.strides, strict=True))
    return Affine(x.offset + factor * y.offset, strides, x.shape)


def filled(shape: tuple[int, ...], value: int) -> Affine:
    return Affine(value, (0,) * len(shape), shape)


def has_same_values(x: Affine, y: Affine) -> bool:
    """Whether two arrays of one shape are equal."""
    moving = [d for d, size in enumerate(x.shape) if size > 1]
    return x.offset == y.offset and all(x.strides[d] == y.strides[d] for d in moving)


def at_place(x: Affine | None, at: At | None) -> Affine | None:
    """The slice of `x` at `at`; `x` if `at` is None."""
    if x is None or at is None:
        return x
    one = [(s, n) if d != at.dim else (0, 1) for d, (s, n) in enumerate(zip(x.strides, x.shape, strict=True))]
    return Affine(x.offset + x.strides[at.dim] * at.position, tuple(s for s, _ in one), tuple(n for _, n in one))


def reshaped(x: Affine, shape: tuple[int, ...]) -> Affine | None:
    """`x` in another shape of the same size; None if the result is not affine.

    Groups of neighbouring dimensions become groups of the same size: [6] with stride 1 becomes [2 3] with (3, 1).
    """
    before = [(s, n) for s, n in zip(x.strides, x.shape, strict=True) if n > 1]
    after = [(d, n) for d, n in enumerate(shape) if n > 1]
    strides = [0] * len(shape)
    i = j = 0
    while i < len(before):
        end, stop = i + 1, j + 1
        while (p := math.prod(n for _, n in before[i:end])) != (q := math.prod(n for _, n in after[j:stop])):
            end, stop = (end + 1, stop) if p < q else (end, stop + 1)

        # Dimensions merge only if each stride is the stride times the length of the next inner dimension.
        step = before[end - 1][0]
        if any(s != before[k + 1][0] * before[k + 1][1] for k, (s, _) in enumerate(before[i : end - 1], i)):
            return None
        for k in range(stop - 1, j - 1, -1):
            strides[after[k][0]] = step
            step *= after[k][1]
        i, j = end, stop
    return Affine(x.offset, tuple(strides), shape)
