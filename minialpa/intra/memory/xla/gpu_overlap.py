"""Work that XLA for GPUs puts beside collectives, and what stays in memory for it.

Its latency-hiding scheduler goes through the program from the end. When it meets a collective, it first schedules what
could also run later, until that takes about as long, and starts the collective in front of it. So gradients of weights
wait for the collectives of activations, and gathers of weights start a product early:

    ... , gradient of a weight, start, done, ...    ->    ... , start, gradient of a weight, done, ...

Here one kernel of products or loops is enough for a collective. What a collective reads and writes is in memory from
its start to its end. One collective runs at a time.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Sequence

from minialpa.intra.memory.compiler import Kernel

#: Results of this size are scalars.
_SCALAR_BYTES = 16


def overlapped(
    kernels: Sequence[Kernel],
    order: Sequence[int],
    sizes: Sequence[float],
    collectives: Collection[int],
    work: Collection[int],
) -> list[Kernel]:
    """`kernels` in the order of XLA's scheduler, which begins with `order`, and with the ends of collectives.

    sizes: bytes of values. collectives: values that collectives write. work: values that products and loops write.
    """
    if not any(v in collectives for kernel in kernels for v in kernel.writes):
        return [kernels[number] for number in order]
    return _Schedule(kernels, order, sizes, collectives, work).kernels()


class _Schedule:
    """A schedule that grows from its end."""

    def __init__(
        self,
        kernels: Sequence[Kernel],
        order: Sequence[int],
        sizes: Sequence[float],
        collectives: Collection[int],
        work: Collection[int],
    ) -> None:
        self._kernels, self._place = kernels, {number: place for place, number in enumerate(order)}
        self._is_collective = [any(v in collectives for v in kernel.writes) for kernel in kernels]
        self._is_work = [any(v in work for v in kernel.writes) for kernel in kernels]
        # The sum of a loss, say, would keep all that is summed.
        self._is_scalar = [max((sizes[v] for v in kernel.writes), default=0.0) <= _SCALAR_BYTES for kernel in kernels]
        maker = {v: number for number, kernel in enumerate(kernels) for v in kernel.writes}
        self._before = [{maker[v] for v in kernel.reads if v in maker} - {n} for n, kernel in enumerate(kernels)]
        self._n_readers: dict[int, int] = defaultdict(int)
        for before in self._before:
            for number in before:
                self._n_readers[number] += 1
        self._add_order_of_changes(maker)
        # The last of those that nothing waits for any more comes first.
        self._ready = [(-self._place[n], n) for n in range(len(kernels)) if not self._n_readers[n]]
        heapq.heapify(self._ready)
        self._from_end: list[Kernel] = []

    def _add_order_of_changes(self, maker: dict[int, int]) -> None:
        """What changes a buffer runs behind all that read the buffer as it was."""
        readers: dict[int, list[int]] = defaultdict(list)
        for number, kernel in enumerate(self._kernels):
            for v in kernel.reads:
                readers[v].append(number)
        for number, kernel in enumerate(self._kernels):
            if not kernel.in_place or kernel.alias is None:
                continue
            for other in readers[kernel.alias]:
                is_first = self._place[other] < self._place[number]
                if is_first and other not in self._before[number]:
                    self._before[number].add(other)
                    self._n_readers[other] += 1

    def kernels(self) -> list[Kernel]:
        """What runs, from the beginning."""
        while self._ready:
            number = self._next()
            if self._is_collective[number]:
                self._add_collective(number)
            else:
                self._add(number)
        return self._from_end[::-1]

    def _next(self) -> int:
        return heapq.heappop(self._ready)[1]

    def _add(self, number: int) -> None:
        self._from_end.append(self._kernels[number])
        for before in self._before[number]:
            self._n_readers[before] -= 1
            if not self._n_readers[before]:
                heapq.heappush(self._ready, (-self._place[before], before))

    def _add_collective(self, collective: int) -> None:
        """Its end, what runs beside it, and its start."""
        others: list[int] = []
        beside = len(self._from_end)
        found = False
        while self._ready and not found:
            number = self._next()
            if self._is_collective[number] or self._is_scalar[number]:
                others.append(number)
                continue
            self._add(number)
            found = self._is_work[number]
        kernel = self._kernels[collective]
        if len(self._from_end) > beside:
            self._from_end.insert(beside, Kernel(reads=(*kernel.reads, *kernel.writes), writes=()))
        self._add(collective)
        for number in others:
            heapq.heappush(self._ready, (-self._place[number], number))
