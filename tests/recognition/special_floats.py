"""Arrays of special floats, and comparisons in which NaN and infinity have to be at the same places."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

#: The largest number is a little below that of the dtype, so that sums of weights that are 1 + eps stay finite.
_LARGEST = 0.9


def floats(dtype: Any) -> st.SearchStrategy[float]:
    """0 of both signs, the smallest and the largest numbers, infinities, NaN, and some ordinary numbers."""
    info = jnp.finfo(dtype)
    special = [0.0, float(info.smallest_subnormal), float(info.tiny), _LARGEST * float(info.max), np.inf]
    return st.sampled_from([sign * x for x in special for sign in (1, -1)] + [np.nan, 1.0, -3.0, 0.25, 2.5])


def arrays(dtype: Any, *shape: int) -> st.SearchStrategy[np.ndarray]:
    """Arrays with at least as many ordinary numbers as special ones."""
    n = int(np.prod(shape))
    ordinary = st.floats(-4, 4, width=16)

    def made(values: list[float]) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.asarray(values, np.float64).reshape(shape).astype(dtype)

    return st.lists(ordinary | floats(dtype), min_size=n, max_size=n).map(made)


def assert_same_floats(x: Any, expected: Any, atol: Any, what: str) -> None:
    """NaN and each infinity at the same places, and all else within `atol`."""
    x, expected = np.asarray(x, np.float64), np.asarray(expected, np.float64)
    with np.errstate(all="ignore"):
        same = (x == expected) | (np.isnan(x) & np.isnan(expected)) | (np.abs(x - expected) <= atol)
    places = ~same
    assert same.all(), f"{what}\n{x[places]}\nin place of\n{expected[places]}"
