"""A training step of two layers for tests of loaders: the step, its parameters and numbered batches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import minialpa


def train_step(params: Any, batch: Any) -> Any:
    def loss(p: Any) -> Any:
        hidden = jnp.tanh(batch["x"] @ p["w"])
        return jnp.mean((hidden @ p["v"] - batch["y"]) ** 2)

    value, grads = minialpa.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def make_params() -> Any:
    return {"w": np.full((8, 16), 0.1, np.float32), "v": np.full((16, 4), 0.1, np.float32)}


def make_batch(number: int = 0, n: int = 16) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    return {"x": rng.standard_normal((n, 8), np.float32), "y": rng.standard_normal((n, 4), np.float32)}
