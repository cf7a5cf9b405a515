"""Trains a small GPT (flax linen) on text of a Markov chain, with checkpoints, and goes on after a kill.

    python examples/train_gpt.py --steps 200 --folder run            # all local devices; the planner decides how
    python examples/train_gpt.py --steps 200 --folder run --stages 2 # two pipeline stages
    python examples/train_gpt.py --steps 200 --folder run --ray      # the hosts of a Ray cluster

Run it again with the same folder, under any of these, and it goes on behind the last checkpoint. `run/losses.csv` has
the loss of every step.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import minialpa

VOCABULARY, LENGTH, BATCH = 64, 32, 16


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
            x = x + nn.SelfAttention(num_heads=4)(y, mask=nn.make_causal_mask(tokens))
            y = nn.LayerNorm()(x)
            x = x + nn.Dense(self.hidden)(nn.gelu(nn.Dense(4 * self.hidden)(y)))
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def batches() -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """Endless text in which each token has four likely successors. The same text in every run."""
    successors = np.random.default_rng(0).integers(VOCABULARY, size=(VOCABULARY, 4))
    rng = np.random.default_rng(1)
    while True:
        tokens = [rng.integers(VOCABULARY, size=BATCH)]
        for _ in range(LENGTH):
            tokens.append(successors[tokens[-1], rng.integers(4, size=BATCH)])
        text = np.stack(tokens, axis=1).astype(np.int32)
        yield {"tokens": text[:, :-1], "labels": text[:, 1:]}


def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, jax.Array]:
    def loss_of(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    loss, grads = minialpa.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


def method_of(n_stages: int) -> minialpa.AutoParallel | minialpa.PipeshardParallel:
    """All decisions left to the planner, or a pipeline of so many stages."""
    if n_stages == 0:
        return minialpa.AutoParallel()
    return minialpa.PipeshardParallel(
        num_micro_batches=4,
        layer_option=minialpa.AutoLayerOption(layer_num=n_stages),
        stage_option=minialpa.UniformStageOption(num_stages=n_stages),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--stages", type=int, default=0, help="pipeline stages; 0 leaves everything to the planner")
    parser.add_argument("--folder", type=Path, default=Path("run"))
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--ray", action="store_true")
    flags = parser.parse_args()
    if flags.ray:
        minialpa.init(cluster="ray")

    model, optimizer = Gpt(flags.hidden, flags.layers), optax.adamw(1e-3)

    def create_state(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, LENGTH), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    step = minialpa.parallelize(train_step, method=method_of(flags.stages))
    example = next(batches())
    with minialpa.CheckpointManager(flags.folder / "checkpoints", max_to_keep=2) as manager:
        loader = minialpa.DataLoader(batches, step)
        if manager.latest_step() is None:
            first = 0
            create = minialpa.parallelize(create_state, method=minialpa.CreateStateParallel(step, (example,)))
            state = create(jax.random.key(0))
        else:
            # Each leaf is read into the sharding of this run's plan, whichever plan it was saved under.
            shapes = jax.eval_shape(create_state, jax.random.key(0))
            found = manager.restore(like=step.get_executable(shapes, example))
            first, state = found.step, found.state
            loader.set_state(found.data)

        print(step.get_last_executable().get_parallel_plan().summary())
        with loader, LossFile(flags.folder / "losses.csv", first) as losses:
            for i in range(first, flags.steps):
                state, loss = step(state, next(loader))
                losses.write(i, float(loss))
                if (i + 1) % flags.save_every == 0 or i + 1 == flags.steps:
                    manager.save(i + 1, state, data=loader.get_state())


class LossFile:
    """A CSV file of losses, without those of steps that a run repeats from a checkpoint on."""

    def __init__(self, path: Path, first: int) -> None:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() and first else ["step,loss"]
        path.write_text("\n".join(lines[: first + 1]) + "\n", encoding="utf-8")
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def __enter__(self) -> LossFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, step: int, loss: float) -> None:
        self._file.write(f"{step},{loss!r}\n")
        if step % 10 == 0:
            print(f"step {step}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
