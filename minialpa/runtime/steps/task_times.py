"""Seconds that a compiled function takes when nothing else runs: what a schedule can be compared with."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp


def function_seconds(compiled: Any, repeats: int) -> float:
    """Median seconds of a call on zeros, from ready arguments to ready results, after one call to warm up.

    It includes what it costs to start a call and to hear of its end. In a runtime of several processes, all of them
    have to measure the same function at the same time.
    """
    avals, shardings = jax.tree.leaves(compiled.in_avals), jax.tree.leaves(compiled.input_shardings)
    # jitted, so that each process makes its own part
    make = jax.jit(lambda: [jnp.zeros(aval.shape, aval.dtype) for aval in avals], out_shardings=shardings)
    seconds = []
    for _ in range(repeats + 1):
        args = jax.block_until_ready(make())  # anew: the call may take over their memory
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
