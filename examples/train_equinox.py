"""Trains a classifier (equinox) on synthetic pictures.

    python examples/train_equinox.py --folder run

The state holds the module itself. Activation functions and other leaves that are not arrays are part of the program.
"""

from __future__ import annotations

import functools
from typing import Any

import common
import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import minialpa

SIZE, N_CLASSES, BATCH_SIZE = 8, 10, 32
optimizer = optax.adam(1e-3)


def loss_of(model: eqx.nn.MLP, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    logits = jax.vmap(model)(batch["image"].reshape(batch["image"].shape[0], -1))
    accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == batch["label"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), accuracy


def train_step(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any]:
    model, opt_state = state
    (loss, accuracy), grads = eqx.filter_value_and_grad(loss_of, has_aux=True)(model, batch)
    updates, opt_state = optimizer.update(grads, opt_state)
    return (eqx.apply_updates(model, updates), opt_state), {"loss": loss, "accuracy": accuracy}


def main(argv: list[str] | None = None) -> None:
    parser = common.flag_parser(__doc__)
    parser.add_argument("--hidden", type=int, default=128)
    flags = common.start(parser, argv)

    def create_state() -> Any:
        model = eqx.nn.MLP(SIZE * SIZE * 3, N_CLASSES, flags.hidden, depth=2, key=jax.random.key(0))
        return model, optimizer.init(eqx.filter(model, eqx.is_array))

    step = minialpa.parallelize(train_step, method=common.method_of(flags))
    common.train(flags, step, create_state, functools.partial(common.pictures, SIZE, N_CLASSES, BATCH_SIZE))


if __name__ == "__main__":
    main()
