"""Muon for matrices and Adam for vectors, with parameters sharded over a mesh and fixed by `out_shardings`.

In the style of google-deepmind/optax optax/contrib/_muon.py as haiku and flax users call it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

optimizer = optax.contrib.muon(3e-2, eps=1e-4, weight_decay=0.1)


def init_params(key, n_layers=3, width=16):
    keys = jax.random.split(key, n_layers + 2)
    layers = [{"w": jax.random.normal(key, (width, width)) / 4, "b": jnp.zeros(width)} for key in keys[2:]]
    return {
        "in": {"w": jax.random.normal(keys[0], (8, width)) / 3, "b": jnp.zeros(width)},
        "layers": layers,
        "out": {"w": jax.random.normal(keys[1], (width, 8)) / 4, "b": jnp.zeros(8)},
    }


def apply_model(params, x):
    x = x @ params["in"]["w"] + params["in"]["b"]
    for layer in params["layers"]:
        x = x + jax.nn.gelu(x @ layer["w"] + layer["b"])
    return x @ params["out"]["w"] + params["out"]["b"]


def train_step(state, batch):
    def loss_fn(params):
        return optax.l2_loss(apply_model(params, batch["x"]), batch["y"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def make():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))

    def sharding(x):
        return NamedSharding(mesh, P("fsdp") if x.ndim == 2 else P())

    params = init_params(jax.random.key(0))
    state = {"params": params, "opt_state": optimizer.init(params)}
    shardings = jax.tree.map(sharding, state)
    state = jax.device_put(state, shardings)
    step = jax.jit(train_step, out_shardings=(shardings, NamedSharding(mesh, P())))
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(3):
        batch = {"x": rng.standard_normal((16, 8), np.float32), "y": rng.standard_normal((16, 8), np.float32)}
        batches.append((jax.device_put(batch, NamedSharding(mesh, P("fsdp"))),))
    return Script(step=step, state=(state,), batches=batches)


CHANGES = {"step = jax.jit(train_step, ": "step = minialpa.parallelize(train_step, method=method, "}
