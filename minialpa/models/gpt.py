"""A GPT decoder: pre-norm blocks with causal attention, learned positions, next-token cross-entropy, AdamW."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from minialpa.models.base import Batch, Boundaries, Hook, ModelCase, make_case
from minialpa.models.layers import FeedForward, FusedAttention
from minialpa.models.losses import cross_entropies


class GptBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)). [b s hidden] -> [b s hidden]."""

    n_heads: int
    dropout: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        drop = nn.Dropout(self.dropout, deterministic=self.dropout == 0)
        attention = FusedAttention(self.n_heads, causal=True, dtype=self.dtype, name="attention")
        x = x + drop(attention(nn.LayerNorm(dtype=self.dtype)(x)))
        x = x + drop(FeedForward(self.dtype, name="feed_forward")(nn.LayerNorm(dtype=self.dtype)(x)))
        return x


class Gpt(nn.Module):
    """Tokens [b s] -> logits [b s vocab_size]. With `tie_head` the head is the transposed embedding table."""

    hidden: int
    n_layers: int
    n_heads: int
    vocab_size: int
    tie_head: bool
    dropout: float
    dtype: DTypeLike
    boundaries: Boundaries

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocab_size, self.hidden, dtype=self.dtype, name="tokens")
        position = self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], self.hidden))
        x = embed(tokens) + position.astype(self.dtype)[None]

        for i in range(self.n_layers):
            x = GptBlock(self.n_heads, self.dropout, self.dtype, name=f"block_{i}")(x)
            self.boundaries.after(i)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return embed.attend(x) if self.tie_head else nn.Dense(self.vocab_size, False, self.dtype, name="head")(x)


def next_tokens(rng: np.random.Generator, n: int, seq_len: int, vocab_size: int) -> Batch:
    """`tokens` and `labels`, both [n seq_len]; a label is the token that follows."""
    text = rng.integers(vocab_size, size=(n, seq_len + 1), dtype=np.int32)
    return {"tokens": text[:, :-1], "labels": text[:, 1:]}


def gpt_case(
    *,
    batch_size: int = 16,
    seq_len: int = 16,
    hidden: int = 32,
    n_layers: int = 2,
    n_heads: int = 4,
    vocab_size: int = 64,
    tie_head: bool = True,
    dropout: float = 0.0,
    learning_rate: float = 1e-3,
    dtype: DTypeLike = jnp.float32,
    boundary: Hook | None = None,
    n_boundaries: int = 1,
) -> ModelCase:
    """Batch: `tokens` and `labels`, both int32 [b seq_len]."""
    cuts = Boundaries(boundary, n_boundaries, n_layers)

    return make_case(
        "gpt",
        model=Gpt(
            hidden=hidden,
            n_layers=n_layers,
            n_heads=n_heads,
            vocab_size=vocab_size,
            tie_head=tie_head,
            dropout=dropout,
            dtype=dtype,
            boundaries=cuts,
        ),
        inputs=("tokens",),
        loss=lambda logits, batch: (jnp.mean(cross_entropies(logits, batch["labels"])), {}),
        optimizer=optax.adamw(learning_rate),
        sample=lambda rng, n: next_tokens(rng, n, seq_len, vocab_size),
        batch_size=batch_size,
        dropout=dropout,
    )
