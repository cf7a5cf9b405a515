"""Bytes and file descriptors on the socket of two workers."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

from minialpa.runtime.mailbox import ProtocolError
from minialpa.runtime.shared_memory import Bytes

_MAX_BUFFERS = 512  # As many as the kernel takes at a time.
_DESCRIPTOR = struct.Struct("i")


@dataclass(slots=True, eq=False)
class Unsent:
    """What is still to be written: buffers, none of them empty, and the file descriptor that goes with the first byte.

    Owns the descriptor. `close` it if it is not written to the end.
    """

    buffers: list[memoryview]
    descriptor: int | None = None

    def write(self, sock: socket.socket, flags: int = 0) -> bool:
        """Write all; with MSG_DONTWAIT, what the socket takes at once. Whether nothing is left."""
        try:
            while self.buffers:
                with_it = [] if self.descriptor is None else [self._ancillary(self.descriptor)]
                self._forget(sock.sendmsg(self.buffers[:_MAX_BUFFERS], with_it, flags))
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def _ancillary(self, descriptor: int) -> tuple[int, int, bytes]:
        return socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(descriptor)

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
    """The next bytes, and the file descriptor that came with them, if any. Raises EOFError where the socket ends."""
    data = b""
    descriptors: list[int] = []
    try:
        while len(data) < n_bytes:
            received, ancillary, _, _ = sock.recvmsg(n_bytes - len(data), socket.CMSG_LEN(_DESCRIPTOR.size))
            for level, kind, sent in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    whole = len(sent) - len(sent) % _DESCRIPTOR.size
                    descriptors += (number for (number,) in _DESCRIPTOR.iter_unpack(sent[:whole]))
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
    """Have TCP send at once, and notice within half a minute that a machine is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
