"""When each buffer of a program is in use, by the kernels that it runs and the arguments that it may overwrite.

A buffer is in use from the kernel that writes it to the last one that reads it, both included, or until that last one
takes the buffer over. Times are numbers of kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from minialpa.intra.memory.compiler import Kernel


@dataclass(frozen=True, slots=True)
class Buffer:
    """`value` (of a Recorder) is in memory at the times start, ..., end - 1."""

    value: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When the values of a program are in memory, besides its arguments.

    Attributes:
        n_times: times are 0, ..., n_times - 1.
        temporaries: values that are free before the end.
        results: values in buffers of their own until the end.
        scratch: (time, bytes) of each buffer that a kernel needs only while it runs.
        shared: for each value that takes over the buffer of an operand, that operand. Its own time starts where that
            of the operand ends.
    """

    n_times: int
    temporaries: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    scratch: tuple[tuple[int, float], ...]
    shared: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class _Spans:
    """When values are first and last used.

    Attributes:
        start: for each value with a buffer, the time at which it is written. Arguments have none.
        end: for each such value and each argument that is read, the time after its last use.
    """

    start: dict[int, int]
    end: dict[int, int]


def timeline_of(
    kernels: Sequence[Kernel],
    sizes: Sequence[float],
    *,
    inputs: Sequence[int],
    results: Sequence[int],
    pairs: Sequence[tuple[int, int]],
) -> Timeline:
    """The timeline of a program of `kernels`, which run in this order. `sizes` are bytes of values.

    pairs: (i, o) where result o takes over the buffer of input i.
    """
    home = _homes(kernels, inputs)
    kept = {home.get(v, v) for v in results}
    replaced = {home.get(results[o], results[o]) for _, o in pairs}

    spans = _spans(kernels, home)
    shared = _shared(kernels, spans, kept | set(home.values()), sizes)
    start, end = spans.start, spans.end
    # Until then the buffer is that of the operand.
    start.update((value, end[operand]) for value, operand in shared.items())

    n_times = len(kernels)
    return Timeline(
        n_times=n_times,
        temporaries=tuple(Buffer(v, begin, end[v]) for v, begin in start.items() if v not in kept),
        results=tuple(Buffer(v, begin, n_times) for v, begin in start.items() if v in kept and v not in replaced),
        scratch=tuple((time, n_bytes) for time, kernel in enumerate(kernels) for n_bytes in kernel.scratch),
        shared=shared,
    )


def _homes(kernels: Sequence[Kernel], inputs: Sequence[int]) -> dict[int, int]:
    """For values in the buffer of another value, that other value. Arguments are not written in place."""
    home: dict[int, int] = {}
    arguments = set(inputs)
    for kernel in kernels:
        if kernel.alias is not None and not (kernel.in_place and kernel.alias in arguments):
            home[kernel.writes[0]] = home.get(kernel.alias, kernel.alias)
    return home


def _spans(kernels: Sequence[Kernel], home: Mapping[int, int]) -> _Spans:
    """When values are in use."""
    start: dict[int, int] = {}
    end: dict[int, int] = {}
    for time, kernel in enumerate(kernels):
        end.update((home.get(value, value), time + 1) for value in kernel.reads)
        for value in kernel.writes:
            if value not in home:
                start[value] = time
                end.setdefault(value, time + 1)
    return _Spans(start, end)


def _shared(
    kernels: Sequence[Kernel], spans: _Spans, fixed: AbstractSet[int], sizes: Sequence[float]
) -> dict[int, int]:
    """For each value that takes over the buffer of an operand, that operand.

    The kernel is one that may share the buffer, reads it for the last time, and writes as many bytes. The operand is
    none of `fixed`, whose buffers hold results, have views or are changed in place.
    """
    shared: dict[int, int] = {}
    changed = {kernel.alias for kernel in kernels if kernel.in_place}

    for time, kernel in enumerate(kernels):
        if len(kernel.writes) != 1:
            continue
        (result,) = kernel.writes
        if result not in spans.start or result in changed:
            continue
        for operand in kernel.shares:
            is_free = operand in spans.start and operand not in fixed and spans.end[operand] == time + 1
            if is_free and sizes[operand] == sizes[result]:
                shared[result] = operand
                break
    return shared
