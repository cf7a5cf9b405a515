"""Trains a small GPT (flax linen, a TrainState) on synthetic text, with evaluation and checkpoints.

    python examples/train_gpt.py --folder run                       # all local devices; the planner decides how
    python examples/train_gpt.py --folder run --stages 2            # two pipeline stages
    python examples/train_gpt.py --folder run --ray --hosts 4       # four hosts of a Ray cluster

A second run with the same folder and more `--steps`, with any of these flags, continues from the last checkpoint.
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

VOCABULARY, LENGTH, BATCH_SIZE = 64, 32, 16
Metrics = dict[str, jax.Array]


class Gpt(nn.Module):
    """Tokens [batch length] to logits [batch length vocabulary]."""

    hidden: int
    n_layers: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, self.hidden)(tokens)
        x = x + self.param("positions", nn.initializers.normal(0.02), (LENGTH, self.hidden))[None]
        for _ in range(self.n_layers):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(y, mask=nn.make_causal_mask(tokens))
            y = nn.LayerNorm()(x)
            x = x + nn.Dense(self.hidden)(nn.gelu(nn.Dense(4 * self.hidden)(y)))
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def loss_of(params: Any, state: TrainState, batch: dict[str, jax.Array]) -> jax.Array:
    logits = state.apply_fn({"params": params}, batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, Metrics]:
    loss, grads = minialpa.value_and_grad(loss_of)(state.params, state, batch)
    return state.apply_gradients(grads=grads), {"loss": loss}


def evaluation_step(state: TrainState, batch: dict[str, jax.Array]) -> Metrics:
    return {"loss": loss_of(state.params, state, batch)}


def main(argv: list[str] | None = None) -> None:
    parser = common.flag_parser(__doc__)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--evaluate-every", type=int, default=50, metavar="N")
    flags = common.start(parser, argv)

    model, optimizer = Gpt(flags.hidden, flags.layers), optax.adamw(1e-3)
    batches = functools.partial(common.texts, VOCABULARY, LENGTH, BATCH_SIZE)
    validation_batch = next(batches(seed=2))

    def create_state() -> TrainState:
        params = model.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    step = minialpa.parallelize(train_step, method=common.method_of(flags))
    # It reads the state on the devices of the training step.
    evaluate = minialpa.parallelize(evaluation_step, method=minialpa.FollowParallel(step))
    common.train(
        flags,
        step,
        create_state,
        batches,
        evaluate=lambda state: evaluate(state, validation_batch),
        evaluate_every=flags.evaluate_every,
    )


if __name__ == "__main__":
    main()
