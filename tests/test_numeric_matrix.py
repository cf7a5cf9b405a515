"""Models under methods train as on one device: parameters and metrics after three steps."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

import minialpa
from minialpa import AutoLayerOption, LogicalMesh, PipeshardParallel, ShardParallel, UniformStageOption, models
from minialpa.methods import Method
from minialpa.testing import assert_allclose

# Learning rates at which rounding noise of the serial run itself stays far below the tolerance: Adam turns the noise of
# a gradient near zero into a full step.
SIZES: dict[str, dict[str, Any]] = {
    "mlp": {"n_layers": 4},
    "gpt": {"n_layers": 2, "learning_rate": 1e-4},
    "bert": {"n_layers": 2, "learning_rate": 1e-4},
    "resnet": {"learning_rate": 1e-3, "filters": 4, "width_factor": 1, "stage_sizes": (1, 1)},
    "two_tower": {"learning_rate": 1e-4},
    "unet": {"learning_rate": 1e-4},
}


def pipeline(n_stages: int, schedule: str, n_micro_batches: int = 4) -> PipeshardParallel:
    n_chunks = 2 if schedule == "zb-v" else 1
    return PipeshardParallel(
        num_micro_batches=n_micro_batches,
        pipeline_schedule=schedule,
        layer_option=AutoLayerOption(layer_num=n_stages * n_chunks),
        stage_option=UniformStageOption(num_stages=n_stages, num_chunks=n_chunks),
    )


METHODS: dict[str, Method] = {
    "shard-8": ShardParallel(devices=LogicalMesh((8,))),
    "shard-2x4": ShardParallel(devices=LogicalMesh((2, 4))),
    "gpipe-4": pipeline(4, "gpipe"),
    "1f1b-2": pipeline(2, "1f1b"),
    "1f1b-4": pipeline(4, "1f1b"),
    "zb-4": pipeline(4, "zb-h1"),
    "zb-v-2": pipeline(2, "zb-v"),
    # BatchNorm has statistics per micro-batch, which the equivalence engine compares.
    "whole-2": pipeline(2, "1f1b", n_micro_batches=1),
}
#: Pairs that always run; `-m slow` runs all pairs.
SHORT = {
    ("mlp", "gpipe-4"),
    ("gpt", "1f1b-2"),
    ("gpt", "zb-4"),
    ("gpt", "zb-v-2"),
    ("resnet", "whole-2"),
    ("two_tower", "1f1b-4"),
}
_PAIRS = [
    (name, method) for name in SIZES for method in METHODS if name != "resnet" or method in ("shard-8", "whole-2")
]


@functools.cache
def serial_run(name: str) -> tuple[models.ModelCase, Any, list[Any], Any]:
    """Three steps on one device: the model, the state before them, the metrics of each, and the state after them."""
    case = models.build(name, **SIZES[name])
    step = jax.jit(case.train_step(jax.value_and_grad))
    initial = state = jax.tree.map(np.asarray, case.init(jax.random.key(0)))
    metrics = []
    for i in range(3):
        state, found = step(state, case.make_batch(i, case.batch_size))
        metrics.append(jax.tree.map(np.asarray, found))
    return case, initial, metrics, jax.tree.map(np.asarray, state)


@pytest.mark.parametrize(
    ("name", "method"), [pytest.param(*pair, marks=() if pair in SHORT else pytest.mark.slow) for pair in _PAIRS]
)
def test_three_steps_equal_the_serial_run(name: str, method: str) -> None:
    case, state, expected_metrics, final = serial_run(name)
    step = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=METHODS[method])
    for i, expected in enumerate(expected_metrics):
        state, metrics = step(state, case.make_batch(i, case.batch_size))
        assert_allclose(metrics, expected, rtol=2e-4, atol=1e-6)
    assert_allclose(state.params, final.params, rtol=2e-4, atol=1e-5)
    if name == "resnet":
        assert_allclose(state.batch_stats, final.batch_stats, rtol=2e-4, atol=1e-6)
    n_stages = len(step.get_last_executable().get_parallel_plan().stages)
    assert n_stages == (1 if method.startswith("shard") else int(method[-1]))
