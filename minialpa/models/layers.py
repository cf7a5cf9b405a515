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


class FeedForward(nn.Module):
    """gelu(x W1 + b1) W2 + b2, with `factor` times as many hidden features as `x` has."""

    dtype: DTypeLike
    factor: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        wide = nn.Dense(self.factor * x.shape[-1], dtype=self.dtype, name="up")(x)
        return nn.Dense(x.shape[-1], dtype=self.dtype, name="down")(nn.gelu(wide))
