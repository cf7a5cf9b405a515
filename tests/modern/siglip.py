"""A sigmoid loss of images and texts: each device keeps its images, and texts go around a ring of devices.

In the style of google-research/big_vision big_vision/trainers/proj/image_text/siglip.py, with the loss by chunks.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
optimizer = optax.adam(3e-3, eps=1e-4)


def init_params(key):
    keys = jax.random.split(key, 4)

    def tower(first, second, n_in):
        return {"in": 0.3 * jax.random.normal(first, (n_in, 32)), "out": 0.3 * jax.random.normal(second, (32, 16))}

    scale = {"t": jnp.log(10.0), "b": jnp.array(-10.0)}
    return {"image": tower(keys[0], keys[1], 12), "text": tower(keys[2], keys[3], 8), **scale}


def tower(params, x):
    y = jax.nn.gelu(x @ params["in"]) @ params["out"]
    return y / jnp.linalg.norm(y, axis=-1, keepdims=True)


@functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P("data"), P(), P()), out_specs=P())
def sigmoid_loss(images, texts, t, b):
    n = jax.lax.axis_size("data")
    ring = [(i, (i + 1) % n) for i in range(n)]

    def hop(carry, i):
        texts, total = carry
        logits = images @ texts.T * jnp.exp(t) + b
        same = jnp.where(i == 0, jnp.eye(len(images)), 0.0)
        total -= jnp.sum(jax.nn.log_sigmoid((2 * same - 1) * logits))
        return (jax.lax.ppermute(texts, "data", ring), total), None

    start = texts, jax.lax.pcast(0.0, "data", to="varying")
    (_, total), _ = jax.lax.scan(hop, start, jnp.arange(n))
    return jax.lax.pmean(total / len(images), "data")


@functools.partial(jax.jit, donate_argnums=(0, 1))
def update_fn(params, opt_state, batch):
    def loss_fn(params):
        images, texts = tower(params["image"], batch["image"]), tower(params["text"], batch["text"])
        return sigmoid_loss(images, texts, params["t"], params["b"])

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, {"loss": loss, "l2_grads": optax.tree.norm(grads), "t": params["t"]}


@functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())
def recall(params, opt_state, batch):
    images = tower(params["image"], batch["image"])
    texts = jax.lax.all_gather(tower(params["text"], batch["text"]), "data", tiled=True)
    own = jax.lax.axis_index("data") * len(images) + jnp.arange(len(images))
    return jax.lax.pmean(jnp.mean(jnp.argmax(images @ texts.T, axis=1) == own), "data")


def make():
    params = jax.device_put(init_params(jax.random.key(0)), NamedSharding(mesh, P()))
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(3):
        batch = {"image": rng.standard_normal((16, 12), np.float32), "text": rng.standard_normal((16, 8), np.float32)}
        batches.append((jax.device_put(batch, NamedSharding(mesh, P("data"))),))
    return Script(step=update_fn, state=(params, optimizer.init(params)), batches=batches, evaluate=recall)


CHANGES = {"@functools.partial(jax.jit, donate_argnums=(0, 1))": "@minialpa.parallelize(method=method)"}
