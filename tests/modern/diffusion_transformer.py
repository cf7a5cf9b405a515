"""A diffusion transformer of equinox modules: flow matching, an average of the weights, `filter_shard` in the step.

In the style of kvfrans/jax-diffusion-transformer train_diffusion.py, and of patrick-kidger/equinox
examples/parallelism.ipynb.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
by_example, whole = NamedSharding(mesh, P("batch")), NamedSharding(mesh, P())
optimizer = optax.adam(3e-3, eps=1e-4)


def time_features(t, size):
    angles = t * jnp.exp(-jnp.arange(size // 2))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)])


class DitBlock(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    modulation: eqx.nn.Linear

    def __init__(self, width, key):
        keys = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(2, width, key=keys[0])
        self.norm = eqx.nn.LayerNorm(width, use_weight=False, use_bias=False)
        self.mlp = eqx.nn.MLP(width, width, 2 * width, 1, activation=jax.nn.gelu, key=keys[1])
        self.modulation = eqx.nn.Linear(width, 6 * width, key=keys[2])

    def __call__(self, x, condition):
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = jnp.split(self.modulation(jax.nn.silu(condition)), 6)
        y = jax.vmap(self.norm)(x) * (1 + scale_1) + shift_1
        x = x + gate_1 * self.attention(y, y, y)
        y = jax.vmap(self.norm)(x) * (1 + scale_2) + shift_2
        return x + gate_2 * jax.vmap(self.mlp)(y)


class Dit(eqx.Module):
    patch: eqx.nn.Linear
    labels: eqx.nn.Embedding
    positions: jax.Array
    blocks: list[DitBlock]
    last: eqx.nn.Linear
    width: int = eqx.field(static=True)

    def __init__(self, key, n_channels=4, width=16, n_layers=2, n_patches=4):
        keys = jax.random.split(key, 4 + n_layers)
        self.patch = eqx.nn.Linear(n_channels, width, key=keys[0])
        self.labels = eqx.nn.Embedding(10, width, key=keys[1])
        self.positions = 0.1 * jax.random.normal(keys[2], (n_patches, width))
        self.blocks = [DitBlock(width, key) for key in keys[4:]]
        self.last = eqx.nn.Linear(width, n_channels, key=keys[3])
        self.width = width

    def __call__(self, patches, t, label):
        x = jax.vmap(self.patch)(patches) + self.positions
        condition = time_features(t, self.width) + self.labels(label)
        for block in self.blocks:
            x = block(x, condition)
        return jax.vmap(self.last)(x)


@eqx.filter_value_and_grad
def loss_of(model, images, labels, key):
    noise_key, time_key, label_key = jax.random.split(key, 3)
    noise = jax.random.normal(noise_key, images.shape)
    t = jax.random.uniform(time_key, (images.shape[0],))
    labels = jnp.where(jax.random.bernoulli(label_key, 0.1, labels.shape), 0, labels)
    mixed = (1 - t[:, None, None]) * noise + t[:, None, None] * images
    velocity = jax.vmap(model)(mixed, t, labels)
    return jnp.mean((velocity - (images - noise)) ** 2)


@eqx.filter_jit(donate="all-except-first")
def train_step(key, model, average, opt_state, images, labels):
    model, average, opt_state = eqx.filter_shard((model, average, opt_state), whole)
    images, labels = eqx.filter_shard((images, labels), by_example)
    key, step_key = jax.random.split(key)
    loss, grads = loss_of(model, images, labels, step_key)
    updates, opt_state = optimizer.update(grads, opt_state, model)
    model = eqx.apply_updates(model, updates)
    average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p if eqx.is_array(p) else p, average, model)
    return key, model, average, opt_state, loss


def make():
    model = eqx.filter_shard(Dit(jax.random.key(0)), whole)
    average = jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, model)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(3):
        images, labels = rng.standard_normal((16, 4, 4), np.float32), rng.integers(0, 10, 16)
        batches.append(tuple(eqx.filter_shard((jnp.array(images), jnp.array(labels)), by_example)))
    return Script(step=train_step, state=(jax.random.key(1), model, average, opt_state), batches=batches)


CHANGES = {'@eqx.filter_jit(donate="all-except-first")': "@minialpa.parallelize(method=method)"}
