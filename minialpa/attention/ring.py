"""Ring attention (Liu et al. 2023) on one device: shards of the operands in, shards of the results out.

Device i of n has block i of the queries and of the keys. In step k, it adds block i - k (modulo n) of the keys and
values to the sums of its queries, and sends the block to device i + 1 meanwhile. In the gradient, the cotangents of
keys and values travel with them, in m pieces of the block. One piece is on its way, and the next ones wait in m - 1
slots, in turns of both halves of the block:

    send the last piece, add to the piece in slot t mod (m - 1), and put there what arrives

In a balanced ring, device i has slices i and 2n - 1 - i of 2n slices, of queries and of keys. A causal mask then hides
half of each step but the first from each device.

In most pairs of slices, a window shows all pairs of positions, a triangle of them, or none. cuDNN computes the first
two; other pairs of slices run block by block. Each device has the positions of all keys, so positions do not travel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from minialpa.attention import blockwise, cudnn
from minialpa.attention.kind import AttentionKind

#: Most positions of a call of cuDNN. Temporary arrays have this length.
MOST_SIDE = 8192
#: Most queries and keys of a pair of blocks in plain jax. With cuDNN, programs have memory for such pairs, too.
PLAIN_SIDES = 512, 256

#: Arrays [b t ...] or [1 t] with one entry for each position.
Arrays = Any
#: (queries, keys, (sums for queries, sums for keys)) -> sums.
Add = Callable[[Arrays, Arrays, Any], Any]


@dataclass(frozen=True, slots=True)
class Ring:
    """Attributes:
    names: of the axes of the mesh, outermost first.
    n: devices.
    is_balanced: whether each device has an early and a late slice; see the module.
    """

    names: tuple[str, ...]
    n: int
    is_balanced: bool = False

    def send(self, arrays: Arrays) -> Arrays:
        ring = [(i, (i + 1) % self.n) for i in range(self.n)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.names, ring), arrays)

    def block(self, x: jax.Array, k: Any) -> jax.Array:
        """The block of `x` [., n x size, ...] that this device has in step k."""
        j = (lax.axis_index(self.names) - k) % self.n
        size = x.shape[1] // self.n
        if not self.is_balanced:
            return lax.dynamic_slice_in_dim(x, j * size, size, 1)
        half = size // 2
        starts = (2 * j * half, (2 * self.n - 1 - 2 * j) * half)
        return jnp.concatenate([lax.dynamic_slice_in_dim(x, start, half, 1) for start in starts], axis=1)


def attend(ring: Ring, *operands: jax.Array, kind: AttentionKind) -> list[jax.Array]:
    query, key, value, *others = operands
    n_keys = key.shape[1] * ring.n
    query_at, key_at = _of_positions(others, kind, query.shape[1], n_keys)
    layout = _Layout.of(key, value)
    plain = _over_pairs(PLAIN_SIDES, functools.partial(_add_keys, kind, n_keys))
    kernel = functools.partial(cudnn.add_keys, kind=kind, n_keys=n_keys)
    add = _added(_side(query.shape[1], 8), plain, kernel, layout)

    def of_block(block: Arrays, sums: Any, k: Any) -> Any:
        return add((query, *query_at), (block, *(ring.block(x, k) for x in key_at)), (sums, ()))[0]

    def step(k: Any, carry: Any) -> Any:
        block, sums = carry
        sent = ring.send(block)
        return sent, of_block(block, sums, k)

    start = (layout.pack((key, value)), blockwise.first_sums(query, key, value))
    block, sums = blockwise.loop(ring.n - 1, step, start)
    out, logsumexp = blockwise.results_of(of_block(block, sums, np.int32(ring.n - 1)), n_keys)
    # Without a barrier, readers of `out` keep the sums.
    return list(lax.optimization_barrier((out.astype(value.dtype), logsumexp)))


def differentiate(
    ring: Ring, *operands: jax.Array, kind: AttentionKind, dtypes: Sequence[str], with_bias_gradient: Sequence[bool]
) -> list[jax.Array]:
    assert not with_bias_gradient, with_bias_gradient
    query, key, value, out, logsumexp, out_bar, *others = operands
    key, value, logsumexp = lax.optimization_barrier((key, value, logsumexp))
    n_keys = key.shape[1] * ring.n
    query_at, key_at = _of_positions(others, kind, query.shape[1], n_keys)
    logsumexp, factor = _statistics(logsumexp, query_at, key_at, kind)

    side, wide = _side(query.shape[1], 16), blockwise.dtype_of_sums(query, key, value)
    pieces = pieces_of(query.shape[1], key.shape[1])
    slots = blockwise.Axis(length=key.shape[1] - pieces.block, n_blocks=pieces.n_blocks - 1, block=pieces.block)
    zeros = [jnp.zeros(x.shape, dtype) for x, dtype in zip((key, value), dtypes[1:], strict=True)]
    layout, of_bars = _Layout.of(key, value, *zeros), _Layout.of(*zeros)
    plain = _over_pairs(PLAIN_SIDES, functools.partial(_add_gradients, kind))
    kernel = functools.partial(cudnn.add_gradients, kind=kind, n_keys=n_keys)
    add = _added(side, plain, kernel)

    def step(t: Any, carry: Any) -> Any:
        waiting, done, query_bar = carry
        i, slot = t % pieces.n_blocks, t % slots.n_blocks
        # At first, no piece is done.
        arrived = jax.tree.map(lambda x, y: jnp.where(t == 0, x, y), done, ring.send(done))
        key, value, *bars = _cut(slots, waiting, slot)
        at = [_cut(pieces, _in_pieces(ring.block(x, t // pieces.n_blocks), pieces), i) for x in key_at]
        sums = tuple(x.astype(np.promote_types(x.dtype, wide)) for x in bars)
        query_bar, sums = add(queries, (key, value, *at), (query_bar, sums))
        # Otherwise, `waiting` and `done` are copied.
        arrived, key, value, sums = lax.optimization_barrier((arrived, key, value, sums))
        rounded = [x.astype(dtype) for x, dtype in zip(sums, dtypes[1:], strict=True)]
        return _put(slots, waiting, layout.unpack(arrived), slot), layout.pack((key, value, *rounded)), query_bar

    parts = [_in_pieces(x, pieces) for x in (key, value, *zeros)]
    waiting, done = [x[:, : slots.length] for x in parts], layout.pack([x[:, slots.length :] for x in parts])
    # As in `blockwise.differentiate`.
    zero = jnp.zeros((), wide)
    waiting, done, query, out, out_bar, zero = lax.optimization_barrier((waiting, done, query, out, out_bar, zero))
    queries = (query, out, logsumexp, factor, out_bar, *query_at)
    start = (waiting, done, (jnp.broadcast_to(zero, query.shape),))
    waiting, done, (query_bar,) = blockwise.loop(ring.n * pieces.n_blocks, step, start)
    last = of_bars.unpack(ring.send(of_bars.pack(layout.unpack(done)[2:])))
    ends = zip(waiting[2:], last, strict=True)
    bars = [_in_order(jnp.concatenate([jnp.roll(x, -ring.n * pieces.block, 1), y], axis=1), pieces) for x, y in ends]
    return [query_bar.astype(dtypes[0]), *bars]


def pieces_of(n_queries: int, n_keys: int) -> blockwise.Axis:
    """Of the keys of a device: equally many from each half."""
    half = blockwise.pieces(n_keys // 2, _side(n_queries, 16))
    return blockwise.Axis(length=n_keys, n_blocks=2 * half.n_blocks, block=half.block)


def _in_pieces(x: jax.Array, pieces: blockwise.Axis) -> jax.Array:
    """Pieces of the first and second half in turns."""
    shape = (x.shape[0], 2, pieces.n_blocks // 2, pieces.block, *x.shape[2:])
    return x.reshape(shape).swapaxes(1, 2).reshape(x.shape)


def _in_order(x: jax.Array, pieces: blockwise.Axis) -> jax.Array:
    shape = (x.shape[0], pieces.n_blocks // 2, 2, pieces.block, *x.shape[2:])
    return x.reshape(shape).swapaxes(1, 2).reshape(x.shape)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Arrays [b s g features] side by side, one array for each dtype, so that few collectives send them."""

    dtypes: tuple[Any, ...]
    widths: tuple[int, ...]

    @staticmethod
    def of(*arrays: jax.Array) -> _Layout:
        return _Layout(tuple(x.dtype for x in arrays), tuple(x.shape[-1] for x in arrays))

    def pack(self, arrays: Sequence[jax.Array]) -> Arrays:
        packed = {}
        for dtype in dict.fromkeys(self.dtypes):
            packed[dtype.name] = jnp.concatenate([x for x in arrays if x.dtype == dtype], axis=-1)
        return packed

    def unpack(self, packed: Arrays) -> list[jax.Array]:
        begins = dict.fromkeys(packed, 0)
        arrays = []
        for dtype, width in zip(self.dtypes, self.widths, strict=True):
            begin = begins[dtype.name]
            arrays.append(lax.slice_in_dim(packed[dtype.name], begin, begin + width, axis=-1))
            begins[dtype.name] += width
        return arrays


