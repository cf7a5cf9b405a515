"""When each buffer of a program is in use, and the bytes that hold them all: kernels in, a timeline and `Packed` out.

A buffer is in use from the kernel that writes it to its last reader, both included, or until the last reader takes the
buffer over. Times are numbers of kernels.                                                               -> timeline_of

As in XLA, buffers that fit into the buffer of a result while it is free are placed there, from large to small. The
others share one block: each takes the smallest gap beside the buffers in use at the same time. The order is from large
to small, or from long to short; the smaller block counts.                                               -> pack
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect, insort
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np

from minialpa.intra.memory.compiler import Kernel
from minialpa.ir.repeats import Repeated, UnitPass

#: Kernels of one pass of a layer are apart if more than `_APART` others run between them. A pass has a span if more
#: than this part of its kernels is together.
_APART, _MOST_KERNELS = 6, 0.4

# ---- times -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Buffer:
    """`value` is in memory at the times start, ..., end - 1."""

    value: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferTimeline:
    """The buffers of a program, without its arguments.

    Attributes:
        temporaries: values that are free before the end.
        results: values with separate buffers until the end.
        scratch: (time, bytes) of each buffer that a kernel needs only while it runs.
        shared: value -> operand whose buffer the value takes over.
        copies: (buffer, n): n further buffers like it, see `copies_of`.
    """

    n_times: int
    temporaries: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    scratch: tuple[tuple[int, float], ...]
    shared: Mapping[int, int]
    copies: tuple[tuple[Buffer, int], ...] = ()


def timeline_of(
    kernels: Sequence[Kernel],
    sizes: Sequence[float],
    *,
    inputs: Sequence[int],
    results: Sequence[int],
    pairs: Sequence[tuple[int, int]],
) -> BufferTimeline:
    """Of `kernels` in this order. sizes: bytes of values. pairs: (i, o) where result o takes over input i."""
    home = homes(kernels, inputs)
    # Also of results that take over an input.
    kept = {home.get(v, v) for v in results}
    replaced = {home.get(results[o], results[o]) for _, o in pairs}

    start, end = _starts_and_ends(kernels, home)
    shared = _buffers_taken_over(kernels, start, end, kept=kept, home=home, sizes=sizes)
    # Before, the buffer has the operand.
    start.update((value, end[operand]) for value, operand in shared.items())

    n_times = len(kernels)
    return BufferTimeline(
        n_times=n_times,
        temporaries=tuple(Buffer(v, begin, end[v]) for v, begin in start.items() if v not in kept),
        results=tuple(Buffer(v, begin, n_times) for v, begin in start.items() if v in kept and v not in replaced),
        scratch=tuple((time, n_bytes) for time, kernel in enumerate(kernels) for n_bytes in kernel.scratch),
        shared=shared,
    )


def homes(kernels: Sequence[Kernel], inputs: Sequence[int] = ()) -> dict[int, int]:
    """Value in the buffer of another value -> first value of the buffer. `inputs` are not written in place."""
    home: dict[int, int] = {}
    arguments = set(inputs)
    for kernel in kernels:
        if kernel.alias is not None and not (kernel.in_place and kernel.alias in arguments):
            home[kernel.writes[0]] = home.get(kernel.alias, kernel.alias)
    return home


def _starts_and_ends(kernels: Sequence[Kernel], home: Mapping[int, int]) -> tuple[dict[int, int], dict[int, int]]:
    """Arguments have only an end."""
    start: dict[int, int] = {}
    end: dict[int, int] = {}
    for time, kernel in enumerate(kernels):
        end.update((home.get(value, value), time + 1) for value in kernel.reads)
        for value in kernel.writes:
            if value not in home:
                start[value] = time
                end.setdefault(value, time + 1)
    return start, end


def _buffers_taken_over(
    kernels: Sequence[Kernel],
    start: Mapping[int, int],
    end: Mapping[int, int],
    *,
    kept: AbstractSet[int],
    home: Mapping[int, int],
    sizes: Sequence[float],
) -> dict[int, int]:
    """Value -> operand whose buffer the value takes over: read by the kernel for the last time, and of equal size.

    Only results of loops take over buffers that are changed in place.

    kept: values whose buffers hold results.
    """
    shared: dict[int, int] = {}
    taken: set[int] = set()
    changed = {kernel.alias for kernel in kernels if kernel.in_place}
    fixed = kept | {home.get(v, v) for v in changed if v is not None}

    def may_take(result: int, operand: int, time: int) -> bool:
        is_new = result in start and result not in shared and result not in changed
        is_free = operand in start and operand not in taken and end[operand] == time + 1
        return is_new and is_free and sizes[operand] == sizes[result]

    for time, kernel in enumerate(kernels):
        pairs = [(result, operand, kept) for result, operand in kernel.carries]
        pairs += [(result, operand, fixed) for result in kernel.writes for operand in kernel.shares]
        for result, view, unavailable in pairs:
            operand = home.get(view, view)
            if operand not in unavailable and may_take(result, operand, time):
                shared[result] = operand
                taken.add(operand)
    return shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Values of the model units of a short step, see `Repeats`.

    places: value -> place of its equation in a model unit.
    moved: results of collectives.
    arguments: the arguments that stand for several.
    """

    places: Mapping[int, Repeated]
    moved: AbstractSet[int]
    arguments: AbstractSet[int]


