"""Sharded parameters in `shard_map`: each layer gathers its weights, and gradients are scattered by transposition.

In the style of jax-ml/jax docs/notebooks/shard_map.md (fully sharded data parallelism).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))


def init_params(key, width=16, n_layers=3):
    keys = jax.random.split(key, n_layers)
    return [(jax.random.normal(key, (width, width)) / 4, jnp.zeros(width)) for key in keys]


@functools.partial(jax.checkpoint, policy=lambda primitive, *_, **__: str(primitive) != "all_gather")
def layer(x, params):
    w, b = jax.lax.all_gather(params, "batch", tiled=True)
    return x + jnp.tanh(x @ w + b)


@functools.partial(jax.shard_map, mesh=mesh, in_specs=P("batch"), out_specs=P())
def loss_of(params, batch):
    x, y = batch
    for one in params:
        x = layer(x, one)
    return jax.lax.pmean(jnp.mean(jnp.sum((x - y) ** 2, axis=-1)), "batch")


@functools.partial(jax.jit, donate_argnums=0)
def train_step(params, batch):
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.02 * g, params, grads), loss


def make():
    rows = NamedSharding(mesh, P("batch"))
    params = jax.device_put(init_params(jax.random.key(0)), rows)
    rng = np.random.default_rng(0)
    batches = [(jax.device_put(tuple(rng.standard_normal((2, 16, 16), np.float32)), rows),) for _ in range(3)]
    return Script(step=train_step, state=(params,), batches=batches)


CHANGES = {"@functools.partial(jax.jit, donate_argnums=0)": "@minialpa.parallelize(method=method)"}
