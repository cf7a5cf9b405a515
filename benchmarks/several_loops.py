"""Steps that run through their micro-batches more than once, on one device: predicted and measured seconds and bytes.

Each step runs with the full batch as one micro-batch, and with several. If a second loop reads per-example values of
the first, there are two runs: one keeps them, as planned, and one has too little memory and recomputes them. Ratios are
to the step under `jax.jit`, which runs in turns with the others. `beside_mb` is the memory of the largest compiled
program, without the parameters.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import minialpa
from benchmarks.registry import Rows, Size, benchmark
from benchmarks.timing import interleaved
from minialpa import AutoShardingOption, ShardParallel

Loss = Callable[[Any, Any], jax.Array]
Step = Callable[[Any, Any], Any]


def _tower(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = jnp.tanh(x @ w)
    return x


def _contrastive(params: Any, x: jax.Array) -> jax.Array:
    z = _tower(params, x)
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(z @ z.T)))


def _balanced(params: Any, x: jax.Array) -> jax.Array:
    routed = jax.nn.softmax(_tower(params, x))
    return jnp.mean(routed**2) + jnp.sum(jnp.mean(routed, 0) ** 2)


def descent(loss: Loss) -> Step:
    def step(params: Any, x: Any) -> Any:
        value, grads = minialpa.value_and_grad(loss)(params, x)
        return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], value

    return step


def sharpness_aware(loss: Loss) -> Step:
    def step(params: Any, x: Any) -> Any:
        grads = minialpa.grad(loss)(params, x)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
        moved = [w + 0.05 * g / norm for w, g in zip(params, grads, strict=True)]
        value, grads = minialpa.value_and_grad(loss)(moved, x)
        return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], value

    return step


STEPS: dict[str, Step] = {
    "contrastive": descent(_contrastive),
    "balanced": descent(_balanced),
    "sharpness-aware": sharpness_aware(lambda params, x: jnp.mean(_tower(params, x) ** 2)),
}


@benchmark("several_loops")
def several_loops(size: Size) -> Rows:
    """Contrastive, balanced and sharpness-aware steps over micro-batches: seconds and bytes, predicted and measured."""
    width, n_layers, n_examples = (512, 12, 2048) if size == "full" else (16, 2, 16)
    rng = np.random.default_rng(0)
    params = [rng.normal(0, width**-0.5, (width, width)).astype(np.float32) for _ in range(n_layers)]
    args = jax.device_put((params, rng.normal(0, 1, (n_examples, width)).astype(np.float32)))
    numbers, repeats = ((1, 4, 8, 16), 20) if size == "full" else ((1, 2), 1)
    return [row for name, step in STEPS.items() for row in _rows(name, step, args, numbers, repeats)]


def _rows(name: str, step: Step, args: Any, numbers: tuple[int, ...], repeats: int) -> Rows:
    parallel = {
        key: minialpa.parallelize(step, method=method, donate_argnums=())
        for n in numbers
        for key, method in _methods(step, args, n).items()
    }
    calls = {"jit": jax.jit(step), **parallel}
    times = interleaved({key: _call(fun, args) for key, fun in calls.items()}, repeats)
    serial_s = statistics.median(times["jit"])
    return [
        {"step": f"{name}, {key}", **_row(fun, args, statistics.median(times[key]), serial_s)}
        for key, fun in parallel.items()
    ]


def _call(fun: Any, args: Any) -> Callable[[], Any]:
    return lambda: fun(*args)


def _methods(step: Step, args: Any, n: int) -> dict[str, ShardParallel]:
    """As planned, and without the memory to keep per-example values."""
    device, name = jax.devices()[:1], f"{n} micro-batches"
    found = {name: ShardParallel(device, n)}
    plan = minialpa.parallelize(step, method=found[name], donate_argnums=()).plan(*args)
    if plan.keeps_activations:
        option = AutoShardingOption(memory_limit_bytes=0.9 * max(plan.cost.peak_bytes))
        found[f"{name}, less memory"] = ShardParallel(device, n, option)
    return found


def _row(fun: Any, args: Any, seconds: float, serial_s: float) -> dict[str, Any]:
    executable = fun.get_executable(*args)
    plan = executable.get_parallel_plan()
    compiled = executable.get_total_allocation_size()
    return {
        "loops": plan.n_loops,
        "rows_kept": plan.keeps_activations,
        "predicted_ms": 1e3 * plan.cost.total_s,
        "measured_ms": 1e3 * seconds,
        "over_jit": seconds / serial_s,
        "beside_mb": (compiled - sum(w.nbytes for w in args[0])) / 1e6,
        "predicted_mb": max(plan.cost.peak_bytes) / 1e6,
    }
