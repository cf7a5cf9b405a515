"""Explicit axes with a region of automatic ones, gradients that stay unreduced, and a scan over stacked layers.

In the style of jax-ml/jax docs/201/sharding.md and docs/301/sharding-ad.md.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, auto_axes, reshard
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

optimizer = optax.adam(1e-2, eps=1e-4)
ROWS = P("data", None)


@auto_axes(out_sharding=ROWS)
def normalised(x, scale):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return scale * (x - mean) * jax.lax.rsqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-5)


def layer(x, params):
    up, down = reshard((params["up"], params["down"]), P(None, None))
    hidden = jax.nn.gelu(jnp.dot(normalised(x, params["scale"]), up, out_sharding=ROWS))
    assert jax.typeof(hidden).sharding.spec == ROWS
    return x + jnp.dot(hidden, down, out_sharding=ROWS), None


def loss_fn(params, batch):
    x, _ = jax.lax.scan(layer, batch["x"], params["layers"])
    logits = jnp.dot(x, reshard(params["out"], P(None, None)), out_sharding=ROWS)
    labels = jax.nn.one_hot(batch["y"], logits.shape[-1], dtype=logits.dtype)
    labels = reshard(labels, ROWS)
    return -jnp.mean(jnp.sum(labels * jax.nn.log_softmax(logits), axis=-1))


@jax.jit
def train_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    grads = jax.tree.map(lambda g, p: reshard(g, jax.typeof(p).sharding), grads, params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, {"loss": loss, "norm": optax.tree.norm(grads)}


def evaluate(params, opt_state, batch):
    """Not jitted: each operation by itself, on the mesh."""
    return loss_fn(params, batch), jax.tree.map(lambda p: jnp.sum(p**2), opt_state[0].mu)


def make(width=16, n_layers=4):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    keys = jax.random.split(jax.random.key(0), 3)
    with jax.set_mesh(mesh):
        up = 0.2 * jax.random.normal(keys[0], (n_layers, width, 2 * width))
        down = 0.2 * jax.random.normal(keys[1], (n_layers, 2 * width, width))
        layers = {
            "up": jax.device_put(up, P(None, "data", None)),
            "down": jax.device_put(down, P(None, None, "data")),
            "scale": jax.device_put(jnp.ones((n_layers, width)), P(None, None)),
        }
        out = jax.device_put(0.2 * jax.random.normal(keys[2], (width, 8)), P("data", None))
        params = {"layers": layers, "out": out}
        opt_state = optimizer.init(params)
        rng = np.random.default_rng(0)
        batches = []
        for _ in range(3):
            x, y = rng.standard_normal((16, width), np.float32), rng.integers(0, 8, 16)
            batches.append(({"x": jax.device_put(x, ROWS), "y": jax.device_put(y, P("data"))},))
    return Script(
        step=train_step,
        state=(params, opt_state),
        batches=batches,
        context=lambda: jax.set_mesh(mesh),
        evaluate=evaluate,
    )


CHANGES = {"@jax.jit\n": "@minialpa.parallelize(method=method)\n"}
