"""A scan over layers whose checkpoints move to host memory in the forward pass, by names.

In the style of AI-Hypercomputer/maxtext src/maxtext/layers/decoders.py with an offloading policy.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
optimizer = optax.sgd(0.1, momentum=0.9)
policy = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=["hidden"],
    names_which_can_be_offloaded=["layer_input"],
    offload_src="device",
    offload_dst="pinned_host",
)


@functools.partial(jax.checkpoint, policy=policy)
def layer(x, params):
    x = checkpoint_name(x, "layer_input")
    hidden = checkpoint_name(jax.nn.silu(x @ params["up"]), "hidden")
    return x + hidden @ params["down"], None


def loss_fn(params, batch):
    x, _ = jax.lax.scan(layer, batch["x"] @ params["in"], params["layers"])
    return jnp.mean((x @ params["out"] - batch["y"]) ** 2)


@functools.partial(jax.jit, donate_argnames=("params", "opt_state"))
def train_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def make(width=16, n_layers=4):
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = (8, width), (width, 8), (n_layers, width, 2 * width), (n_layers, 2 * width, width)
    first, last, up, down = (0.2 * jax.random.normal(key, size) for key, size in zip(keys, sizes, strict=True))
    params = {"in": first, "layers": {"up": up, "down": down}, "out": last}
    params = jax.device_put(params, NamedSharding(mesh, P()))
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(3):
        batch = {"x": rng.standard_normal((16, 8), np.float32), "y": rng.standard_normal((16, 8), np.float32)}
        batches.append((jax.device_put(batch, NamedSharding(mesh, P("data"))),))
    return Script(step=train_step, state=(params, optimizer.init(params)), batches=batches)


CHANGES = {
    '@functools.partial(jax.jit, donate_argnames=("params", "opt_state"))': "@minialpa.parallelize(method=method)",
}