def _of_positions(
    others: Sequence[jax.Array], kind: AttentionKind, n_queries: int, n_keys: int
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Positions [1 t] and segments [b t g r 1] of the queries of this device, and the same of all keys."""
    n = kind.n_positions
    of_queries, of_keys = [x[None] for x in others[: n // 2]], [x[None] for x in others[n // 2 : n]]
    for queries, keys in zip(others[n::2], others[n + 1 :: 2], strict=True):
        of_queries.append(_with_positions(jnp.moveaxis(queries, 3, 1), n_queries))
        of_keys.append(_with_positions(jnp.moveaxis(keys, 4, 1), n_keys))
    return of_queries, of_keys


def _with_positions(x: jax.Array, n: int) -> jax.Array:
    return jnp.broadcast_to(x, (x.shape[0], n, *x.shape[2:]))


def _statistics(
    logsumexp: jax.Array, query_at: Sequence[jax.Array], key_at: Sequence[jax.Array], kind: AttentionKind
) -> tuple[jax.Array, jax.Array]:
    """shift and factor [b t g r] with p = exp(score - shift) factor.

    If a query sees no key, a finite masked score may be so large that logsumexp has lost the number of keys.
    """
    ones = jnp.ones_like(logsumexp)
    if not key_at or kind.masked_score == -math.inf:
        return logsumexp, ones
    n_keys = key_at[0].shape[1]
    columns = blockwise.pieces(n_keys, PLAIN_SIDES[1])

    def column(j: Any, sees: jax.Array) -> jax.Array:
        visible = _visible(query_at, _cut(columns, key_at, j), kind)
        return sees | visible.any(axis=-1)

    sees = blockwise.loop(columns.n_blocks, column, jnp.zeros(logsumexp.shape, bool))
    return jnp.where(sees, logsumexp, kind.masked_score), jnp.where(sees, ones, 1 / n_keys)


def _visible(query_at: Sequence[jax.Array], key_at: Sequence[jax.Array], kind: AttentionKind) -> jax.Array:
    """[b t g r s], where b, g and r may have length 1."""
    n = kind.n_positions // 2
    conditions = []
    for queries, keys in zip(query_at[:n], key_at[:n], strict=True):
        ahead = (keys[:, None] - queries[:, :, None])[:, :, None, None]
        conditions += [ahead >= -kind.left] if kind.left is not None else []
        conditions += [ahead <= kind.right] if kind.right is not None else []
    for queries, keys in zip(query_at[n:], key_at[n:], strict=True):
        conditions.append(queries == jnp.moveaxis(keys, 1, 4))
    return functools.reduce(jnp.logical_and, conditions)


def _side(n_queries: int, n_parts: int) -> int:
    """Positions of a call of cuDNN, which are at most half of the queries."""
    return max(1, min(n_queries // 2, max(MOST_SIDE // 4, n_queries // n_parts), MOST_SIDE))


def _added(side: int, plain: Add, with_kernel: Callable[..., Any], layout: _Layout | None = None) -> Add:
    on_gpus, on_others = (
        _over_pairs((side, side), add, layout) for add in (functools.partial(with_kernel, plain=plain), plain)
    )

    def add(queries: Arrays, keys: Arrays, sums: Any) -> Any:
        return lax.platform_dependent(queries, keys, sums, cuda=on_gpus, default=on_others)

    return add


def _add_keys(kind: AttentionKind, n_keys: int, queries: Arrays, keys: Arrays, sums: Any) -> Any:
    return blockwise.add_keys(queries, keys, sums[0], kind=kind, n_keys=n_keys), ()


def _add_gradients(kind: AttentionKind, queries: Arrays, keys: Arrays, sums: Any) -> Any:
    query_bar, *key_bars = blockwise.gradients_of_keys(queries, keys, kind=kind)
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, ((query_bar,), tuple(key_bars)))


def _over_pairs(sides: tuple[int, int], add: Add, layout: _Layout | None = None) -> Add:
    """`add` for pieces of at most as many queries and keys as `sides`.

    layout: of key and value, which are packed.
    """

    def add_all(queries: Arrays, keys: Arrays, sums: Any) -> Any:
        n_keys = jax.tree.leaves(keys)[0].shape[1]
        rows, columns = blockwise.pieces(queries[0].shape[1], sides[0]), blockwise.pieces(n_keys, sides[1])

        def column(j: Any, sums: Any) -> Any:
            of_queries, of_keys = sums
            piece = _cut(columns, keys, j)
            if layout is not None:
                piece = (*layout.unpack(piece[0]), *piece[1:])

            def row(i: Any, sums: Any) -> Any:
                of_queries, of_piece = sums
                new = add(_cut(rows, queries, i), piece, (_cut(rows, of_queries, i), of_piece))
                return _put(rows, of_queries, new[0], i), new[1]

            of_queries, end = blockwise.loop(rows.n_blocks, row, (of_queries, _cut(columns, of_keys, j)))
            return of_queries, _put(columns, of_keys, end, j)

        return blockwise.loop(columns.n_blocks, column, sums)

    return add_all


def _cut(axis: blockwise.Axis, arrays: Arrays, i: Any) -> Arrays:
    return jax.tree.map(lambda x: axis.cut(x, i, 1), arrays)


def _put(axis: blockwise.Axis, arrays: Arrays, pieces: Arrays, i: Any) -> Arrays:
    return jax.tree.map(lambda x, piece: axis.put(x, piece, i, 1), arrays, pieces)
