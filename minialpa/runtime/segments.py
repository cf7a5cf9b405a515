"""Memory for messages: pages that are used again and again, because fresh ones cost far more than a copy.

Writing 64 MB to fresh pages takes about 15 times as long as to pages that were used before. A segment is a mapping that
may be shared with one other process. Its first bytes say whether its payload is in use: the side that fills segments
sets the flag, the side that reads clears it when nobody refers to the payload any more. So giving memory back is one
store: no message, no lock, safe in a finalizer that runs anywhere.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

from minialpa.runtime.transport import ALIGNMENT

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_HEADER_BYTES = ALIGNMENT
_FREE, _IN_USE = 0, 1


class Segment:
    """A mapping with a flag and a payload of at least `size_bytes`, aligned to ALIGNMENT.

    The pages have no name and live as long as a mapping or array of any process refers to them.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        pages = np.frombuffer(mapping, np.uint8)
        self._flag = pages[:1]
        self._payload = pages[_HEADER_BYTES:]
        self.size_bytes = self._payload.size

    @property
    def free(self) -> bool:
        return bool(self._flag[0] == _FREE)

    def take(self, size_bytes: int) -> Bytes:
        """The first bytes of the payload, to be written. The segment is in use from now on."""
        self._flag[0] = _IN_USE
        return self._payload[:size_bytes]

    def lend(self, size_bytes: int) -> Bytes:
        """The first bytes of the payload, to be read. The segment is free when nothing refers to them any more."""
        return np.asarray(_Lease(self._payload[:size_bytes], self._flag))


class _Lease:
    """Owner of the memory of an array: what is sliced, viewed or taken over by jax keeps it, and its end is theirs."""

    def __init__(self, payload: Bytes, flag: Bytes) -> None:
        self.__array_interface__ = payload.__array_interface__
        self._payload = payload  # Keeps the pages mapped.
        self._flag = flag

    def __del__(self) -> None:
        self._flag[0] = 0  # _FREE, whose name may be gone when the interpreter ends.


class Pool:
    """Segments by size, made where none is free. Segments that are free are kept up to `idle_bytes` in all.

    shared: whether the pages are to be mapped by another process as well. One thread takes.
    """

    def __init__(self, shared: bool, idle_bytes: int) -> None:
        self._shared = shared
        self._idle_bytes = idle_bytes
        self._total_bytes = 0
        self._segments: dict[int, Segment] = {}  # By number, the one that was taken last at the end.
        self._n_made = 0

    def take(self, size_bytes: int) -> tuple[int, Segment, int | None]:
        """A free segment: its number, itself, and if it is new and shared a file descriptor, which the caller closes."""
        total_bytes = segment_bytes(size_bytes)
        for number, segment in self._segments.items():
            if segment.size_bytes + _HEADER_BYTES == total_bytes and segment.free:
                self._segments[number] = self._segments.pop(number)
                return number, segment, None
        mapping, descriptor = _map_shared(total_bytes) if self._shared else (_map_private(total_bytes), None)
        number, self._n_made = self._n_made, self._n_made + 1
        self._segments[number] = segment = Segment(mapping)
        self._total_bytes += total_bytes
        return number, segment, descriptor

    def drop_idle(self) -> list[int]:
        """Forget free segments, those first that were not used for longest, down to `idle_bytes`; their numbers."""
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
    """Bytes of the segment for a payload: whole pages, at most an eighth too many, so that like sizes share segments."""
    needed = size_bytes + _HEADER_BYTES
    step = max(mmap.PAGESIZE, 1 << max(0, needed.bit_length() - 4))
    return -(-needed // step) * step


def map_descriptor(descriptor: int, total_bytes: int) -> Segment:
    """The segment that a peer has made. Raises ValueError if the descriptor's pages are fewer than `total_bytes`."""
    return Segment(mmap.mmap(descriptor, total_bytes))


def _map_shared(total_bytes: int) -> tuple[mmap.mmap, int]:
    descriptor = os.memfd_create("minialpa", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, total_bytes)
        return mmap.mmap(descriptor, total_bytes), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def _map_private(total_bytes: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, total_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Fresh huge pages cost a fifth of fresh small ones.
    mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
