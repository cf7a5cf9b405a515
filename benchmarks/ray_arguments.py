"""Time to get a batch of NumPy arrays to the workers of two meshes on Ray, as arguments of a step.

One batch is cut between the meshes, and both meshes read another one whole. The same run has a copy with the same
number of bytes in this process, `ray.put` of these bytes, and the step with a batch of a few rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import minialpa
from benchmarks.ray_session import ray_session
from benchmarks.registry import Rows, Size, benchmark

WIDTH = 1024


@benchmark("ray_arguments")
def ray_arguments(size: Size) -> Rows:
    """A 64 MB batch to two meshes: milliseconds of the driver, of the whole step, of a copy and of `ray.put`."""
    import ray

    batch_bytes, repeats = (64 << 20, 20) if size == "full" else (1 << 20, 2)
    n_rows = batch_bytes // (4 * WIDTH)
    cut = {name: np.ones((n_rows // 2, WIDTH), np.float32) for name in "xy"}
    whole = {"x": np.ones((n_rows, WIDTH), np.float32)}
    with ray_session(2) as runtime:
        calls = {
            "cut between meshes": _training(cut),
            "cut, a few rows": _training({name: value[:8] for name, value in cut.items()}),
            "read by both": _training(whole),
            "both, a few rows": _training({"x": whole["x"][:8]}),
            "copy": lambda: whole["x"].copy(),
            "ray.put": lambda: ray.put(whole["x"]),
        }
        driver, total = _measure(calls, runtime, repeats)
    return [
        {
            "case": name,
            "driver_ms": driver[name] * 1e3,
            "step_ms": total[name] * 1e3,
            "mb_per_s": batch_bytes / 1e6 / total[name] if "rows" not in name else "",
        }
        for name in calls
    ]


def _measure(
    calls: Mapping[str, Callable[[], Any]], runtime: Any, repeats: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds until each call returns, and until the started work has ended."""
    driver: dict[str, list[float]] = {name: [] for name in calls}
    total: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(3 + repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            kept = call()
            returned = time.perf_counter()
            runtime.sync()
            if i >= 3:
                driver[name].append(returned - start)
                total[name].append(time.perf_counter() - start)
            del kept
    return tuple({name: statistics.median(s) for name, s in times.items()} for times in (driver, total))  # type: ignore


def _training(batch: Any) -> Callable[[], Any]:
    """A call that starts a step which reads every number of `batch` and has almost no other work."""

    def train_step(params: Any, batch: Any) -> Any:
        def loss(p: Any) -> Any:
            h = jnp.mean(batch["x"], 1, keepdims=True) * p["u"]
            minialpa.mark_pipeline_boundary()
            return jnp.mean((h * p["v"] - jnp.mean(batch.get("y", batch["x"]), 1, keepdims=True)) ** 2)

        value, grads = minialpa.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 1e-6 * g, params, grads), value

    step = minialpa.parallelize(
        train_step,
        method=minialpa.PipeshardParallel(
            num_micro_batches=1, layer_option="manual", stage_option=minialpa.UniformStageOption(num_stages=2)
        ),
        donate_argnums=(0,),
    )
    params: Any = {name: np.ones((1, 8), np.float32) for name in "uv"}

    def call() -> Any:
        nonlocal params
        params, value = step(params, batch)
        return value

    return call
