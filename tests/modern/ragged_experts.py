"""Experts without a capacity: tokens sorted by expert, and `ragged_dot` over groups of any size.

In the style of marin-community/haliax src/haliax/nn/linear.py (MoELinear) and AI-Hypercomputer/maxtext moe.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

N_EXPERTS, TOP_K = 4, 2
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
optimizer = optax.adamw(3e-3, eps=1e-4)


def experts(layer, x):
    tokens = x.reshape(-1, x.shape[-1])
    probabilities = jax.nn.softmax(tokens @ layer["router"])
    weights, chosen = jax.lax.top_k(probabilities, TOP_K)
    weights = weights / weights.sum(axis=-1, keepdims=True)

    order = jnp.argsort(chosen.reshape(-1))
    group_sizes = jnp.bincount(chosen.reshape(-1), length=N_EXPERTS)
    by_expert = tokens[order // TOP_K]
    hidden = jax.nn.silu(jax.lax.ragged_dot(by_expert, layer["gate"], group_sizes))
    hidden = hidden * jax.lax.ragged_dot(by_expert, layer["up"], group_sizes)
    out = jax.lax.ragged_dot(hidden, layer["down"], group_sizes)

    by_token = out[jnp.argsort(order)].reshape(-1, TOP_K, x.shape[-1])
    y = jnp.sum(by_token * weights[..., None], axis=1).reshape(x.shape)
    balance = N_EXPERTS * jnp.sum(probabilities.mean(axis=0) * group_sizes / len(order))
    return y, balance


def loss_fn(params, tokens):
    x, balance = params["embed"][tokens[:, :-1]], 0.0
    for layer in params["layers"]:
        y, layer_balance = experts(layer, x)
        x, balance = x + y, balance + layer_balance
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["embed"].T, tokens[:, 1:])
    return losses.mean() + 0.01 * balance


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, opt_state, tokens):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def init_params(key, vocabulary=32, width=16, n_layers=2):
    keys = iter(jax.random.split(key, 1 + 4 * n_layers))

    def normal(*shape):
        return 0.3 * jax.random.normal(next(keys), shape)

    layers = [
        {
            "router": normal(width, N_EXPERTS),
            "gate": normal(N_EXPERTS, width, width),
            "up": normal(N_EXPERTS, width, width),
            "down": normal(N_EXPERTS, width, width),
        }
        for _ in range(n_layers)
    ]
    return {"embed": normal(vocabulary, width), "layers": layers}


def make():
    params = jax.device_put(init_params(jax.random.key(0)), NamedSharding(mesh, P()))
    tokens = np.random.default_rng(0).integers(0, 32, (3, 16, 9))
    batches = [(jax.device_put(one, NamedSharding(mesh, P("data"))),) for one in tokens]
    return Script(step=train_step, state=(params, optimizer.init(params)), batches=batches)


CHANGES = {"@functools.partial(jax.jit, donate_argnums=(0, 1))": "@minialpa.parallelize(method=method)"}
