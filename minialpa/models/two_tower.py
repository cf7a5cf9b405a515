"""Two towers with shared ends: one embedding and one projection serve both, the layers between are each tower's own.

Score of a pair = dot product of the two projections; loss = mean over pairs of (score - target)^2. Examples do not mix.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from minialpa.models.base import Batch, Boundaries, Hook, ModelCase, make_case
from minialpa.models.losses import squared_error


class TwoTower(nn.Module):
    """Tokens [b s] of the query and of the item -> scores [b]."""

    hidden: int
    n_layers: int
    vocab_size: int
    dtype: DTypeLike
    boundaries: Boundaries

    @nn.compact
    def __call__(self, query: jax.Array, item: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocab_size, self.hidden, dtype=self.dtype, name="embedding")
        project = nn.Dense(self.hidden, dtype=self.dtype, name="projection")
        ends = []
        for tower, (name, tokens) in enumerate((("query", query), ("item", item))):
            x = jnp.mean(embed(tokens), axis=1)
            for i in range(self.n_layers):
                x = nn.relu(nn.Dense(self.hidden, dtype=self.dtype, name=f"{name}_{i}")(x))
                self.boundaries.after(tower * self.n_layers + i)
            ends.append(project(x))
        return jnp.sum(ends[0] * ends[1], axis=-1)


def two_tower_case(
    *,
    batch_size: int = 16,
    seq_len: int = 8,
    hidden: int = 32,
    n_layers: int = 2,
    vocab_size: int = 64,
    learning_rate: float = 1e-2,
    dtype: DTypeLike = jnp.float32,
    boundary: Hook | None = None,
    n_boundaries: int = 1,
) -> ModelCase:
    """Batch: `query` and `item`, int32 [b seq_len], and `target`, float32 [b]."""

    def sample(rng: np.random.Generator, n: int) -> Batch:
        query, item = rng.integers(vocab_size, size=(2, n, seq_len), dtype=np.int32)
        return {"query": query, "item": item, "target": rng.random(n, np.float32)}

    return make_case(
        "two_tower",
        model=TwoTower(hidden, n_layers, vocab_size, dtype, Boundaries(boundary, n_boundaries, 2 * n_layers)),
        inputs=("query", "item"),
        loss=lambda scores, batch: (squared_error(scores, batch["target"]), {}),
        optimizer=optax.adam(learning_rate),
        sample=sample,
        batch_size=batch_size,
    )
