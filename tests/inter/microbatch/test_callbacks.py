"""Callbacks into Python in a step with micro-batches run once per step with the full batch, or are refused."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from minialpa import (
    AutoParallel,
    AutoStageOption,
    PipeshardParallel,
    ShardParallel,
    TraceError,
    UniformStageOption,
    Zero3Parallel,
)
from minialpa.testing import assert_allclose

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


def _step_that_notes(note: Any, place: str) -> Any:
    """A training step that calls `note` on activations: in a layer, in a scan over layers or in a branch."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        x = jnp.tanh(x @ w)
        note(x)
        return x, None

    def loss_of(weights: Any, batch: Any) -> jax.Array:
        stacked = jnp.stack([weights["in"], weights["out"]])
        if place == "scan":
            return (jax.lax.scan(layer, batch, stacked)[0] ** 2).mean()
        if place == "layer":
            return (layer(batch, weights["in"])[0] ** 2).mean()
        x = batch @ weights["in"]
        x = jax.lax.cond(x[0, 0] > 2, lambda x: x, lambda x: layer(x, weights["out"])[0], x)
        return (x**2).mean()

    def step(weights: Any, batch: Any) -> Any:
        loss, grads = minialpa.value_and_grad(loss_of)(weights, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss

    return step


@pytest.mark.parametrize("place", ["layer", "scan"])
def test_a_callback_with_values_of_each_example_is_refused(place: str) -> None:
    step = _step_that_notes(lambda x: jax.debug.print("{}", x), place)
    with pytest.raises(TraceError, match=r"values of each example to a Python callback.*return the values"):
        minialpa.parallelize(step, method=METHODS[0])(WEIGHTS, BATCH)


@pytest.mark.parametrize("place", ["scan", "branch"])
def test_loops_and_branches_with_callbacks_run_as_in_jax_without_micro_batches(place: str) -> None:
    method = Zero3Parallel(jax.devices()[:2])
    seen: list[np.ndarray] = []
    step = _step_that_notes(lambda x: jax.debug.callback(lambda x: seen.append(np.asarray(x)), x), place)
    expected = jax.jit(step)(WEIGHTS, BATCH)
    jax.effects_barrier()
    n = len(seen)
    assert_allclose(minialpa.parallelize(step, method=method)(WEIGHTS, BATCH), expected, rtol=1e-5, atol=1e-6)
    jax.effects_barrier()
    assert 0 < n == len(seen) - n
    order = lambda arrays: sorted(arrays, key=lambda x: float(np.abs(x).sum()))  # noqa: E731
    assert_allclose(order(seen[n:]), order(seen[:n]), rtol=1e-5, atol=1e-6)


def test_ordered_debug_callbacks_run_on_one_device_only() -> None:
    step = _step_that_notes(lambda x: jax.debug.callback(lambda x: None, x, ordered=True), "branch")
    with pytest.raises(TraceError, match=r"`cond` at .*ordered `jax.debug` callback.*io_callback"):
        minialpa.parallelize(step, method=Zero3Parallel(jax.devices()[:2]))(WEIGHTS, BATCH)


def test_a_search_plans_steps_that_cannot_be_split_for_one_micro_batch() -> None:
    step = _step_that_notes(lambda x: jax.debug.callback(lambda x: None, x), "branch")
    searched = AutoStageOption(planned_steps=math.inf)
    plan = minialpa.parallelize(step, method=AutoParallel(jax.devices()[:2], stage_option=searched)).plan(
        WEIGHTS, BATCH
    )
    assert plan.n_micro_batches == 1
