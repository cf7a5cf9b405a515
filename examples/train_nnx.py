"""Trains a classifier with dropout (flax nnx) on synthetic pictures.

    python examples/train_nnx.py --folder run

A step of nnx changes its model and optimizer in place. Checkpoints need values, so the state is the arrays of both. The
step makes the objects from the state with `nnx.merge` and returns a new state with `nnx.state`.
"""

from __future__ import annotations

import functools
from typing import Any

import common
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import minialpa

SIZE, N_CLASSES, BATCH_SIZE = 8, 10, 32


class Classifier(nnx.Module):
    """Images [batch size size 3] to logits [batch class]. Its random numbers are part of its state."""

    def __init__(self, hidden: int, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(SIZE * SIZE * 3, hidden, rngs=rngs)
        self.second = nnx.Linear(hidden, hidden, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(hidden, N_CLASSES, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = nnx.relu(self.first(image.reshape(image.shape[0], -1)))
        x = self.dropout(nnx.relu(self.second(x)))
        return self.last(x)


def loss_of(model: Classifier, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    logits = model(batch["image"])
    accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == batch["label"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), accuracy


def main(argv: list[str] | None = None) -> None:
    parser = common.flag_parser(__doc__)
    parser.add_argument("--hidden", type=int, default=128)
    flags = common.start(parser, argv)

    def make() -> tuple[Classifier, nnx.Optimizer]:
        model = Classifier(flags.hidden, nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def create_state() -> nnx.State:
        return nnx.state(make())

    structure = nnx.graphdef(nnx.eval_shape(make))

    def train_step(state: nnx.State, batch: dict[str, jax.Array]) -> tuple[nnx.State, Any]:
        model, optimizer = nnx.merge(structure, state)
        (loss, accuracy), grads = nnx.value_and_grad(loss_of, has_aux=True)(model, batch)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), {"loss": loss, "accuracy": accuracy}

    step = minialpa.parallelize(train_step, method=common.method_of(flags))
    common.train(flags, step, create_state, functools.partial(common.pictures, SIZE, N_CLASSES, BATCH_SIZE))


if __name__ == "__main__":
    main()
