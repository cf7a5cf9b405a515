"""A convolutional classifier of flax.nnx with dropout and a metrics object that the step updates.

In the style of google/flax docs_nnx/mnist_tutorial.md, with a batch sharded as in docs_nnx/guides/flax_gspmd.md.
"""

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script


class Cnn(nnx.Module):
    def __init__(self, *, rngs):
        self.conv = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
        self.norm = nnx.GroupNorm(8, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.hidden = nnx.Linear(32, 16, rngs=rngs)
        self.last = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.norm(self.conv(x))), window_shape=(2, 2), strides=(2, 2))
        x = self.dropout(nnx.relu(self.hidden(x.reshape(x.shape[0], -1))))
        return self.last(x)


def loss_fn(model, batch):
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits


@nnx.jit
def train_step(model, optimizer, metrics, batch):
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)


@nnx.jit
def eval_step(model, batch):
    return loss_fn(model, batch)[0]


def make():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model = Cnn(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(5e-3, 0.9, eps=1e-4), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    for module in (model, optimizer, metrics):
        nnx.update(module, jax.device_put(nnx.state(module), NamedSharding(mesh, P())))
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(3):
        batch = {"image": rng.standard_normal((16, 4, 4, 1), np.float32), "label": rng.integers(0, 4, 16)}
        batches.append((jax.device_put(batch, NamedSharding(mesh, P("data"))),))

    def evaluate(model, optimizer, metrics, batch):
        model.eval()
        return eval_step(model, batch), metrics.compute()

    return Script(step=train_step, in_place=(model, optimizer, metrics), batches=batches, evaluate=evaluate)


CHANGES = {"@nnx.jit\ndef train_step(": "@minialpa.parallelize(method=method)\ndef train_step("}
