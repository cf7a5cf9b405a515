"""Experts on the devices of an axis: tokens go to their expert and back by `all_to_all`, up to a capacity.

In the style of AI-Hypercomputer/maxtext src/maxtext/layers/moe.py, by hand in `shard_map`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

N_EXPERTS, CAPACITY = 8, 3
mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
BY_TOKEN, BY_EXPERT = P(("data", "expert")), P("expert")
optimizer = optax.adam(3e-3, eps=1e-4)


@functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(BY_TOKEN, P(), BY_EXPERT, BY_EXPERT),
    out_specs=(BY_TOKEN, P()),
)
def experts(x, router, up, down):
    """x: (tokens, width) of one device; up, down: the weights of its experts."""
    probabilities = jax.nn.softmax(x @ router)
    gate, chosen = probabilities.max(axis=-1), probabilities.argmax(axis=-1)
    one_hot = jax.nn.one_hot(chosen, N_EXPERTS)
    slot = jnp.sum((jnp.cumsum(one_hot, axis=0) - 1) * one_hot, axis=-1).astype(int)
    dispatch = one_hot[:, :, None] * jax.nn.one_hot(slot, CAPACITY)[:, None, :]

    sent = jnp.einsum("tec,td->ecd", dispatch, x)
    received = jax.lax.all_to_all(sent, "expert", split_axis=0, concat_axis=1, tiled=True)
    hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", received, up))
    returned = jnp.einsum("ecf,efd->ecd", hidden, down)
    returned = jax.lax.all_to_all(returned, "expert", split_axis=1, concat_axis=0, tiled=True)
    y = jnp.einsum("tec,ecd->td", dispatch * gate[:, None, None], returned)

    axes = "data", "expert"
    load = jax.lax.pmean(one_hot.mean(axis=0), axes) * jax.lax.pmean(probabilities.mean(axis=0), axes)
    return y, N_EXPERTS * jnp.sum(load)


def loss_fn(params, x, y):
    balance = 0.0
    h = jnp.tanh(x @ params["in"])
    for layer in params["layers"]:
        out, layer_balance = experts(h, layer["router"], layer["up"], layer["down"])
        h, balance = h + out, balance + layer_balance
    error = jnp.mean((h @ params["out"] - y) ** 2)
    return error + 0.01 * balance, (error, balance)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, opt_state, x, y):
    (_, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, x, y)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, metrics


def init_params(key, width=8, n_layers=2):
    keys = iter(jax.random.split(key, 2 + 3 * n_layers))

    def normal(*shape):
        return 0.4 * jax.random.normal(next(keys), shape)

    layers = []
    for _ in range(n_layers):
        up, down = normal(N_EXPERTS, width, 2 * width), normal(N_EXPERTS, 2 * width, width)
        sharding = NamedSharding(mesh, BY_EXPERT)
        layer = {"router": normal(width, N_EXPERTS), "up": up, "down": down}
        layers.append(layer | jax.device_put({"up": up, "down": down}, sharding))
    return {"in": normal(6, width), "layers": layers, "out": normal(width, 4)}


def make():
    params = init_params(jax.random.key(0))
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(3):
        pair = rng.standard_normal((64, 6), np.float32), rng.standard_normal((64, 4), np.float32)
        batches.append(jax.device_put(pair, NamedSharding(mesh, BY_TOKEN)))
    return Script(step=train_step, state=(params, optimizer.init(params)), batches=batches)


CHANGES = {"@functools.partial(jax.jit, donate_argnums=(0, 1))": "@minialpa.parallelize(method=method)"}
