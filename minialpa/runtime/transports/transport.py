"""The interface of transports between worker processes, and the layout of a message.

A message is a list of parts of arrays that one worker sends to one peer under a tag. Both sides know shapes and dtypes
from the program, so only bytes travel, and no pickles.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

ALIGNMENT = 64
"""In bytes. jax on CPU uses a NumPy array without a copy if its memory begins at a multiple of this."""


Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """An array on one device, or a slice of it.

    Attributes:
        index: a slice for each dimension of `array`; None for the whole array.
        device: the receiving device, as the receiving worker numbers its devices. The host transport ignores it.
    """

    array: jax.Array | np.ndarray[Any, Any]
    index: tuple[slice, ...] | None = None
    device: int = 0


@dataclass(frozen=True, slots=True)
class ExpectedPart:
    """`device` is as in `Part`."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device: int = 0

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Transport(Protocol):
    """Moves messages between this worker and its peers. Any thread may call it.

    A pair of workers uses each tag once. The receiver keeps early messages, so a sender never waits for `receive`.
    After the first error, every call raises it at once. All errors are WorkerErrors that name the peer.
    """

    def send(self, peer: int, tag: int, parts: Sequence[Part]) -> Future[None]:
        """Send parts in the background, once they are ready. Do not donate them before the future is done."""
        ...

    def receive(self, peer: int, tag: int, expected: Sequence[ExpectedPart], timeout_s: float) -> list[Any]:
        """The parts of a message, in the order of sending.

        Raises WorkerError if it does not come within `timeout_s` seconds or does not match `expected`.
        """
        ...

    def close(self) -> None:
        """Send ready messages; end threads and connections. Received arrays stay valid."""
        ...


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of parts in the bytes of a message.

    Attributes:
        offsets: first byte of each part, a multiple of ALIGNMENT.
        digest: checksum of shapes and dtypes.
    """

    offsets: tuple[int, ...]
    size_bytes: int
    digest: int


@functools.lru_cache(maxsize=4096)  # Steps repeat their messages, and the name of a dtype takes long to make.
def lay_out(expected: tuple[ExpectedPart, ...]) -> Layout:
    """Aligned parts, one after the other, equal for sender and receiver. Parts of 12 and 5 bytes begin at 0 and 64."""
    offsets = []
    end = 0
    for part in expected:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(start)
        end = start + part.size_bytes
    words = ";".join(f"{part.shape}{part.dtype}" for part in expected)
    return Layout(tuple(offsets), end, zlib.crc32(words.encode()))
