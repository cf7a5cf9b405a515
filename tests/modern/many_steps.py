"""Several training steps in one call: a scan over a stack of batches, with a schedule and an average of weights.

In the style of google/brax brax/training/agents/ppo/train.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

optimizer = optax.inject_hyperparams(optax.adamw)(optax.cosine_decay_schedule(1e-2, 10), eps=1e-4)


def init_params(key, sizes=(8, 32, 4)):
    keys = jax.random.split(key, len(sizes) - 1)
    pairs = zip(keys, sizes[:-1], sizes[1:], strict=True)
    return [(jax.random.normal(key, (n, m)) / n**0.5, jnp.zeros(m)) for key, n, m in pairs]


def loss_fn(params, x, y):
    (w, b), (v, c) = params
    return jnp.mean((jnp.tanh(x @ w + b) @ v + c - y) ** 2)


@functools.partial(jax.jit, static_argnames=("decay",), donate_argnames=("state",))
def train_epoch(state, x, y, *, decay):
    def one_step(state, batch):
        params, opt_state, average = state
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, 1 - decay)
        return (params, opt_state, average), {"loss": loss, "rate": opt_state.hyperparams["learning_rate"]}

    return jax.lax.scan(one_step, state, (x, y))


def make():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params = init_params(jax.random.key(0))
    state = params, optimizer.init(params), jax.tree.map(jnp.copy, params)
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(3):
        pair = rng.standard_normal((2, 16, 8), np.float32), rng.standard_normal((2, 16, 4), np.float32)
        batches.append(jax.device_put(pair, NamedSharding(mesh, P(None, "data"))))
    step = functools.partial(train_epoch, decay=0.9)
    return Script(step=step, state=(jax.device_put(state, NamedSharding(mesh, P())),), batches=batches)


CHANGES = {
    '@functools.partial(jax.jit, static_argnames=("decay",), donate_argnames=("state",))': (
        '@minialpa.parallelize(method=method, static_argnames=("decay",), batch_argnums=())'
    ),
}
