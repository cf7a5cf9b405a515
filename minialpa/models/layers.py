"""Layers: activations go in and come out. Letters of shapes: b batch, q/k positions, h heads, d features of a head."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool = False, bias: jax.Array | None = None
) -> jax.Array:
    """softmax(query key^T / sqrt(d) + bias) value, softmax in float32. [b q h d], [b k h d], [b k h d] -> [b q h d].

    `bias` is [1 h q k]. With `causal`, position q sees positions k <= q. Fewer key/value heads serve equal groups of
    query heads (grouped-query attention, Ainslie et al., 2023).
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
    """The float32 softmax of scores plus bias, both with the dimensions [... q k]."""
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
    """Self-attention. One projection makes query, key and value, head by head, so that heads can be split."""

    n_heads: int
    causal: bool
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        *leading, hidden = x.shape
        # No bias: on keys it cancels in the softmax, and Adam would scale up its gradient, rounding noise.
        qkv = nn.Dense(3 * hidden, use_bias=False, dtype=self.dtype, name="qkv")(x)
        query, key, value = jnp.split(qkv.reshape(*leading, self.n_heads, -1), 3, axis=-1)
        out = attend(query, key, value, causal=self.causal)
        return nn.Dense(hidden, dtype=self.dtype, name="out")(out.reshape(x.shape))


class Attention(nn.Module):
    """`x` [b q hidden] attends to `memory` [b k hidden]. Returns [b q hidden]."""

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
    """gelu(x W1 + b1) W2 + b2, with `factor` times as many hidden features as `x`."""

    dtype: DTypeLike
    factor: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        wide = nn.Dense(self.factor * x.shape[-1], dtype=self.dtype, name="up")(x)
        return nn.Dense(x.shape[-1], dtype=self.dtype, name="down")(nn.gelu(wide))


# ---- a mixture of experts with top-2 gating (GShard, arXiv:2006.16668) -----------------------------------------------
#
# A group is one example. Letters: g groups, s tokens of a group, e experts, c slots of an expert in a group,
# m features, f features inside an expert.
#
#     dispatch [g s e c] is 1 where a token has a slot;  combine [g s e c] is its gate there
#     experts see  einsum("gsec,gsm->egcm", dispatch, x);  a token gets  einsum("gsec,egcm->gsm", combine, y)
#
# Tokens beyond an expert's slots pass only through the residual.


@dataclass(frozen=True, slots=True)
class Gating:
    """`combine` [g s e c]; `imbalance` is a scalar, 1 if the experts are used evenly."""

    combine: jax.Array
    imbalance: jax.Array


def top2_gating(logits: jax.Array, n_slots: int) -> Gating:
    """Send each token to its two best experts. First choices take slots before second ones. `logits` is [g s e]."""
    n_experts = logits.shape[-1]
    gates = jax.nn.softmax(logits.astype(jnp.float32))
    first = jax.nn.one_hot(jnp.argmax(gates, axis=-1), n_experts)
    second = jax.nn.one_hot(jnp.argmax(gates * (1 - first), axis=-1), n_experts)

    # imbalance = e * sum_e mean_s(gates) * mean_s(first), GShard's l_aux; mean over groups.
    share = jnp.mean(gates, axis=1) * jnp.mean(first, axis=1)
    imbalance = n_experts * jnp.mean(jnp.sum(share, axis=-1))

    # The rank of a token among the tokens of its expert is its slot.
    rank_first = jnp.cumsum(first, axis=1) - first
    rank_second = jnp.cumsum(second, axis=1) - second + jnp.sum(first, axis=1, keepdims=True)
    total = jnp.sum(gates * (first + second), axis=-1, keepdims=True)
    combine = jnp.zeros((*gates.shape, n_slots), jnp.float32)
    for chosen, rank in ((first, rank_first), (second, rank_second)):
        slot = jax.nn.one_hot(jnp.sum(rank * chosen, axis=-1).astype(jnp.int32), n_slots)  # 0 beyond the last slot
        combine = combine + (gates / total * chosen)[..., None] * slot[:, :, None]
    return Gating(combine, imbalance)


class Experts(nn.Module):
    """`n_experts` feed-forward layers; returns the new [g s m] and the imbalance of the gating."""

    n_experts: int
    factor: int
    capacity: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        _, s, m = x.shape
        init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=1, out_axis=2, batch_axis=0)
        up = self.param("up", init, (self.n_experts, m, self.factor * m)).astype(self.dtype)
        down = self.param("down", init, (self.n_experts, self.factor * m, m)).astype(self.dtype)

        n_slots = max(1, math.ceil(2 * s * self.capacity / self.n_experts))
        gating = top2_gating(nn.Dense(self.n_experts, use_bias=False, name="gate")(x), n_slots)
        combine = gating.combine.astype(self.dtype)
        dispatch = (gating.combine > 0).astype(self.dtype)

        y = jnp.einsum("gsec,gsm->egcm", dispatch, x)
        y = nn.gelu(jnp.einsum("egcm,emf->egcf", y, up))
        y = jnp.einsum("egcf,efm->egcm", y, down)
        return jnp.einsum("gsec,egcm->gsm", combine, y), gating.imbalance
