"""A BERT encoder: post-norm blocks, masked-token cross-entropy sum(loss * mask) / sum(mask), AdamW."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from minialpa.models.base import Batch, Boundaries, Hook, ModelCase, make_case
from minialpa.models.layers import FeedForward
from minialpa.models.losses import cross_entropies, weighted_mean


class BertBlock(nn.Module):
    """norm(x + attention(x)), then norm(x + feed_forward(x)). [b s hidden] -> [b s hidden]."""

    n_heads: int
    dropout: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        drop = nn.Dropout(self.dropout, deterministic=self.dropout == 0)
        attention = nn.MultiHeadDotProductAttention(self.n_heads, use_bias=False, dtype=self.dtype, name="attention")
        x = nn.LayerNorm(dtype=self.dtype)(x + drop(attention(x)))
        x = nn.LayerNorm(dtype=self.dtype)(x + drop(FeedForward(self.dtype, name="feed_forward")(x)))
        return x


class Bert(nn.Module):
    """Tokens [b s] -> logits [b s vocab_size]; the head is a dense layer and the transposed embedding table."""

    hidden: int
    n_layers: int
    n_heads: int
    vocab_size: int
    dropout: float
    dtype: DTypeLike
    boundaries: Boundaries

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocab_size, self.hidden, dtype=self.dtype, name="tokens")
        position = nn.Embed(tokens.shape[1], self.hidden, dtype=self.dtype, name="positions")
        x = embed(tokens) + position(jnp.arange(tokens.shape[1]))[None]
        x = nn.LayerNorm(dtype=self.dtype)(x)
        for i in range(self.n_layers):
            x = BertBlock(self.n_heads, self.dropout, self.dtype, name=f"block_{i}")(x)
            self.boundaries.after(i)
        x = nn.LayerNorm(dtype=self.dtype)(nn.gelu(nn.Dense(self.hidden, dtype=self.dtype, name="transform")(x)))
        bias = self.param("head_bias", nn.initializers.zeros, (self.vocab_size,))
        return embed.attend(x) + bias.astype(self.dtype)[None, None]


def bert_case(
    *,
    batch_size: int = 16,
    seq_len: int = 16,
    hidden: int = 32,
    n_layers: int = 2,
    n_heads: int = 4,
    vocab_size: int = 64,
    dropout: float = 0.0,
    learning_rate: float = 1e-3,
    dtype: DTypeLike = jnp.float32,
    boundary: Hook | None = None,
    n_boundaries: int = 1,
) -> ModelCase:
    """Batch: `tokens` and `labels`, int32 [b seq_len]; `mask`, float32 [b seq_len], 1 where the token is guessed."""

    def sample(rng: np.random.Generator, n: int) -> Batch:
        labels = rng.integers(1, vocab_size, size=(n, seq_len), dtype=np.int32)
        hidden_rows = rng.random((n, seq_len)) < 0.25
        hidden_rows[:, 0] = True  # Every example counts, so that no micro-batch divides by zero.
        tokens = np.where(hidden_rows, np.int32(0), labels)
        return {"tokens": tokens, "labels": labels, "mask": hidden_rows.astype(np.float32)}

    cuts = Boundaries(boundary, n_boundaries, n_layers)
    return make_case(
        "bert",
        model=Bert(
            hidden=hidden,
            n_layers=n_layers,
            n_heads=n_heads,
            vocab_size=vocab_size,
            dropout=dropout,
            dtype=dtype,
            boundaries=cuts,
        ),
        inputs=("tokens",),
        loss=lambda logits, batch: (weighted_mean(cross_entropies(logits, batch["labels"]), batch["mask"]), {}),
        optimizer=optax.adamw(learning_rate),
        sample=sample,
        batch_size=batch_size,
        dropout=dropout,
    )
