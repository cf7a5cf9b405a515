"""Arrays in the form in which they cross processes by pickle.

Pickle moves arrays of NumPy's own dtypes out of band, without a copy. It would copy arrays of other packages' dtypes,
such as bfloat16, into its stream, so these cross as unsigned integers of the same size.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def to_plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`array` if its dtype is one of NumPy's own, or a view of its memory as unsigned integers."""
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")


def from_plain(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """The inverse of `to_plain`, for an array of `dtype`."""
    return array if np.dtype(dtype).isbuiltin == 1 else array.view(dtype)
