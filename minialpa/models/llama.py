"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, untied head, AdamW.

With `scan_layers` the blocks are one `lax.scan` over stacked parameters [n_layers ...], else a Python loop. With
`loss_chunks` the logits of a long sequence are never there at once: the head and the loss are a `lax.scan` over runs of
positions, which the backward pass computes again, as trainers for long contexts do. With `remat_blocks` it computes
each block again from its input.
Letters of the shapes: b batch, s positions, d features of a head.
"""

from __future__ import annotations

from typing import Any

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


class _HeadLosses(nn.Dense):
    """The head and the loss of a run of positions, with the (carry, input) -> (carry, output) signature of a scan."""

    @nn.compact
    def __call__(self, _: None, run: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:  # type: ignore[override]
        x, labels = run
        return None, cross_entropies(super().__call__(x), labels)


class Llama(nn.Module):
    """Tokens [b s] -> logits [b s vocab_size]; with `loss_chunks` tokens, labels [b s] -> losses [b chunk s]."""

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
    loss_chunks: int = 0
    remat_blocks: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array, labels: jax.Array | None = None) -> jax.Array:
        x = nn.Embed(self.vocab_size, self.hidden, dtype=self.dtype, name="tokens")(tokens)
        shape = (self.n_heads, self.n_kv_heads, self.ffn, self.rope_base, self.dtype)
        if self.scan_layers:
            # Iterations of a loop are apart anyway, so that nothing has to keep recomputed equations from merging.
            block = nn.remat(_ScanBlock, prevent_cse=False) if self.remat_blocks else _ScanBlock
            stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.n_layers)
            x, _ = stack(*shape, name="blocks")(x, None)
        else:
            one_block = nn.remat(LlamaBlock) if self.remat_blocks else LlamaBlock
            for i in range(self.n_layers):
                x = one_block(*shape, name=f"block_{i}")(x)
                self.boundaries.after(i)
        x = nn.RMSNorm(dtype=self.dtype, name="norm")(x)

        if labels is None:
            return nn.Dense(self.vocab_size, use_bias=False, dtype=self.dtype, name="head")(x)
        b = len(tokens)
        runs = x.reshape(b, self.loss_chunks, -1, self.hidden), labels.reshape(b, self.loss_chunks, -1)
        in_runs = nn.scan(
            nn.remat(_HeadLosses, prevent_cse=False),
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
        )
        losses: jax.Array
        _, losses = in_runs(self.vocab_size, use_bias=False, dtype=self.dtype, name="head")(None, runs)
        return losses


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
    loss_chunks: int = 0,
    remat_blocks: bool = False,
    learning_rate: float = 1e-3,
    dtype: DTypeLike = jnp.float32,
    boundary: Hook | None = None,
    n_boundaries: int = 1,
) -> ModelCase:
    """Batch: `tokens` and `labels`, both int32 [b seq_len].

    loss_chunks: a divisor of `seq_len`; 0 for all at once.
    remat_blocks: whether the backward pass computes each block again from its input.
    """
    if scan_layers and boundary is not None and n_boundaries:
        raise TraceError("A boundary cannot lie inside a scan. Use `scan_layers=False`, or give no `boundary`.")
    if loss_chunks and seq_len % loss_chunks:
        raise TraceError(f"`loss_chunks={loss_chunks}` does not divide the {seq_len} positions of `seq_len`.")
    cuts = Boundaries(boundary, n_boundaries, n_layers)

    def loss(outputs: jax.Array, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        return jnp.mean(outputs if loss_chunks else cross_entropies(outputs, batch["labels"])), {}

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
            loss_chunks=loss_chunks,
            remat_blocks=remat_blocks,
        ),
        inputs=("tokens", "labels") if loss_chunks else ("tokens",),
        loss=loss,
        optimizer=optax.adamw(learning_rate),
        sample=lambda rng, n: next_tokens(rng, n, seq_len, vocab_size),
        batch_size=batch_size,
    )
