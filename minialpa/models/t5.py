"""A T5-style encoder-decoder: RMSNorm, relative position biases that the layers of a stack share, AdamW.

Source and target share the embedding table, which is also the head. Every decoder layer reads the encoder's output, so
that tensor skips over pipeline stages, and so do the biases.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from minialpa.models.base import Batch, Boundaries, Hook, ModelCase, make_case
from minialpa.models.gpt import next_tokens
from minialpa.models.layers import FeedForward, attend
from minialpa.models.losses import cross_entropies


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


class T5Block(nn.Module):
    """Pre-norm self-attention, cross-attention when there is a `memory`, feed-forward. [b s hidden] -> [b s hidden]."""

    n_heads: int
    causal: bool
    dropout: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array, memory: jax.Array | None = None) -> jax.Array:
        drop = nn.Dropout(self.dropout, deterministic=self.dropout == 0)
        y = nn.RMSNorm(dtype=self.dtype)(x)
        x = x + drop(Attention(self.n_heads, self.causal, self.dtype, name="attention")(y, y, bias))
        if memory is not None:
            y = nn.RMSNorm(dtype=self.dtype)(x)
            x = x + drop(Attention(self.n_heads, False, self.dtype, name="cross_attention")(y, memory))
        x = x + drop(FeedForward(self.dtype, name="feed_forward")(nn.RMSNorm(dtype=self.dtype)(x)))
        return x


class T5(nn.Module):
    """Source tokens [b s] and target tokens [b t] -> logits [b t vocab_size]."""

    hidden: int
    n_layers: int
    n_heads: int
    vocab_size: int
    reach: int
    dropout: float
    dtype: DTypeLike
    boundaries: Boundaries

    @nn.compact
    def __call__(self, source: jax.Array, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocab_size, self.hidden, dtype=self.dtype, name="tokens")
        x, bias = embed(source), PositionBias(self.n_heads, self.reach, name="encoder_bias")(source.shape[1])
        for i in range(self.n_layers):
            x = T5Block(self.n_heads, False, self.dropout, self.dtype, name=f"encoder_{i}")(x, bias)
            self.boundaries.after(i)
        memory = nn.RMSNorm(dtype=self.dtype, name="encoder_norm")(x)
        x, bias = embed(tokens), PositionBias(self.n_heads, self.reach, name="decoder_bias")(tokens.shape[1])
        for i in range(self.n_layers):
            x = T5Block(self.n_heads, True, self.dropout, self.dtype, name=f"decoder_{i}")(x, bias, memory)
            self.boundaries.after(self.n_layers + i)
        return embed.attend(nn.RMSNorm(dtype=self.dtype, name="decoder_norm")(x))


def t5_case(
    *,
    batch_size: int = 16,
    source_len: int = 16,
    seq_len: int = 8,
    hidden: int = 32,
    n_layers: int = 2,
    n_heads: int = 4,
    vocab_size: int = 64,
    reach: int = 8,
    dropout: float = 0.0,
    learning_rate: float = 1e-3,
    dtype: DTypeLike = jnp.float32,
    boundary: Hook | None = None,
    n_boundaries: int = 1,
) -> ModelCase:
    """Batch: `source`, int32 [b source_len]; `tokens` and `labels`, int32 [b seq_len]. `n_layers` each side."""

    def sample(rng: np.random.Generator, n: int) -> Batch:
        source = rng.integers(vocab_size, size=(n, source_len), dtype=np.int32)
        return {"source": source, **next_tokens(rng, n, seq_len, vocab_size)}

    cuts = Boundaries(boundary, n_boundaries, 2 * n_layers)
    return make_case(
        "t5",
        model=T5(
            hidden=hidden,
            n_layers=n_layers,
            n_heads=n_heads,
            vocab_size=vocab_size,
            reach=reach,
            dropout=dropout,
            dtype=dtype,
            boundaries=cuts,
        ),
        inputs=("source", "tokens"),
        loss=lambda logits, batch: (jnp.mean(cross_entropies(logits, batch["labels"])), {}),
        optimizer=optax.adamw(learning_rate),
        sample=sample,
        batch_size=batch_size,
        dropout=dropout,
    )
