"""Common parts of the models: synthetic data, and the step around a loss and an optimizer of optax."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.models.catalogue import Training

#: Steps of each training, and examples of each batch.
N_STEPS, N_EXAMPLES = 3, 8
Loss = Callable[[Any, Any], jax.Array]


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers; the first dimension is the examples."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def integers(below: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, below, shape).astype(np.int32)


def batches(make: Callable[[int], Any]) -> list[Any]:
    """A batch for each step; `make` takes the seed."""
    return [make(10 * (step + 1)) for step in range(N_STEPS)]


def regression(n_in: int, n_out: int) -> list[Any]:
    return batches(lambda s: {"x": floats(N_EXAMPLES, n_in, seed=s), "y": floats(N_EXAMPLES, n_out, seed=s + 1)})


def images(size: int, n_classes: int, channels: int = 3) -> list[Any]:
    return batches(
        lambda s: {
            "x": floats(N_EXAMPLES, size, size, channels, seed=s),
            "y": integers(n_classes, N_EXAMPLES, seed=s + 1),
        }
    )


def tokens(n_words: int, length: int) -> list[Any]:
    return batches(lambda s: {"ids": integers(n_words, N_EXAMPLES, length, seed=s)})


def minimise(loss: Loss, params: Any, optimizer: Any, data: list[Any]) -> Training:
    """Steps of `optimizer` on `loss(params, batch)`."""
    import optax

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return Training(step=step, state=(params, optimizer.init(params)), batches=data)


def minimise_noisy(loss: Callable[..., jax.Array], params: Any, optimizer: Any, data: list[Any]) -> Training:
    """As `minimise`, for `loss(params, batch, key)`; the key is in the state."""
    import optax

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, key = state
        key, own = jax.random.split(key)
        value, grads = jax.value_and_grad(loss)(params, batch, own)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, key), value

    return Training(step=step, state=(params, optimizer.init(params), jax.random.key(7)), batches=data)


def dense(n_in: int, n_out: int, seed: int) -> dict[str, jax.Array]:
    return {"w": jnp.asarray(floats(n_in, n_out, seed=seed)) / np.float32(np.sqrt(n_in)), "b": jnp.zeros(n_out)}


def towers(*widths: int, seed: int = 100) -> list[dict[str, jax.Array]]:
    """Parameters of dense layers."""
    return [dense(a, b, seed + i) for i, (a, b) in enumerate(pairwise(widths))]


def apply_dense(layer: Any, x: jax.Array) -> jax.Array:
    return jnp.asarray(x @ layer["w"] + layer["b"])


def apply_tower(layers: Any, x: jax.Array) -> jax.Array:
    """Dense layers with tanh between them."""
    for layer in layers[:-1]:
        x = jnp.tanh(apply_dense(layer, x))
    return apply_dense(layers[-1], x)


def cross_entropy(logits: Any, labels: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, logits.shape[-1]), -1))


def next_token_loss(logits: Any, ids: jax.Array) -> jax.Array:
    return cross_entropy(logits[:, :-1], ids[:, 1:])
