"""Training steps that scan over stacked layers: one in plain jax with an evaluation, and a perceptron."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import minialpa
from minialpa import AutoLayerOption, PipeshardParallel, UniformStageOption, Zero3Parallel, models
from minialpa.methods import Method

N_LAYERS, WIDTH = 4, 8
BATCH = {"x": np.ones((16, WIDTH), np.float32), "y": np.ones((16, WIDTH), np.float32)}

#: One mesh with a sharded state; two meshes, each with blocks of rows of the stacked leaves.
METHODS: dict[str, Method] = {
    "zero3": Zero3Parallel(),
    "blocks": PipeshardParallel(
        num_micro_batches=2, layer_option=AutoLayerOption(N_LAYERS), stage_option=UniformStageOption(2)
    ),
}


def _init_layer(key: jax.Array) -> dict[str, jax.Array]:
    first, second = jax.random.split(key)
    return {
        "up": jax.random.normal(first, (WIDTH, 2 * WIDTH)) * 0.1,
        "down": jax.random.truncated_normal(second, -2.0, 2.0, (2 * WIDTH, WIDTH)) * 0.1,
    }


def init(key: jax.Array) -> dict[str, Any]:
    """A state with weights that were drawn layer by layer and stacked, a number, keys and a captured array."""
    own, layers, shift, head = jax.random.split(key, 4)
    params = {
        "layers": jax.vmap(_init_layer)(jax.random.split(layers, N_LAYERS)),
        "shift": jax.random.uniform(shift, (N_LAYERS, WIDTH)),
        "head": jax.random.orthogonal(head, WIDTH),
        "scale": jnp.asarray(np.linspace(0.5, 1.0, WIDTH, dtype=np.float32)),
    }
    return {"params": params, "moments": jax.tree.map(jnp.zeros_like, params), "step": 0, "rng": own, "given": key}


def _outputs(params: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, of_layer: Any) -> tuple[jax.Array, None]:
        weights, shift = of_layer
        return x + jax.nn.relu(x @ weights["up"] + 0.1) @ weights["down"] + shift[None], None

    x, _ = jax.lax.scan(layer, x, (params["layers"], params["shift"]))
    return x @ params["head"] * params["scale"][None]


def _loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((_outputs(params, batch["x"]) - batch["y"]) ** 2)


def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], jax.Array]:
    loss, grads = minialpa.value_and_grad(_loss)(state["params"], batch)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], grads)
    params = jax.tree.map(lambda p, m: p - 0.01 * m, state["params"], moments)
    new = {"params": params, "moments": moments, "step": state["step"] + 1, "rng": jax.random.fold_in(state["rng"], 0)}
    return {**new, "given": state["given"]}, loss


def evaluate(state: dict[str, Any], batch: Any) -> tuple[jax.Array, jax.Array]:
    return _loss(state["params"], batch), _outputs(state["params"], batch["x"])


def evaluate_params(params: dict[str, Any], batch: Any) -> jax.Array:
    return _loss(params, batch)


def perceptron(n_layers: int, again: bool) -> models.ModelCase:
    """x -> tanh(x w + b) for each layer in a scan, then a head; Adam with clipping by the global norm.

    again: whether the backward pass recomputes the layers.
    """
    width = 16
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, eps=1e-4))

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, 2)
        params = {
            "b": jnp.zeros((n_layers, width)),
            "head": jax.random.normal(keys[0], (width, 1)) * 0.3,
            "w": jax.random.normal(keys[1], (n_layers, width, width)) * 0.3,
        }
        return params, transform.init(params)

    def make_batch(seed: int, n: int) -> Any:
        x = np.random.default_rng(seed).standard_normal((n, width), np.float32)
        return {"x": x, "y": np.sin(x.sum(1, keepdims=True))}

    def layer(x: jax.Array, row: Any) -> tuple[jax.Array, jax.Array]:
        x = x + jnp.tanh(jnp.dot(x, row["w"]) + row["b"][None])
        return x, jnp.mean(x * x)

    def loss(params: Any, batch: Any) -> jax.Array:
        body = jax.checkpoint(layer, prevent_cse=False) if again else layer
        x, norms = jax.lax.scan(body, batch["x"], {name: params[name] for name in ("w", "b")})
        return jnp.mean((jnp.dot(x, params["head"]) - batch["y"]) ** 2) + 1e-3 * jnp.sum(norms)

    def train_step(value_and_grad: Any) -> Any:
        def step(state: Any, batch: Any) -> Any:
            params, moments = state
            value, grads = value_and_grad(loss)(params, batch)
            with jax.numpy_dtype_promotion("standard"):
                updates, moments = transform.update(grads, moments, params)
                return (optax.apply_updates(params, updates), moments), {"loss": value}

        return step

    return models.ModelCase(name="perceptron", batch_size=16, init=init, make_batch=make_batch, train_step=train_step)
