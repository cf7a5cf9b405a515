"""The transport through host memory: NumPy arrays over TCP, within one machine and between machines.

jax on CPU uses received arrays without a copy: `jax.device_put` to any device, `jax.dlpack.from_dlpack` to the first.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future
from queue import Empty
from typing import Any

import numpy as np

from minialpa.errors import WorkerError
from minialpa.runtime.transports.channel import Channel
from minialpa.runtime.transports.handshake import Address, Listener, connect
from minialpa.runtime.transports.mailbox import Mailbox, ReceivedBytes
from minialpa.runtime.transports.transport import ExpectedPart, Part, lay_out

_FLUSH_S = 2.0


class HostTransport:
    """The transport of worker `number`. Make it, send all peers its `address`, then call `connect`.

    It listens only on `host`. Its threads need Python's interpreter a few times for each message:
    `OwnProcess.start_jax` shortens each time.
    """

    def __init__(self, secret: bytes, number: int, host: str = "127.0.0.1") -> None:
        self.number = number
        self._secret = secret
        self._listener = Listener(secret, number, host)
        self.mailbox = Mailbox[ReceivedBytes](number)
        self._channels: dict[int, Channel] = {}

    @property
    def address(self) -> Address:
        return self._listener.address

    def connect(self, addresses: Sequence[Address], timeout_s: float = 60.0) -> None:
        """Worker i is at `addresses[i]`. Raises WorkerError after `timeout_s` seconds.

        Every worker connects to peers with higher numbers and accepts the others. All listen from the start, so no
        worker waits for another to reach this call.
        """
        deadline = time.monotonic() + timeout_s
        try:
            for peer in range(self.number + 1, len(addresses)):
                sock = connect(addresses[peer], secret=self._secret, number=self.number, peer=peer, deadline=deadline)
                self._add(peer, sock)
            while len(self._channels) < len(addresses) - 1:
                try:
                    self._add(*self._listener.authenticated.get(timeout=max(0.0, deadline - time.monotonic())))
                except Empty:
                    missing = sorted(set(range(self.number)) - set(self._channels))
                    raise WorkerError(
                        f"Worker {self.number} waited {timeout_s:g} s for connections from workers {missing}. Check "
                        "that they run, and that no firewall between the hosts blocks TCP; if they start slowly, raise "
                        "`worker_timeout_s` of `minialpa.init`."
                    ) from None
        finally:
            self._listener.close()

    def send(self, peer: int, tag: int, parts: Sequence[Part]) -> Future[None]:
        self.mailbox.check()
        return self._channel(peer).send(tag, parts)

    def receive(
        self, peer: int, tag: int, expected: Sequence[ExpectedPart], timeout_s: float
    ) -> list[np.ndarray[Any, Any]]:
        """The arrays are aligned to ALIGNMENT, and share the memory of the message."""
        message = self.take(peer, tag, timeout_s)
        layout = lay_out(tuple(expected))
        if (message.payload.size, message.digest) != (layout.size_bytes, layout.digest):
            raise WorkerError(
                f"Worker {self.number} expected {layout.size_bytes} bytes from worker {peer} (tag {tag}), {expected}, "
                f"and got {message.payload.size} bytes with another layout. This is a bug in minialpa: report it with "
                "this message."
            )
        return [
            message.payload[offset : offset + part.size_bytes].view(part.dtype).reshape(part.shape)
            for offset, part in zip(layout.offsets, expected, strict=True)
        ]

    def take(self, peer: int, tag: int, timeout_s: float | None) -> ReceivedBytes:
        """Waits for ever if `timeout_s` is None."""
        self._channel(peer)
        return self.mailbox.take(peer, tag, timeout_s)

    def close(self) -> None:
        """Waits up to `_FLUSH_S` seconds for sends under way."""
        self._listener.close()

        # All send their goodbye first, so that they share the time.
        for channel in self._channels.values():
            channel.say_goodbye()
        deadline = time.monotonic() + _FLUSH_S
        for channel in self._channels.values():
            channel.close(max(0.0, deadline - time.monotonic()))

        # Connected peers that `connect` has not taken.
        while not self._listener.authenticated.empty():
            self._listener.authenticated.get()[1].close()
        self.mailbox.fail(WorkerError(f"Worker {self.number} has closed its connections to other workers."))

    def _add(self, peer: int, sock: socket.socket) -> None:
        # A second connection of one worker is a mistake: the first one stays.
        if peer in self._channels or peer == self.number:
            sock.close()
            return
        self._channels[peer] = Channel(peer, sock, self.mailbox)

    def _channel(self, peer: int) -> Channel:
        channel = self._channels.get(peer)
        if channel is None:
            raise WorkerError(
                f"Worker {self.number} is not connected to worker {peer}, but to workers {sorted(self._channels)}. "
                "This is a bug in minialpa: report it with this message."
            )
        return channel
