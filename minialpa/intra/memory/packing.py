"""Places of buffers in memory, and the bytes that hold them all.

The largest are placed first, into the buffer of a result that is free for their time. The others share one block. Each
is placed at the smallest gap that it fits, beside those that are in use at the same time; once from large to small and
once from long to short, and the smaller block counts. Gaps remain, so a block may be larger than what is in use at any
time. XLA does so for all kinds of devices.
"""

from __future__ import annotations

import math
from bisect import bisect, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minialpa.intra.memory.timeline import Buffer, Timeline


@dataclass(frozen=True, slots=True)
class _Block:
    """Aligned bytes that are in use at the times start, ..., end - 1."""

    start: int
    end: int
    n_bytes: float


@dataclass(frozen=True, slots=True)
class Packed:
    """The block of temporaries.

    Attributes:
        n_bytes: of the block.
        values: those in it when most bytes are in use.
        scratch: bytes of the buffers in it at that time that one kernel needs while it runs.
    """

    n_bytes: float
    values: tuple[int, ...]
    scratch: tuple[float, ...]


def pack(timeline: Timeline, sizes: Sequence[float], alignment_bytes: int) -> Packed:
    """The block that holds all temporaries.

    sizes: bytes of values. alignment_bytes: buffers start at multiples of this.
    """
    # What one kernel needs while it runs is a temporary like others, of a value without a number in the program.
    scratch = [Buffer(len(sizes) + i, time, time + 1) for i, (time, _) in enumerate(timeline.scratch)]
    all_sizes = [*sizes, *(n_bytes for _, n_bytes in timeline.scratch)]
    aligned = [math.ceil(n_bytes / alignment_bytes) * alignment_bytes for n_bytes in all_sizes]
    left = _without_room(timeline, [*timeline.temporaries, *scratch], all_sizes, aligned)
    blocks = _blocks(timeline, left, aligned)
    by_size = sorted(blocks, key=lambda block: (-block.n_bytes, block.start - block.end))
    by_duration = sorted(blocks, key=lambda block: (block.start - block.end, -block.n_bytes))
    at = _fullest(blocks, timeline.n_times)
    n_bytes = min(_height(by_size), _height(by_duration))
    alive = [buffer.value for buffer in left if buffer.start <= at < buffer.end]
    return Packed(
        n_bytes=n_bytes,
        values=tuple(value for value in alive if value < len(sizes)),
        scratch=tuple(all_sizes[value] for value in alive if value >= len(sizes)),
    )


def _without_room(
    timeline: Timeline, temporaries: Sequence[Buffer], sizes: Sequence[float], aligned: Sequence[int]
) -> list[Buffer]:
    """Those of `temporaries` that find no place in the buffer of a result."""
    room_bytes = np.array([aligned[own.value] for own in timeline.results])
    # When rooms are in use, in order. A result keeps its room until the end, so nothing that outlives its start fits.
    spans = [[(own.start, own.end)] for own in timeline.results]
    last_end = np.array([own.start for own in timeline.results])

    left: list[Buffer] = []
    for buffer in sorted(temporaries, key=lambda buffer: (-sizes[buffer.value], buffer.start)):
        span = (buffer.start, buffer.end)
        for room in np.flatnonzero((room_bytes >= aligned[buffer.value]) & (last_end >= buffer.end)).tolist():
            if _is_free(spans[room], span):
                insort(spans[room], span)
                break
        else:
            left.append(buffer)
    return left


def _is_free(spans: Sequence[tuple[int, int]], span: tuple[int, int]) -> bool:
    """Whether `span` has no time in common with any of `spans`, which have none in common and are in order."""
    start, end = span
    behind = bisect(spans, (start, math.inf))
    if behind < len(spans) and spans[behind][0] < end:
        return False
    return behind == 0 or spans[behind - 1][1] <= start or spans[behind - 1][0] >= end


def _blocks(timeline: Timeline, left: Sequence[Buffer], aligned: Sequence[int]) -> list[_Block]:
    """What to place: the buffers `left`, of which values that share a buffer are one block."""
    first: dict[int, Buffer] = {}  # for each value, the one that its buffer began with
    end: dict[int, int] = {}  # of the buffers that begin with a value
    for buffer in sorted(left, key=lambda buffer: buffer.start):
        first[buffer.value] = first.get(timeline.shared.get(buffer.value, -1), buffer)
        end[first[buffer.value].value] = buffer.end

    return [
        _Block(buffer.start, end[buffer.value], aligned[buffer.value])
        for buffer in left
        if first[buffer.value] is buffer
    ]


def _fullest(blocks: Sequence[_Block], n_times: int) -> int:
    """The first time at which most bytes are in use."""
    change = np.zeros(n_times + 1)
    for block in blocks:
        change[block.start] += block.n_bytes
        change[block.end] -= block.n_bytes
    return int(np.argmax(np.cumsum(change)))


def _height(blocks: Sequence[_Block]) -> float:
    """Bytes up to the highest end when blocks are placed in this order."""
    starts, ends, lows, highs = (np.zeros(len(blocks)) for _ in range(4))
    for i, block in enumerate(blocks):
        # The blocks in use at the same time, from low to high, and the gap below each of them and above the last.
        beside = np.flatnonzero((starts[:i] < block.end) & (block.start < ends[:i]))
        beside = beside[np.argsort(lows[beside])]
        tops = np.maximum.accumulate(np.concatenate([[0.0], highs[beside]]))
        gaps = np.append(lows[beside], np.inf) - tops

        smallest = int(np.argmin(np.where(gaps >= block.n_bytes, gaps, np.inf)))
        low = tops[smallest if gaps[smallest] >= block.n_bytes else -1]
        starts[i], ends[i], lows[i], highs[i] = block.start, block.end, low, low + block.n_bytes
    return float(highs.max(initial=0.0))
