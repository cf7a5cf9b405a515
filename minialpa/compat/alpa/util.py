"""Alpa's `util` and `timers`: functions, trees and HLO texts go in; times and counts come out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from minialpa.compat.alpa import names
from minialpa.util import disable_tqdm_globally as disable_tqdm_globally

GB = 1 << 30
MB = 1 << 20

#: A function that waits for the devices.
Sync = Callable[[], object] | None


def benchmark_func(
    run_func: Callable[[], object],
    sync_func: Sync = None,
    warmup: int = 1,
    repeat: int = 3,
    number: int = 5,
) -> np.ndarray[Any, Any]:
    """Seconds of one call of `run_func`, measured `repeat` times.

    sync_func: waits for the work of `run_func`, before and after each measurement.
    warmup: calls before the first measurement.
    number: calls in each measurement.
    """

    def measure() -> float:
        _call(sync_func)
        start = time.perf_counter()
        for _ in range(number):
            run_func()
        _call(sync_func)
        return (time.perf_counter() - start) / number

    for _ in range(warmup):
        run_func()
    return np.array([measure() for _ in range(repeat)])


def _call(sync_func: Sync) -> None:
    if sync_func is not None:
        sync_func()


def write_tsv(heads: Sequence[str], values: Sequence[Any], filename: str, print_line: bool = True) -> None:
    """Append a line of `values`, separated by tabs, to a file; print them with their `heads`."""
    with open(filename, "a", encoding="utf-8") as file:
        file.write("\t".join(map(str, values)) + "\n")
    if print_line:
        print("  ".join(f"{head}: {value}" for head, value in zip(heads, values, strict=True)))


def map_to_shape(tree: Any) -> Any:
    return jax.tree.map(np.shape, tree)


def map_to_nparray(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def compute_param_number(tree: Any) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree) if hasattr(x, "shape"))


def compute_bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree) if hasattr(x, "shape"))


def compute_gpt_tflops(
    batch_size: int,
    seq_len: int,
    num_layers: int,
    hidden_size: int,
    vocab_size: int,
    num_gpus: int,
    latency: float,
    backward: bool = True,
    checkpoint_activations: bool = False,
) -> float:
    """10^12 floating point operations per second and device of a GPT's step of `latency` seconds.

    A layer has 24 h^2 (1 + s / 6h) operations per token in the forward pass and in a recomputation, twice as many in
    the backward pass; the output embedding has 6 h V (Narayanan et al., SC'21).
    """
    passes = 1 + 2 * backward + checkpoint_activations
    per_layer = 24 * passes * hidden_size**2 * (1 + seq_len / (6 * hidden_size))
    per_token = num_layers * per_layer + 6 * hidden_size * vocab_size
    return batch_size * seq_len * per_token / latency / num_gpus / 1e12


def count_communication_primitives(
    hlo_ir: str, ignore_scalar_all_reduce: bool = False
) -> tuple[int, int, int, int, int]:
    """(all, all-reduces, all-gathers, reduce-scatters, all-to-alls) in compiled HLO."""
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
    counts = [hlo_ir.count(f" {kind}(") + hlo_ir.count(f" {kind}-start(") for kind in kinds]
    if ignore_scalar_all_reduce:
        scalars = sum(
            hlo_ir.count(f"= {dtype}[] all-reduce{end}(") for dtype in ("f32", "f16", "bf16") for end in ("", "-start")
        )
        counts[0] -= scalars
    return sum(counts), counts[0], counts[1], counts[2], counts[3]


class Timer:
    """Collects the seconds of intervals in `costs`. Calls `sync_func` before it reads the clock."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self._started_s = 0.0

    def reset(self) -> None:
        self.costs.clear()

    def start(self, sync_func: Sync = None) -> None:
        _call(sync_func)
        self._started_s = time.perf_counter()

    def stop(self, sync_func: Sync = None) -> None:
        _call(sync_func)
        self.costs.append(time.perf_counter() - self._started_s)

    def elapsed(self, mode: str = "average") -> float:
        """Mean seconds of an interval, or with another `mode` their sum; 0 without intervals."""
        return sum(self.costs) / (max(len(self.costs), 1) if mode == "average" else 1)


class Timers(dict[str, Timer]):
    def __call__(self, name: str) -> Timer:
        return self.setdefault(name, Timer())


timers = Timers()


def __getattr__(name: str) -> Any:
    return names.find(name)