def copies_of(
    timeline: BufferTimeline, kernels: Sequence[Kernel], inputs: Sequence[int], units: Units
) -> tuple[tuple[Buffer, int], ...]:
    """Buffers of the units that a model unit stands for, and their numbers, see `Repeats`.

    A value that one pass of a unit leaves for another pass waits in all units at the same time: from the end of the
    first pass of the model unit, which stands for the last unit, to the start of the second. So do values that wait for
    kernels far from their pass.
    """
    uses = _uses(kernels, inputs, units)
    spans = {one: span for one, found in uses.times.items() if (span := _span_of_pass(found)) is not None}
    copies: list[tuple[Buffer, int]] = []
    for buffer in timeline.temporaries:
        if buffer.value not in uses.of_value:
            continue
        unit, used = uses.unit_of[buffer.value], uses.of_value[buffer.value]
        start, end = uses.fetched.get(buffer.value, used[0]), min(buffer.end, used[-1] + 1)
        beside = sorted(span for one, span in spans.items() if one.run == unit.unit_pass.run)
        # Kernels far from the others of their pass run unit by unit, too.
        if any(start < high and low < end for low, high in beside):
            copies += [
                (Buffer(buffer.value, low, high), unit.n - 1) for low, high in _times_outside(beside, start, end)
            ]
    return tuple(copies)


@dataclass(frozen=True, slots=True)
class _Uses:
    """When kernels of model units run.

    times: of the kernels of each pass.
    of_value: of the kernels that make or read each value.
    unit_of: the last pass of these kernels.
    fetched: for collectives of arguments.
    """

    times: dict[UnitPass, list[int]] = field(default_factory=dict)
    of_value: dict[int, list[int]] = field(default_factory=dict)
    unit_of: dict[int, Repeated] = field(default_factory=dict)
    fetched: dict[int, int] = field(default_factory=dict)


def _uses(kernels: Sequence[Kernel], inputs: Sequence[int], units: Units) -> _Uses:
    home, places, uses = homes(kernels, inputs), dict(units.places), _Uses()
    for time, kernel in enumerate(kernels):
        made = [*kernel.writes]
        if not units.moved.isdisjoint(made):
            # A collective belongs to the unit that makes its operand.
            made += kernel.reads
            places.update((v, places[read]) for v in kernel.writes for read in kernel.reads if read in places)
            if all(read in units.arguments for read in kernel.reads):
                uses.fetched.update((v, time) for v in kernel.writes)

        here = next((places[v] for v in made if v in places), None)
        if here is not None:
            uses.times.setdefault(here.unit_pass, []).append(time)
            for value in (home.get(v, v) for v in (*kernel.reads, *kernel.writes)):
                uses.of_value.setdefault(value, []).append(time)
                uses.unit_of[value] = here
    return uses


def _span_of_pass(times: Sequence[int]) -> tuple[int, int] | None:
    """First time, and time after the last, of most kernels of a pass; None if units take turns all the time.

    Compilers run a few kernels of a pass long before or after the others.
    """
    breaks = [i for i, (a, b) in enumerate(itertools.pairwise(times), 1) if b - a > _APART]
    runs = [times[a:b] for a, b in itertools.pairwise((0, *breaks, len(times)))]
    most = max(runs, key=len)
    return (most[0], most[-1] + 1) if len(most) > _MOST_KERNELS * len(times) else None


def _times_outside(spans: Sequence[tuple[int, int]], start: int, end: int) -> Iterator[tuple[int, int]]:
    for low, high in spans:
        if start < min(low, end):
            yield start, min(low, end)
        start = max(start, high)
    if start < end:
        yield start, end


# ---- places ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Block:
    start: int
    end: int
    n_bytes: float


@dataclass(frozen=True, slots=True)
class Packed:
    """The block of temporaries.

    values: values in it when most bytes are in use.
    scratch: bytes of its scratch buffers at that time.
    """

    n_bytes: float
    values: tuple[int, ...]
    scratch: tuple[float, ...]


