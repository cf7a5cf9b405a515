"""A multi-layer perceptron: `n_layers` dense layers with relu between them, mean squared error, Adam."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.typing import DTypeLike

from minialpa.models.base import Batch, Boundaries, Hook, ModelCase, make_case
from minialpa.models.losses import squared_error


class Mlp(nn.Module):
    """[b hidden] -> [b hidden]."""

    hidden: int
    n_layers: int
    use_bias: bool
    dtype: DTypeLike
    boundaries: Boundaries

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.n_layers):
            x = nn.Dense(self.hidden, use_bias=self.use_bias, dtype=self.dtype)(x if i == 0 else nn.relu(x))
            self.boundaries.after(i)
        return x


def mlp_case(
    *,
    batch_size: int = 16,
    hidden: int = 32,
    n_layers: int = 4,
    use_bias: bool = True,
    learning_rate: float = 1e-2,
    dtype: DTypeLike = jnp.float32,
    boundary: Hook | None = None,
    n_boundaries: int = 1,
) -> ModelCase:
    """Batch: `x` and `y`, both [b hidden]."""

    def sample(rng: np.random.Generator, n: int) -> Batch:
        x, y = rng.standard_normal((2, n, hidden), np.float32)
        return {"x": x, "y": y}

    return make_case(
        "mlp",
        model=Mlp(hidden, n_layers, use_bias, dtype, Boundaries(boundary, n_boundaries, n_layers)),
        inputs=("x",),
        loss=lambda outputs, batch: (squared_error(outputs, batch["y"]), {}),
        optimizer=optax.adam(learning_rate),
        sample=sample,
        batch_size=batch_size,
    )
