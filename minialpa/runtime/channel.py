"""The connection of two workers: frames on a socket, a thread that writes and one that reads at each end.

A frame is a header of fixed size. On a Unix socket, messages lie in memory that both processes map, and the frame only
says where. Over TCP, and for small messages, the bytes follow their frame. The reader reads everything as it comes.

A message that is small and ready is written by the thread that sends it, as far as the socket takes it at once: waking
the writer would take longer. The writer has the rest, and everything that comes behind it.
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
from minialpa.runtime.handshake import shut
from minialpa.runtime.mailbox import Mailbox, Message, ProtocolError
from minialpa.runtime.shared_memory import Bytes, Pool, Segment, map_descriptor, segment_bytes
from minialpa.runtime.transport import ALIGNMENT, Layout, Part, Piece, lay_out
from minialpa.runtime.wire import Unsent, receive_into, receive_with_descriptor, tune

INLINE_BYTES = 32 << 10
"""Messages up to this size follow their frame, as all do over TCP."""

_QUICK_BYTES = 1 << 20  # Copied in the time that waking a thread takes.
_IDLE_BYTES = 1 << 30
_MAX_MESSAGE_BYTES = 1 << 40
_JOIN_S = 1.0


class _Kind(IntEnum):
    """What a frame is. INLINE: a message follows. SHARED: a message lies in a segment; where that is new, its file
    descriptor comes with the frame. DROP: a segment is not used again. GOODBYE: nothing else comes."""

    INLINE = 1
    SHARED = 2
    DROP = 3
    GOODBYE = 4


# Magic, kind, digest, tag, number of the segment, bytes of the message.
_FRAME = struct.Struct("<HHIQQQ")
_MAGIC = 0xA1FA


@dataclass(frozen=True, slots=True, eq=False)
class _Outgoing:
    """A message to be sent. unsent: what is left of it, once it has been begun."""

    tag: int
    parts: tuple[Part, ...]
    sent: Future[None]
    unsent: Unsent | None = None


class Channel:
    """The connection to one peer, with a thread that writes to it and one that reads."""

    def __init__(self, peer: int, sock: socket.socket, mailbox: Mailbox[Message]) -> None:
        self._peer = peer
        self._socket = sock
        self._mailbox = mailbox
        self._closing = False
        self._shares = sock.family not in (socket.AF_INET, socket.AF_INET6)
        # Of the writer's where memory is shared, else of the reader's.
        self._pool = Pool(self._shares, _IDLE_BYTES)
        self._segments: dict[int, Segment] = {}  # The peer's.
        self._lock = threading.Lock()
        # What the writer has to do and has not done; while there is something, nobody else writes.
        self._n_outgoing = 0
        self._outgoing: SimpleQueue[_Outgoing | None] = SimpleQueue()
        if not self._shares:
            tune(sock)
        self._threads = [
            threading.Thread(target=run, name=f"minialpa-{name}-{peer}", daemon=True)
            for name, run in (("write", self._write_all), ("read", self._read_all))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, tag: int, parts: Sequence[Part]) -> Future[None]:
        sent: Future[None] = Future()
        sent.set_running_or_notify_cancel()
        job = _Outgoing(tag, tuple(parts), sent)
        with self._lock:
            is_quick = not self._n_outgoing and self._is_quick(parts)
            left = self._write(job, socket.MSG_DONTWAIT) if is_quick else job
            if left is not None:
                self._n_outgoing += 1
                self._outgoing.put(left)
        return sent

    def say_goodbye(self) -> None:
        with self._lock:
            self._closing = True
            self._n_outgoing += 1
            self._outgoing.put(None)

    def close(self, flush_s: float) -> None:
        """Give the writer `flush_s` seconds to end, then cut it short."""
        writer, reader = self._threads
        writer.join(flush_s)
        shut(self._socket)
        # A writer that still waits for jax to compute an array cannot be woken. It ends when that is done.
        writer.join(_JOIN_S)
        reader.join(_JOIN_S)
        self._socket.close()

    # Writing

    def _is_quick(self, parts: Sequence[Part]) -> bool:
        """Whether the parts are ready, and copied sooner than the writer would wake."""
        at_most = _QUICK_BYTES if self._shares else INLINE_BYTES
        return sum(part.array.nbytes for part in parts) <= at_most and all(_is_ready(part.array) for part in parts)

    def _write_all(self) -> None:
        while (job := self._outgoing.get()) is not None:
            self._write(job)
            del job  # And with it the arrays, while waiting for the next one.
            with self._lock:
                self._n_outgoing -= 1
        if not self._mailbox.failed:
            with contextlib.suppress(OSError):
                self._socket.sendall(_FRAME.pack(_MAGIC, _Kind.GOODBYE, 0, 0, 0, 0))

    def _write(self, job: _Outgoing, flags: int = 0) -> _Outgoing | None:
        """Write a message; with MSG_DONTWAIT, as far as the socket takes it at once. What is left to be written."""
        unsent = job.unsent
        try:
            self._mailbox.check()
            unsent = unsent or self._bytes_of(job)
            if not unsent.write(self._socket, flags):
                return replace(job, unsent=unsent)
            job.sent.set_result(None)
        except BaseException as error:
            if unsent is not None:
                unsent.close()
            job.sent.set_exception(self._failed_to_send(job.tag, error))
            if not isinstance(error, Exception):  # An interrupt: nobody knows how much was written.
                raise
        return None

    def _bytes_of(self, job: _Outgoing) -> Unsent:
        arrays = [_view(part) for part in job.parts]
        layout = lay_out(tuple(Piece(array.shape, array.dtype) for array in arrays))
        if self._shares and layout.size_bytes > INLINE_BYTES:
            return self._shared(job.tag, layout, arrays)
        return self._inline(job.tag, layout, arrays)

    def _shared(self, tag: int, layout: Layout, arrays: list[np.ndarray[Any, Any]]) -> Unsent:
        number, segment, descriptor = self._pool.take(layout.size_bytes)
        try:
            payload = segment.take(layout.size_bytes)
            for offset, array in zip(layout.offsets, arrays, strict=True):
                target = payload[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
                np.copyto(_plain(target), _plain(array))
        except BaseException:
            if descriptor is not None:
                os.close(descriptor)
            raise
        frames = [_FRAME.pack(_MAGIC, _Kind.SHARED, layout.digest, tag, number, layout.size_bytes)]
        frames += (_FRAME.pack(_MAGIC, _Kind.DROP, 0, 0, dropped, 0) for dropped in self._pool.drop_idle())
        return Unsent([memoryview(b"".join(frames))], descriptor)

    def _inline(self, tag: int, layout: Layout, arrays: list[np.ndarray[Any, Any]]) -> Unsent:
        buffers = [memoryview(_FRAME.pack(_MAGIC, _Kind.INLINE, layout.digest, tag, 0, layout.size_bytes))]
        end = 0
        for offset, array in zip(layout.offsets, arrays, strict=True):
            buffers.append(memoryview(bytes(offset - end)))
            whole = _plain(np.ascontiguousarray(array))
            buffers.append(whole.reshape(-1).view(np.uint8).data)
            end = offset + array.nbytes
        return Unsent([buffer for buffer in buffers if buffer.nbytes])

    def _failed_to_send(self, tag: int, error: BaseException) -> WorkerError:
        failure = WorkerError(f"Message {tag} to worker {self._peer} was not sent: {str(error) or repr(error)}")
        failure.__cause__ = error
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
                why = "Its process has ended, or failed" if isinstance(error, EOFError | OSError) else "This is a bug"
                self._mailbox.fail(WorkerError(f"Worker {self._peer} is lost: {error}. {why}."))
                shut(self._socket)  # Wakes the writer.
        finally:
            self._segments.clear()

    def _read_frame(self) -> bool:
        """Read a frame and what belongs to it. False after a goodbye."""
        data, descriptor = receive_with_descriptor(self._socket, _FRAME.size)
        try:
            magic, kind, digest, tag, number, size_bytes = _FRAME.unpack(data)
            if magic != _MAGIC or size_bytes > _MAX_MESSAGE_BYTES:
                raise ProtocolError(f"it sent a frame {data.hex()}")
            match kind:
                case _Kind.INLINE:
                    payload = self._read_payload(size_bytes)
                case _Kind.SHARED:
                    payload = self._find_payload(number, size_bytes, descriptor)
                case _Kind.DROP:
                    self._segments.pop(number, None)
                    return True
                case _Kind.GOODBYE:
                    return False
                case _:
                    raise ProtocolError(f"it sent a frame of kind {kind}")
            self._mailbox.put(self._peer, tag, Message(payload, digest))
            return True
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _read_payload(self, size_bytes: int) -> Bytes:
        if size_bytes <= INLINE_BYTES:
            payload = _aligned(size_bytes)
            receive_into(self._socket, payload)
            return payload
        _, segment, _ = self._pool.take(size_bytes)
        receive_into(self._socket, segment.take(size_bytes))
        self._pool.drop_idle()
        return segment.lend(size_bytes)

    def _find_payload(self, number: int, size_bytes: int, descriptor: int | None) -> Bytes:
        if descriptor is not None:
            self._segments[number] = map_descriptor(descriptor, segment_bytes(size_bytes))
        segment = self._segments.get(number)
        if segment is None or size_bytes > segment.size_bytes:
            raise ProtocolError(f"it sent {size_bytes} bytes in segment {number}")
        return segment.lend(size_bytes)


def _view(part: Part) -> np.ndarray[Any, Any]:
    """What a part sends. Waits until it is ready; a jax array on CPU is viewed, not copied."""
    array = np.asarray(part.array)
    return array if part.index is None else array[part.index]


def _is_ready(array: Any) -> bool:
    """Whether viewing an array takes no waiting. One that is deleted is an error at once."""
    return isinstance(array, np.ndarray) or array.is_deleted() or array.is_ready()


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same elements as unsigned integers: NumPy copies those of other packages, as bfloat16, one by one."""
    size = array.dtype.itemsize
    return array.view(f"u{size}") if size in (1, 2, 4, 8) else array


def _aligned(size_bytes: int) -> Bytes:
    room = np.empty(size_bytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + size_bytes]
