"""Layers that several models share. Letters: b batch, q/k positions, h heads, d features of a head."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool = False, bias: jax.Array | None = None
) -> jax.Array:
    """softmax(query key^T / sqrt(d) + bias) value, softmax in float32. [b q h d], [b k h d], [b k h d] -> [b q h d].

    `bias` is [1 h q k]. With `causal`, position q sees positions k <= q. Of fewer key/value heads, each serves the next
    query heads, all the same number of them (grouped-query attention, Ainslie et al., 2023).
    """
    *leading, h, d = query.shape
    g = key.shape[2]
    if g < h:
        return _attend_grouped(query.reshape(*leading, g, h // g, d), key, value, causal, bias).reshape(query.shape)

    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(d)
    weights = _weights(scores, causal, bias).astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def _attend_grouped(
    query: jax.Array, key: jax.Array, value: jax.Array, causal: bool, bias: jax.Array | None
) -> jax.Array:
    """[b q g r d], [b k g d], [b k g d] -> [b q g r d]: each key/value head g serves r query heads."""
    scores = jnp.einsum("bqgrd,bkgd->bgrqk", query, key) / math.sqrt(query.shape[-1])
    if bias is not None:
        bias = bias.reshape(bias.shape[0], *scores.shape[1:3], *bias.shape[2:])
    weights = _weights(scores, causal, bias).astype(value.dtype)
    return jnp.einsum("bgrqk,bkgd->bqgrd", weights, value)


def _weights(scores: jax.Array, causal: bool, bias: jax.Array | None) -> jax.Array:
    """The softmax of scores [... q k] and a bias of the same dimensions, in float32."""
    scores = scores.astype(jnp.float32)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    if causal:
        visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(jnp.expand_dims(visible, range(scores.ndim - 2)), scores, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores)


def rotate(x: jax.Array, base: float) -> jax.Array:
    """Rotary embedding (Su et al., 2021) of [b s h d]: turns (x[i], x[i + d/2]) at position s by s base^(-2i/d)."""
    _, s, _, d = x.shape
    frequency = base ** (-jnp.arange(0, d, 2, dtype=jnp.float32) / d)
    angle = jnp.arange(s, dtype=jnp.float32)[:, None] * frequency[None]
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class FusedAttention(nn.Module):
    """Self-attention with one projection for query, key and value, laid out head by head so that heads can be split."""

    n_heads: int
    causal: bool
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        *leading, hidden = x.shape
        # No bias: a bias on keys cancels in the softmax, so its gradient is rounding noise, which Adam would scale up.
        qkv = nn.Dense(3 * hidden, use_bias=False, dtype=self.dtype, name="qkv")(x)
        query, key, value = jnp.split(qkv.reshape(*leading, self.n_heads, -1), 3, axis=-1)
        out = attend(query, key, value, causal=self.causal)
        return nn.Dense(hidden, dtype=self.dtype, name="out")(out.reshape(x.shape))


class Attention(nn.Module):
    """`x` [b q hidden] asks `memory` [b k hidden]. Returns [b q hidden]."""

    n_heads: int
    causal: bool
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        hidden = x.shape[-1]
        heads = (self.n_heads, hidden // self.n_heads)
        query = nn.DenseGeneral(heads, use_bias=False, dtype=self.dtype, name="query")(x)
        key = nn.DenseGeneral(heads, use_bias=False, dtype=self.dtype, name="key")(memory)
        value = nn.DenseGeneral(heads, use_bias=False, dtype=self.dtype, name="value")(memory)
        out = attend(query, key, value, causal=self.causal, bias=bias)
        return nn.DenseGeneral(hidden, axis=(-2, -1), use_bias=False, dtype=self.dtype, name="out")(out)


class PositionBias(nn.Module):
    """A learned score for each head and distance k - q, clipped to +-`reach`. [1 h s s]."""

    n_heads: int
    reach: int

    @nn.compact
    def __call__(self, seq_len: int) -> jax.Array:
        table = self.param("table", nn.initializers.normal(0.02), (2 * self.reach + 1, self.n_heads))
        position = jnp.arange(seq_len)
        distance = jnp.clip(position[None] - position[:, None], -self.reach, self.reach)
        return jnp.transpose(table[distance + self.reach], (2, 0, 1))[None]


class FeedForward(nn.Module):
    """gelu(x W1 + b1) W2 + b2, with `factor` times as many hidden features as `x` has."""

    dtype: DTypeLike
    factor: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        wide = nn.Dense(self.factor * x.shape[-1], dtype=self.dtype, name="up")(x)
        return nn.Dense(x.shape[-1], dtype=self.dtype, name="down")(nn.gelu(wide))
