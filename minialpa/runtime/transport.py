"""How arrays get from one worker process to another: the protocol that every transport keeps, and what a message is.

A message is a list of parts of arrays that one worker sends to one peer under a tag. Workers are numbered 0, 1, ...
Both sides know from the program what a message holds, so only bytes travel, never a description to be unpickled.
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
"""Bytes. Where a NumPy array begins at a multiple of it, jax on CPU takes it over without a copy."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What is sent: `array`, which lies on one device, or the elements of it at `index`, a tuple of slices.

    device: the device that it is for, as the receiving worker numbers its own. The host transport leaves that alone.
    """

    array: jax.Array | np.ndarray[Any, Any]
    index: tuple[slice, ...] | None = None
    device: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """What is received: shape and dtype of a part, and its device as in `Part`."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device: int = 0

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Transport(Protocol):
    """Moves messages between this worker and its peers.

    A tag is used for one message of a pair. Messages can be received in another order than they were sent in; those
    that nobody has asked for yet wait at the receiver, so a sender never waits for `receive`. After the first error
    every call raises it, and those that wait end at once. All errors are WorkerErrors that name the peer.
    """

    def send(self, peer: int, tag: int, parts: Sequence[Part]) -> Future[None]:
        """Send parts once they are ready, in the background.

        The transport keeps the arrays until the future is done. Until then they must not be donated; later they may.
        """
        ...

    def receive(self, peer: int, tag: int, pieces: Sequence[Piece], timeout_s: float) -> list[Any]:
        """Wait for a message and return its parts, in the order in which they were sent.

        Raises WorkerError if it does not come within `timeout_s` seconds or is not what `pieces` say.
        """
        ...

    def close(self) -> None:
        """Send what is ready, tell the peers, and end threads and connections. Arrays that were received stay valid."""
        ...


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a message lie in its bytes.

    offsets: of each part, multiples of ALIGNMENT. size_bytes: of the whole. digest: differs where shapes or dtypes do.
    """

    offsets: tuple[int, ...]
    size_bytes: int
    digest: int


@functools.lru_cache(maxsize=4096)  # Each step has the messages of the one before, and names of dtypes take long.
def lay_out(pieces: tuple[Piece, ...]) -> Layout:
    """One piece behind the other, each aligned. Sender and receiver get the same answer for the same pieces."""
    offsets = []
    end = 0
    for piece in pieces:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(start)
        end = start + piece.size_bytes
    words = ";".join(f"{piece.shape}{piece.dtype}" for piece in pieces)
    return Layout(tuple(offsets), end, zlib.crc32(words.encode()))