def pack(timeline: BufferTimeline, sizes: Sequence[float], alignment_bytes: int) -> Packed:
    """sizes: bytes of values."""
    scratch = [Buffer(len(sizes) + i, time, time + 1) for i, (time, _) in enumerate(timeline.scratch)]
    all_sizes = [*sizes, *(n_bytes for _, n_bytes in timeline.scratch)]
    for copy, n in timeline.copies:
        scratch.append(Buffer(len(all_sizes), copy.start, copy.end))
        all_sizes.append(n * sizes[copy.value])
    aligned = [math.ceil(n_bytes / alignment_bytes) * alignment_bytes for n_bytes in all_sizes]
    # XLA keeps the buffers of a loop's body apart from results.
    unplaced = [*_unplaced_buffers(timeline, timeline.temporaries, all_sizes, aligned), *scratch]
    blocks = _blocks(timeline, unplaced, aligned)
    by_size = sorted(blocks, key=lambda block: (-block.n_bytes, block.start - block.end))
    by_duration = sorted(blocks, key=lambda block: (block.start - block.end, -block.n_bytes))
    at = _peak_time(blocks, timeline.n_times)
    n_bytes = min(_height(by_size), _height(by_duration))
    alive = [buffer.value for buffer in unplaced if buffer.start <= at < buffer.end]
    return Packed(
        n_bytes=n_bytes,
        values=tuple(value for value in alive if value < len(sizes)),
        scratch=tuple(all_sizes[value] for value in alive if value >= len(sizes)),
    )


def _unplaced_buffers(
    timeline: BufferTimeline, temporaries: Sequence[Buffer], sizes: Sequence[float], aligned: Sequence[int]
) -> list[Buffer]:
    result_bytes = np.array([aligned[buffer.value] for buffer in timeline.results])
    # The uses of each place, in order. A result keeps its place until the end.
    spans = [[(buffer.start, buffer.end)] for buffer in timeline.results]
    last_end = np.array([buffer.start for buffer in timeline.results])

    unplaced: list[Buffer] = []
    for buffer in sorted(temporaries, key=lambda buffer: (-sizes[buffer.value], buffer.start)):
        span = (buffer.start, buffer.end)
        for place in np.flatnonzero((result_bytes >= aligned[buffer.value]) & (last_end >= buffer.end)).tolist():
            if _is_free(spans[place], span):
                insort(spans[place], span)
                break
        else:
            unplaced.append(buffer)
    return unplaced


def _is_free(spans: Sequence[tuple[int, int]], span: tuple[int, int]) -> bool:
    start, end = span
    place = bisect(spans, (start, math.inf))
    if place < len(spans) and spans[place][0] < end:
        return False
    return place == 0 or spans[place - 1][1] <= start or spans[place - 1][0] >= end


def _blocks(timeline: BufferTimeline, unplaced: Sequence[Buffer], aligned: Sequence[int]) -> list[_Block]:
    """Values in one buffer are one block."""
    first: dict[int, Buffer] = {}  # of each value's buffer
    end: dict[int, int] = {}  # of each buffer, by its first value
    for buffer in sorted(unplaced, key=lambda buffer: buffer.start):
        first[buffer.value] = first.get(timeline.shared.get(buffer.value, -1), buffer)
        end[first[buffer.value].value] = buffer.end

    return [
        _Block(buffer.start, end[buffer.value], aligned[buffer.value])
        for buffer in unplaced
        if first[buffer.value] is buffer
    ]


def _peak_time(blocks: Sequence[_Block], n_times: int) -> int:
    change = np.zeros(n_times + 1)
    for block in blocks:
        change[block.start] += block.n_bytes
        change[block.end] -= block.n_bytes
    return int(np.argmax(np.cumsum(change)))


def _height(blocks: Sequence[_Block]) -> float:
    starts, ends, lows, highs = (np.zeros(len(blocks)) for _ in range(4))
    for i, block in enumerate(blocks):
        # Blocks in use at the same time, and the gap below each and above the last.
        beside = np.flatnonzero((starts[:i] < block.end) & (block.start < ends[:i]))
        beside = beside[np.argsort(lows[beside])]
        tops = np.maximum.accumulate(np.concatenate([[0.0], highs[beside]]))
        gaps = np.append(lows[beside], np.inf) - tops

        smallest = int(np.argmin(np.where(gaps >= block.n_bytes, gaps, np.inf)))
        low = tops[smallest if gaps[smallest] >= block.n_bytes else -1]
        starts[i], ends[i], lows[i], highs[i] = block.start, block.end, low, low + block.n_bytes
    return float(highs.max(initial=0.0))
