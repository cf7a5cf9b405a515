"""Trains a small ResNet (flax linen) on synthetic pictures. Its batch statistics are part of the state.

    python examples/train_resnet.py --folder run

With `--stages` there are four micro-batches, and BatchNorm normalises each of them by itself: see
docs/micro_batches.md. So its losses differ a little from the losses of the whole batch.
"""

from __future__ import annotations

import functools
from typing import Any

import common
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import minialpa

SIZE, N_CLASSES, BATCH_SIZE = 16, 10, 32


class ResNet(nn.Module):
    """Images [batch size size 3] to logits [batch class]."""

    width: int
    n_blocks: int

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        norm = functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.9)
        x = nn.relu(norm()(nn.Conv(self.width, (3, 3), strides=2, use_bias=False)(image)))
        for _ in range(self.n_blocks):
            y = nn.relu(norm()(nn.Conv(self.width, (3, 3), use_bias=False)(x)))
            x = nn.relu(x + norm()(nn.Conv(self.width, (3, 3), use_bias=False)(y)))
        return nn.Dense(N_CLASSES)(x.mean(axis=(1, 2)))


class State(TrainState):
    batch_stats: Any = None


def train_step(state: State, batch: dict[str, jax.Array]) -> tuple[State, Any]:
    def loss_of(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updated = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
        accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == batch["label"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return loss, (accuracy, updated["batch_stats"])

    (loss, (accuracy, batch_stats)), grads = minialpa.value_and_grad(loss_of, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), {"loss": loss, "accuracy": accuracy}


def main(argv: list[str] | None = None) -> None:
    parser = common.flag_parser(__doc__)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=3)
    flags = common.start(parser, argv)

    model, optimizer = ResNet(flags.width, flags.blocks), optax.sgd(0.1, momentum=0.9)

    def create_state() -> State:
        variables = model.init(jax.random.key(0), jnp.zeros((1, SIZE, SIZE, 3)))
        return State.create(apply_fn=model.apply, tx=optimizer, **variables)

    step = minialpa.parallelize(train_step, method=common.method_of(flags))
    common.train(flags, step, create_state, functools.partial(common.pictures, SIZE, N_CLASSES, BATCH_SIZE))


if __name__ == "__main__":
    main()
