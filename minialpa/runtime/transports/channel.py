"""The connection of two workers: it sends messages to one peer, and puts the peer's messages into the mailbox.

It carries frames: a header, then the bytes of a message. A reader thread reads every frame at once, so a sending peer
never waits. A writer thread sends queued messages. While it is idle, the caller itself writes small ready messages, as
far as the socket takes them without blocking, because waking a thread takes longer than the copy.

If the connection breaks or a message cannot be sent, the mailbox fails with a WorkerError that names the peer.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import IntEnum
from queue import SimpleQueue
from typing import Any

import numpy as np

from minialpa.errors import WorkerError
from minialpa.runtime.transports.handshake import shut
from minialpa.runtime.transports.mailbox import Mailbox, ProtocolError, ReceivedBytes
from minialpa.runtime.transports.transport import ALIGNMENT, Bytes, ExpectedPart, Part, lay_out

QUICK_BYTES = 128 << 10
"""Largest message that the caller itself writes."""

_MAX_MESSAGE_BYTES = 1 << 40
"""A frame that announces more bytes is an error."""
_JOIN_S = 1.0
"""Seconds that `close` waits for each thread after the socket is shut."""


class FrameKind(IntEnum):
    MESSAGE = 1
    GOODBYE = 2


# Magic, kind, digest, tag, bytes of the message.
_FRAME = struct.Struct("<HHIQQ")
_MAGIC = 0xA1FA


@dataclass(frozen=True, slots=True, eq=False)
class _QueuedMessage:
    """A message to send.

    Attributes:
        sent: done when the socket has taken the message or has failed to.
        rest: bytes that the caller could not write; None before the first try.
    """

    tag: int
    parts: tuple[Part, ...]
    sent: Future[None]
    rest: bytes | None = None


class Channel:
    """The connection to worker `peer` over `sock`, which the channel owns."""

    def __init__(self, peer: int, sock: socket.socket, mailbox: Mailbox[ReceivedBytes]) -> None:
        self._peer = peer
        self._socket = sock
        self._mailbox = mailbox
        self._closing = False

        # Unfinished sends. While there are any, only the writer writes: messages stay whole and in order.
        self._lock = threading.Lock()
        self._n_unfinished = 0
        self._queue: SimpleQueue[_QueuedMessage | None] = SimpleQueue()

        _tune(sock)
        self._threads = [
            threading.Thread(target=run, name=f"minialpa-{name}-{peer}", daemon=True)
            for name, run in (("write", self._write_all), ("read", self._read_all))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, tag: int, parts: Sequence[Part]) -> Future[None]:
        sent: Future[None] = Future()
        sent.set_running_or_notify_cancel()
        send = _QueuedMessage(tag, tuple(parts), sent)
        with self._lock:
            is_quick = not self._n_unfinished and _is_quick(parts)
            unsent = self._write_quickly(send) if is_quick else send
            if unsent is not None:
                self._n_unfinished += 1
                self._queue.put(unsent)
        return sent

    def say_goodbye(self) -> None:
        """Queue a goodbye."""
        with self._lock:
            self._closing = True
            self._n_unfinished += 1
            self._queue.put(None)

    def close(self, flush_s: float) -> None:
        """Wait up to `flush_s` seconds for the writer, then end connection and threads."""
        writer, reader = self._threads
        writer.join(flush_s)
        shut(self._socket)
        # A writer that waits for an array of jax cannot be woken.
        writer.join(_JOIN_S)
        reader.join(_JOIN_S)
        self._socket.close()

    # Writing

    def _write_all(self) -> None:
        while (send := self._queue.get()) is not None:
            self._write(send)
            del send  # Otherwise its arrays would live until the next message.
            with self._lock:
                self._n_unfinished -= 1
        # After a failure, the peer has to see the connection end without a goodbye.
        if not self._mailbox.failed:
            with contextlib.suppress(OSError):
                self._socket.sendall(_FRAME.pack(_MAGIC, FrameKind.GOODBYE, 0, 0, 0))

    def _write(self, send: _QueuedMessage) -> None:
        with self._reporting(send):
            for data in _encoded(send) if send.rest is None else (send.rest,):
                self._socket.sendall(data)
            send.sent.set_result(None)

    def _write_quickly(self, send: _QueuedMessage) -> _QueuedMessage | None:
        """Write without blocking; returns a message with the other bytes, if any."""
        with self._reporting(send):
            data = b"".join(_encoded(send))
            try:
                n_sent = self._socket.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                n_sent = 0
            if n_sent < len(data):
                return replace(send, rest=data[n_sent:])
            send.sent.set_result(None)
        return None

    @contextlib.contextmanager
    def _reporting(self, send: _QueuedMessage) -> Iterator[None]:
        """Errors become the error of `send.sent` and the mailbox."""
        try:
            self._mailbox.check()
            yield
        except BaseException as error:
            send.sent.set_exception(self._send_error(send.tag, error))
            if not isinstance(error, Exception):  # An interrupt: it is unknown how much was written.
                raise

    def _send_error(self, tag: int, error: BaseException) -> WorkerError:
        failure = WorkerError(f"Arrays for worker {self._peer} were not sent (tag {tag}). {str(error) or repr(error)}")
        failure.__cause__ = error
        # A closed peer takes no more messages, without a failure of the others.
        if not self._closing and not self._mailbox.has_left(self._peer):
            self._mailbox.fail(failure)
        return failure

    # Reading

    def _read_all(self) -> None:
        try:
            while self._read_frame():
                pass
            self._mailbox.leave(self._peer)
        except Exception as error:
            if not self._closing:
                # The peer has died, or its transport has failed.
                why = (
                    "Its process has ended, or failed."
                    if isinstance(error, EOFError | OSError)
                    else "This is a bug in minialpa: report it with this message."
                )
                self._mailbox.fail(WorkerError(f"Worker {self._peer} is lost: {error}. {why}"))
                shut(self._socket)  # Wakes the writer.

    def _read_frame(self) -> bool:
        """Returns False for a goodbye."""
        header = np.empty(_FRAME.size, np.uint8)
        self._fill(header)
        magic, kind, digest, tag, size_bytes = _FRAME.unpack(header.data)
        if magic != _MAGIC or size_bytes > _MAX_MESSAGE_BYTES:
            raise ProtocolError(f"it sent a frame {header.tobytes().hex()}")

        match kind:
            case FrameKind.MESSAGE:
                payload = _aligned(size_bytes)
                self._fill(payload)
                self._mailbox.put(self._peer, tag, ReceivedBytes(payload, digest))
                return True
            case FrameKind.GOODBYE:
                return False
            case _:
                raise ProtocolError(f"it sent a frame of kind {kind}")

    def _fill(self, target: Bytes) -> None:
        """Raises EOFError where the connection ends."""
        view = target.data
        while view.nbytes:
            n_received = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            if not n_received:
                raise EOFError("the connection was closed")
            view = view[n_received:]


def _encoded(send: _QueuedMessage) -> Iterator[bytes | memoryview]:
    arrays = [_view(part) for part in send.parts]
    layout = lay_out(tuple(ExpectedPart(array.shape, array.dtype) for array in arrays))
    yield _FRAME.pack(_MAGIC, FrameKind.MESSAGE, layout.digest, send.tag, layout.size_bytes)
    end = 0
    for offset, array in zip(layout.offsets, arrays, strict=True):
        if offset > end:
            yield bytes(offset - end)
        yield np.ascontiguousarray(_as_unsigned(array)).reshape(-1).view(np.uint8).data
        end = offset + array.nbytes


def _view(part: Part) -> np.ndarray[Any, Any]:
    """Waits for the array. A jax array on CPU is viewed, not copied."""
    array = np.asarray(part.array)
    return array if part.index is None else array[part.index]


def _is_quick(parts: Sequence[Part]) -> bool:
    return sum(part.array.nbytes for part in parts) <= QUICK_BYTES and all(_is_ready(part.array) for part in parts)


def _is_ready(array: Any) -> bool:
    """Whether `_view` returns, or for a deleted array raises, at once."""
    return isinstance(array, np.ndarray) or array.is_deleted() or array.is_ready()


def _as_unsigned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """As unsigned integers, since NumPy copies foreign dtypes, such as bfloat16, element by element."""
    size = array.dtype.itemsize
    return array.view(f"u{size}") if size in (1, 2, 4, 8) else array


def _aligned(size_bytes: int) -> Bytes:
    padded = np.empty(size_bytes + ALIGNMENT, np.uint8)
    start = -padded.ctypes.data % ALIGNMENT
    return padded[start : start + size_bytes]


def _tune(sock: socket.socket) -> None:
    """Send at once; detect within 30 seconds that the other machine is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
