"""Transformers: tokens or images go in, logits come out. Six models configure one block. Shapes: b batch, s positions.

`attention` and `feed_forward` make flax modules inside the calling block, `forward` inside the network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from minialpa.errors import TraceError
from minialpa.models.base import (
    Batch,
    Metrics,
    Model,
    Network,
    classification,
    cross_entropies,
    labelled_images,
    masked_tokens,
    next_tokens,
)
from minialpa.models.layers import Attention, Experts, FeedForward, FusedAttention, PositionBias, attend, rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer(Model):
    """Base of the transformers, with a GPT's attention and feed-forward layer. AdamW.

    Attributes:
        norm: the flax module that normalises.
        norm_names: names of a block's norms; None for flax's names.
        norm_first: True for x + layer(norm(x)), False for norm(x + layer(x)).
    """

    inputs: ClassVar[tuple[str, ...]] = ("tokens",)
    norm: ClassVar[Any] = nn.LayerNorm
    norm_names: ClassVar[tuple[str | None, str | None]] = (None, None)
    norm_first: ClassVar[bool] = True

    hidden: int = 32
    n_layers: int = 2
    n_heads: int = 4
    dropout: float = 0.0
    optimizer: str = "adamw"

    @property
    def n_blocks(self) -> int:
        return self.n_layers

    @property
    def has_dropout(self) -> bool:
        return self.dropout != 0

    def attention(self, x: jax.Array, bias: jax.Array | None, causal: bool) -> jax.Array:
        return FusedAttention(self.n_heads, causal, self.dtype, name="attention")(x)

    def feed_forward(self, x: jax.Array) -> jax.Array:
        return FeedForward(self.dtype, name="feed_forward")(x)

    def dense(self, n_features: int, name: str, use_bias: bool = False) -> nn.Dense:
        return nn.Dense(n_features, use_bias=use_bias, dtype=self.dtype, name=name)

    def normalised(self, x: jax.Array, name: str | None = None) -> jax.Array:
        y: jax.Array = self.norm(dtype=self.dtype, name=name)(x)
        return y

    def drop(self) -> nn.Dropout:
        return nn.Dropout(self.dropout, deterministic=not self.has_dropout)

    def blocks(self, network: Network, x: jax.Array) -> jax.Array:
        for i in range(self.n_layers):
            x = TransformerBlock(self, name=f"block_{i}")(x)
            network.boundaries.after(i)
        return x

    def with_positions(self, network: Network, x: jax.Array) -> jax.Array:
        position = network.param("positions", nn.initializers.normal(0.02), x.shape[1:])
        return x + position.astype(self.dtype)[None]


class TransformerBlock(nn.Module):
    """Attention, cross-attention if there is a `memory`, and feed-forward. [b s hidden] -> [b s hidden]."""

    model: Transformer
    causal: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array | None = None, memory: jax.Array | None = None) -> jax.Array:
        model, drop = self.model, self.model.drop()

        def around(layer: Callable[[jax.Array], jax.Array], x: jax.Array, name: str | None) -> jax.Array:
            """x + layer(norm(x)), or norm(x + layer(x)), with dropout after the layer."""
            y: jax.Array = drop(layer(model.normalised(x, name) if model.norm_first else x))
            return x + y if model.norm_first else model.normalised(x + y, name)

        x = around(lambda y: model.attention(y, bias, self.causal), x, model.norm_names[0])
        if memory is not None:
            cross = Attention(model.n_heads, causal=False, dtype=model.dtype, name="cross_attention")
            x = around(lambda y: cross(y, memory), x, None)
        return around(model.feed_forward, x, model.norm_names[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens(Transformer):
    """A model of the next token by default. Batch: `tokens` and `labels`, int32 [b seq_len]."""

    seq_len: int = 16
    vocab_size: int = 64

    def embedding(self) -> nn.Embed:
        return nn.Embed(self.vocab_size, self.hidden, dtype=self.dtype, name="tokens")

    def loss(self, outputs: Any, batch: Any) -> tuple[jax.Array, Metrics]:
        return jnp.mean(cross_entropies(outputs, batch["labels"])), {}

    def sample(self, rng: np.random.Generator, n: int) -> Batch:
        return next_tokens(rng, n, self.seq_len, self.vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt(Tokens):
    """Tokens [b s] -> logits [b s vocab_size]. With `tie_head`, the head is the transposed embedding table."""

    tie_head: bool = True

    def forward(self, network: Network, tokens: jax.Array) -> jax.Array:
        embed = self.embedding()
        x = self.normalised(self.blocks(network, self.with_positions(network, embed(tokens))))
        return embed.attend(x) if self.tie_head else self.dense(self.vocab_size, "head")(x)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe(Tokens):
    """A GPT with experts in blocks 0, 2, ...; tokens [b s] -> logits [b s vocab_size] and the summed imbalance.

    Loss = cross-entropy + `balance` * imbalance, also a metric. An expert has `factor` * hidden features, and capacity
    * 2 * seq_len / n_experts slots for each example.
    """

    n_experts: int = 8
    factor: int = 4
    capacity: float = 2.0
    balance: float = 0.01

    def forward(self, network: Network, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        embed, drop = self.embedding(), self.drop()
        x = self.with_positions(network, embed(tokens))

        total = jnp.zeros((), jnp.float32)
        for i in range(self.n_layers):
            attention = FusedAttention(self.n_heads, causal=True, dtype=self.dtype, name=f"attention_{i}")
            x = x + drop(attention(self.normalised(x)))
            y = self.normalised(x)
            if i % 2 == 0:
                y, imbalance = Experts(self.n_experts, self.factor, self.capacity, self.dtype, name=f"experts_{i}")(y)
                total = total + imbalance
            else:
                y = FeedForward(self.dtype, self.factor, name=f"feed_forward_{i}")(y)
            x = x + drop(y)
            network.boundaries.after(i)
        return embed.attend(self.normalised(x)), total

    def loss(self, outputs: Any, batch: Any) -> tuple[jax.Array, Metrics]:
        logits, imbalance = outputs
        value = jnp.mean(cross_entropies(logits, batch["labels"])) + self.balance * imbalance
        return value, {"imbalance": imbalance}


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama(Tokens):
    """Rotary positions, grouped-query attention, SwiGLU, untied head. Tokens [b s] -> logits [b s vocab_size].

    Attributes:
        scan_layers: whether blocks are one `lax.scan` over stacked parameters [n_layers ...].
        loss_chunks: a divisor of `seq_len`. Head and loss are a rematerialised `lax.scan` over chunks of positions, so
            the whole logits never exist; outputs are losses [b chunk s]. 0: no scan.
        remat_blocks: whether the backward pass recomputes each block from its input.
    """

    inputs: ClassVar = ("tokens", "labels")
    norm: ClassVar = nn.RMSNorm
    norm_names: ClassVar = ("attention_norm", "ffn_norm")

    n_kv_heads: int = 2
    ffn: int = 64
    rope_base: float = 10000.0
    scan_layers: bool = False
    loss_chunks: int = 0
    remat_blocks: bool = False

    def __post_init__(self) -> None:
        if self.loss_chunks and self.seq_len % self.loss_chunks:
            raise TraceError(
                f"`loss_chunks={self.loss_chunks}` does not divide `seq_len={self.seq_len}`. Pass a divisor, or 0 for "
                "no chunks."
            )

    @property
    def n_blocks(self) -> int:
        return 1 if self.scan_layers else self.n_layers

    def attention(self, x: jax.Array, bias: jax.Array | None, causal: bool) -> jax.Array:
        b, s, hidden = x.shape
        d = hidden // self.n_heads
        query = rotate(self.dense(hidden, "query")(x).reshape(b, s, self.n_heads, d), self.rope_base)
        key = rotate(self.dense(self.n_kv_heads * d, "key")(x).reshape(b, s, self.n_kv_heads, d), self.rope_base)
        value = self.dense(self.n_kv_heads * d, "value")(x).reshape(b, s, self.n_kv_heads, d)
        return self.dense(hidden, "out")(attend(query, key, value, causal=causal).reshape(x.shape))

    def feed_forward(self, x: jax.Array) -> jax.Array:
        wide = nn.silu(self.dense(self.ffn, "gate")(x)) * self.dense(self.ffn, "up")(x)
        return self.dense(x.shape[-1], "down")(wide)

    def blocks(self, network: Network, x: jax.Array) -> jax.Array:
        if self.scan_layers:
            return self._scan_blocks(x)
        block = nn.remat(TransformerBlock) if self.remat_blocks else TransformerBlock
        for i in range(self.n_layers):
            x = block(self, name=f"block_{i}")(x)
            network.boundaries.after(i)
        return x

    def _scan_blocks(self, x: jax.Array) -> jax.Array:

        def layer(block: TransformerBlock, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return block(x), None

        # In a loop, recomputed equations cannot merge with the first ones.
        layer = nn.remat(layer, prevent_cse=False) if self.remat_blocks else layer
        keys: Any = {"params": True, "dropout": True}
        stack = nn.scan(layer, variable_axes={"params": 0}, split_rngs=keys, length=self.n_layers)
        x, _ = stack(TransformerBlock(self, name="blocks"), x, None)
        return x

    def forward(self, network: Network, tokens: jax.Array, labels: jax.Array | None = None) -> jax.Array:
        x = self.normalised(self.blocks(network, self.embedding()(tokens)), "norm")
        head = self.dense(self.vocab_size, "head")
        if labels is None or not self.loss_chunks:
            return head(x)

        def losses_of(head: nn.Dense, _: None, run: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
            return None, cross_entropies(head(run[0]), run[1])

        shape = (len(tokens), self.loss_chunks, -1)
        runs = x.reshape(*shape, self.hidden), labels.reshape(shape)
        chunk = nn.remat(losses_of, prevent_cse=False)
        in_runs = nn.scan(chunk, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1)
        losses: jax.Array = in_runs(head, None, runs)[1]
        return losses

    def loss(self, outputs: Any, batch: Any) -> tuple[jax.Array, Metrics]:
        return jnp.mean(outputs if self.loss_chunks else cross_entropies(outputs, batch["labels"])), {}


@dataclass(frozen=True, slots=True, kw_only=True)
class T5(Tokens):
    """An encoder and a decoder of `n_layers`. Source tokens [b s] and target tokens [b t] -> logits [b t vocab_size].

    Source, target and head share the embedding table; layers of a stack share relative position biases. All decoder
    layers read the encoder's output, so it skips over pipeline stages, as do the biases. Batch: `source`, int32 [b
    source_len]; `tokens` and `labels`, int32 [b seq_len].
    """

    inputs: ClassVar = ("source", "tokens")
    norm: ClassVar = nn.RMSNorm

    source_len: int = 16
    seq_len: int = 8
    reach: int = 8

    @property
    def n_blocks(self) -> int:
        return 2 * self.n_layers

    def attention(self, x: jax.Array, bias: jax.Array | None, causal: bool) -> jax.Array:
        return Attention(self.n_heads, causal, self.dtype, name="attention")(x, x, bias)

    def forward(self, network: Network, source: jax.Array, tokens: jax.Array) -> jax.Array:
        embed = self.embedding()
        memory = self._stack(network, "encoder", embed(source), None)
        return embed.attend(self._stack(network, "decoder", embed(tokens), memory))

    def _stack(self, network: Network, name: str, x: jax.Array, memory: jax.Array | None) -> jax.Array:
        """The encoder; or the decoder, which reads the output `memory` of the encoder."""
        bias = PositionBias(self.n_heads, self.reach, name=f"{name}_bias")(x.shape[1])
        first = 0 if memory is None else self.n_layers
        for i in range(self.n_layers):
            x = TransformerBlock(self, causal=memory is not None, name=f"{name}_{i}")(x, bias, memory)
            network.boundaries.after(first + i)
        return self.normalised(x, f"{name}_norm")

    def sample(self, rng: np.random.Generator, n: int) -> Batch:
        source = rng.integers(self.vocab_size, size=(n, self.source_len), dtype=np.int32)
        return {"source": source, **next_tokens(rng, n, self.seq_len, self.vocab_size)}


def _attend_to_all(model: Transformer, x: jax.Array, bias: jax.Array | None, causal: bool) -> jax.Array:
    """Attention in which all positions see each other."""
    attention = nn.MultiHeadDotProductAttention(model.n_heads, use_bias=False, dtype=model.dtype, name="attention")
    y: jax.Array = attention(x)
    return y


@dataclass(frozen=True, slots=True, kw_only=True)
class Bert(Tokens):
    """Tokens [b s] -> logits [b s vocab_size]. The head is a dense layer and the transposed embedding table.

    Batch: see `masked_tokens`. Loss = sum(cross-entropy * mask) / sum(mask).
    """

    norm_first: ClassVar = False
    attention = _attend_to_all

    def forward(self, network: Network, tokens: jax.Array) -> jax.Array:
        embed = self.embedding()
        position = nn.Embed(tokens.shape[1], self.hidden, dtype=self.dtype, name="positions")
        x = self.normalised(embed(tokens) + position(jnp.arange(tokens.shape[1]))[None])
        x = self.normalised(nn.gelu(self.dense(self.hidden, "transform", use_bias=True)(self.blocks(network, x))))
        bias = network.param("head_bias", nn.initializers.zeros, (self.vocab_size,))
        return embed.attend(x) + bias.astype(self.dtype)[None, None]

    def loss(self, outputs: Any, batch: Any) -> tuple[jax.Array, Metrics]:
        losses, mask = cross_entropies(outputs, batch["labels"]), batch["mask"]
        return jnp.sum(losses * mask) / jnp.sum(mask), {}

    def sample(self, rng: np.random.Generator, n: int) -> Batch:
        return masked_tokens(rng, n, self.seq_len, self.vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vit(Transformer):
    """Images [b y x 3] -> logits [b n_classes]: patches by a strided convolution, mean over positions.

    Batch: see `labelled_images`. Metric: see `classification`.
    """

    inputs: ClassVar = ("image",)
    attention = _attend_to_all

    image_size: int = 16
    patch: int = 4
    n_classes: int = 16

    def forward(self, network: Network, image: jax.Array) -> jax.Array:
        window = (self.patch, self.patch)
        x = nn.Conv(self.hidden, window, window, padding="VALID", dtype=self.dtype, name="patches")(image)
        x = self.with_positions(network, x.reshape(x.shape[0], -1, self.hidden))
        x = self.normalised(jnp.mean(self.blocks(network, x), axis=1))
        return self.dense(self.n_classes, "head", use_bias=True)(x)

    def loss(self, outputs: jax.Array, batch: Any) -> tuple[jax.Array, Metrics]:
        return classification(outputs, batch["label"])

    def sample(self, rng: np.random.Generator, n: int) -> Batch:
        return labelled_images(rng, n, self.image_size, self.n_classes)
