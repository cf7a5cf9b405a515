"""Training runs of a few layers for tests: a state, a step with random noise, batches, and the serial loop's losses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import minialpa
from minialpa import StepReport

WIDTH, N_LAYERS = 8, 2
optimizer = optax.sgd(0.1, momentum=0.9)


def create_state() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), N_LAYERS)
    params = [jax.random.normal(key, (WIDTH, WIDTH)) * 0.5 for key in keys]
    return {"params": params, "opt_state": optimizer.init(params), "n": 0, "key": jax.random.key(1)}


def train_step(state: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    key, noise_key = jax.random.split(state["key"])
    noise = 0.1 * jax.random.normal(noise_key, (1, WIDTH))

    def loss_of(params: list[jax.Array]) -> jax.Array:
        x = batch["x"] + noise
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = minialpa.value_and_grad(loss_of)(state["params"])
    updates, opt_state = optimizer.update(grads, state["opt_state"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "n": state["n"] + 1, "key": key}, {"loss": loss}


def evaluate(params: list[jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - batch["y"]) ** 2)


def batches() -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(0)
    while True:
        yield {name: rng.standard_normal((16, WIDTH), np.float32) for name in ("x", "y")}


def parallelized() -> Any:
    """One stage for each host, so that a mesh is on one host."""
    return minialpa.parallelize(
        train_step,
        method=minialpa.PipeshardParallel(
            num_micro_batches=2,
            layer_option=minialpa.AutoLayerOption(layer_num=N_LAYERS),
            stage_option=minialpa.UniformStageOption(),
        ),
    )


class Log:
    """Losses by step; a repeated step replaces its loss."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def __call__(self, report: StepReport) -> None:
        assert report.n_steps <= len(self.losses) + 1, "reports come in order"
        self.losses[report.n_steps] = report.metrics["loss"]


def serial_losses(n_steps: int) -> dict[int, float]:
    """The losses of the serial loop, by the number of steps done."""
    losses, state, step = {}, create_state(), jax.jit(train_step)
    for i, batch in enumerate(itertools.islice(batches(), n_steps), start=1):
        state, metrics = step(state, batch)
        losses[i] = float(metrics["loss"])
    return losses
