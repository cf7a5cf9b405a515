"""Arrays from a device of one process to a device of another, next to `device_put` between two devices of one process.

Each message goes there and back, as a jax array that is ready on a device at both ends; half of that is its time.
Between processes of one machine, the bytes go through shared memory, or over TCP on the loopback interface.
"""

from __future__ import annotations

import itertools
import multiprocessing
import secrets
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import jax
import numpy as np

from benchmarks.registry import Rows, Size, benchmark
from benchmarks.timing import interleaved
from minialpa.errors import WorkerError
from minialpa.runtime.handshake import Address
from minialpa.runtime.host_transport import HostTransport
from minialpa.runtime.transport import Part, Piece

_TIMEOUT_S = 60.0


@benchmark("transport")
def transport(size: Size) -> Rows:
    """Arrays of 1 KB to 256 MB between two processes of this machine, next to `device_put` within one."""
    kilobytes = [1, *(1024 * n for n in (1, 4, 16, 64, 256))] if size == "full" else [1, 1024]
    source, target = jax.devices()[:2] if len(jax.devices()) > 1 else (jax.devices()[0],) * 2
    rows = []
    with _echo(shared=True) as shared, _echo(shared=False) as tcp:
        for n_kb in kilobytes:
            x = jax.device_put(np.zeros(n_kb << 10, np.uint8), source)
            repeats = 2 if size == "tiny" else min(500, max(15, (1 << 20) // n_kb))
            for name, there_and_back in (("shared memory", shared), ("TCP", tcp)):
                calls: dict[str, Callable[[], Any]] = {
                    "device_put": partial(jax.device_put, x, target),
                    name: partial(there_and_back, x, target),
                }
                seconds = interleaved(calls, repeats)
                alone_s, one_way_s = statistics.median(seconds["device_put"]), statistics.median(seconds[name]) / 2
                rows.append(
                    {
                        "array": f"{n_kb} KB" if n_kb < 1024 else f"{n_kb >> 10} MB",
                        "way": name,
                        "time_us": one_way_s * 1e6,
                        "device_put_us": alone_s * 1e6,
                        "gb_per_s": n_kb * 1024 / one_way_s / 1e9,
                        "speed_to_device_put": alone_s / one_way_s,
                    }
                )
    return rows


@contextmanager
def _echo(shared: bool) -> Iterator[Callable[[jax.Array, jax.Device], jax.Array]]:
    """A function that sends an array to another process and puts what comes back on a device."""
    secret = secrets.token_bytes(32)
    mine = HostTransport(secret, 0)
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=_echo_all, args=(secret, far), daemon=True)
    process.start()
    addresses = [mine.address, near.recv()]
    if not shared:
        addresses = [_only_tcp(address) for address in addresses]
    near.send(addresses)
    mine.connect(addresses, _TIMEOUT_S)
    n_sent = 0

    def there_and_back(x: jax.Array, device: jax.Device) -> jax.Array:
        nonlocal n_sent
        n_sent += 1
        mine.send(1, n_sent, [Part(x)])
        (back,) = mine.receive(1, n_sent, [Piece(x.shape, np.dtype(x.dtype))], _TIMEOUT_S)
        arrived: jax.Array = jax.device_put(back, device).block_until_ready()
        return arrived

    try:
        yield there_and_back
    finally:
        mine.close()
        process.join()


def _echo_all(secret: bytes, pipe: Connection) -> None:
    """The other process: puts what it gets on its device and sends that back."""
    jax.config.update("jax_platforms", "cpu")
    mine = HostTransport(secret, 1)
    pipe.send(mine.address)
    mine.connect(pipe.recv(), _TIMEOUT_S)
    device = jax.devices()[0]
    for tag in itertools.count(1):
        try:
            message = mine.take(0, tag, None)
        except WorkerError:  # The other one has closed.
            break
        mine.send(0, tag, [Part(jax.device_put(message.payload, device).block_until_ready())])
    mine.close()


def _only_tcp(address: Address) -> Address:
    return replace(address, local_name="")
