"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, untied head, AdamW.

With `scan_layers` the blocks are one `lax.scan` over stacked parameters [n_layers ...], else a Python loop.
Letters of the shapes: b batch, s positions, d features of a head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from minialpa.errors import TraceError
from minialpa.models.base import Boundaries, Hook, ModelCase, make_case
from minialpa.models.gpt import next_tokens
from minialpa.models.layers import attend
from minialpa.models.losses import cross_entropies


def rotate(x: jax.Array, base: float) -> jax.Array:
    """Rotary embedding (Su et al., 2021) of [b s h d]: turns (x[i], x[i + d/2]) at position s by s base^(-2i/d)."""
    _, s, _, d = x.shape
    frequency = base ** (-jnp.arange(0, d, 2, dtype=jnp.float32) / d)
    angle = jnp.arange(s, dtype=jnp.float32)[:, None] * frequency[None]
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class LlamaBlock(nn.Module):
    """x + attention(norm(x)), then x + (silu(y W1) * y W2) W3 with y = norm(x). [b s hidden] -> [b s hidden]."""

    n_heads: int
    n_kv_heads: int
    ffn: int
    rope_base: float
    dtype: DTypeLike

    def dense(self, n_features: int, name: str) -> nn.Dense:
        return nn.Dense(n_features, use_bias=False, dtype=self.dtype, name=name)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        b, s, hidden = x.shape
        d = hidden // self.n_heads

        y = nn.RMSNorm(dtype=self.dtype, name="attention_norm")(x)
        query = rotate(self.dense(hidden, "query")(y).reshape(b, s, self.n_heads, d), self.rope_base)
        key = rotate(self.dense(self.n_kv_heads * d, "key")(y).reshape(b, s, self.n_kv_heads, d), self.rope_base)
        value = self.dense(self.n_kv_heads * d, "value")(y).reshape(b, s, self.n_kv_heads, d)

        x = x + self.dense(hidden, "out")(attend(query, key, value, causal=True).reshape(x.shape))

        y = nn.RMSNorm(dtype=self.dtype, name="ffn_norm")(x)
        return x + self.dense(hidden, "down")(nn.silu(self.dense(self.ffn, "gate")(y)) * self.dense(self.ffn, "up")(y))


class _ScanBlock(LlamaBlock):
    """`LlamaBlock` with the (carry, input) -> (carry, output) signature of a scan."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:  # type: ignore[override]
        return super().__call__(x), None


class Llama(nn.Module):
    """Tokens [b s] -> logits [b s vocab_size]."""

    hidden: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn: int
    vocab_size: int
    rope_base: float
    scan_layers: bool
    dtype: DTypeLike
    boundaries: Boundaries

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocab_size, self.hidden, dtype=self.dtype, name="tokens")(tokens)
        shape = (self.n_heads, self.n_kv_heads, self.ffn, self.rope_base, self.dtype)
        if self.scan_layers:
            stack = nn.scan(_ScanBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.n_layers)
            x, _ = stack(*shape, name="blocks")(x, None)
        else:
            for i in range(self.n_layers):
                x = LlamaBlock(*shape, name=f"block_{i}")(x)
                self.boundaries.after(i)
        x = nn.RMSNorm(dtype=self.dtype, name="norm")(x)
        return nn.Dense(self.vocab_size, use_bias=False, dtype=self.dtype, name="head")(x)


def llama_case(
    *,
    batch_size: int = 16,
    seq_len: int = 16,
    hidden: int = 32,
    n_layers: int = 2,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    ffn: int = 64,
    vocab_size: int = 64,
    rope_base: float = 10000.0,
    scan_layers: bool = False,
    learning_rate: float = 1e-3,
    dtype: DTypeLike = jnp.float32,
    boundary: Hook | None = None,
    n_boundaries: int = 1,
) -> ModelCase:
    """Batch: `tokens` and `labels`, both int32 [b seq_len]."""
    if scan_layers and boundary is not None and n_boundaries:
        raise TraceError("A boundary cannot lie inside a scan. Use `scan_layers=False`, or give no `boundary`.")
    cuts = Boundaries(boundary, n_boundaries, n_layers)

    return make_case(
        "llama",
        model=Llama(
            hidden=hidden,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            ffn=ffn,
            vocab_size=vocab_size,
            rope_base=rope_base,
            scan_layers=scan_layers,
            dtype=dtype,
            boundaries=cuts,
        ),
        inputs=("tokens",),
        loss=lambda logits, batch: (jnp.mean(cross_entropies(logits, batch["labels"])), {}),
        optimizer=optax.adamw(learning_rate),
        sample=lambda rng, n: next_tokens(rng, n, seq_len, vocab_size),
        batch_size=batch_size,
    )
