"""How arrays move from one worker process to another: the interface of every transport, and the layout of a message.

A message is a list of parts of arrays that one worker sends to one peer under a tag. Workers are numbered 0, 1, ...
Both sides know the contents of a message from the program, so only bytes travel, and no pickles.
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
"""Bytes. jax on CPU uses the memory of a NumPy array without a copy if it begins at a multiple of this."""


Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """An array, or a slice of one, to be sent.

    Attributes:
        array: on one device.
        index: the slices of `array` to send, one for each dimension; None for all of it.
        device: the device that receives it, as the receiving worker numbers its own. The host transport ignores it.
    """

    array: jax.Array | np.ndarray[Any, Any]
    index: tuple[slice, ...] | None = None
    device: int = 0


@dataclass(frozen=True, slots=True)
class ExpectedPart:
    """The part that a receiver expects, with the device that receives it, as in `Part`."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device: int = 0

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Transport(Protocol):
    """Moves messages between this worker and its peers. Any thread may call it.

    Each tag is used for one message of a pair of workers. Messages may be received in another order than they were
    sent: the receiver keeps early messages, so a sender never waits for `receive`. After the first error every call
    raises it, and waiting calls end at once. All errors are WorkerErrors that name the peer.
    """

    def send(self, peer: int, tag: int, parts: Sequence[Part]) -> Future[None]:
        """Send parts in the background, once they are ready.

        The transport keeps the arrays until the future is done. Until then they must not be donated; later they may.
        """
        ...

    def receive(self, peer: int, tag: int, expected: Sequence[ExpectedPart], timeout_s: float) -> list[Any]:
        """Wait for a message and return its parts, in the order in which they were sent.

        Raises WorkerError if it does not come within `timeout_s` seconds or does not match `expected`.
        """
        ...

    def close(self) -> None:
        """Send what is ready, say goodbye to the peers, and end threads and connections. Received arrays stay valid."""
        ...


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of the parts of a message in its bytes.

    Attributes:
        offsets: the first byte of each part, a multiple of ALIGNMENT.
        digest: a checksum of shapes and dtypes, by which a receiver notices that it expects other parts.
    """

    offsets: tuple[int, ...]
    size_bytes: int
    digest: int


@functools.lru_cache(maxsize=4096)  # All steps have the same messages, and the name of a dtype takes long to make.
def lay_out(expected: tuple[ExpectedPart, ...]) -> Layout:
    """The pieces one after the other, each aligned. Sender and receiver compute the same layout for the same pieces."""
    offsets = []
    end = 0
    for part in expected:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(start)
        end = start + part.size_bytes
    words = ";".join(f"{part.shape}{part.dtype}" for part in expected)
    return Layout(tuple(offsets), end, zlib.crc32(words.encode()))
