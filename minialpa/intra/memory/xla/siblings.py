"""Loops that XLA for GPUs makes one kernel of, since one reads what the others write, and all write results.

The new state of an optimiser is an example: both moments of a weight, and the weight that is made of them. XLA computes
them in one kernel, and so while the gradient is still in memory. A kernel with several results takes over no buffer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from minialpa.intra.memory.compiler import Kernel


def joined(kernels: Sequence[Kernel], results: Sequence[int]) -> list[Kernel]:
    """`kernels`, each behind those that it reads from, with loops that write results joined to their only readers."""
    n_readers = Counter(v for kernel in kernels for v in kernel.reads)
    maker = {v: number for number, kernel in enumerate(kernels) for v in kernel.writes}
    below = _dependencies(kernels, maker)
    ends = {
        v
        for v in set(results)
        if v in maker and n_readers[v] == 1 and kernels[maker[v]].shares and len(kernels[maker[v]].writes) == 1
    }
    joins = {number: _producers(kernel, ends, maker, below) for number, kernel in enumerate(kernels)}
    gone = set().union(*joins.values())
    return [
        _together([kernels[i] for i in sorted(joins[number])], kernel) if joins[number] else kernel
        for number, kernel in enumerate(kernels)
        if number not in gone
    ]


def _producers(kernel: Kernel, ends: set[int], maker: Mapping[int, int], below: Sequence[int]) -> set[int]:
    """Those that write values of `ends` which `kernel` reads element by element; none if it also waits for others that
    wait for them."""
    found = {maker[v] for v in kernel.shares if v in ends} if len(kernel.writes) == 1 else set[int]()
    others = {maker[v] for v in kernel.reads if v in maker} - found
    return set() if any(below[other] >> one & 1 for other in others for one in found) else found


def _dependencies(kernels: Sequence[Kernel], maker: Mapping[int, int]) -> list[int]:
    """For each kernel, those that it waits for, as bits."""
    below: list[int] = []
    for kernel in kernels:
        bits = 0
        for v in kernel.reads:
            if v in maker:
                bits |= below[maker[v]] | 1 << maker[v]
        below.append(bits)
    return below


def _together(producers: Sequence[Kernel], reader: Kernel) -> Kernel:
    writes = (*(v for one in producers for v in one.writes), *reader.writes)
    reads = dict.fromkeys(v for one in (*producers, reader) for v in one.reads if v not in writes)
    return Kernel(reads=tuple(reads), writes=writes, scratch=reader.scratch)
