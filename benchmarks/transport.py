"""Arrays from a device of one process to a device of another, next to `device_put` between two devices of one process.

One at a time: an array goes to the other process and back, ready on a device at both ends; half of the time counts. The
threads that take part sleep before. Streamed: many arrays are sent without waiting, each is put on a device of the
other process, and the last one comes back. The reference issues the same number of `device_put` before it waits for
any. Between processes of one machine, the bytes go over TCP on the loopback interface.
"""

from __future__ import annotations

import itertools
import multiprocessing
import secrets
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import jax
import numpy as np

from benchmarks.registry import Rows, Size, benchmark
from benchmarks.timing import interleaved
from minialpa.errors import WorkerError
from minialpa.runtime.transports.host_transport import HostTransport
from minialpa.runtime.transports.transport import ExpectedPart, Part

_TIMEOUT_S = 60.0
#: Sent after an array: whether other arrays follow before the reply.
_MORE, _LAST = np.zeros(1, np.uint8), np.ones(1, np.uint8)


@benchmark("transport")
def transport(size: Size) -> Rows:
    """Arrays of 1 KB to 256 MB between two processes of this machine, next to `device_put` within one."""
    kilobytes = [1, *(1024 * n for n in (1, 4, 16, 64, 256))] if size == "full" else [1, 1024]
    source, target = jax.devices()[:2] if len(jax.devices()) > 1 else (jax.devices()[0],) * 2
    rows = []
    with _peer() as send:
        for n_kb in kilobytes:
            x = jax.device_put(np.zeros(n_kb << 10, np.uint8), source)
            n_streamed = 2 if size == "tiny" else min(32, max(2, (512 << 10) // n_kb))
            repeats = 2 if size == "tiny" else min(500, max(15, (1 << 20) // n_kb))
            one = _seconds_each(send, x, target, 1, repeats)
            streamed = _seconds_each(send, x, target, n_streamed, max(15, repeats // n_streamed))
            rows.append(
                {
                    "array": f"{n_kb} KB" if n_kb < 1024 else f"{n_kb >> 10} MB",
                    "time_us": one[1] / 2 * 1e6,
                    "device_put_us": one[0] * 1e6,
                    "speed_to_device_put": 2 * one[0] / one[1],
                    "streamed": n_streamed,
                    "streamed_gb_per_s": n_kb * 1024 / streamed[1] / 1e9,
                    "streamed_speed_to_device_put": streamed[0] / streamed[1],
                }
            )
    return rows


_Send = Callable[[jax.Array, jax.Device, int], jax.Array]


def _seconds_each(send: _Send, x: jax.Array, target: jax.Device, n: int, repeats: int) -> tuple[float, float]:
    """Seconds for each of `n` arrays: of `device_put`, and of `send`."""
    calls: dict[str, Callable[[], Any]] = {
        "device_put": lambda: [jax.device_put(x, target) for _ in range(n)],
        "send": lambda: send(x, target, n),
    }
    seconds = interleaved(calls, repeats)
    return statistics.median(seconds["device_put"]) / n, statistics.median(seconds["send"]) / n


@contextmanager
def _peer() -> Iterator[_Send]:
    """A function that sends an array to another process n times and puts the reply once on a device."""
    secret = secrets.token_bytes(32)
    mine = HostTransport(secret, 0)
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=_put_all, args=(secret, far), daemon=True)
    process.start()
    addresses = [mine.address, near.recv()]
    near.send(addresses)
    mine.connect(addresses, _TIMEOUT_S)
    tag = 0

    def send(x: jax.Array, device: jax.Device, n: int) -> jax.Array:
        nonlocal tag
        for k in range(n):
            tag += 1
            mine.send(1, tag, [Part(x), Part(_LAST if k + 1 == n else _MORE)])
        (back,) = mine.receive(1, tag, [ExpectedPart(x.shape, np.dtype(x.dtype))], _TIMEOUT_S)
        arrived: jax.Array = jax.device_put(back, device).block_until_ready()
        return arrived

    try:
        yield send
    finally:
        mine.close()
        process.join()


def _put_all(secret: bytes, pipe: Connection) -> None:
    """The other process: puts each received array on its device, and sends the last array of each call back."""
    jax.config.update("jax_platforms", "cpu")
    mine = HostTransport(secret, 1)
    pipe.send(mine.address)
    mine.connect(pipe.recv(), _TIMEOUT_S)
    device = jax.devices()[0]
    for tag in itertools.count(1):
        try:
            payload = mine.take(0, tag, None).payload
        except WorkerError:  # The other one has closed.
            break
        arrived = jax.device_put(payload[:-1], device).block_until_ready()
        if payload[-1]:
            mine.send(0, tag, [Part(arrived)])
    mine.close()
