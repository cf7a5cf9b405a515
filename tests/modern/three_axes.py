"""Hybrid sharding: examples over two axes of three, weights over the other two, under `jax.set_mesh`.

In the style of MaxText's meshes (data, fsdp, tensor), with constraints on activations and sharded parameters.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
EXAMPLES = ("data", "fsdp")


def loss_fn(params, x, y):
    for layer in params:
        x = jax.lax.with_sharding_constraint(x, P(EXAMPLES, None))
        hidden = jax.lax.with_sharding_constraint(jax.nn.gelu(x @ layer["up"]), P(EXAMPLES, "tensor"))
        x = x + hidden @ layer["down"]
    return jnp.mean((x - y) ** 2)


@jax.jit
def train_step(params, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def make(width=16, n_layers=2):
    specs = {"down": P("tensor", "fsdp"), "up": P("fsdp", "tensor")}
    rng = np.random.default_rng(0)
    shapes = {"down": (2 * width, width), "up": (width, 2 * width)}
    params = [
        {
            name: jax.device_put(0.2 * rng.standard_normal(shape, np.float32), NamedSharding(mesh, specs[name]))
            for name, shape in shapes.items()
        }
        for _ in range(n_layers)
    ]
    rows = NamedSharding(mesh, P(EXAMPLES))
    batches = [jax.device_put(tuple(rng.standard_normal((2, 16, width), np.float32)), rows) for _ in range(3)]
    return Script(step=train_step, state=(params,), batches=batches, context=lambda: jax.set_mesh(mesh))


CHANGES = {"@jax.jit\n": "@minialpa.parallelize(method=method)\n"}
