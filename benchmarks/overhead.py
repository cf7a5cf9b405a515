"""A step of `ShardParallel` on one device against the same step under `jax.jit` with the same donation.

The steps are tiny, so that `overhead_us` is the time of a call beyond `jax.jit`.
"""

from __future__ import annotations

import statistics
from typing import Any

import jax

import minialpa
from benchmarks.registry import Rows, Size, benchmark
from benchmarks.timing import interleaved, training
from minialpa import models


@benchmark("overhead")
def overhead(size: Size) -> Rows:
    """One step on one device, next to `jax.jit`: median microseconds, their ratio and difference."""
    rows = [_row("mlp, tiny", models.build("mlp"), size), _row("gpt, tiny", models.build("gpt"), size)]
    if size == "full":
        mlp = models.build("mlp", hidden=512, batch_size=128)
        gpt = models.build("gpt", hidden=128, seq_len=32)
        rows += [_row("mlp", mlp, size), _row("gpt", gpt, size), _row("gpt, NumPy batch", gpt, size, numpy=True)]
    return rows


def _row(name: str, case: models.ModelCase, size: Size, numpy: bool = False) -> dict[str, Any]:
    method = minialpa.ShardParallel(devices=[jax.devices()[0]])
    state, batch = case.init(jax.random.key(0)), case.make_batch(0, case.batch_size)
    batch = batch if numpy else jax.device_put(batch)
    steps = {
        "jit": jax.jit(case.train_step(jax.value_and_grad), donate_argnums=0),
        "minialpa": minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=method),
    }
    seconds = interleaved(
        {key: training(step, state, batch) for key, step in steps.items()}, repeats=300 if size == "full" else 3
    )
    jit_us, minialpa_us = (statistics.median(seconds[key]) * 1e6 for key in ("jit", "minialpa"))
    return {
        "case": name,
        "leaves": len(jax.tree.leaves((state, batch))),
        "jit_us": jit_us,
        "minialpa_us": minialpa_us,
        "ratio": minialpa_us / jit_us,
        "overhead_us": minialpa_us - jit_us,
    }
