"""The whole step in `shard_map`: a loop over micro-batches of a device, one `psum` of the gradients, an update.

In the style of jax-ml/jax docs/notebooks/shard_map.md (8-way batch data parallelism).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2, eps=1e-4))


def init_params(key, sizes=(8, 32, 32, 4)):
    keys = jax.random.split(key, len(sizes) - 1)
    pairs = zip(keys, sizes[:-1], sizes[1:], strict=True)
    return [{"w": jax.random.normal(key, (n, m)) / n**0.5, "b": jnp.zeros(m)} for key, n, m in pairs]


def loss_sum(params, x, y):
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    x = x @ params[-1]["w"] + params[-1]["b"]
    return jnp.sum((x - y) ** 2)


@jax.jit
@functools.partial(
    jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("batch"), P("batch")), out_specs=(P(), P(), P()), check_vma=False
)
def train_step(params, opt_state, x, y):
    def accumulate(sums, pair):
        value = jax.value_and_grad(loss_sum)(params, *pair)
        return jax.tree.map(jnp.add, sums, value), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    halves = x.reshape(2, -1, x.shape[-1]), y.reshape(2, -1, y.shape[-1])
    sums, _ = jax.lax.scan(accumulate, zeros, halves)
    n = jax.lax.psum(x.shape[0], "batch")
    loss, grads = jax.tree.map(lambda v: jax.lax.psum(v, "batch") / n, sums)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def make():
    params = jax.device_put(init_params(jax.random.key(0)), NamedSharding(mesh, P()))
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(3):
        pair = rng.standard_normal((32, 8), np.float32), rng.standard_normal((32, 4), np.float32)
        batches.append(jax.device_put(pair, NamedSharding(mesh, P("batch"))))
    return Script(step=train_step, state=(params, optimizer.init(params)), batches=batches)


CHANGES = {"@jax.jit\n": "@minialpa.parallelize(method=method)\n"}
