"""Products of sorted rows with the matrices of their groups: `grouped_product_p` and `grouped_sum_p`.

For batch b and block x of rows, group g has the rows m with starts[b x g] <= position[m] < ends[b x g]; a row without a
group gives zeros. The blocks of a batch share its matrices.

    product: out[b x m n] = sum_k lhs[b x m k] rhs[b g k n], for row m of group g
    sum:     out[b g k n] = sum_(x m) lhs[b x m k] rhs[b x m n], over the rows m of group g

A loop computes the rows of a group in tiles, which may have rows of several blocks. Positions of rows are an operand,
so devices may share rows and groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from minialpa.support.private_jax import define_batching, define_bilinear, define_function, new_aval

#: Operands: lhs [b x m k], rhs [b g k n], or [b g n k] if `summed` is 3, starts and ends [b x g], and consecutive
#: positions [m]; the last three are int32.
#: Result: out [b x m n] of `dtype`.
grouped_product_p = Primitive("minialpa_grouped_product")

#: Operands: lhs [b x m k], rhs [b x m n], then as above. Result: out [b g k n] of `dtype`.
grouped_sum_p = Primitive("minialpa_grouped_sum")

#: The scope of a loop, with its expected mean number of iterations, for readers of compiled programs.
TRIPS = "minialpa_trips_"
#: The scope of a loop that balanced rows do not need.
NEVER = TRIPS + "0"
#: Rows of a tile: at most this part of the mean group, for little arithmetic on rows of other groups.
_PART = 0.15
_SMALLEST_TILE, _LARGEST_TILE = 64, 4096


def rows_of_tile(n_rows: int, n_whole_rows: int, n_groups: int) -> int:
    """A power of two, or all rows. n_rows: of a device. n_whole_rows, n_groups: of the whole product."""
    wanted = max(_SMALLEST_TILE, min(_LARGEST_TILE, int(_PART * min(n_whole_rows / n_groups, n_rows))))
    return min(n_rows, 1 << (wanted.bit_length() - 1))


def tiles_of_group(n_rows: int, n_whole_rows: int, n_groups: int) -> float:
    """Tiles of a group on a device, if groups have equal rows. A group that ends in a tile has half of it."""
    length, n_rows = rows_of_tile(n_rows, n_whole_rows, n_groups), min(n_rows, n_whole_rows)
    groups_here = min(1.0, n_rows / n_whole_rows + 1 / n_groups)
    return n_rows / n_groups / length + groups_here / 2


@functools.partial(jax.jit, static_argnames=("summed", "n_rows", "n_groups", "precision", "dtype"))
def product(
    lhs: Any,
    rhs: Any,
    starts: Any,
    ends: Any,
    positions: Any,
    out: Any = None,
    *,
    summed: int,
    n_rows: int,
    n_groups: int,
    precision: Any,
    dtype: str,
) -> list[Any]:
    """out: results of rows without a group; zeros by default."""
    tiles = _Tiles(starts, ends, positions, n_rows, n_groups)
    rows, matrices = lhs.reshape(-1, lhs.shape[-1]), rhs.reshape(-1, *rhs.shape[2:])
    options = {"precision": precision, "preferred_element_type": np.dtype(dtype)}

    def put_tile(matrix: Any, tile: Any, is_in_group: Any, out: Any) -> Any:
        made = lax.dot_general(tiles.cut(rows, tile), matrix, (((1,), (summed - 2,)), ((), ())), **options)
        return tiles.put(out, made, tile, is_in_group)

    def add_group(group: Any, out: Any) -> Any:
        return tiles.walk(group, functools.partial(put_tile, matrices[group]), out)

    if out is None:
        # Without the barrier, XLA fills the results of all products of the step at its start.
        zero, rows, matrices = lax.optimization_barrier((jnp.zeros((), dtype), rows, matrices))
        out = jnp.full((len(rows), rhs.shape[5 - summed]), zero)
    out = lax.fori_loop(0, len(matrices), add_group, out.reshape(len(rows), -1))
    return [out.reshape(*lhs.shape[:3], -1)]


@functools.partial(jax.jit, static_argnames=("n_rows", "n_groups", "precision", "dtype"))
def sum_of_products(
    lhs: Any, rhs: Any, *bounds: Any, n_rows: int, n_groups: int, precision: Any, dtype: str
) -> list[Any]:
    tiles = _Tiles(*bounds, n_rows, n_groups)
    # As in `product`.
    zero, *factors = lax.optimization_barrier(
        (jnp.zeros((), dtype), *(array.reshape(-1, array.shape[-1]) for array in (lhs, rhs)))
    )
    wide = np.promote_types(dtype, np.float32) if jnp.issubdtype(dtype, jnp.inexact) else np.dtype(dtype)
    options = {"precision": precision, "preferred_element_type": wide}

    def add_tile(tile: Any, is_in_group: Any, total: Any) -> Any:
        left, right = (jnp.where(is_in_group, tiles.cut(array, tile), 0) for array in factors)
        return total + lax.dot_general(left, right, (((0,), (0,)), ((), ())), **options)

    shape = lhs.shape[-1], rhs.shape[-1]

    def put_group(group: Any, out: Any) -> Any:
        total = tiles.walk(group, add_tile, jnp.full(shape, zero.astype(wide)))
        return lax.dynamic_update_index_in_dim(out, total.astype(dtype), group, 0)

    out = lax.fori_loop(0, tiles.n_matrices, put_group, jnp.full((tiles.n_matrices, *shape), zero))
    return [out.reshape(lhs.shape[0], -1, *shape)]


class _Tiles:
    """The rows of each group in tiles of `length` rows.

    A tile of a single block is the number of its first row; otherwise, it has the number of each row, over all blocks.
    """

    def __init__(self, starts: Any, ends: Any, positions: Any, *whole: int) -> None:
        """whole: n_whole_rows, n_groups."""
        n_whole_rows, n_groups = whole
        self.n_rows = len(positions)
        self.n_batches, self.n_blocks, self.n_groups = starts.shape
        sizes = self.n_blocks * self.n_rows, self.n_blocks * n_whole_rows, n_groups
        self.length, self.n_expected = rows_of_tile(*sizes), tiles_of_group(*sizes)
        self.n_matrices = self.n_batches * self.n_groups
        # [b g x], in the order of the matrices.
        self.first, self.end = (
            jnp.clip(bounds - positions[0], 0, self.n_rows).transpose(0, 2, 1).reshape(-1, self.n_blocks)
            for bounds in (starts, ends)
        )

    def cut(self, array: Any, tile: Any) -> Any:
        if self.n_blocks == 1:
            return lax.dynamic_slice_in_dim(array, tile, self.length, 0)
        return array.at[tile].get(mode="promise_in_bounds")

    def put(self, array: Any, rows: Any, tile: Any, is_in_group: Any) -> Any:
        """The array with the rows of a tile that are in its group."""
        if self.n_blocks == 1:
            rows = jnp.where(is_in_group, rows, self.cut(array, tile))
            return lax.dynamic_update_slice_in_dim(array, rows, tile, 0)
        nowhere = len(array) + jnp.arange(self.length, dtype=np.int32)
        return array.at[jnp.where(is_in_group[:, 0], tile, nowhere)].set(rows, mode="drop", unique_indices=True)

    def walk(self, matrix: Any, visit: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        """`carry` after `visit(tile, is_in_group, carry)` for each tile of the rows with this matrix."""
        first_row = matrix // self.n_groups * self.n_blocks * self.n_rows  # of the batch
        first, end = self.first[matrix], self.end[matrix]
        after = jnp.cumsum(jnp.maximum(end - first, 0))
        before = jnp.concatenate([jnp.zeros(1, after.dtype), after[:-1]])
        shift = first - before + self.n_rows * jnp.arange(self.n_blocks, dtype=np.int32)

        def visit_tile(i: Any, carry: Any) -> Any:
            start = i * self.length
            if self.n_blocks == 1:
                tile = jnp.minimum(first[0] + start, self.n_rows - self.length)
                rows = tile + jnp.arange(self.length)
                is_in_group = (rows >= first[0] + start) & (rows < end[0])
                return visit(first_row + tile, is_in_group[:, None], carry)

            number = start + lax.broadcasted_iota(np.int32, (self.length, 1), 0)  # in the group
            is_here = (number >= before[None]) & (number < after[None])
            tile = jnp.sum(jnp.where(is_here, number + shift[None], 0), axis=1, dtype=np.int32)
            return visit(first_row + tile, number < after[-1], carry)

        with jax.named_scope(f"{TRIPS}{self.n_expected:.4f}"):
            return lax.fori_loop(0, (after[-1] + self.length - 1) // self.length, visit_tile, carry)


def product_aval(lhs: Any, rhs: Any, *others: Any, summed: int, dtype: str, **_: Any) -> list[Any]:
    return [new_aval((*lhs.shape[:3], rhs.shape[5 - summed]), np.dtype(dtype), (lhs, rhs, *others))]


def sum_aval(lhs: Any, rhs: Any, starts: Any, *others: Any, dtype: str, **_: Any) -> list[Any]:
    shape = (lhs.shape[0], starts.shape[-1], lhs.shape[-1], rhs.shape[-1])
    return [new_aval(shape, np.dtype(dtype), (lhs, rhs, starts, *others))]


def _batched(primitive: Primitive, operands: Sequence[Any], dims: Sequence[int | None], **params: Any) -> Any:
    """New blocks, if they share the matrices of a product; otherwise new batches."""
    *arrays, positions = operands
    n = next(x.shape[dim] for x, dim in zip(arrays, dims, strict=False) if dim is not None)
    shares_matrices = primitive is grouped_product_p and dims[1] is None
    at = int(shares_matrices)

    def merged(x: Any, dim: int | None) -> Any:
        x = jnp.moveaxis(x, dim, at) if dim is not None else jnp.broadcast_to(jnp.expand_dims(x, at), _with(x, n, at))
        return x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :])

    merged_arrays = [
        x if shares_matrices and i == 1 else merged(x, dim)
        for i, (x, dim) in enumerate(zip(arrays, dims, strict=False))
    ]
    (out,) = primitive.bind(*merged_arrays, positions, **params)
    return [out.reshape(*out.shape[:at], n, -1, *out.shape[at + 1 :])], [at]


def _sum_like(array: Any, left: Any, right: Any, *bounds: Any, summed: int, dtype: str, **params: Any) -> Any:
    """The cotangent of the matrices `array`, which has their order and dtype."""
    del dtype
    rows = (left, right) if summed == 2 else (right, left)
    return grouped_sum_p.bind(*rows, *bounds, dtype=_dtype(array), **params)[0]


def _product_like(array: Any, rows: Any, matrices: Any, *bounds: Any, summed: int, **params: Any) -> Any:
    """The cotangent of the rows `array`, of its dtype."""
    return grouped_product_p.bind(rows, matrices, *bounds, summed=summed, **{**params, "dtype": _dtype(array)})[0]


def _dtype(undefined: Any) -> str:
    return str(undefined.aval.dtype)


define_bilinear(
    grouped_product_p,
    (
        lambda out_bar, lhs, rhs, *bounds, summed, **params: _product_like(
            lhs, out_bar, rhs, *bounds, summed=5 - summed, **params
        ),
        lambda out_bar, lhs, rhs, *bounds, **params: _sum_like(rhs, lhs, out_bar, *bounds, **params),
    ),
)
define_bilinear(
    grouped_sum_p,
    (
        lambda out_bar, lhs, rhs, *bounds, **params: _product_like(lhs, rhs, out_bar, *bounds, summed=3, **params),
        lambda out_bar, lhs, rhs, *bounds, **params: _product_like(rhs, lhs, out_bar, *bounds, summed=2, **params),
    ),
)


def _with(x: Any, n: int, at: int) -> tuple[int, ...]:
    return (*x.shape[:at], n, *x.shape[at:])


for primitive, aval, fun in (
    (grouped_product_p, product_aval, product),
    (grouped_sum_p, sum_aval, sum_of_products),
):
    primitive.multiple_results = True
    primitive.def_abstract_eval(aval)
    primitive.def_impl(fun)
    define_function(primitive, fun)
    define_batching(primitive, functools.partial(_batched, primitive))
