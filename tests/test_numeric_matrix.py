"""Every model under every method trains as on one device: parameters and metrics after three steps.

Models with BatchNorm normalise within a micro-batch. Their reference runs the step on each micro-batch from the same
state and averages the results, which is exact for momentum SGD, whose update is linear in the gradient.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest

import minialpa
from minialpa import AutoLayerOption, LogicalMesh, PipeshardParallel, ShardParallel, UniformStageOption, models
from minialpa.testing import assert_allclose

N_MICRO_BATCHES = 4
# Learning rates at which rounding noise of the serial run itself stays far below the tolerance: Adam turns the noise of
# a gradient near zero into a full step, and BatchNorm over four examples multiplies it by a thousand in two steps.
SIZES: dict[str, dict[str, Any]] = {
    "mlp": {"n_layers": 4},
    "gpt": {"n_layers": 2, "learning_rate": 1e-4},
    "bert": {"n_layers": 2, "learning_rate": 1e-4},
    "resnet": {"learning_rate": 1e-3},
    "two_tower": {"learning_rate": 1e-4},
    "unet": {"learning_rate": 1e-4},
}


def pipeline(n_stages: int, schedule: str) -> PipeshardParallel:
    return PipeshardParallel(
        num_micro_batches=N_MICRO_BATCHES,
        pipeline_schedule=schedule,
        layer_option=AutoLayerOption(layer_num=n_stages),
        stage_option=UniformStageOption(num_stages=n_stages),
    )


METHODS = {
    "shard-8": ShardParallel(devices=LogicalMesh((8,))),
    "shard-2x4": ShardParallel(devices=LogicalMesh((2, 4))),
    "gpipe-2": pipeline(2, "gpipe"),
    "gpipe-4": pipeline(4, "gpipe"),
    "1f1b-2": pipeline(2, "1f1b"),
    "1f1b-4": pipeline(4, "1f1b"),
}


@dataclass(frozen=True, eq=False)
class SerialRun:
    """Three steps on one device: the state before them, the metrics of each, and the state behind them, in NumPy."""

    case: models.ModelCase
    initial: Any
    metrics: list[Any]
    final: Any


@functools.cache
def serial_run(name: str, n_micro_batches: int) -> SerialRun:
    """The run that a model is compared with: one for all methods."""
    case = models.build(name, **SIZES[name])
    step = _serial_step(case, n_micro_batches)
    initial = state = jax.tree.map(np.asarray, case.init(jax.random.key(0)))
    metrics = []
    for i in range(3):
        state, found = step(state, case.make_batch(i, case.batch_size))
        metrics.append(jax.tree.map(np.asarray, found))
    return SerialRun(case, initial, metrics, jax.tree.map(np.asarray, state))


def _serial_step(case: models.ModelCase, n_micro_batches: int) -> Any:
    step = jax.jit(case.train_step(jax.value_and_grad))
    if n_micro_batches == 1:
        return step

    def averaged(state: Any, batch: Any) -> Any:
        size = case.batch_size // n_micro_batches
        parts = [jax.tree.map(lambda x, m=m: x[m * size : (m + 1) * size], batch) for m in range(n_micro_batches)]
        outs = [step(state, part) for part in parts]

        def combine(*leaves: Any) -> Any:
            if np.issubdtype(leaves[0].dtype, np.inexact):
                return sum(leaves[1:], leaves[0]) / len(leaves)
            return leaves[0]

        new_state, metrics = jax.tree.map(combine, *outs)
        metrics["correct"] = sum(out[1]["correct"] for out in outs)
        return new_state, metrics

    return averaged


#: Models that take long to compile run under these methods only; `-m slow` runs the others. The MLP has all of them.
SHORT = {
    "bert": (),
    "gpt": ("1f1b-4",),
    "resnet": ("1f1b-2",),
    "two_tower": ("shard-8", "1f1b-4"),
    "unet": (),
}


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=() if method in SHORT.get(name, METHODS) else pytest.mark.slow)
        for name in SIZES
        for method in METHODS
    ],
)
def test_three_steps_equal_the_serial_run(name: str, method: str) -> None:
    n_micro_batches = 1 if method.startswith("shard") else N_MICRO_BATCHES
    run = serial_run(name, n_micro_batches if name == "resnet" else 1)
    step = minialpa.parallelize(run.case.train_step(minialpa.value_and_grad), method=METHODS[method])
    state = run.initial
    for i, expected in enumerate(run.metrics):
        state, metrics = step(state, run.case.make_batch(i, run.case.batch_size))
        assert_allclose(metrics, expected, rtol=2e-4, atol=1e-6)
    assert_allclose(state.params, run.final.params, rtol=2e-4, atol=1e-5)
    if name == "resnet":
        assert_allclose(state.batch_stats, run.final.batch_stats, rtol=2e-4, atol=1e-6)
    n_stages = len(step.get_last_executable().get_parallel_plan().stages)
    assert n_stages == (1 if method.startswith("shard") else int(method[-1]))
