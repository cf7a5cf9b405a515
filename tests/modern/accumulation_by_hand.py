"""Gradients of micro-batches added up in a scan, with constraints on each of them and on the sums.

In the style of stanford-crfm/levanter src/levanter/grad_accum.py.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.lax import with_sharding_constraint
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

N_MICRO_BATCHES = 2
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
optimizer = optax.adamw(1e-2, eps=1e-4, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params))


class Mlp(eqx.Module):
    layers: list[eqx.nn.Linear]
    norms: list[eqx.nn.LayerNorm]

    def __init__(self, key, width=16, n_layers=3):
        self.layers = [eqx.nn.Linear(width, width, key=key) for key in jax.random.split(key, n_layers)]
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(n_layers)]

    def __call__(self, x):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + jax.nn.silu(layer(norm(x)))
        return x


def spec_of(x):
    return P("model", "data") if x.ndim == 2 else P()


def loss_of(model, x, y):
    out = with_sharding_constraint(jax.vmap(model)(x), P("data", None))
    return jnp.mean((out - y) ** 2)


@eqx.filter_jit(donate="all")
def train_step(model, opt_state, batch):
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def reshaped(x):
        x = x.reshape(N_MICRO_BATCHES, -1, *x.shape[1:])
        return with_sharding_constraint(x, P(None, "data", None))

    def accumulate(sums, micro_batch):
        micro_batch = with_sharding_constraint(micro_batch, P("data", None))
        value = jax.value_and_grad(lambda p: loss_of(eqx.combine(p, static), *micro_batch))(params)
        sums = jax.tree.map(lambda s, v: s + v / N_MICRO_BATCHES, sums, value)
        return with_sharding_constraint(sums, jax.tree.map(spec_of, sums)), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    (loss, grads), _ = jax.lax.scan(accumulate, zeros, jax.tree.map(reshaped, batch))
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return eqx.combine(optax.apply_updates(params, updates), static), opt_state, loss


def make():
    model = Mlp(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    params = jax.tree.map(lambda p: jax.device_put(p, NamedSharding(mesh, spec_of(p))), params)
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(3):
        pair = tuple(rng.standard_normal((2, 32, 16), np.float32))
        batches.append((jax.device_put(pair, NamedSharding(mesh, P("data"))),))
    return Script(
        step=train_step,
        state=(eqx.combine(params, static), optimizer.init(params)),
        batches=batches,
        context=lambda: jax.set_mesh(mesh),
    )


CHANGES = {'@eqx.filter_jit(donate="all")': "@minialpa.parallelize(method=method)"}
