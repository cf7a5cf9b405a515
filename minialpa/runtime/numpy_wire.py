"""Arrays between processes by pickle: those of NumPy's own numbers go beside the pickle as they are.

Those of other packages, as bfloat16, would be copied into it. So they travel as unsigned integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def to_plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`array`, or its memory seen as unsigned integers of the same size."""
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")


def from_plain(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """The inverse of `to_plain`, for an array of `dtype`."""
    return array if np.dtype(dtype).isbuiltin == 1 else array.view(dtype)
