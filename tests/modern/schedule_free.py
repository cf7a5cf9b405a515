"""Schedule-free Adam with a callable class as the step, and evaluation parameters among the metrics.

In the style of google-deepmind/optax optax/contrib/_schedule_free.py and its examples.
"""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script


class Updater:
    """As DeepMind's haiku examples write it: the class holds pure functions."""

    def __init__(self, net_init, loss_fn, optimizer):
        self._net_init = net_init
        self._loss_fn = loss_fn
        self._optimizer = optimizer

    def init(self, key, x):
        key, init_key = jax.random.split(key)
        params = self._net_init(init_key, x)
        return {"step": jnp.array(0), "rng": key, "opt_state": self._optimizer.init(params), "params": params}

    @functools.partial(jax.jit, static_argnums=0)
    def update(self, state, x, y):
        key, next_key = jax.random.split(state["rng"])
        loss, grads = jax.value_and_grad(self._loss_fn)(state["params"], key, x, y)
        updates, opt_state = self._optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        averaged = optax.contrib.schedule_free_eval_params(opt_state, params)
        new_state = {"step": state["step"] + 1, "rng": next_key, "opt_state": opt_state, "params": params}
        return new_state, {"loss": loss, "norm_of_average": optax.tree.norm(averaged)}


def make():
    def forward(x):
        x = jax.nn.relu(hk.Linear(32)(x))
        x = x + hk.dropout(hk.next_rng_key(), 0.1, jax.nn.relu(hk.Linear(32)(x)))
        return hk.Linear(4)(hk.LayerNorm(-1, True, True)(x))

    net = hk.transform(forward)

    def loss_fn(params, key, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(net.apply(params, key, x), y).mean()

    optimizer = optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2, eps=1e-4)
    updater = Updater(net.init, loss_fn, optimizer)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(3):
        pair = rng.standard_normal((16, 8), np.float32), rng.integers(0, 4, 16)
        batches.append(jax.device_put(pair, NamedSharding(mesh, P("data"))))
    state = jax.device_put(updater.init(jax.random.key(0), batches[0][0]), NamedSharding(mesh, P()))
    return Script(step=updater.update, state=(state,), batches=batches)


CHANGES = {
    "@functools.partial(jax.jit, static_argnums=0)": (
        "@functools.partial(minialpa.parallelize, method=method, static_argnums=0)"
    ),
}
