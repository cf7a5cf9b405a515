"""Mutable state beside a functional step: averaged weights in an argument, counters of metrics in a closure.

In the style of jax-ml/jax docs/array_refs.md.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

optimizer = optax.adam(1e-2, eps=1e-4)


def layer(x, w, b):
    return jnp.tanh(x @ w + b)


def init_params(key):
    keys = jax.random.split(key, 3)
    sizes = [(8, 32), (32, 32), (32, 4)]
    return [(0.3 * jax.random.normal(key, size), jnp.zeros(size[1])) for key, size in zip(keys, sizes, strict=True)]


def make_train_step(counters):
    """counters: Refs of the number of examples and of the sum of their losses."""

    @jax.jit
    def train_step(average, params, opt_state, batch):
        def loss_of(params):
            *first, (w, b) = params
            x = batch["x"]
            for one in first:
                x = layer(x, *one)
            losses = jnp.mean((x @ w + b - batch["y"]) ** 2, axis=-1)
            return jnp.mean(losses), losses

        (loss, losses), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        params = optax.apply_updates(params, updates)

        for ref, value in zip(jax.tree.leaves(average), jax.tree.leaves(params), strict=True):
            ref[...] = 0.9 * ref[...] + 0.1 * value
        counters["examples"][...] += len(losses)
        counters["loss"][...] += jnp.sum(losses)
        return params, opt_state, loss

    return train_step


def make():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params = jax.device_put(init_params(jax.random.key(0)), NamedSharding(mesh, P()))
    average = jax.tree.map(jax.new_ref, params)
    counters = jax.device_put({"examples": jnp.array(0), "loss": jnp.array(0.0)}, NamedSharding(mesh, P()))
    counters = jax.tree.map(jax.new_ref, counters)
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(3):
        batch = {"x": rng.standard_normal((16, 8), np.float32), "y": rng.standard_normal((16, 4), np.float32)}
        batches.append((jax.device_put(batch, NamedSharding(mesh, P("data"))),))
    return Script(
        step=make_train_step(counters),
        in_place=(average,),
        state=(params, optimizer.init(params)),
        captured=counters,
        batches=batches,
        evaluate=lambda average, params, opt_state, batch: counters["loss"][...] / counters["examples"][...],
    )


CHANGES = {"    @jax.jit\n": "    @minialpa.parallelize(method=method)\n"}
