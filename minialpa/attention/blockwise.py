"""Attention in plain jax, block by block (Rabe and Staats 2021; Dao et al. 2022), for machines without a kernel.

The operands of `attention_p` and `attention_gradient_p` in, their results out (`operation`). Only the scores of one
block i of queries and one block j of keys exist at a time. For each i, a loop over j updates

    maximum = max_s score,     total = sum_s exp(score - maximum),     mixed = sum_s exp(score - maximum) value

and at the end out = mixed / total. If the window hides block j from all queries of block i, all scores of the pair are
`masked_score`, and the update needs no product of queries and keys:

    total += n_keys exp(masked_score - maximum),     mixed += exp(masked_score - maximum) sum_s value

and, in the gradient, value_bar += sum_(r t) p out_bar for each of these keys. This is exact for every `masked_score`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from minialpa.attention.kind import AttentionKind, Step

Carry = TypeVar("Carry")
#: (maximum, total, mixed) of a block of queries: the sums of the module, over the blocks of keys so far.
State = tuple[jax.Array, jax.Array, jax.Array]

#: Most positions in a block, if both queries and keys have several blocks.
SIDE = 512
#: Most scores at a time, unless blocks of the smallest side have more.
MOST_SCORES = 1 << 24
SMALLEST_SIDE = 128
#: Beyond this magnitude, rounding of a logsumexp makes exp(score - logsumexp) inaccurate.
COARSE = 64.0


@functools.partial(jax.jit, static_argnames="kind")
def attend(*operands: jax.Array, kind: AttentionKind) -> list[jax.Array]:
    query, key, value, *others = operands
    problem = _problem(query, key, value, others, kind)
    shrink = _shrink(problem)
    maximum, total, mixed = _walk(replace(problem, value_scale=shrink))

    # Without a score above -inf, total is 0 and the result NaN, as in a written softmax.
    out = problem.rows.unpad(mixed / total[..., None] / shrink, 3)
    logsumexp = problem.rows.unpad(_finite_or_zero(maximum) + jnp.log(total), 3)
    statistics = np.promote_types(query.dtype, np.float32)
    return [out.transpose(0, 3, 1, 2, 4).astype(value.dtype), logsumexp.transpose(0, 3, 1, 2).astype(statistics)]


@functools.partial(jax.jit, static_argnames=("kind", "dtypes", "with_bias_gradient"))
def differentiate(
    *operands: jax.Array, kind: AttentionKind, dtypes: Sequence[str], with_bias_gradient: Sequence[bool]
) -> list[jax.Array]:
    # Without a barrier, a compiler that sees both passes keeps scores or unrounded results of the first pass.
    # `out` passes flat, as a product reads it. And without `zero`, XLA would fill the first sums of all attentions of a
    # step at once.
    query, key, value, out, *rest = operands[:6]
    flat, zero = out.reshape(*out.shape[:2], math.prod(out.shape[2:])), jnp.zeros((), dtype_of_sums(query))
    query, key, value, flat, zero, logsumexp, out_bar = jax.lax.optimization_barrier(
        (query, key, value, flat, zero, *rest)
    )
    out = flat.reshape(out.shape)
    others = operands[6:]
    problem = _problem(query, key, value, others, kind)
    rows = _rows_of_gradient(problem, out, logsumexp, out_bar)
    requested = [n for n, is_requested in enumerate(with_bias_gradient) if is_requested]
    results = _gradients(problem, rows, requested, dtypes[1:3], zero)
    return [x.astype(dtype) for x, dtype in zip(results, dtypes, strict=True)]


def _gradients(
    problem: _BlockedArrays,
    rows: _Rows,
    requested: Sequence[int],
    dtypes: Sequence[Any] | None = None,
    zero: jax.Array | float = 0.0,
) -> list[jax.Array]:
    """query_bar [b t g r d], key_bar [b s g d], value_bar [b s g e], then cotangents of the requested biases.

    dtypes: of key_bar and value_bar, which have the dtype of the sums by default.
    zero: fills the first sums.
    """
    bias_bars = [jnp.full(problem.biases[n].shape, zero, problem.dtype) for n in requested]

    def add_row(j: Any, i: Any, carry: Any) -> Any:
        query_bar, bias_bars, key_bar, value_bar = carry
        query_block, key_block, value_block, bias_blocks = _pair_gradient(problem, rows, requested, i, j)
        query_bar = problem.rows.add(query_bar, query_block, i, 3)
        bias_bars = [problem.add(bar, block, i, j) for bar, block in zip(bias_bars, bias_blocks, strict=True)]
        return query_bar, bias_bars, key_bar + key_block, value_bar + value_block

    def add_column(carry: Any, j: Any) -> Any:
        key_zeros, value_zeros = jnp.zeros_like(problem.keys(0)), jnp.zeros_like(problem.values(0))
        *carry, key_bar, value_bar = loop(
            problem.rows.n_blocks, functools.partial(add_row, j), (*carry, key_zeros, value_zeros)
        )
        # Rounded block by block, so that no array of the sums' dtype has all keys.
        bars = (key_bar, value_bar) if dtypes is None else (key_bar.astype(dtypes[0]), value_bar.astype(dtypes[1]))
        return tuple(carry), bars

    carry, (key_bar, value_bar) = _scan(
        problem.columns.n_blocks, add_column, (jnp.full(problem.query.shape, zero, problem.dtype), bias_bars)
    )
    query_bar, bias_bars = carry
    query_bar = problem.rows.unpad(query_bar, 3).transpose(0, 3, 1, 2, 4)
    key_bar, value_bar = (
        problem.columns.unpad(problem.columns.join(x, 2), 2).transpose(0, 2, 1, 3) for x in (key_bar, value_bar)
    )
    return [query_bar, key_bar, value_bar, *(problem.unpad(bar) for bar in bias_bars)]


# ---- some of the keys ------------------------------------------------------------------------------------------------

#: `State` of the keys so far, for queries [b t g r]. `mixed` has values times `shrink_for`.
Sums = State


def dtype_of_sums(*arrays: jax.Array) -> np.dtype[Any]:
    return functools.reduce(np.promote_types, (x.dtype for x in arrays), np.dtype(np.float32))


def first_sums(query: jax.Array, key: jax.Array, value: jax.Array) -> Sums:
    dtype, rows = dtype_of_sums(query, key, value), query.shape[:-1]
    return jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype), jnp.zeros((*rows, value.shape[-1]), dtype)


def add_keys(
    queries: Sequence[jax.Array], keys: Sequence[jax.Array], sums: Sums, *, kind: AttentionKind, n_keys: int
) -> Sums:
    """Of an attention without biases and masks.

    queries: [b t g r d], and with a window positions [1 t]; then segments [b t g r 1].
    keys: key and value, and with a window positions [1 s]; then segments [b s g r 1].
    n_keys: in the whole attention.
    """
    (query, *query_at), (key, value, *key_at) = queries, keys
    problem = _problem(query, key, value, _others(query_at, key_at, kind), kind)
    maximum, total, mixed = (problem.rows.pad(jnp.moveaxis(x, 1, 3), 3) for x in sums)
    state = _walk(replace(problem, value_scale=shrink_for(n_keys), is_part=True), (maximum, total, mixed))
    maximum, total, mixed = (jnp.moveaxis(problem.rows.unpad(x, 3), 3, 1) for x in state)
    return maximum, total, mixed


def _others(queries: Sequence[jax.Array], keys: Sequence[jax.Array], kind: AttentionKind) -> list[jax.Array]:
    """As in the primitives, from arrays with positions in dimension 1."""
    n = kind.n_positions // 2
    others = [x[0] for x in (*queries[:n], *keys[:n])]
    for query, key in zip(queries[n:], keys[n:], strict=True):
        others += [jnp.moveaxis(query, 1, 3), jnp.moveaxis(key, 1, 4)]
    return others


def joined(sums: Sums, out: jax.Array, logsumexp: jax.Array, n_keys: int) -> Sums:
    """With results for other keys."""
    old, total, mixed = sums
    maximum = jnp.maximum(old, logsumexp)
    shift = _finite_or_zero(maximum)
    old_weight, weight = jnp.exp(old - shift), jnp.exp(logsumexp - shift)
    new = (weight * shrink_for(n_keys))[..., None] * out.astype(mixed.dtype)
    return maximum, old_weight * total + weight, old_weight[..., None] * mixed + new


def results_of(sums: Sums, n_keys: int) -> tuple[jax.Array, jax.Array]:
    """out and logsumexp."""
    maximum, total, mixed = sums
    return mixed / total[..., None] / shrink_for(n_keys), _finite_or_zero(maximum) + jnp.log(total)


def shrink_for(n_keys: int) -> float:
    """A power of 2, so that sums of finite values are finite."""
    return 2.0 ** -math.ceil(math.log2(2 * max(n_keys, 1)))


def gradients_of_keys(queries: Sequence[jax.Array], keys: Sequence[jax.Array], *, kind: AttentionKind) -> Any:
    """Parts of query_bar, key_bar and value_bar, in the dtype of the sums.

    queries: query, out, logsumexp, factor [b t g r], out_bar, positions, segments; p = exp(score - logsumexp) factor.
    """
    (query, out, logsumexp, factor, out_bar, *query_at), (key, value, *key_at) = queries, keys
    problem = replace(_problem(query, key, value, _others(query_at, key_at, kind), kind), is_part=True)
    return tuple(_gradients(problem, _rows_of_gradient(problem, out, logsumexp, out_bar, factor), ()))


# ---- blocks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """`length` positions in blocks of one length, the last of which may end with padding."""

    length: int
    n_blocks: int
    block: int

    @property
    def is_padded(self) -> bool:
        return self.n_blocks * self.block > self.length

    def pad(self, x: jax.Array, dim: int, fill: float = 0) -> jax.Array:
        """To whole blocks along `dim`, unless `dim` is broadcast."""
        if not self.is_padded or x.shape[dim] != self.length:
            return x
        widths = [(0, 0, 0)] * x.ndim
        widths[dim] = (0, self.n_blocks * self.block - self.length, 0)
        return lax.pad(x, jnp.asarray(fill, x.dtype), widths)

    def unpad(self, x: jax.Array, dim: int) -> jax.Array:
        return lax.slice_in_dim(x, 0, self.length, axis=dim) if x.shape[dim] > self.length else x

    def cut(self, x: jax.Array, i: Any, dim: int) -> jax.Array:
        """Block i, or all of a broadcast dimension."""
        if self.n_blocks == 1 or x.shape[dim] == 1:
            return x
        return lax.dynamic_slice_in_dim(x, i * self.block, self.block, dim)

    def add(self, x: jax.Array, block: jax.Array, i: Any, dim: int) -> jax.Array:
        if self.n_blocks == 1:
            return x + block
        return lax.dynamic_update_slice_in_dim(x, self.cut(x, i, dim) + block, i * self.block, dim)

    def put(self, x: jax.Array, block: jax.Array, i: Any, dim: int) -> jax.Array:
        return block if self.n_blocks == 1 else lax.dynamic_update_slice_in_dim(x, block, i * self.block, dim)

    def join(self, blocks: jax.Array, dim: int) -> jax.Array:
        """Blocks [i ...], concatenated along `dim`."""
        moved = jnp.moveaxis(blocks, 0, dim)
        n_positions = moved.shape[dim] * moved.shape[dim + 1]
        joined: jax.Array = moved.reshape(*moved.shape[:dim], n_positions, *moved.shape[dim + 2 :])
        return joined

    def exists(self, i: Any) -> jax.Array:
        """A mask of positions of block i that are not padding."""
        exists: jax.Array = i * self.block + lax.iota(np.int32, self.block) < self.length
        return exists


def _axis(length: int, side: int) -> Axis:
    """Blocks of at most `side`: of a large divisor of `length` if there is one, else padded."""
    fewest = max(1, -(-length // side))
    n_blocks = next((n for n in range(fewest, 2 * fewest) if length % n == 0), fewest)
    return Axis(length=length, n_blocks=n_blocks, block=-(-length // n_blocks))


def pieces(length: int, side: int) -> Axis:
    """At most `side` positions in each, or all `length` without a divisor."""
    found = _axis(length, side)
    return _axis(length, length) if found.is_padded else found


def _axes(n_queries: int, n_keys: int, n_heads: int) -> tuple[Axis, Axis]:
    """Of queries and of keys. If one side is short, as in decoding, the other has long blocks."""
    side = SIDE
    while side > SMALLEST_SIDE and n_heads * side * side > MOST_SCORES:
        side //= 2
    rows = _axis(n_queries, max(side, side * side // max(n_keys, 1)))
    return rows, _axis(n_keys, max(side, side * side // max(rows.block, 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockedArrays:
    """Arrays in the dtype of the sums, padded to whole blocks.

    Attributes:
        rows, columns: blocks of queries and of keys.
        query: [b g r t d].
        key: [b g s d].
        value: [b g s e]; these three in their own dtypes, of which blocks are converted to `dtype`.
        positions: of queries [t] and keys [s], or empty.
        segments: pairs of [b g r t 1] and [b g r 1 s], each dimension of which may have length 1.
        biases: [b g r t s], each dimension of which may have length 1; in their own dtypes.
        masks: the same, of bools.
        is_part: whether there are other queries or keys.
    """

    kind: AttentionKind
    dtype: np.dtype[Any]
    rows: Axis
    columns: Axis
    query: jax.Array
    key: jax.Array
    value: jax.Array
    positions: Sequence[jax.Array]
    segments: Sequence[tuple[jax.Array, jax.Array]]
    biases: Sequence[jax.Array]
    masks: Sequence[jax.Array]
    value_scale: jax.Array | float | None = None
    is_part: bool = False

    def queries(self, i: Any) -> jax.Array:
        return self.rows.cut(self.query, i, 3).astype(self.dtype)

    def keys(self, j: Any) -> jax.Array:
        return self.columns.cut(self.key, j, 2).astype(self.dtype)

    def values(self, j: Any) -> jax.Array:
        return self.scaled_value(self.columns.cut(self.value, j, 2))

    def scaled_value(self, x: jax.Array) -> jax.Array:
        x = x.astype(self.dtype)
        return x if self.value_scale is None else x * self.value_scale

    @property
    def masked_score(self) -> jax.Array:
        return jnp.asarray(self.kind.masked_score, self.dtype)

    def scaled(self, x: jax.Array) -> jax.Array:
        # After the product, as users write it: a scaled query may overflow or underflow.
        return x if self.kind.scale == 1 else x * jnp.asarray(self.kind.scale, self.dtype)

    def rounded(self, x: jax.Array, step: Step) -> jax.Array:
        return _float16(x) if step in self.kind.float16 else x

    def exists(self, i: Any, j: Any) -> jax.Array | None:
        """A mask [1 1 1 t s] of the scores of a pair of blocks that are not padding; None for all."""
        if not self.rows.is_padded and not self.columns.is_padded:
            return None
        return _outer(jnp.logical_and, self.rows.exists(i), self.columns.exists(j))

    def cut(self, x: jax.Array, i: Any, j: Any) -> jax.Array:
        return self.columns.cut(self.rows.cut(x, i, 3), j, 4)

    def add(self, x: jax.Array, block: jax.Array, i: Any, j: Any) -> jax.Array:
        # jax clamps the start in a dimension of length 1 to 0.
        starts = [jnp.asarray(k, np.int32) for k in (0, 0, 0, i * self.rows.block, j * self.columns.block)]
        return lax.dynamic_update_slice(x, self.cut(x, i, j) + block, starts)

    def unpad(self, x: jax.Array) -> jax.Array:
        return self.columns.unpad(x, 4) if x.shape[3] == 1 else self.rows.unpad(self.columns.unpad(x, 4), 3)

    def scores(self, i: Any, j: Any) -> tuple[jax.Array, jax.Array | None]:
        """[b g r t s] of a pair of blocks, and the mask of visible ones; None for all."""
        score = self.rounded(_product(self.queries(i), self.keys(j), ((4,), (3,))), "product")
        score = self.rounded(self.scaled(score), "scale")
        for bias in self.biases:
            score = score + self.cut(bias, i, j).astype(self.dtype)

        conditions = [self.cut(mask, i, j) for mask in self.masks] + self._window(i, j)
        conditions += [self.cut(queries, i, j) == self.cut(keys, i, j) for queries, keys in self.segments]
        if conditions:
            score = jnp.where(functools.reduce(jnp.logical_and, conditions), score, self.masked_score)

        # Padding has weight 0; masked scores may have a weight.
        exists = self.exists(i, j)
        if exists is not None:
            score = jnp.where(exists, score, -jnp.inf)
            conditions.append(exists)
        return score, functools.reduce(jnp.logical_and, conditions) if conditions else None

    def _window(self, i: Any, j: Any) -> list[jax.Array]:
        """Masks [1 1 1 t s] for a pair of blocks."""
        if not self.positions:
            return []
        queries, keys = self._block_positions(i, j)
        ahead = _outer(lambda query, key: key - query, queries, keys)
        bounds = [ahead >= -self.kind.left] if self.kind.left is not None else []
        return bounds + ([ahead <= self.kind.right] if self.kind.right is not None else [])

    def some_seen(self, i: Any, j: Any) -> jax.Array | None:
        """False only if block j of keys is hidden from block i of queries by window or segments; None if unknown."""
        is_alone = self.rows.n_blocks * self.columns.n_blocks == 1 and not self.is_part
        if is_alone or not (self.positions or self.segments):
            return None
        bounds = []
        if self.positions:
            queries, keys = self._block_positions(i, j)
            bounds += [keys.max() - queries.min() >= -self.kind.left] if self.kind.left is not None else []
            bounds += [keys.min() - queries.max() <= self.kind.right] if self.kind.right is not None else []
        for pair in self.segments:
            queries, keys = (self.cut(x, i, j) for x in pair)
            least, most = (functools.partial(f, axis=(3, 4)) for f in (jnp.min, jnp.max))
            bounds.append(((least(queries) <= most(keys)) & (least(keys) <= most(queries))).any())
        return functools.reduce(jnp.logical_and, bounds)

    def _block_positions(self, i: Any, j: Any) -> tuple[jax.Array, jax.Array]:
        return self.rows.cut(self.positions[0], i, 0), self.columns.cut(self.positions[1], j, 0)


def _problem(
    query: jax.Array, key: jax.Array, value: jax.Array, others: Sequence[Any], kind: AttentionKind
) -> _BlockedArrays:
    """others: positions, segments, biases and masks, in this order."""
    n = kind.n_positions
    first_bias = n + 2 * kind.n_segments
    end = first_bias + kind.n_biases
    positions, segments, biases, masks = others[:n], others[n:first_bias], others[first_bias:end], others[end:]

    dtype = dtype_of_sums(query, key, value, *biases)
    b, t, g, r, _ = query.shape
    rows, columns = _axes(t, key.shape[1], b * g * r)

    return _BlockedArrays(
        kind=kind,
        dtype=dtype,
        rows=rows,
        columns=columns,
        query=rows.pad(query.transpose(0, 2, 3, 1, 4), 3),
        key=columns.pad(key.transpose(0, 2, 1, 3), 2),
        value=columns.pad(value.transpose(0, 2, 1, 3), 2),
        positions=[_pad_last(axis, x, 0) for axis, x in zip((rows, columns), positions, strict=False)],
        segments=[
            (_pad_last(rows, queries, 3), _pad_last(columns, keys, 4))
            for queries, keys in zip(segments[::2], segments[1::2], strict=True)
        ],
        biases=[columns.pad(rows.pad(x, 3), 4) for x in biases],
        masks=[columns.pad(rows.pad(x, 3), 4) for x in masks],
    )


def _pad_last(axis: Axis, x: jax.Array, dim: int) -> jax.Array:
    """Padding repeats the last entry, which keeps the bounds of the block."""
    n_padded = axis.n_blocks * axis.block - axis.length
    if not n_padded or x.shape[dim] == 1:
        return x
    widths = [(0, n_padded if d == dim else 0) for d in range(x.ndim)]
    return jnp.pad(x, widths, mode="edge")


# ---- attention -------------------------------------------------------------------------------------------------------


def _walk(problem: _BlockedArrays, first: State | None = None) -> State:
    """maximum and total [b g r t] and mixed [b g r t e] of all queries, padding included.

    first: of earlier keys.
    """
    value_sums = _value_sums(problem)

    def row(i: Any) -> State:
        add = functools.partial(_add_pair, problem, value_sums, i)
        if first is not None:
            maximum, total, mixed = (problem.rows.cut(x, i, 3) for x in first)
            return loop(problem.columns.n_blocks, add, (maximum, total, mixed))
        b, g, r, t, _ = problem.rows.cut(problem.query, 0, 3).shape
        start = (
            jnp.full((b, g, r, t), -jnp.inf, problem.dtype),
            jnp.zeros((b, g, r, t), problem.dtype),
            jnp.zeros((b, g, r, t, problem.value.shape[-1]), problem.dtype),
        )
        return loop(problem.columns.n_blocks, add, start)

    _, blocks = _scan(problem.rows.n_blocks, lambda carry, i: (carry, row(i)), ())
    maximum, total, mixed = (problem.rows.join(x, 3) for x in blocks)
    return maximum, total, mixed


def _add_pair(problem: _BlockedArrays, value_sums: jax.Array, i: Any, j: Any, state: State) -> State:
    some_seen = problem.some_seen(i, j)
    if some_seen is None:
        return _add_scores(problem, i, j, state)
    new_state: State = lax.cond(
        some_seen,
        lambda: _add_scores(problem, i, j, state),
        lambda: _add_masked(problem, j, value_sums, state),
    )
    return new_state


def _add_scores(problem: _BlockedArrays, i: Any, j: Any, state: State) -> State:
    old, total, mixed = state
    score, _ = problem.scores(i, j)
    maximum = jnp.maximum(old, score.max(axis=-1, initial=-jnp.inf))
    # While all scores are -inf, the shift is 0, since -inf - -inf is NaN.
    shift = _finite_or_zero(maximum)
    weight = jnp.exp(score - shift[..., None])
    old_weight = jnp.exp(old - shift)
    new = _product(weight, problem.values(j), ((4,), (2,)))
    return maximum, old_weight * total + weight.sum(axis=-1), old_weight[..., None] * mixed + new


def _add_masked(problem: _BlockedArrays, j: Any, value_sums: jax.Array, state: State) -> State:
    """If all keys are masked. As in `_add_scores`, an infinite value with weight 0 gives NaN."""
    old, total, mixed = state
    maximum = jnp.maximum(old, problem.masked_score)
    shift = _finite_or_zero(maximum)
    weight, old_weight = jnp.exp(problem.masked_score - shift), jnp.exp(old - shift)
    n_keys = jnp.minimum(problem.columns.block, problem.columns.length - j * problem.columns.block)
    new = weight[..., None] * lax.dynamic_index_in_dim(value_sums, j, 2)[:, :, None]
    return maximum, old_weight * total + n_keys.astype(problem.dtype) * weight, old_weight[..., None] * mixed + new


def _shrink(problem: _BlockedArrays) -> jax.Array:
    """1, or a smaller power of 2 if the sum of the values before the division would be infinite."""
    shrink = shrink_for(problem.columns.length)
    limit = jnp.finfo(problem.dtype).max * shrink
    is_large = (jnp.abs(problem.value.astype(problem.dtype)) > limit).any()
    return jnp.where(is_large, shrink, 1.0).astype(problem.dtype)


def _value_sums(problem: _BlockedArrays) -> jax.Array:
    """[b g j e], by block j."""
    b, g, _, e = problem.value.shape
    value = problem.scaled_value(problem.value)
    return value.reshape(b, g, problem.columns.n_blocks, problem.columns.block, e).sum(axis=3)


def _finite_or_zero(maximum: jax.Array) -> jax.Array:
    return jnp.where(maximum == -jnp.inf, 0, maximum)


# ---- gradients -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Statistics of each query for the gradients: p = exp(score - shift) * factor.

    Attributes:
        shift: [b g r t]; inf for padding, so p is 0.
        factor: [b g r t].
        out_bar: [b g r t e], in its own dtype.
        inner: [b g r t], sum_e out_bar out; sum_s p p_bar if p_bar may be infinite in float16.
        masked: [b g i e], sum_(r t) p out_bar of a masked key, for each block of queries.
    """

    shift: jax.Array
    factor: jax.Array
    out_bar: jax.Array
    inner: jax.Array
    masked: jax.Array


