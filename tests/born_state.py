"""A process of its own that creates a state and prints what it took, for tests of memory: ru_maxrss never falls."""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import jax
import jax.numpy as jnp

import minialpa

N_LAYERS, WIDTH = 12, 768


def init(key: jax.Array) -> dict[str, Any]:
    """Weights with two moments, as Adam keeps them."""
    keys = jax.random.split(key, N_LAYERS)
    weights = [jax.random.normal(each, (WIDTH, WIDTH)) for each in keys]
    return {"weights": weights, "moments": [[jnp.zeros_like(w) for w in weights] for _ in range(2)]}


def train_step(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    def loss_fn(weights: list[jax.Array]) -> jax.Array:
        x = batch
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    loss, grads = minialpa.value_and_grad(loss_fn)(state["weights"])
    moments = [jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, old, grads) for old in state["moments"]]
    weights = jax.tree.map(lambda w, m, v: w - m / (1e-3 + jnp.abs(v)), state["weights"], *moments)
    return {"weights": weights, "moments": moments}, loss


def peak_bytes() -> int:
    """Bytes of memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    batch = jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)
    step = minialpa.parallelize(train_step, method=minialpa.Zero3Parallel())
    create = minialpa.parallelize(init, method=minialpa.CreateStateParallel(step, (batch,)))
    key = jax.random.key(0)
    executable = create.get_executable(key)

    before = peak_bytes()
    state = jax.block_until_ready(create(key))
    found = {
        "state": sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        "per_device": executable.get_total_allocation_size(),
        "grown": peak_bytes() - before,
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
