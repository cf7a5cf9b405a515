"""Devices in; seconds of products, of kernels that only move bytes, and of sums over devices out.

All devices run together, as in a step: virtual devices share a processor, GPUs may share power. A program repeats its
operation; one repetition takes (seconds of 2 n - seconds of n) / n, without the cost of a call. Sizes grow until one
repetition takes `_LONG_S`.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from minialpa.support.progress import Report

#: Sizes grow until a repetition takes so long.
_LONG_S = 0.02
#: Counted repetitions take longer: clock and other processes matter little.
_RUN_S = 0.02
#: Number of differences of a long and a short run, whose median counts.
_N_ROUNDS = 5
_AXIS = "devices"

_Time = TypeVar("_Time")


@dataclass(frozen=True, slots=True)
class ProductTime:
    """One matrix product on each device.

    rate: name of the rate in `DeviceSpec.peak_flops`.
    n_bytes: bytes of operands and result.
    """

    rate: str
    flops: float
    n_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class ByteTime:
    """One kernel that only moves bytes, or one sum over all devices.

    n_bytes: read and written by a kernel; input of each device to a sum.
    """

    n_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Measurements on `n_devices` devices. One device has no sums."""

    n_devices: int
    products: tuple[ProductTime, ...]
    kernels: tuple[ByteTime, ...]
    sums: tuple[ByteTime, ...]


def measured(devices: Sequence[jax.Device], report: Report) -> Measurements:
    return Measurements(
        n_devices=len(devices),
        products=tuple(_counted("products", product_times(devices), report)),
        kernels=tuple(_counted("kernels", kernel_times(devices), report)),
        sums=tuple(_counted("sums", _sum_times(_mesh(devices)), report)) if len(devices) > 1 else (),
    )


def _counted(what: str, times: Iterator[_Time], report: Report) -> Iterator[_Time]:
    """Their number depends on the seconds, so the total is unknown."""
    report(what, 0, 0)
    for n, one in enumerate(times, 1):
        report(what, n, 0)
        yield one


def product_times(devices: Sequence[jax.Device]) -> Iterator[ProductTime]:
    """Lazily, of growing size for each rate."""
    for rate, dtype, precision in _rates(devices[0]):
        yield from _product_times_of_rate(_mesh(devices), rate, dtype, precision)


def kernel_times(devices: Sequence[jax.Device]) -> Iterator[ByteTime]:
    for n_bytes in _growing_sizes(2**18, 4):
        seconds = _seconds(_mesh(devices), lambda carry: (carry[0] * 0.5 + 1,), "float32", (n_bytes // 4,))
        yield ByteTime(2.0 * n_bytes, seconds)
        if seconds > _LONG_S / 2 or n_bytes > 2**30:
            return


def _mesh(devices: Sequence[jax.Device]) -> Mesh:
    return Mesh(np.array(devices), (_AXIS,))


def _rates(device: jax.Device) -> list[tuple[str, str, lax.Precision]]:
    """(name of a rate, dtype, precision)."""
    exact, default = lax.Precision.HIGHEST, lax.Precision.DEFAULT
    if device.platform == "cpu":
        return [("float32", "float32", default), ("bfloat16", "bfloat16", default)]
    return [
        ("bfloat16", "bfloat16", default),
        ("float16", "float16", default),
        ("tensorfloat32", "float32", default),
        ("float32", "float32", exact),
    ]


def _product_times_of_rate(mesh: Mesh, rate: str, dtype: str, precision: lax.Precision) -> Iterator[ProductTime]:
    """Lazily, of growing sides."""

    def body(carry: Any) -> Any:
        x, y, out = carry
        out = lax.dot(x, y, precision=precision, preferred_element_type=x.dtype)
        return x.at[0, 0].add(out[0, 0] * 0), y, out  # the next product waits for this one

    for side in _growing_sizes(64, 2):
        longest = 0.0
        for m, k, n in ((side, side, side), (4 * side, side, side), (side, 4 * side, side), (side, side, 4 * side)):
            seconds = _seconds(mesh, body, dtype, (m, k), (k, n), (m, n))
            n_bytes = (m * k + k * n + m * n) * jnp.dtype(dtype).itemsize
            yield ProductTime(rate, 2.0 * m * k * n, float(n_bytes), seconds)
            longest = max(longest, seconds)
        if longest > _LONG_S:
            return


def _sum_times(mesh: Mesh) -> Iterator[ByteTime]:
    for n_bytes in _growing_sizes(2**10, 8):
        seconds = _seconds(mesh, lambda carry: (lax.psum(carry[0], _AXIS) * 0.5,), "float32", (n_bytes // 4,))
        yield ByteTime(float(n_bytes), seconds)
        if seconds > _LONG_S or n_bytes > 2**28:
            return


def _growing_sizes(first: int, by: int) -> Iterator[int]:
    """first, first * by, first * by^2, ..."""
    return (first * by**i for i in itertools.count())


def _seconds(mesh: Mesh, body: Callable[[Any], Any], dtype: str, *shapes: tuple[int, ...]) -> float:
    """Of one `body`, which maps arrays of `shapes` to arrays of `shapes`, on each device."""
    spec = PartitionSpec(_AXIS)

    def on_device(n: jax.Array, *arrays: jax.Array) -> Any:
        return lax.fori_loop(0, n, lambda _, carry: tuple(body(carry)), arrays)

    run = jax.jit(
        jax.shard_map(
            on_device, mesh=mesh, in_specs=(PartitionSpec(), *(spec for _ in shapes)), out_specs=spec, check_vma=False
        )
    )
    arrays = [
        jnp.full((shape[0] * mesh.size, *shape[1:]), 1e-3, dtype, device=NamedSharding(mesh, spec)) for shape in shapes
    ]

    def run_s(n: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(np.int32(n), *arrays))
        return time.perf_counter() - start

    run_s(1)  # compiles
    n = 2
    while True:
        rounds = [run_s(2 * n) - run_s(n) for _ in range(_N_ROUNDS)]
        more_s = statistics.median(rounds)
        if more_s > _RUN_S or n > 2**20:
            return max(more_s, 1e-9) / n
        n *= 4 if more_s < _RUN_S / 8 else 2
