"""Memory for messages: pools of pages that are reused, because fresh pages cost far more than a copy.

Writing 64 MB to fresh pages takes about 15 times as long as to pages that were used before. A segment is a mapping
that may be shared with one other process. Its first byte is a flag that says whether its payload is in use. The
process that fills a segment owns it, in a `Pool`, and sets the flag. The process that reads it clears the flag when
nothing refers to the payload any more. So returning memory is one store, without a message or a lock, and safe in a
finalizer on any thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from minialpa.runtime.transports.transport import ALIGNMENT

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_HEADER_BYTES = ALIGNMENT
_FREE, _IN_USE = 0, 1


class Segment:
    """A mapping with a flag and a payload that is aligned to ALIGNMENT.

    The pages have no name and live as long as a mapping or array of any process refers to them.

    Attributes:
        size_bytes: Bytes of the payload.
    """

    def __init__(self, pages: Bytes) -> None:
        self._flag = pages[:1]
        self._payload = pages[_HEADER_BYTES:]
        self.size_bytes = self._payload.size

    @property
    def free(self) -> bool:
        return bool(self._flag[0] == _FREE)

    def take(self, size_bytes: int) -> Bytes:
        """Mark the segment as in use; the first `size_bytes` of its payload, to be written."""
        self._flag[0] = _IN_USE
        return self._payload[:size_bytes]

    def lend(self, size_bytes: int) -> Bytes:
        """The first `size_bytes` of the payload, to be read. The segment is free once nothing refers to them."""
        return np.asarray(_Lease(self._payload[:size_bytes], self._flag))


class _Lease:
    """The base of a lent array. Slices, views and jax arrays of its memory keep it; freeing it frees the segment."""

    def __init__(self, payload: Bytes, flag: Bytes) -> None:
        self.__array_interface__ = payload.__array_interface__
        self._payload = payload  # Keeps the pages mapped.
        self._flag = flag
        self._process = os.getpid()

    # Defaults, because the names of the module may be gone when the interpreter ends.
    def __del__(self, free: int = _FREE, getpid: Callable[[], int] = os.getpid) -> None:
        if self._process == getpid():  # A forked child has a copy of this object, and the parent still reads the pages.
            self._flag[0] = free


class Pool:
    """Segments that one thread at a time takes and fills. Free ones are reused, and kept up to `idle_bytes` in total.

    If `shared`, another process can map the segments as well.
    """

    def __init__(self, shared: bool, idle_bytes: int) -> None:
        self._shared = shared
        self._idle_bytes = idle_bytes
        self._total_bytes = 0
        self._segments: dict[int, Segment] = {}  # By number, the most recently taken last.
        self._n_made = 0

    def take(self, size_bytes: int) -> tuple[int, Segment, int | None]:
        """A free segment for `size_bytes`: its number, the segment, and a file descriptor if it is new and shared.

        The caller owns the descriptor.
        """
        total_bytes = segment_bytes(size_bytes)
        # The most recently taken first: its pages may still be in a cache.
        for number, segment in reversed(self._segments.items()):
            if segment.size_bytes + _HEADER_BYTES == total_bytes and segment.free:
                self._segments[number] = self._segments.pop(number)
                return number, segment, None

        descriptor = None
        if self._shared:
            descriptor = os.memfd_create("minialpa", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, total_bytes)
            segment = map_descriptor(descriptor, total_bytes)
        else:
            segment = Segment(_map_private(total_bytes))

        number, self._n_made = self._n_made, self._n_made + 1
        self._segments[number] = segment
        self._total_bytes += total_bytes
        return number, segment, descriptor

    def drop_idle(self) -> list[int]:
        """Forget free segments, the least recently taken first, until `idle_bytes` are left; the numbers of these."""
        if self._total_bytes <= self._idle_bytes:
            return []

        idle = {number: segment.size_bytes for number, segment in self._segments.items() if segment.free}
        dropped = []
        excess = sum(idle.values()) - self._idle_bytes
        for number, size_bytes in idle.items():
            if excess <= 0:
                break
            excess -= size_bytes
            self._total_bytes -= size_bytes + _HEADER_BYTES
            del self._segments[number]
            dropped.append(number)
        return dropped


def segment_bytes(size_bytes: int) -> int:
    """Bytes of the segment for a payload of `size_bytes`, in whole pages.

    Rounded up by at most an eighth, so that messages of similar sizes reuse the same segments.
    """
    needed = size_bytes + _HEADER_BYTES
    step = max(mmap.PAGESIZE, 1 << max(0, needed.bit_length() - 4))
    return -(-needed // step) * step


def map_descriptor(descriptor: int, total_bytes: int) -> Segment:
    """The segment in the pages of a file descriptor. Raises ValueError if these are fewer than `total_bytes`."""
    if os.fstat(descriptor).st_size < total_bytes:
        raise ValueError(f"a segment of {total_bytes} bytes has only {os.fstat(descriptor).st_size}")
    return Segment(np.asarray(_SharedPages(descriptor, total_bytes)))


class _SharedPages:
    """A shared mapping. Unlike a mapping of Python's `mmap`, it keeps no file descriptor: a process has few of them.

    Only arrays refer to it, which the garbage collector does not traverse: it is unmapped when the last one is freed.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc().mmap(None, size_bytes, access, mmap.MAP_SHARED, descriptor, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": (size_bytes,), "typestr": "|u1"}
        self._unmap = functools.partial(_libc().munmap, address, size_bytes)

    def __del__(self) -> None:
        if hasattr(self, "_unmap"):
            self._unmap()


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


def _map_private(total_bytes: int) -> Bytes:
    mapping = mmap.mmap(-1, total_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Fresh huge pages cost a fifth as much as fresh small ones. Not every system has them.
    with contextlib.suppress(AttributeError, OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)
