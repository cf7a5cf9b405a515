"""A GPT whose every second feed-forward layer is a mixture of experts with top-2 gating (GShard, arXiv:2006.16668).

A group is one row of the batch, so examples do not mix. Letters: g groups, s tokens of a group, e experts,
c slots of an expert in a group, m features, f features inside an expert.

    dispatch [g s e c] is 1 where a token has a slot;  combine [g s e c] is its gate there
    experts see  einsum("gsec,gsm->egcm", dispatch, x);  a token gets  einsum("gsec,egcm->gsm", combine, y)

Tokens beyond an expert's slots pass by on the residual. Loss = next-token cross-entropy + `balance` * auxiliary loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from minialpa.models.base import Boundaries, Hook, ModelCase, make_case
from minialpa.models.gpt import next_tokens
from minialpa.models.layers import FeedForward, FusedAttention
from minialpa.models.losses import cross_entropies


@dataclass(frozen=True, slots=True)
class Gating:
    """`combine` [g s e c]; `imbalance` is a scalar, 1 when the experts are used evenly."""

    combine: jax.Array
    imbalance: jax.Array


def top2_gating(logits: jax.Array, n_slots: int) -> Gating:
    """Each token goes to its two best experts; first choices take slots before second ones. `logits` is [g s e]."""
    n_experts = logits.shape[-1]
    gates = jax.nn.softmax(logits.astype(jnp.float32))
    first = jax.nn.one_hot(jnp.argmax(gates, axis=-1), n_experts)
    second = jax.nn.one_hot(jnp.argmax(gates * (1 - first), axis=-1), n_experts)

    # imbalance = e * sum_e mean_s(gates) * mean_s(first), GShard's l_aux; mean over groups.
    share = jnp.mean(gates, axis=1) * jnp.mean(first, axis=1)
    imbalance = n_experts * jnp.mean(jnp.sum(share, axis=-1))

    rank_first = jnp.cumsum(first, axis=1) - first
    rank_second = jnp.cumsum(second, axis=1) - second + jnp.sum(first, axis=1, keepdims=True)
    total = jnp.sum(gates * (first + second), axis=-1, keepdims=True)
    combine = jnp.zeros((*gates.shape, n_slots), jnp.float32)
    for chosen, rank in ((first, rank_first), (second, rank_second)):
        slot = jax.nn.one_hot(jnp.sum(rank * chosen, axis=-1).astype(jnp.int32), n_slots)  # All 0 beyond the last slot.
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


class Moe(nn.Module):
    """Tokens [b s] -> logits [b s vocab_size] and the summed imbalance. Blocks 0, 2, ... have experts."""

    hidden: int
    n_layers: int
    n_heads: int
    n_experts: int
    factor: int
    capacity: float
    vocab_size: int
    dtype: DTypeLike
    boundaries: Boundaries

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        embed = nn.Embed(self.vocab_size, self.hidden, dtype=self.dtype, name="tokens")
        position = self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], self.hidden))
        x = embed(tokens) + position.astype(self.dtype)[None]

        total = jnp.zeros((), jnp.float32)
        for i in range(self.n_layers):
            attention = FusedAttention(self.n_heads, causal=True, dtype=self.dtype, name=f"attention_{i}")
            x = x + attention(nn.LayerNorm(dtype=self.dtype)(x))
            y = nn.LayerNorm(dtype=self.dtype)(x)
            if i % 2 == 0:
                y, imbalance = Experts(self.n_experts, self.factor, self.capacity, self.dtype, name=f"experts_{i}")(y)
                total = total + imbalance
            else:
                y = FeedForward(self.dtype, self.factor, name=f"feed_forward_{i}")(y)
            x = x + y
            self.boundaries.after(i)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x)), total


def moe_case(
    *,
    batch_size: int = 16,
    seq_len: int = 16,
    hidden: int = 32,
    n_layers: int = 2,
    n_heads: int = 4,
    n_experts: int = 8,
    factor: int = 4,
    capacity: float = 2.0,
    balance: float = 0.01,
    vocab_size: int = 64,
    optimizer: Literal["adamw", "adafactor"] = "adamw",
    learning_rate: float = 1e-3,
    dtype: DTypeLike = jnp.float32,
    boundary: Hook | None = None,
    n_boundaries: int = 1,
) -> ModelCase:
    """Batch: `tokens` and `labels`, int32 [b seq_len]. Metric `imbalance`: see `Gating`, summed over layers.

    Adafactor (arXiv:1804.04235) keeps sums of rows and columns where Adam has moments: experts have many weights for
    little work. An expert has capacity * 2 * seq_len / n_experts slots for each row of the batch.
    """

    def loss(outputs: tuple[jax.Array, jax.Array], batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits, imbalance = outputs
        value = jnp.mean(cross_entropies(logits, batch["labels"])) + balance * imbalance
        return value, {"imbalance": imbalance}

    cuts = Boundaries(boundary, n_boundaries, n_layers)
    return make_case(
        "moe",
        model=Moe(
            hidden=hidden,
            n_layers=n_layers,
            n_heads=n_heads,
            n_experts=n_experts,
            factor=factor,
            capacity=capacity,
            vocab_size=vocab_size,
            dtype=dtype,
            boundaries=cuts,
        ),
        inputs=("tokens",),
        loss=loss,
        optimizer={"adamw": optax.adamw, "adafactor": optax.adafactor}[optimizer](learning_rate),
        sample=lambda rng, n: next_tokens(rng, n, seq_len, vocab_size),
        batch_size=batch_size,
    )
