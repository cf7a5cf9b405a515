"""Moments of Adam in host memory between steps: the step copies them to the device, and the new ones back.

In the style of jax-ml/jax docs/notebooks/host-offloading.md and docs/201/memory-spaces.md.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
on_device, on_host = (NamedSharding(mesh, P("fsdp"), memory_kind=kind) for kind in ("device", "pinned_host"))
optimizer = optax.adam(1e-2, eps=1e-4)


def init_params(key, n_layers=3):
    keys = jax.random.split(key, n_layers + 2)
    layers = [0.2 * jax.random.normal(key, (32, 32)) for key in keys[2:]]
    first, last = (0.2 * jax.random.normal(key, (16, 32)) for key in keys[:2])
    return {"in": first, "layers": layers, "out": last.T}


def moved(opt_state, space):
    """Scalars, such as the count of steps, stay on the device."""
    return jax.tree.map(lambda x: jax.device_put(x, space) if x.ndim else x, opt_state)


def loss_fn(params, batch):
    h = batch["x"] @ params["in"]
    for w in params["layers"]:
        h = h + jax.nn.gelu(h @ w)
    return jnp.mean((h @ params["out"] - batch["y"]) ** 2)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    opt_state = moved(opt_state, jax.memory.Space.Device)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), moved(opt_state, jax.memory.Space.Host), loss


def memory_kinds(params, opt_state, batch):
    """1 for each array in host memory, and 0 for all others."""
    return [jnp.array(x.sharding.memory_kind == "pinned_host", int) for x in jax.tree.leaves((params, opt_state))]


def make():
    params = jax.device_put(init_params(jax.random.key(0)), on_device)
    opt_state = moved(optimizer.init(params), on_host)
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(3):
        batch = {"x": rng.standard_normal((16, 16), np.float32), "y": rng.standard_normal((16, 16), np.float32)}
        batches.append((jax.device_put(batch, on_device),))
    return Script(step=train_step, state=(params, opt_state), batches=batches, evaluate=memory_kinds)


CHANGES = {"@functools.partial(jax.jit, donate_argnums=(0, 1))": "@minialpa.parallelize(method=method)"}
