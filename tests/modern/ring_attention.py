"""Attention over a sequence that four devices share: keys and values go around the ring, with a running softmax.

In the style of haoliuhl/ringattention ringattention/ringattention_jax.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

mesh = jax.make_mesh((2, 4), ("dp", "sp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
SPEC = P("dp", "sp", None, None)
optimizer = optax.sgd(0.1, momentum=0.9)


@functools.partial(jax.shard_map, mesh=mesh, in_specs=(SPEC, SPEC, SPEC), out_specs=SPEC)
def ring_attention(q, k, v):
    n, here = jax.lax.axis_size("sp"), jax.lax.axis_index("sp")
    length = q.shape[1]
    ring = [(i, (i + 1) % n) for i in range(n)]
    rows = here * length + jnp.arange(length)

    def hop(carry, i):
        k, v, numerator, denominator, largest = carry
        columns = (here - i) % n * length + jnp.arange(length)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        scores = jnp.where(rows[:, None] >= columns[None, :], scores, -1e9)
        new_largest = jnp.maximum(largest, scores.max(axis=-1))
        weights = jnp.exp(scores - new_largest[..., None])
        correction = jnp.exp(largest - new_largest)
        seen = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        numerator = numerator * correction.swapaxes(1, 2)[..., None] + seen
        denominator = denominator * correction + weights.sum(axis=-1)
        k, v = jax.lax.ppermute((k, v), "sp", ring)
        return (k, v, numerator, denominator, new_largest), None

    zeros = jnp.zeros_like(q[..., 0]).swapaxes(1, 2)
    start = k, v, jnp.zeros_like(q), zeros, zeros - 1e9
    (_, _, numerator, denominator, _), _ = jax.lax.scan(hop, start, jnp.arange(n))
    return numerator / denominator.swapaxes(1, 2)[..., None]


def loss_fn(params, batch):
    x = params["embed"][batch["inputs"]] + params["positions"]
    for layer in params["layers"]:
        q, k, v = jnp.einsum("bsd,cdhk->cbshk", x, layer["qkv"])
        x = x + jnp.einsum("bshk,hkd->bsd", ring_attention(q, k, v), layer["out"])
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["embed"].T, batch["targets"])
    return losses.mean()


@jax.jit
def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt_state = optimizer.update(grads, state["opt_state"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def init_params(key, vocabulary=32, width=8, length=16, n_layers=1):
    keys = iter(jax.random.split(key, 2 + 4 * n_layers))

    def normal(*shape):
        return 0.3 * jax.random.normal(next(keys), shape)

    layers = [
        {
            "qkv": normal(3, width, 2, width // 2),
            "out": normal(2, width // 2, width),
            "up": normal(width, 2 * width),
            "down": normal(2 * width, width),
        }
        for _ in range(n_layers)
    ]
    return {"embed": normal(vocabulary, width), "positions": normal(length, width), "layers": layers}


def make():
    params = jax.device_put(init_params(jax.random.key(0)), NamedSharding(mesh, P()))
    text = np.random.default_rng(0).integers(0, 32, (3, 8, 17))
    sharding = NamedSharding(mesh, P("dp", "sp"))
    batches = [(jax.device_put({"inputs": one[:, :-1], "targets": one[:, 1:]}, sharding),) for one in text]
    return Script(step=train_step, state=({"params": params, "opt_state": optimizer.init(params)},), batches=batches)


CHANGES = {"@jax.jit\ndef train_step(": "@minialpa.parallelize(method=method)\ndef train_step("}
