"""A foreign function that every jaxlib for CPUs has: LU decompositions by LAPACK."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def lu_by_lapack(x: Any) -> Any:
    """LU decompositions of matrices [..., n, n], in place, with pivots [..., n] and whether they worked [...]."""
    jax.jit(jax.lax.linalg.lu).lower(jax.ShapeDtypeStruct((2, 2), np.float32))  # registers the targets of LAPACK
    matrix = (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)
    leading = x.shape[:-2]
    results = [
        jax.ShapeDtypeStruct(x.shape, np.float32),
        jax.ShapeDtypeStruct((*leading, x.shape[-1]), np.int32),
        jax.ShapeDtypeStruct(leading, np.int32),
    ]
    call = jax.ffi.ffi_call(
        "lapack_sgetrf_ffi", results, input_layouts=[matrix], output_layouts=[matrix, None, None],
        input_output_aliases={0: 0}, vmap_method="broadcast_all",
    )  # fmt: skip
    return call(x)
