"""Loops that read one array become one kernel, as in the multi-output fusion of XLA for GPUs: kernels in, fewer out.

A stored value goes away if only loops over its elements read it, which do not depend on each other: one kernel computes
it and all of them. It may write over its operands. For example, gelu and its derivative read the products y
and g of matrices, and tanh(y):

    tanh(y) -> t;  y, t -> gelu;  y, t, g -> gradient    =>    y, g -> gelu, gradient

XLA also merges loops that read a value with further readers. In the model, this made predictions worse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from minialpa.intra.memory.compiler import Kernel

#: Kernels between two that are merged.
_MOST_BETWEEN = 256
#: Operands and results of a kernel in XLA.
_MOST_ARRAYS = 96


def with_siblings(
    kernels: Sequence[Kernel], loops: AbstractSet[int], results: AbstractSet[int], shapes: Sequence[Sequence[int]]
) -> list[Kernel]:
    """Each kernel is after the makers of its operands, as before.

    loops: values of loops without reductions.
    shapes: of all values.
    """
    merging = _Merging(kernels, loops, shapes)
    for value in merging.parents():
        if value not in results:
            merging.merge_readers(value)
    return merging.kernels()


class _Merging:
    """Kernels by number, and their order; None where a kernel was."""

    def __init__(self, kernels: Sequence[Kernel], loops: AbstractSet[int], shapes: Sequence[Sequence[int]]) -> None:
        self._kernels, self._loops, self._shapes = list(kernels), loops, shapes
        self._order: list[int | None] = list(range(len(kernels)))
        self._place = list(range(len(kernels)))
        self._maker = {v: number for number, kernel in enumerate(kernels) for v in kernel.writes}
        self._readers: dict[int, set[int]] = {}
        for number, kernel in enumerate(kernels):
            for v in kernel.reads:
                self._readers.setdefault(v, set()).add(number)

    def kernels(self) -> list[Kernel]:
        return [self._kernels[number] for number in self._order if number is not None]

    def parents(self) -> list[int]:
        """Values with several readers, the last one first."""
        return [v for v in reversed(self._maker) if len(self._readers.get(v, ())) > 1]

    def merge_readers(self, value: int) -> None:
        n = math.prod(self._shapes[value])
        maker, readers = self._maker[value], sorted(self._readers[value], key=self._place.__getitem__)
        if all(self._is_loop(number, n) for number in (maker, *readers)) and self._kernels[maker].writes == (value,):
            first, *others = readers
            if all([self._merge(first, other) for other in others]):
                self._compute_inside(value, maker, first)

    def _is_loop(self, number: int, n_elements: int) -> bool:
        kernel = self._kernels[number]
        is_loop = all(v in self._loops and math.prod(self._shapes[v]) == n_elements for v in kernel.writes)
        return is_loop and kernel.alias is None and bool(kernel.writes)

    def _merge(self, first: int, second: int) -> bool:
        """Into the place of `second`, with the number `first`; False if that is not possible."""
        a, b = self._kernels[first], self._kernels[second]
        begin, end = self._place[first], self._place[second]
        reads = tuple(dict.fromkeys((*a.reads, *b.reads)))
        if not 0 < end - begin <= _MOST_BETWEEN or len(reads) + len(a.writes) + len(b.writes) > _MOST_ARRAYS:
            return False

        made, before, after = set(a.writes), list[int](), list[int]()
        for number in (number for number in self._order[begin + 1 : end] if number is not None):
            kernel = self._kernels[number]
            depends = not made.isdisjoint(kernel.reads)
            made.update(kernel.writes if depends else ())
            (after if depends else before).append(number)
            if kernel.in_place and kernel.alias in a.reads:
                return False
        if not made.isdisjoint(b.reads):
            return False

        # Values that each kernel reads element by element.
        shares = tuple(v for v in reads if all(v in one.shares for one in (a, b) if v in one.reads))
        self._kernels[first] = replace(a, reads=reads, writes=(*a.writes, *b.writes), shares=shares)
        for v in b.reads:
            self._readers[v] = self._readers[v] - {second} | {first}
        self._maker.update(dict.fromkeys(b.writes, first))
        self._put(begin, end, [*before, first, *after])
        return True

    def _put(self, begin: int, end: int, numbers: Sequence[int]) -> None:
        free = end + 1 - begin - len(numbers)
        self._order[begin : end + 1] = [*[None] * free, *numbers]
        for i, number in enumerate(numbers):
            self._place[number] = begin + free + i

    def _compute_inside(self, value: int, maker: int, reader: int) -> None:
        source, target = self._kernels[maker], self._kernels[reader]
        reads = tuple(dict.fromkeys((*(v for v in target.reads if v != value), *source.reads)))
        once = source.shares if value in target.shares else ()
        shares = tuple(
            v for v in reads if (v not in target.reads or v in target.shares) and (v not in source.reads or v in once)
        )
        self._kernels[reader] = replace(target, reads=reads, shares=shares)
        for v in source.reads:
            self._readers[v] = self._readers[v] - {maker} | {reader}
        self._order[self._place[maker]] = None
