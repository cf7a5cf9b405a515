"""Worker processes for tests of transports: each runs functions of the test on a transport of its own."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from minialpa.runtime.transports.host_transport import HostTransport

SECRET = b"a secret of tests"
TIMEOUT_S = 60.0


@dataclasses.dataclass
class Peer:
    """A process whose transport is worker 1, connected to `mine`, which is worker 0."""

    mine: HostTransport
    process: Any
    pipe: Connection

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Run `function(transport, *args)` there."""
        self.pipe.send((function, args))

    def result(self) -> Any:
        """What the function returned."""
        if not self.pipe.poll(TIMEOUT_S):
            raise TimeoutError("The peer does not answer.")
        result = self.pipe.recv()
        if isinstance(result, Exception):
            raise result
        return result

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        self.start(function, *args)
        return self.result()


@contextmanager
def peer_process() -> Iterator[Peer]:
    """A connected peer. It is killed at the end if it still runs."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=_serve, args=(far,), daemon=True)
    process.start()
    mine = HostTransport(SECRET, 0)
    try:
        addresses = [mine.address, near.recv()]
        near.send(addresses)
        mine.connect(addresses, TIMEOUT_S)
        yield Peer(mine, process, near)
    finally:
        mine.close()
        process.kill()
        process.join()
        near.close()
        far.close()


def _serve(pipe: Connection) -> None:
    transport = HostTransport(SECRET, 1)
    pipe.send(transport.address)
    transport.connect(pipe.recv(), TIMEOUT_S)
    while True:
        function, args = pipe.recv()
        try:
            result = function(transport, *args)
        except Exception as error:
            result = error
        pipe.send(result)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
