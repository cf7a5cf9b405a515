"""A feed-forward block whose model axis is manual (`axis_names`) and whose data axis the compiler shards.

In the style of jax-ml/jax docs/notebooks/shard_map.md (tensor parallelism), with `psum_scatter` along the sequence.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
optimizer = optax.adamw(1e-2, eps=1e-4)


@functools.partial(
    jax.shard_map,
    axis_names={"model"},
    in_specs=(P(None, "model", None), P(None, "model"), P("model", None)),
    out_specs=P(None, "model", None),
)
def feed_forward(x, up, down):
    """x: (batch, positions of one device, width)."""
    whole = jax.lax.all_gather(x, "model", axis=1, tiled=True)
    hidden = jax.lax.with_sharding_constraint(jax.nn.gelu(whole @ up), P("data", None, None))
    return jax.lax.psum_scatter(hidden @ down, "model", scatter_dimension=1, tiled=True)


def loss_fn(params, x, y):
    x = x @ params["in"]
    for layer in params["layers"]:
        x = x + feed_forward(x, layer["up"], layer["down"])
    return jnp.mean((x @ params["out"] - y) ** 2)


@jax.jit
def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def make(width=16, n_layers=2):
    keys = jax.random.split(jax.random.key(0), n_layers + 2)
    layers = []
    for key in keys[2:]:
        up, down = 0.3 * jax.random.normal(key, (2, width, 2 * width))
        layers.append({"up": up, "down": down.T})
    first, last = (0.3 * jax.random.normal(key, (8, width)) for key in keys[:2])
    params = jax.device_put({"in": first, "layers": layers, "out": last.T}, NamedSharding(mesh, P()))
    rng = np.random.default_rng(0)
    batches = [
        jax.device_put(tuple(rng.standard_normal((2, 8, 4, 8), np.float32)), NamedSharding(mesh, P("data")))
        for _ in range(3)
    ]
    return Script(
        step=train_step, state=(params, optimizer.init(params)), batches=batches, context=lambda: jax.set_mesh(mesh)
    )


CHANGES = {"@jax.jit\n": "@minialpa.parallelize(method=method)\n"}
