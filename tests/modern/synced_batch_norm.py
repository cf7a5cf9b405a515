"""A residual network with statistics of the batch over all devices: BatchNorm with an axis name, in `shard_map`.

In the style of google/flax examples/imagenet/train.py and google-deepmind/dm-haiku examples/imagenet/train.py.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, axis_name="batch")
        x = nn.Conv(8, (3, 3), use_bias=False)(x)
        y = nn.relu(norm()(x))
        x = x + nn.Conv(8, (3, 3), use_bias=False)(y)
        return nn.Dense(4)(jnp.mean(nn.relu(norm()(x)), axis=(1, 2)))


class TrainState(train_state.TrainState):
    batch_stats: dict


def train_step(state, batch):
    """On the images of one device."""

    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, batch["image"], train=True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        decay = sum(jnp.sum(p**2) for p in jax.tree.leaves(params) if p.ndim > 1)
        return loss + 1e-4 * decay, (logits, new["batch_stats"])

    (loss, (logits, batch_stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grads, loss = jax.lax.pmean((grads, loss), "batch")
    accuracy = jax.lax.pmean(jnp.mean(jnp.argmax(logits, -1) == batch["label"]), "batch")
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), {"loss": loss, "accuracy": accuracy}


def make():
    model = ResNet()
    variables = model.init(jax.random.key(0), jnp.ones((1, 4, 4, 3)), train=False)
    tx = optax.sgd(0.05, momentum=0.9, nesterov=True)
    state = TrainState.create(
        apply_fn=model.apply, params=variables["params"], batch_stats=variables["batch_stats"], tx=tx
    )
    sharded = jax.shard_map(train_step, mesh=mesh, in_specs=(P(), P("batch")), out_specs=(P(), P()), check_vma=False)
    p_train_step = jax.jit(sharded, donate_argnums=0)
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(3):
        batch = {"image": rng.standard_normal((16, 4, 4, 3), np.float32), "label": rng.integers(0, 4, 16)}
        batches.append((jax.device_put(batch, NamedSharding(mesh, P("batch"))),))
    return Script(step=p_train_step, state=(jax.device_put(state, NamedSharding(mesh, P())),), batches=batches)


CHANGES = {"jax.jit(sharded, donate_argnums=0)": "minialpa.parallelize(sharded, method=method)"}