def _rows_of_gradient(
    problem: _BlockedArrays,
    out: jax.Array,
    logsumexp: jax.Array,
    out_bar: jax.Array,
    known_factor: jax.Array | None = None,
) -> _Rows:
    dtype, pad = problem.dtype, problem.rows.pad
    # Before the transpose, which would copy the result.
    inner = pad((out_bar.astype(dtype) * out.astype(dtype)).sum(axis=-1).transpose(0, 2, 3, 1), 3)
    out_bar = pad(out_bar.transpose(0, 2, 3, 1, 4), 3)
    logsumexp = pad(logsumexp.transpose(0, 2, 3, 1).astype(dtype), 3, math.inf)

    # Two rare cases recompute maximum and total. A logsumexp far from 0 is too coarse: without visible keys, it may be
    # -1e9 + log(n_keys), rounded to -1e9. In float16, an infinite p_bar depends on both.
    def recomputed() -> tuple[jax.Array, jax.Array]:
        maximum, total, _ = _walk(problem)
        is_padding = logsumexp == jnp.inf
        return jnp.where(is_padding, logsumexp, maximum), jnp.where(is_padding, 1, 1 / total)

    if known_factor is not None:
        shift, factor = logsumexp, pad(known_factor.transpose(0, 2, 3, 1).astype(dtype), 3)
        masked = _masked(problem, shift, factor, out_bar)
        return _Rows(shift=shift, factor=factor, out_bar=out_bar, inner=inner, masked=masked)

    is_coarse = (jnp.isfinite(logsumexp) & (jnp.abs(logsumexp) > COARSE)).any()
    overflows = _may_overflow(problem, out_bar)
    shift, factor = lax.cond(is_coarse | overflows, recomputed, lambda: (logsumexp, jnp.ones_like(logsumexp)))
    if "p_bar" in problem.kind.float16:
        inner = lax.cond(overflows, lambda: _inner_sums(problem, shift, factor, out_bar), lambda: inner)

    masked = _masked(problem, shift, factor, out_bar)
    return _Rows(shift=shift, factor=factor, out_bar=out_bar, inner=inner, masked=masked)


