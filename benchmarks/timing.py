"""Timing on a machine with other work: compared calls alternate, and every time is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def interleaved(calls: Mapping[str, Callable[[], object]], repeats: int, warm_up: int = 3) -> dict[str, list[float]]:
    """Seconds of each of `repeats` runs of each call, until its results are ready. The order reverses every time."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for i in range(warm_up + repeats):
        for name in names if i % 2 else reversed(names):
            start = time.perf_counter()
            jax.block_until_ready(calls[name]())
            if i >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def training(step: Any, state: Any, batch: Any) -> Callable[[], Any]:
    """A call that runs one more training step on its own copy of `state`."""
    state = jax.tree.map(lambda x: x.copy(), state)

    def train() -> Any:
        nonlocal state
        state, metrics = step(state, batch)
        return state, metrics

    return train
