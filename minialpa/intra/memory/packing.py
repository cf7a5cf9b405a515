"""Buffers of a program in memory: when values are there in, the bytes that hold them out.

As XLA does: the largest are placed first, into the buffer of a result, or of an argument that was copied, that is free
for their time. What is left goes into one block, each at the smallest gap that it fits beside those that are there at
the same time; by size and by duration, and the better of the two counts. Gaps remain, so a block may be larger than
what is in memory at any time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

#: Buffers start at multiples of this.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Buffer:
    """`value` (of a Recorder) is in memory at the times start, ..., end - 1."""

    value: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """When the values of a program are in memory, besides its arguments.

    results: values in buffers of their own until the end. idle: buffers of arguments that were copied, until a result
    takes them over. scratch: (time, bytes) of kernels that need more. shared: values that start in the buffer of an
    operand that ends then, and that operand.
    """

    n_times: int
    temporaries: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    idle: tuple[Buffer, ...]
    scratch: tuple[tuple[int, float], ...]
    shared: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class _Block:
    start: int
    end: int
    n_bytes: float


def pack(timeline: Timeline, sizes: Sequence[float]) -> tuple[float, list[int]]:
    """Bytes of the block of temporaries, and those that are there when most are; `sizes` are bytes of values."""
    left = _without_room(timeline, sizes)
    blocks = _blocks(timeline, left, sizes)
    by_size = sorted(blocks, key=lambda b: (-b.n_bytes, b.start - b.end))
    by_duration = sorted(blocks, key=lambda b: (b.start - b.end, -b.n_bytes))
    at = _fullest(blocks, timeline.n_times)
    return min(_height(by_size), _height(by_duration)), [b.value for b in left if b.start <= at < b.end]


def _without_room(timeline: Timeline, sizes: Sequence[float]) -> list[Buffer]:
    """Temporaries that find no place in the buffer of a result or argument."""
    rooms = [(_aligned(sizes[b.value]), [(b.start, b.end)]) for b in timeline.results]
    rooms += [(_aligned(sizes[b.value]), [(0, b.start), (b.end, timeline.n_times)]) for b in timeline.idle]
    left: list[Buffer] = []
    for b in sorted(timeline.temporaries, key=lambda b: (-sizes[b.value], b.start)):
        size = _aligned(sizes[b.value])
        for room, spans in rooms:
            if room >= size and all(b.end <= start or end <= b.start for start, end in spans):
                spans.append((b.start, b.end))
                break
        else:
            left.append(b)
    return left


def _blocks(timeline: Timeline, left: Sequence[Buffer], sizes: Sequence[float]) -> list[_Block]:
    """What to place: values that share a buffer as one, and scratch."""
    end: dict[int, int] = {}  # of those that begin with a value of their own
    first: dict[int, Buffer] = {}
    for b in sorted(left, key=lambda b: b.start):
        first[b.value] = first.get(timeline.shared.get(b.value, -1), b)
        end[first[b.value].value] = b.end
    own = [_Block(b.start, end[b.value], _aligned(sizes[b.value])) for b in left if first[b.value] is b]
    return own + [_Block(t, t + 1, n_bytes) for t, n_bytes in timeline.scratch]


def _fullest(blocks: Sequence[_Block], n_times: int) -> int:
    """The first time at which most bytes are in use."""
    change = np.zeros(n_times + 1)
    for b in blocks:
        change[b.start] += b.n_bytes
        change[b.end] -= b.n_bytes
    return int(np.argmax(np.cumsum(change)))


def _height(blocks: Sequence[_Block]) -> float:
    """Bytes up to the highest end when blocks are placed in this order."""
    starts, ends, lows, highs = (np.zeros(len(blocks)) for _ in range(4))
    for i, b in enumerate(blocks):
        beside = np.flatnonzero((starts[:i] < b.end) & (b.start < ends[:i]))
        beside = beside[np.argsort(lows[beside])]
        tops = np.maximum.accumulate(np.concatenate([[0.0], highs[beside]]))
        gaps = np.append(lows[beside], np.inf) - tops
        smallest = int(np.argmin(np.where(gaps >= b.n_bytes, gaps, np.inf)))
        low = tops[smallest if gaps[smallest] >= b.n_bytes else -1]
        starts[i], ends[i], lows[i], highs[i] = b.start, b.end, low, low + b.n_bytes
    return float(highs.max(initial=0.0))


def _aligned(n_bytes: float) -> float:
    return math.ceil(n_bytes / _ALIGNMENT) * _ALIGNMENT