def _masked(problem: _BlockedArrays, shift: jax.Array, factor: jax.Array, out_bar: jax.Array) -> jax.Array:
    """`_Rows.masked`."""
    weight = problem.rounded(jnp.exp(problem.masked_score - shift), "softmax") * factor
    masked = weight[..., None] * out_bar.astype(problem.dtype)
    b, g, r, _, e = masked.shape
    return masked.reshape(b, g, r, problem.rows.n_blocks, problem.rows.block, e).sum(axis=(2, 4))


def _may_overflow(problem: _BlockedArrays, out_bar: jax.Array) -> jax.Array:
    """False only if p_bar and its differences are within the range of float16."""
    if "p_bar" not in problem.kind.float16:
        return jnp.asarray(False)
    squares = (jnp.square(x.astype(problem.dtype)) for x in (out_bar, problem.value))
    cotangent, value = (jnp.sqrt(x.sum(axis=-1).max(initial=0)) for x in squares)
    return ~(cotangent * value < 0.5 * float(jnp.finfo(jnp.float16).max))


def _inner_sums(problem: _BlockedArrays, shift: jax.Array, factor: jax.Array, out_bar: jax.Array) -> jax.Array:
    """sum_s p p_bar, [b g r t], over all keys: if a mask hides infinity, 0 times infinity is NaN."""

    def add_block(i: Any, j: Any, inner: jax.Array) -> jax.Array:
        weight, p_bar, _ = _weights(problem, shift, out_bar, i, j)
        terms = weight * problem.rows.cut(factor, i, 3)[..., None] * p_bar
        exists = problem.exists(i, j)
        terms = terms if exists is None else jnp.where(exists, terms, 0)
        return problem.rows.add(inner, terms.sum(axis=-1), i, 3)

    def add_row(i: Any, inner: jax.Array) -> jax.Array:
        return loop(problem.columns.n_blocks, functools.partial(add_block, i), inner)

    return loop(problem.rows.n_blocks, add_row, jnp.zeros_like(shift))


