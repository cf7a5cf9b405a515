"""Models trained for three steps on one GPU, next to `jax.jit` on the same device: the largest relative errors.

python -m benchmarks.gpu_numeric [--cpu] [MODEL ...]

An error is max |a - b| / max |b| over one array; the row has the largest over all metrics, and over all parameters.
Models with BatchNorm normalise within a micro-batch, so they run only without micro-batches.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import numpy as np

import minialpa
from benchmarks.registry import Rows
from benchmarks.run import table
from minialpa import AutoLayerOption, PipeshardParallel, ShardParallel, UniformStageOption, models

N_STEPS = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_numeric", description=__doc__)
    parser.add_argument("models", nargs="*", default=list(models.MODELS), metavar="MODEL")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU, to check the script")
    args = parser.parse_args()
    device = one_device(args.cpu)
    if device is None:
        return 0
    # TF32 would round the two runs differently.
    with jax.default_matmul_precision("highest"), jax.default_device(device):
        print(table([row for name in args.models for row in rows_of(name, device)]))
    return 0


def one_device(cpu: bool) -> jax.Device | None:
    """The first GPU, or with `cpu` the first CPU device. Without a GPU, prints a line and returns None."""
    if cpu:
        jax.config.update("jax_platforms", "cpu")
        return jax.devices()[0]
    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        print("Skipped: jax finds no GPU here. Install the `gpu` extra, or pass `--cpu` to check the script.")
        return None


def rows_of(name: str, device: jax.Device) -> Rows:
    """Errors of one model under sharding and under a pipeline of one stage."""
    case = models.build(name)
    pipeline = PipeshardParallel(
        devices=[device],
        num_micro_batches=4,
        layer_option=AutoLayerOption(layer_num=2),
        stage_option=UniformStageOption(num_stages=1),
    )
    rows = [_row(case, "shard", ShardParallel(devices=[device]))]
    if jax.eval_shape(case.init, jax.random.key(0)).batch_stats is None:
        rows.append(_row(case, "pipeline, 4 micro-batches", pipeline))
    return rows


def _row(case: models.ModelCase, label: str, method: Any) -> dict[str, Any]:
    expected_step = jax.jit(case.train_step(jax.value_and_grad))
    actual_step = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=method)
    expected = actual = case.init(jax.random.key(0))
    # The first call of `actual_step` may donate its state.
    actual = jax.tree.map(lambda x: x.copy(), actual)
    metrics_error = 0.0
    for i in range(N_STEPS):
        batch = case.make_batch(i, case.batch_size)
        expected, expected_metrics = expected_step(expected, batch)
        actual, actual_metrics = actual_step(actual, batch)
        metrics_error = max(metrics_error, _error(actual_metrics, expected_metrics))
    return {
        "model": case.name,
        "method": label,
        "metrics_error": metrics_error,
        "params_error": _error(actual.params, expected.params),
    }


def _error(actual: Any, expected: Any) -> float:
    """Largest max |a - b| / max |b| over the arrays of two trees."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        worst = max(worst, float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30)))
    return worst


if __name__ == "__main__":
    raise SystemExit(main())
