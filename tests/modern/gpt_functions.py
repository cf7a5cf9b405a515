"""A GPT of pure functions on a tree of arrays, with a scan over its stacked layers.

In the style of jenkspt/gpt-jax model.py and jax-ml/jax docs/301/cookbook.md, without a framework.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

optimizer = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10), eps=1e-4)


def init_params(key, vocabulary=32, width=16, n_layers=4):
    keys = jax.random.split(key, 5)

    def normal(key, *shape):
        return 0.2 * jax.random.normal(key, shape)

    layers = {
        "qkv": normal(keys[0], n_layers, width, 3 * width),
        "out": normal(keys[1], n_layers, width, width),
        "up": normal(keys[2], n_layers, width, 2 * width),
        "down": normal(keys[3], n_layers, 2 * width, width),
        "scale": jnp.ones((n_layers, 2, width)),
    }
    return {"embed": normal(keys[4], vocabulary, width), "layers": layers}


def norm(x, scale):
    return scale * x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


@jax.checkpoint
def block(x, layer):
    qkv = norm(x, layer["scale"][0]) @ layer["qkv"]
    q, k, v = (y.reshape(*y.shape[:2], 2, -1) for y in jnp.split(qkv, 3, axis=-1))
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + y.reshape(x.shape) @ layer["out"]
    return x + jax.nn.gelu(norm(x, layer["scale"][1]) @ layer["up"]) @ layer["down"]


def loss_fn(params, tokens):
    x = params["embed"][tokens[:, :-1]]
    x, _ = jax.lax.scan(lambda x, layer: (block(x, layer), None), x, params["layers"])
    logits = x @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, opt_state, tokens):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def make():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params = jax.device_put(init_params(jax.random.key(0)), NamedSharding(mesh, P()))
    tokens = np.random.default_rng(0).integers(0, 32, (3, 16, 9))
    batches = [(jax.device_put(one, NamedSharding(mesh, P("data"))),) for one in tokens]
    return Script(step=train_step, state=(params, optimizer.init(params)), batches=batches)


CHANGES = {"@functools.partial(jax.jit, donate_argnums=(0, 1))": "@minialpa.parallelize(method=method)"}
