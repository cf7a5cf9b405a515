"""Models of dense layers: a multi-layer perceptron and two towers. Squared error, Adam."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from minialpa.models.base import Batch, Metrics, Model, Network, squared_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp(Model):
    """Dense layers with relu between them, [b hidden] -> [b hidden]. Batch: `x` and `y`, both [b hidden]."""

    inputs: ClassVar = ("x",)

    hidden: int = 32
    n_layers: int = 4
    use_bias: bool = True
    learning_rate: float = 1e-2

    @property
    def n_blocks(self) -> int:
        return self.n_layers

    def forward(self, network: Network, x: jax.Array) -> jax.Array:
        for i in range(self.n_layers):
            x = nn.Dense(self.hidden, use_bias=self.use_bias, dtype=self.dtype)(x if i == 0 else nn.relu(x))
            network.boundaries.after(i)
        return x

    def loss(self, outputs: jax.Array, batch: Any) -> tuple[jax.Array, Metrics]:
        return squared_error(outputs, batch["y"])

    def sample(self, rng: np.random.Generator, n: int) -> Batch:
        x, y = rng.standard_normal((2, n, self.hidden), np.float32)
        return {"x": x, "y": y}


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoTower(Model):
    """Tokens [b s] of the query and of the item -> scores [b], the dot products of two projections.

    The towers share the embedding and the projection; the layers between are each tower's own. Examples do not mix.
    Batch: `query` and `item`, int32 [b seq_len], and `target`, float32 [b].
    """

    inputs: ClassVar = ("query", "item")

    seq_len: int = 8
    hidden: int = 32
    n_layers: int = 2
    vocab_size: int = 64
    learning_rate: float = 1e-2

    @property
    def n_blocks(self) -> int:
        return 2 * self.n_layers

    def forward(self, network: Network, query: jax.Array, item: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocab_size, self.hidden, dtype=self.dtype, name="embedding")
        project = nn.Dense(self.hidden, dtype=self.dtype, name="projection")
        ends = []
        for tower, (name, tokens) in enumerate((("query", query), ("item", item))):
            x = jnp.mean(embed(tokens), axis=1)
            for i in range(self.n_layers):
                x = nn.relu(nn.Dense(self.hidden, dtype=self.dtype, name=f"{name}_{i}")(x))
                network.boundaries.after(tower * self.n_layers + i)
            ends.append(project(x))
        return jnp.sum(ends[0] * ends[1], axis=-1)

    def loss(self, outputs: jax.Array, batch: Any) -> tuple[jax.Array, Metrics]:
        return squared_error(outputs, batch["target"])

    def sample(self, rng: np.random.Generator, n: int) -> Batch:
        query, item = rng.integers(self.vocab_size, size=(2, n, self.seq_len), dtype=np.int32)
        return {"query": query, "item": item, "target": rng.random(n, np.float32)}
