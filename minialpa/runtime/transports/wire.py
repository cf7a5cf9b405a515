"""Writes and reads bytes and file descriptors on the socket between two workers."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

from minialpa.runtime.transports.mailbox import ProtocolError
from minialpa.runtime.transports.shared_memory import Bytes

_MAX_BUFFERS = 512  # As many as the kernel takes at a time.


@dataclass(slots=True, eq=False)
class Unsent:
    """What is still to be written to a socket. Owns the descriptor: `close` it if it is not written to the end.

    Attributes:
        buffers: in order, none of them empty.
        descriptor: a file descriptor that goes with the first byte; None if there is none, or once it is sent.
    """

    buffers: list[memoryview]
    descriptor: int | None = None

    def write(self, sock: socket.socket, flags: int = 0) -> bool:
        """Write all; with MSG_DONTWAIT, what the socket takes at once. Whether nothing is left."""
        try:
            while self.buffers:
                # Not by `socket.send_fds`, which ignores `flags` in Python 3.11.
                sent = sock.sendmsg(self.buffers[:_MAX_BUFFERS], self._ancillary(), flags)
                self._forget(sent)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def _ancillary(self) -> list[tuple[int, int, bytes]]:
        if self.descriptor is None:
            return []
        return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", self.descriptor))]

    def _forget(self, n_bytes: int) -> None:
        """`n_bytes` have been written."""
        self.close()
        n_whole = 0
        while n_whole < len(self.buffers) and n_bytes >= self.buffers[n_whole].nbytes:
            n_bytes -= self.buffers[n_whole].nbytes
            n_whole += 1
        del self.buffers[:n_whole]
        if n_bytes:
            self.buffers[0] = self.buffers[0][n_bytes:]


def receive_with_descriptor(sock: socket.socket, n_bytes: int) -> tuple[bytes, int | None]:
    """The next bytes, and the file descriptor that came with them, if any; the caller owns it.

    Raises EOFError where the socket ends, and ProtocolError if several descriptors came; both close what came.
    """
    data = b""
    descriptors: list[int] = []
    try:
        while len(data) < n_bytes:
            received, found, _, _ = socket.recv_fds(sock, n_bytes - len(data), maxfds=1)
            descriptors += found
            if not received:
                raise EOFError("the connection was closed")
            data += received
        if len(descriptors) > 1:
            raise ProtocolError(f"it sent {len(descriptors)} file descriptors at once")
        return data, descriptors.pop() if descriptors else None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def receive_into(sock: socket.socket, target: Bytes) -> None:
    """Fill `target`. Raises EOFError where the socket ends."""
    view = target.data
    while view.nbytes:
        n_received = sock.recv_into(view, 0, socket.MSG_WAITALL)
        if not n_received:
            raise EOFError("the connection was closed in the middle of a message")
        view = view[n_received:]


def tune(sock: socket.socket) -> None:
    """Let TCP send at once, and notice within half a minute that the other machine is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
