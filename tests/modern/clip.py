"""A softmax loss of images and texts over the whole batch, which each device gathers.

In the style of mlfoundations/open_clip src/open_clip/loss.py, with `shard_map` and `all_gather`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
optimizer = optax.adam(3e-3, eps=1e-4)


class Clip(eqx.Module):
    image: eqx.nn.MLP
    text: eqx.nn.MLP
    log_scale: jax.Array

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.image = eqx.nn.MLP(12, 8, 32, 1, key=first)
        self.text = eqx.nn.MLP(6, 8, 32, 1, key=second)
        self.log_scale = jnp.log(5.0)

    def __call__(self, images, texts):
        def unit(x):
            return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

        return unit(jax.vmap(self.image)(images)), unit(jax.vmap(self.text)(texts))


def contrastive_loss(images, texts, scale):
    """Of the examples of one device, against all examples."""
    all_images = jax.lax.all_gather(images, "data", tiled=True)
    all_texts = jax.lax.all_gather(texts, "data", tiled=True)
    labels = jax.lax.axis_index("data") * len(images) + jnp.arange(len(images))
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    by_image = cross_entropy(scale * images @ all_texts.T, labels)
    by_text = cross_entropy(scale * texts @ all_images.T, labels)
    return jax.lax.pmean(jnp.mean(by_image + by_text) / 2, "data")


@eqx.filter_jit
def train_step(model, opt_state, images, texts):
    def loss_of(model):
        loss = jax.shard_map(contrastive_loss, mesh=mesh, in_specs=(P("data"), P("data"), P()), out_specs=P())
        return loss(*model(images, texts), jnp.exp(model.log_scale))

    loss, grads = eqx.filter_value_and_grad(loss_of)(model)
    updates, opt_state = optimizer.update(grads, opt_state)
    return eqx.apply_updates(model, updates), opt_state, loss


def make():
    model = eqx.filter_shard(Clip(jax.random.key(0)), NamedSharding(mesh, P()))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(3):
        pair = rng.standard_normal((16, 12), np.float32), rng.standard_normal((16, 6), np.float32)
        batches.append(jax.device_put(pair, NamedSharding(mesh, P("data"))))
    return Script(step=train_step, state=(model, opt_state), batches=batches)


CHANGES = {"@eqx.filter_jit": "@minialpa.parallelize(method=method)"}