def _weights(
    problem: _BlockedArrays, shift: jax.Array, out_bar: jax.Array, i: Any, j: Any
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """exp(score - shift) and p_bar of a pair of blocks, and the mask of `scores`."""
    score, seen = problem.scores(i, j)
    weight = jnp.exp(score - problem.rows.cut(shift, i, 3)[..., None])
    cotangent = problem.rows.cut(out_bar, i, 3).astype(problem.dtype)
    p_bar = _product(cotangent, problem.values(j), ((4,), (3,)))
    return problem.rounded(weight, "softmax"), problem.rounded(p_bar, "p_bar"), seen


def _pair_gradient(problem: _BlockedArrays, rows: _Rows, requested: Sequence[int], i: Any, j: Any) -> Any:
    """Summands of a pair of blocks: query_bar [b g r t d], key_bar [b g s d], value_bar [b g s e], bias_bars."""
    some_seen = problem.some_seen(i, j)
    if some_seen is None:
        return _gradient_of_scores(problem, rows, requested, i, j)
    seen = functools.partial(_gradient_of_scores, problem, rows, requested, i, j)
    shapes = jax.eval_shape(seen)

    def masked() -> Any:
        # A score_bar of 0 times a factor is 0, or NaN if the factor is infinite or NaN.
        query, key = problem.queries(i), problem.keys(j)
        query_bar, key_bar, value_bar, bias_bars = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        query_bar += (0 * key).sum(axis=2)[:, :, None, None]
        key_bar += (0 * query).sum(axis=(2, 3))[:, :, None]
        return query_bar, key_bar, value_bar + lax.dynamic_index_in_dim(rows.masked, i, 2), bias_bars

    return lax.cond(some_seen, seen, masked)


def _gradient_of_scores(problem: _BlockedArrays, rows: _Rows, requested: Sequence[int], i: Any, j: Any) -> Any:
    cut = problem.rows.cut
    out_bar, query, key = cut(rows.out_bar, i, 3).astype(problem.dtype), problem.queries(i), problem.keys(j)
    factor, inner = (cut(x, i, 3)[..., None] for x in (rows.factor, rows.inner))

    weight, p_bar, seen = _weights(problem, rows.shift, rows.out_bar, i, j)
    p = weight * factor
    if "softmax" in problem.kind.float16:
        score_bar = weight * problem.rounded((p_bar - inner) * factor, "softmax")
    else:
        # Without brackets: the difference may be infinite where p is 0.
        score_bar = p * p_bar - p * inner
    if seen is not None:
        score_bar = jnp.where(seen, score_bar, 0)

    bias_bars = [_sum_to(score_bar, problem.cut(problem.biases[n], i, j).shape) for n in requested]
    # A scale in float16 has its cotangents in float16, and so does a product.
    score_bar = problem.rounded(problem.scaled(problem.rounded(score_bar, "scale")), "product")
    return (
        _product(score_bar, key, ((4,), (2,))),
        _product(score_bar, query, ((2, 3), (2, 3))),
        _product(p, out_bar, ((2, 3), (2, 3))),
        bias_bars,
    )


def _sum_to(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    return x.sum(axis=[dim for dim, length in enumerate(shape) if length != x.shape[dim]], keepdims=True)


# ---- float16, products and loops -------------------------------------------------------------------------------------


def _float16(x: jax.Array) -> jax.Array:
    """From a wider dtype. Compilers may drop conversions to float16 and back."""
    rounded = lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10)
    # `reduce_precision` rounds subnormal numbers (multiples of 2^-24 below 2^-14) to 0.
    return jnp.where(jnp.abs(x) < 2.0**-14, jnp.round(x * 2.0**24) * 2.0**-24, rounded)


def _product(x: jax.Array, y: jax.Array, summed: tuple[tuple[int, ...], tuple[int, ...]]) -> jax.Array:
    """For each example and key head."""
    return lax.dot_general(x, y, (summed, ((0, 1), (0, 1))))


def _outer(fun: Callable[[jax.Array, jax.Array], jax.Array], queries: jax.Array, keys: jax.Array) -> jax.Array:
    """[1 1 1 t s]."""
    return fun(queries[:, None], keys[None, :])[None, None, None]


def loop(n: int, body: Callable[[Any, Carry], Carry], carry: Carry) -> Carry:
    last: Carry
    last, _ = _scan(n, lambda carry, i: (body(i, carry), None), carry)
    return last


def _scan(n: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """Over range(n), without a loop if n is 1."""
    if n > 1:
        return lax.scan(body, carry, lax.iota(np.int32, n))
    carry, block = body(carry, np.int32(0))
    return carry, jax.tree.map(lambda x: x[None], block)
