"""Callbacks into Python in a step with micro-batches: once per step with values of the full batch, or refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from minialpa import PipeshardParallel, ShardParallel, TraceError, UniformStageOption

BATCH = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
WEIGHTS = {"in": np.eye(8, dtype=np.float32), "out": np.eye(8, dtype=np.float32)[::-1].copy()}
METHODS = [
    ShardParallel(num_micro_batches=4),
    PipeshardParallel(num_micro_batches=4, layer_option="manual", stage_option=UniformStageOption(2)),
]


@pytest.mark.parametrize("method", METHODS)
def test_a_callback_gets_values_of_the_full_batch_once(method: Any) -> None:
    seen: list[float] = []

    def loss_of(weights: Any, batch: Any) -> jax.Array:
        x = jnp.tanh(batch @ weights["in"])
        minialpa.mark_pipeline_boundary()
        loss = ((x @ weights["out"]) ** 2).mean()
        jax.debug.callback(lambda value: seen.append(float(value)), loss)
        return loss

    def step(weights: Any, batch: Any) -> Any:
        loss, grads = minialpa.value_and_grad(loss_of)(weights, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss

    _, loss = minialpa.parallelize(step, method=method)(WEIGHTS, BATCH)
    jax.block_until_ready(loss)
    jax.effects_barrier()
    assert seen == [pytest.approx(float(loss))]


@pytest.mark.parametrize("inside_scan", [True, False])
def test_a_callback_with_values_of_each_example_is_refused(inside_scan: bool) -> None:
    def loss_of(weights: Any, batch: Any) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            x = jnp.tanh(x @ weights["in"])
            if inside_scan:
                jax.debug.print("{}", x.sum())
            return x, None

        x, _ = jax.lax.scan(layer, batch, None, length=2)
        if not inside_scan:
            jax.debug.print("{}", x)
        return (x**2).mean()

    def step(weights: Any, batch: Any) -> Any:
        _, grads = minialpa.value_and_grad(loss_of)(weights, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)

    with pytest.raises(TraceError, match=r"calls Python with values of each example.*Return these values"):
        minialpa.parallelize(step, method=METHODS[0])(WEIGHTS, BATCH)
