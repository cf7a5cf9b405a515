"""Gradients added up in a Ref inside the step, a Ref of random keys, and a buffer of metrics filled row by row.

In the style of jax-ml/jax docs/301/refs.md.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

N_MICRO_BATCHES = 2


def loss_fn(params, key, x, y):
    keep = jax.random.bernoulli(key, 0.9, (x.shape[0], params["up"].shape[1]))
    return jnp.mean((jnp.where(keep, jnp.tanh(x @ params["up"]), 0.0) @ params["down"] - y) ** 2)


@jax.jit
def train_step(params, key, log, x, y):
    """params, key: trees of Refs; log: a Ref of one row per step."""
    values = jax.tree.map(jax.ref.get, params)
    sums = jax.tree.map(lambda p: jax.new_ref(jnp.zeros_like(p)), values)
    loss_sum = jax.new_ref(0.0)
    halves = x.reshape(N_MICRO_BATCHES, -1, x.shape[1]), y.reshape(N_MICRO_BATCHES, -1, y.shape[1])

    def accumulate(i, _):
        step_key = jax.random.fold_in(key["key"][...], i)
        loss, grads = jax.value_and_grad(loss_fn)(values, step_key, halves[0][i], halves[1][i])
        loss_sum[...] += loss
        for name, g in grads.items():
            sums[name][...] += g

    jax.lax.fori_loop(0, N_MICRO_BATCHES, accumulate, None)
    for name, ref in params.items():
        ref[...] -= 0.1 * sums[name][...] / N_MICRO_BATCHES
    i = key["step"][...]
    log[i, 0] = loss_sum[...] / N_MICRO_BATCHES
    log[i, 1:] = jnp.stack([jnp.linalg.norm(ref[...]) for ref in sums.values()])
    key["step"][...] = i + 1
    key["key"][...] = jax.random.split(key["key"][...])[0]


def make():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"up": jax.random.normal(keys[0], (8, 32)) / 3, "down": jax.random.normal(keys[1], (32, 4)) / 6}
    state = params, {"key": jax.random.PRNGKey(1), "step": jnp.array(0)}, jnp.zeros((3, 3))
    state = jax.tree.map(jax.new_ref, jax.device_put(state, NamedSharding(mesh, P())))
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(3):
        pair = rng.standard_normal((32, 8), np.float32), rng.standard_normal((32, 4), np.float32)
        batches.append(jax.device_put(pair, NamedSharding(mesh, P("data"))))
    return Script(step=train_step, in_place=state, batches=batches)


CHANGES = {"@jax.jit\n": "@minialpa.parallelize(method=method)\n"}
