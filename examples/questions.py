"""One training step in plain jax, in flax and in equinox, as models for `minialpa plan examples/questions.py:plain`.

Each function returns the step for one device, its state and its batch, as shapes. docs/five-questions.md plans them.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import minialpa

WIDTH, N_LAYERS, N_CLASSES = 4096, 8, 16
OPTIMIZER = optax.adam(1e-3)


def batch_of(n_examples: int) -> dict[str, jax.ShapeDtypeStruct]:
    shape = jax.ShapeDtypeStruct
    return {"x": shape((n_examples, WIDTH), jnp.bfloat16), "label": shape((n_examples,), jnp.int32)}


def cross_entropy(logits: jax.Array, batch: Any) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["label"])
    return jnp.mean(losses)


def plain(batch_size: int = 8192) -> tuple[Any, Any, Any]:
    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            x = batch["x"]
            for k in range(N_LAYERS):
                with jax.named_scope(f"layer_{k}"):
                    x = jax.nn.relu(x @ params[f"w{k}"])
            return cross_entropy(x @ params["head"], batch)

        value, grads = minialpa.value_and_grad(loss)(state["params"])
        updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    def create() -> Any:
        params = {f"w{k}": jnp.zeros((WIDTH, WIDTH), jnp.bfloat16) for k in range(N_LAYERS)}
        params["head"] = jnp.zeros((WIDTH, N_CLASSES), jnp.bfloat16)
        return {"params": params, "opt": OPTIMIZER.init(params)}

    return step, jax.eval_shape(create), batch_of(batch_size)


class Network(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(N_LAYERS):
            x = nn.relu(nn.Dense(WIDTH, dtype=jnp.bfloat16)(x))
        return nn.Dense(N_CLASSES, dtype=jnp.bfloat16)(x)


def flax(batch_size: int = 8192) -> tuple[Any, Any, Any]:
    def step(state: Any, batch: Any) -> Any:
        value, grads = minialpa.value_and_grad(
            lambda params: cross_entropy(Network().apply(params, batch["x"]), batch)
        )(state["params"])
        updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    def create() -> Any:
        params = Network().init(jax.random.key(0), jnp.zeros((1, WIDTH), jnp.bfloat16))
        return {"params": params, "opt": OPTIMIZER.init(params)}

    return step, jax.eval_shape(create), batch_of(batch_size)


def equinox(batch_size: int = 8192) -> tuple[Any, Any, Any]:
    def step(state: Any, batch: Any) -> Any:
        model, opt = state
        value, grads = eqx.filter_value_and_grad(lambda model: cross_entropy(jax.vmap(model)(batch["x"]), batch))(model)
        updates, opt = OPTIMIZER.update(grads, opt)
        return (eqx.apply_updates(model, updates), opt), value

    def create() -> Any:
        model = eqx.nn.MLP(WIDTH, N_CLASSES, WIDTH, N_LAYERS, dtype=jnp.bfloat16, key=jax.random.key(0))
        return model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))

    return step, eqx.filter_eval_shape(create), batch_of(batch_size)
