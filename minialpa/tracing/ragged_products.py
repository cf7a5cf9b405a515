"""`ragged_dot_general` in; a product of grouped rows (`minialpa.grouped`) out.

XLA's own form multiplies all rows with the weights of all groups.

    [m k], [g k n] -> [m n]      the ragged rows are kept: `grouped_product_p`
    [m k], [m n] -> [g k n]      the ragged rows are summed over: `grouped_sum_p`
    ragged batches               a plain product
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from minialpa.errors import TraceError
from minialpa.grouped import grouped_product_p, grouped_sum_p


def grouped_product(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    *,
    ragged_dot_dimension_numbers: Any,
    precision: Any,
    preferred_element_type: Any,
    group_offset: Any = None,
    out_sharding: Any = None,
) -> tuple[Any]:
    """The result of `ragged_dot_general` with these parameters."""
    del out_sharding  # the plan decides
    if group_offset is not None:
        raise NotImplementedError("jax compiles no `ragged_dot_general` with a `group_offset`.")
    numbers = ragged_dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    (lhs_sums, rhs_sums), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    dtype = np.dtype(preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype))
    params: dict[str, Any] = {"precision": precision, "dtype": dtype.name}
    if ragged in lhs_batch:
        dot = functools.partial(lax.dot_general, precision=precision, preferred_element_type=dtype)
        return (dot(lhs, rhs, numbers.dot_dimension_numbers),)

    lhs_kept, rhs_kept = (
        _others(lhs, lhs_sums, lhs_batch),
        _others(rhs, rhs_sums, rhs_batch, numbers.rhs_group_dimensions),
    )
    is_summed = ragged in lhs_sums
    rows = list(lhs_sums) if is_summed else lhs_kept
    at = rows.index(ragged)
    # Rows [b x m]: b batches, x blocks of rows that share the matrices of their groups, m rows in each.
    parts = [lhs_batch, rows[:at], rows[at:], lhs_kept if is_summed else lhs_sums]
    left = _merged(lhs, parts)
    if is_summed:
        right = _merged(rhs, [rhs_batch, rhs_sums[:at], rhs_sums[at:], rhs_kept])
    else:
        # In the order that needs no transpose.
        matrix = sorted([rhs_sums, rhs_kept], key=lambda dims: min(dims, default=-1))
        right = _merged(rhs, [rhs_batch, numbers.rhs_group_dimensions, *matrix])
        params["summed"] = 2 + matrix.index(rhs_sums)

    shape = [array.shape[dim] for array, dims in ((lhs, lhs_batch), (lhs, lhs_kept), (rhs, rhs_kept)) for dim in dims]
    shape = [group_sizes.shape[-1], *shape] if is_summed else shape
    if 0 in (lhs.size, rhs.size):
        return (jnp.zeros(shape, dtype),)

    n_in_row = math.prod(lhs.shape[dim] for dim in rows[at + 1 :])
    bounds = _bounds(group_sizes, (*left.shape[:2], group_sizes.shape[-1]), lhs.shape[ragged], n_in_row)
    positions = lax.iota(np.int32, left.shape[2])
    params |= {"n_rows": left.shape[2], "n_groups": bounds[0].shape[-1]}
    (out,) = (grouped_sum_p if is_summed else grouped_product_p).bind(left, right, *bounds, positions, **params)
    # Without a batch, a transpose would count as a copy.
    out = jnp.moveaxis(out, 1, 0) if is_summed and out.shape[0] > 1 else out
    return (out.reshape(shape),)


def _others(array: Any, *named: Sequence[int]) -> list[int]:
    return [dim for dim in range(array.ndim) if not any(dim in dims for dims in named)]


def _merged(array: Any, parts: Sequence[Sequence[int]]) -> Any:
    """With one dimension for each of `parts`, which list all dimensions."""
    shape = [math.prod(array.shape[dim] for dim in dims) for dims in parts]
    return lax.reshape(lax.transpose(array, [dim for dims in parts for dim in dims]), shape)


def _bounds(sizes: Any, shape: tuple[int, ...], n_rows: int, n_in_row: int) -> tuple[Any, Any]:
    """The first row of each group, and the end of its rows; `n_in_row` rows count as one."""
    if n_rows > np.iinfo(sizes.dtype).max:
        raise TraceError(
            f"`ragged_dot` has group sizes of {sizes.dtype}, which cannot count its {n_rows} rows. Use int32 sizes."
        )
    ends = lax.cumsum(sizes.astype(np.int32), axis=sizes.ndim - 1)
    starts = ends - sizes.astype(np.int32)
    reshape = jnp.broadcast_to if sizes.ndim == 1 else lax.reshape
    return reshape(n_in_row * starts, shape), reshape(n_in_row * ends, shape)
