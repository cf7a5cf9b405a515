"""Trains a classifier with dropout (haiku) on synthetic pictures.

    python examples/train_haiku.py --folder run

The key for dropout is part of the state, so that a continued run draws the same numbers as a run without interruption.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import common
import haiku as hk
import jax
import jax.numpy as jnp
import optax

import minialpa

SIZE, N_CLASSES, BATCH_SIZE = 8, 10, 32
optimizer = optax.adam(1e-3)


class State(NamedTuple):
    params: hk.Params
    opt_state: optax.OptState
    key: jax.Array


def main(argv: list[str] | None = None) -> None:
    parser = common.flag_parser(__doc__)
    parser.add_argument("--hidden", type=int, default=128)
    flags = common.start(parser, argv)

    @hk.transform
    def model(image: jax.Array) -> jax.Array:
        """Images [batch size size 3] to logits [batch class]."""
        x = hk.Flatten()(image)
        return hk.nets.MLP([flags.hidden, flags.hidden, N_CLASSES])(x, dropout_rate=0.1, rng=hk.next_rng_key())

    def create_state() -> State:
        params = model.init(jax.random.key(0), jnp.zeros((1, SIZE, SIZE, 3)))
        return State(params, optimizer.init(params), jax.random.key(1))

    def train_step(state: State, batch: dict[str, jax.Array]) -> tuple[State, Any]:
        key, dropout_key = jax.random.split(state.key)

        def loss_of(params: hk.Params) -> tuple[jax.Array, jax.Array]:
            logits = model.apply(params, dropout_key, batch["image"])
            accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == batch["label"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), accuracy

        (loss, accuracy), grads = minialpa.value_and_grad(loss_of, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        return State(params, opt_state, key), {"loss": loss, "accuracy": accuracy}

    step = minialpa.parallelize(train_step, method=common.method_of(flags))
    common.train(flags, step, create_state, functools.partial(common.pictures, SIZE, N_CLASSES, BATCH_SIZE))


if __name__ == "__main__":
    main()
