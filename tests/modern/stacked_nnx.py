"""Layers of flax.nnx, created by `nnx.vmap` and applied by `nnx.scan`, with dropout and a metric object.

In the style of google/flax docs_nnx/guides/transforms.md.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script


class Block(nnx.Module):
    def __init__(self, width, *, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x, rngs):
        return x + self.down(self.dropout(nnx.gelu(self.up(self.norm(x))), rngs=rngs))


class Model(nnx.Module):
    def __init__(self, n_layers=4, width=16, *, rngs):
        @nnx.split_rngs(splits=n_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create_block(rngs):
            return Block(width, rngs=rngs)

        self.n_layers = n_layers
        self.first = nnx.Linear(8, width, rngs=rngs)
        self.blocks = create_block(rngs)
        self.last = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x, rngs):
        @nnx.split_rngs(splits=self.n_layers)
        @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
        def forward(x, block, rngs):
            return block(x, rngs)

        return self.last(forward(self.first(x), self.blocks, rngs))


@nnx.jit
def train_step(model, optimizer, rngs, x, y):
    def loss_of(model, rngs):
        return jnp.mean((model(x, rngs) - y) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model, rngs)
    optimizer.update(model, grads)
    return loss


def make():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model = Model(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2, eps=1e-4), wrt=nnx.Param)
    rngs = nnx.Rngs(dropout=1)
    for module in (model, optimizer, rngs):
        nnx.update(module, jax.device_put(nnx.state(module), NamedSharding(mesh, P())))
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(3):
        pair = rng.standard_normal((16, 8), np.float32), rng.standard_normal((16, 4), np.float32)
        batches.append(jax.device_put(pair, NamedSharding(mesh, P("data"))))
    return Script(step=train_step, in_place=(model, optimizer, rngs), batches=batches)


CHANGES = {"@nnx.jit\ndef train_step(": "@minialpa.parallelize(method=method)\ndef train_step("}
