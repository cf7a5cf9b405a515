"""The connection of two workers: it sends messages to one peer, and puts what the peer sends into the mailbox.

The connection carries frames. A frame is a header of fixed size; over TCP, and for small messages, the bytes of the
message follow it. On a Unix socket, large messages are in memory that both processes map, and the frame says where.

Each end has two threads. The reader reads every frame as it comes, so a peer that sends never waits for the program
here. The writer sends what the caller could not: waking a thread takes as long as copying a megabyte, so the caller
itself writes a message that is small and ready, as far as the socket takes it without blocking. The writer sends the
rest, and everything queued behind it: the caller writes only while, under the lock, the writer has nothing to do.

A channel owns its socket and the memory that it sends from. If the connection breaks, or a message cannot be sent, the
mailbox fails with a WorkerError that names the peer.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import IntEnum
from queue import SimpleQueue
from typing import Any

import numpy as np

from minialpa.errors import WorkerError
from minialpa.runtime.transports.handshake import shut
from minialpa.runtime.transports.mailbox import Mailbox, ProtocolError, ReceivedBytes
from minialpa.runtime.transports.shared_memory import Bytes, Pool, Segment, map_descriptor, segment_bytes
from minialpa.runtime.transports.transport import ALIGNMENT, Layout, Part, Piece, lay_out
from minialpa.runtime.transports.wire import Unsent, receive_into, receive_with_descriptor, tune

INLINE_BYTES = 32 << 10
"""Messages up to this size follow their frame. Over TCP, all do."""

_QUICK_BYTES = 1 << 20
"""The caller itself writes messages up to this size: copying them takes no longer than waking the writer."""
_IDLE_BYTES = 1 << 30
"""Memory that a channel keeps for later messages."""
_MAX_MESSAGE_BYTES = 1 << 40
"""A frame that announces more is not one of ours."""
_JOIN_S = 1.0
"""Seconds that `close` waits for each thread once the socket is shut."""


class FrameKind(IntEnum):
    """What follows a frame, or what it says."""

    INLINE = 1
    """The bytes of a message follow."""
    SHARED = 2
    """A message is in a segment. If the segment is new to the peer, its file descriptor comes with the frame."""
    DROP = 3
    """The sender will not use a segment again."""
    GOODBYE = 4
    """Nothing else comes."""


# Magic, kind, digest, tag, number of the segment, bytes of the message.
_FRAME = struct.Struct("<HHIQQQ")
_MAGIC = 0xA1FA


@dataclass(frozen=True, slots=True, eq=False)
class _QueuedSend:
    """A message to be sent.

    Attributes:
        tag: The tag of the message.
        parts: What it holds.
        sent: Done when the socket has taken the message, or when that has failed.
        unsent: What the socket has not taken yet; None before the first try.
    """

    tag: int
    parts: tuple[Part, ...]
    sent: Future[None]
    unsent: Unsent | None = None


class Channel:
    """The connection to worker `peer` over `sock`, which the channel owns from now on."""

    def __init__(self, peer: int, sock: socket.socket, mailbox: Mailbox[ReceivedBytes]) -> None:
        self._peer = peer
        self._socket = sock
        self._mailbox = mailbox
        self._closing = False

        # One thread at a time uses the pool: over Unix sockets, where memory is shared, the one that writes, and over
        # TCP the reader.
        self._shares_memory = sock.family not in (socket.AF_INET, socket.AF_INET6)
        self._pool = Pool(self._shares_memory, _IDLE_BYTES)
        self._peer_segments: dict[int, Segment] = {}  # Read and written by the reader only.

        # Sends that the writer has been given and has not finished. While there are any, only the writer writes, so
        # that messages stay whole and in order.
        self._lock = threading.Lock()
        self._n_unfinished = 0
        self._queue: SimpleQueue[_QueuedSend | None] = SimpleQueue()

        if not self._shares_memory:
            tune(sock)
        self._threads = [
            threading.Thread(target=run, name=f"minialpa-{name}-{peer}", daemon=True)
            for name, run in (("write", self._write_all), ("read", self._read_all))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, tag: int, parts: Sequence[Part]) -> Future[None]:
        """See `Transport.send`. The future fails with a WorkerError that names the message and the peer."""
        sent: Future[None] = Future()
        sent.set_running_or_notify_cancel()
        send = _QueuedSend(tag, tuple(parts), sent)
        with self._lock:
            is_quick = not self._n_unfinished and self._is_quick(parts)
            left = self._write(send, socket.MSG_DONTWAIT) if is_quick else send
            if left is not None:
                self._n_unfinished += 1
                self._queue.put(left)
        return sent

    def say_goodbye(self) -> None:
        """Have the writer tell the peer, behind all queued messages, that nothing else comes."""
        with self._lock:
            self._closing = True
            self._n_unfinished += 1
            self._queue.put(None)

    def close(self, flush_s: float) -> None:
        """Wait up to `flush_s` seconds for the writer, then end the connection and the threads. After `say_goodbye`."""
        writer, reader = self._threads
        writer.join(flush_s)
        shut(self._socket)
        # A writer that is waiting for jax to compute an array cannot be woken. It ends once the array is ready.
        writer.join(_JOIN_S)
        reader.join(_JOIN_S)
        self._socket.close()

    # Writing

    def _is_quick(self, parts: Sequence[Part]) -> bool:
        """Whether the parts are ready, and copying them takes less time than waking the writer."""
        most_bytes = _QUICK_BYTES if self._shares_memory else INLINE_BYTES
        return sum(part.array.nbytes for part in parts) <= most_bytes and all(_is_ready(part.array) for part in parts)

    def _write_all(self) -> None:
        while (send := self._queue.get()) is not None:
            self._write(send)
            del send  # Otherwise its arrays would live until the next message.
            with self._lock:
                self._n_unfinished -= 1
        # After a failure, the peer has to see the connection end without a goodbye.
        if not self._mailbox.failed:
            with contextlib.suppress(OSError):
                self._socket.sendall(_frame(FrameKind.GOODBYE))

    def _write(self, send: _QueuedSend, flags: int = 0) -> _QueuedSend | None:
        """Write a message, with MSG_DONTWAIT only as far as the socket takes it at once; the rest, or None.

        Errors go into the future of the message.
        """
        unsent = send.unsent
        try:
            self._mailbox.check()
            unsent = unsent or self._encode(send)
            if not unsent.write(self._socket, flags):
                return replace(send, unsent=unsent)
            send.sent.set_result(None)
        except BaseException as error:
            if unsent is not None:
                unsent.close()
            send.sent.set_exception(self._failed_to_send(send.tag, error))
            if not isinstance(error, Exception):  # An interrupt: nobody knows how much was written.
                raise
        return None

    def _encode(self, send: _QueuedSend) -> Unsent:
        """The frame of a message, with its bytes or the segment that holds them. Waits until the arrays are ready."""
        arrays = [_view(part) for part in send.parts]
        layout = lay_out(tuple(Piece(array.shape, array.dtype) for array in arrays))
        if self._shares_memory and layout.size_bytes > INLINE_BYTES:
            return self._encode_shared(send.tag, layout, arrays)
        return _encode_inline(send.tag, layout, arrays)

    def _encode_shared(self, tag: int, layout: Layout, arrays: list[np.ndarray[Any, Any]]) -> Unsent:
        number, segment, descriptor = self._pool.take(layout.size_bytes)
        try:
            payload = segment.take(layout.size_bytes)
            for offset, array in zip(layout.offsets, arrays, strict=True):
                target = payload[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
                np.copyto(_as_unsigned(target), _as_unsigned(array))
        except BaseException:
            if descriptor is not None:
                os.close(descriptor)
            raise

        frames = [
            _frame(FrameKind.SHARED, digest=layout.digest, tag=tag, segment=number, size_bytes=layout.size_bytes),
            *(_frame(FrameKind.DROP, segment=dropped) for dropped in self._pool.drop_idle()),
        ]
        return Unsent([memoryview(b"".join(frames))], descriptor)

    def _failed_to_send(self, tag: int, error: BaseException) -> WorkerError:
        failure = WorkerError(f"Message {tag} to worker {self._peer} was not sent: {str(error) or repr(error)}")
        failure.__cause__ = error
        # A peer that has closed its transport takes nothing more, and that is no failure of the others.
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
                # The peer ends the connection without a goodbye when it dies, and also when its transport fails.
                why = "Its process has ended, or failed" if isinstance(error, EOFError | OSError) else "This is a bug"
                self._mailbox.fail(WorkerError(f"Worker {self._peer} is lost: {error}. {why}."))
                shut(self._socket)  # Wakes the writer.
        finally:
            self._peer_segments.clear()

    def _read_frame(self) -> bool:
        """Read a frame, and put the message that comes with it into the mailbox. False after a goodbye."""
        data, descriptor = receive_with_descriptor(self._socket, _FRAME.size)
        try:
            magic, kind, digest, tag, number, size_bytes = _FRAME.unpack(data)
            if magic != _MAGIC or size_bytes > _MAX_MESSAGE_BYTES:
                raise ProtocolError(f"it sent a frame {data.hex()}")

            match kind:
                case FrameKind.INLINE:
                    payload = self._read_payload(size_bytes)
                case FrameKind.SHARED:
                    payload = self._map_payload(number, size_bytes, descriptor)
                case FrameKind.DROP:
                    self._peer_segments.pop(number, None)
                    return True
                case FrameKind.GOODBYE:
                    return False
                case _:
                    raise ProtocolError(f"it sent a frame of kind {kind}")
            self._mailbox.put(self._peer, tag, ReceivedBytes(payload, digest))
            return True
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _read_payload(self, size_bytes: int) -> Bytes:
        """The bytes behind an inline frame."""
        if size_bytes <= INLINE_BYTES:
            payload = _aligned(size_bytes)
            receive_into(self._socket, payload)
            return payload

        _, segment, _ = self._pool.take(size_bytes)
        receive_into(self._socket, segment.take(size_bytes))
        self._pool.drop_idle()
        return segment.lend(size_bytes)

    def _map_payload(self, number: int, size_bytes: int, descriptor: int | None) -> Bytes:
        """The bytes in segment `number` of the peer, which is mapped now if `descriptor` comes with it."""
        if descriptor is not None:
            self._peer_segments[number] = map_descriptor(descriptor, segment_bytes(size_bytes))
        segment = self._peer_segments.get(number)
        if segment is None or size_bytes > segment.size_bytes:
            raise ProtocolError(f"it sent {size_bytes} bytes in segment {number}")
        return segment.lend(size_bytes)


def _frame(kind: FrameKind, *, digest: int = 0, tag: int = 0, segment: int = 0, size_bytes: int = 0) -> bytes:
    return _FRAME.pack(_MAGIC, kind, digest, tag, segment, size_bytes)


def _encode_inline(tag: int, layout: Layout, arrays: list[np.ndarray[Any, Any]]) -> Unsent:
    """The frame of a message and its bytes, with zeros between parts up to the next offset."""
    frame = _frame(FrameKind.INLINE, digest=layout.digest, tag=tag, size_bytes=layout.size_bytes)
    buffers = [memoryview(frame)]
    end = 0
    for offset, array in zip(layout.offsets, arrays, strict=True):
        buffers.append(memoryview(bytes(offset - end)))
        contiguous = _as_unsigned(np.ascontiguousarray(array))
        buffers.append(contiguous.reshape(-1).view(np.uint8).data)
        end = offset + array.nbytes
    return Unsent([buffer for buffer in buffers if buffer.nbytes])


def _view(part: Part) -> np.ndarray[Any, Any]:
    """The elements that a part sends. Waits until they are ready; a jax array on CPU is viewed, not copied."""
    array = np.asarray(part.array)
    return array if part.index is None else array[part.index]


def _is_ready(array: Any) -> bool:
    """Whether `_view` returns without waiting. For a deleted array it raises at once."""
    return isinstance(array, np.ndarray) or array.is_deleted() or array.is_ready()


def _as_unsigned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The memory of `array` as unsigned integers: NumPy copies dtypes of other packages, as bfloat16, one by one."""
    size = array.dtype.itemsize
    return array.view(f"u{size}") if size in (1, 2, 4, 8) else array


def _aligned(size_bytes: int) -> Bytes:
    """Fresh memory that begins at a multiple of ALIGNMENT."""
    room = np.empty(size_bytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + size_bytes]
