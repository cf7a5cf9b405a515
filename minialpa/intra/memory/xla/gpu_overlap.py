"""Work that XLA for GPUs puts beside collectives, for which values stay longer in memory: kernels in, a new order out.

XLA's latency-hiding scheduler goes through the program from the end. At a collective, it schedules kernels that could
also run later, until they take as long, and then the start of the collective. So gradients of weights wait for the
collectives of activations, and gathers of weights start a product early:

    ... , gradient of a weight, start, done, ...    ->    ... , start, gradient of a weight, done, ...

Of the kernels that could run, it takes one with most collectives on a path to it, then with most that wait for it.

Here, work takes as long as a collective if it moves as many bytes. One collective runs at a time.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet

from minialpa.intra.memory.compiler import Kernel

#: Results of this size are scalars.
_SCALAR_BYTES = 16


def overlapped(
    kernels: Sequence[Kernel], sizes: Sequence[float], collectives: Collection[int], work: Collection[int]
) -> list[Kernel]:
    """`kernels`, from a valid order, in the order of XLA's scheduler, with the ends of collectives.

    collectives: values that collectives write.
    work: values that products and loops write.
    """
    if not any(v in collectives for kernel in kernels for v in kernel.writes):
        return list(kernels)
    return _Schedule(kernels, sizes, collectives, work).kernels()


def with_host_copies(
    kernels: Sequence[Kernel], fetched: AbstractSet[int], stored: AbstractSet[int], work: AbstractSet[int]
) -> list[Kernel]:
    """The kernels, in the order in which XLA runs them beside copies from host memory (`fetched`) and to it (`stored`).

    Copies start once their operands exist; to the device, before all kernels without which they can. They end at the
    first reader; to the host, without readers, after the next kernel in `work`.
    """
    kernels = _after_copies_to_device(kernels, fetched)
    read_at = {v: i for i, kernel in reversed(list(enumerate(kernels))) for v in kernel.reads}
    is_work = [not work.isdisjoint(kernel.writes) for kernel in kernels]
    found: list[tuple[float, Kernel]] = []
    for i, kernel in enumerate(kernels):
        found.append((i, kernel))
        if fetched.isdisjoint(kernel.writes) and stored.isdisjoint(kernel.writes):
            continue
        read = min((read_at[v] for v in kernel.writes if v in read_at), default=len(kernels))
        if read == len(kernels) and not stored.isdisjoint(kernel.writes):
            read = next((k + 1 for k in range(i + 1, len(kernels)) if is_work[k]), read)
        found.append((read - 0.5, Kernel(reads=(*kernel.reads, *kernel.writes), writes=())))
    return [kernel for _, kernel in sorted(found, key=lambda each: each[0])]


def _after_copies_to_device(kernels: Sequence[Kernel], fetched: AbstractSet[int]) -> list[Kernel]:
    """Each copy right after the kernels that it waits for and that no earlier copy waits for; views as early."""
    maker = {v: i for i, kernel in enumerate(kernels) for v in kernel.writes}
    order: dict[int, None] = {}
    for i, kernel in enumerate(kernels):
        if not fetched.isdisjoint(kernel.writes):
            found, stack = {i}, [i]
            while stack:
                before = {maker[v] for v in kernels[stack.pop()].reads if v in maker} - found - order.keys()
                found |= before
                stack += before
            order.update(dict.fromkeys(sorted(found)))
    order.update(dict.fromkeys(range(len(kernels))))
    kernels = [kernels[i] for i in order]

    made_at: dict[int, float] = {}
    times: list[tuple[float, int]] = []
    for i, kernel in enumerate(kernels):
        time = float(i)
        if kernel.alias is not None and not kernel.in_place:
            time = max((made_at[v] for v in kernel.reads if v in made_at), default=-1.0)
        made_at.update((v, time) for v in kernel.writes)
        times.append((time, i))
    return [kernels[i] for _, i in sorted(times)]


class _Schedule:
    """Kernels are ready once all their readers are scheduled."""

    def __init__(
        self, kernels: Sequence[Kernel], sizes: Sequence[float], collectives: Collection[int], work: Collection[int]
    ) -> None:
        self._kernels = kernels
        self._is_collective = [any(v in collectives for v in kernel.writes) for kernel in kernels]
        self._is_work = [any(v in work for v in kernel.writes) for kernel in kernels]
        # Scalars do not count as work: the sum of a loss would keep all its summands.
        self._is_scalar = [max((sizes[v] for v in kernel.writes), default=0.0) <= _SCALAR_BYTES for kernel in kernels]
        self._n_bytes = [sum(sizes[v] for v in (*kernel.reads, *kernel.writes)) for kernel in kernels]
        maker = {v: number for number, kernel in enumerate(kernels) for v in kernel.writes}
        self._before = [{maker[v] for v in kernel.reads if v in maker} - {n} for n, kernel in enumerate(kernels)]
        self._add_order_of_changes()

        self._readers: dict[int, set[int]] = defaultdict(set)
        for number, kernels_before in enumerate(self._before):
            for before in kernels_before:
                self._readers[before].add(number)
        self._depth = self._depths()
        # Kernels that only wait for this one.
        self._n_freed = Counter(next(iter(readers)) for readers in self._readers.values() if len(readers) == 1)

        self._from_end: list[Kernel] = []
        self._done: set[int] = set()
        self._ready: list[tuple[int, int, int]] = []
        for number in range(len(kernels)):
            if not self._readers[number]:
                self._push_ready(number)

    def _depths(self) -> list[int]:
        """Most collectives on a path to each kernel."""
        depths = [0] * len(self._kernels)
        for number, kernels_before in enumerate(self._before):
            depths[number] = max((depths[k] + self._is_collective[k] for k in kernels_before), default=0)
        return depths

    def _add_order_of_changes(self) -> None:
        """Changes wait for earlier readers of the old value."""
        readers: dict[int, list[int]] = defaultdict(list)
        for number, kernel in enumerate(self._kernels):
            for v in kernel.reads:
                readers[v].append(number)
        for number, kernel in enumerate(self._kernels):
            if kernel.in_place and kernel.alias is not None:
                self._before[number].update(other for other in readers[kernel.alias] if other < number)

    def kernels(self) -> list[Kernel]:
        while (number := self._next_kernel()) is not None:
            if self._is_collective[number]:
                self._add_collective(number)
            else:
                self._add(number)
        return self._from_end[::-1]

    def _push_ready(self, number: int) -> None:
        heapq.heappush(self._ready, (-self._depth[number], -self._n_freed[number], -number))

    def _next_kernel(self) -> int | None:
        while self._ready:
            number = -heapq.heappop(self._ready)[-1]
            if number not in self._done:
                return number
        return None

    def _add(self, number: int) -> None:
        self._from_end.append(self._kernels[number])
        self._done.add(number)
        for before in self._before[number]:
            readers = self._readers[before]
            readers.remove(number)
            if not readers:
                self._push_ready(before)
            elif len(readers) == 1:
                (last,) = readers
                self._n_freed[last] += 1
                if not self._readers[last]:
                    self._push_ready(last)

    def _add_collective(self, collective: int) -> None:
        """Adds its end, the work beside it, and its start."""
        others: list[int] = []
        beside = len(self._from_end)
        kernel, left_bytes = self._kernels[collective], self._n_bytes[collective]
        while left_bytes > 0 and (number := self._next_kernel()) is not None:
            if self._is_collective[number] or self._is_scalar[number]:
                others.append(number)
                continue
            self._add(number)
            left_bytes -= self._n_bytes[number] if self._is_work[number] else 0.0
        if len(self._from_end) > beside:
            self._from_end.insert(beside, Kernel(reads=(*kernel.reads, *kernel.writes), writes=()))
        self._add(collective)
        for number in others:
            self._push_ready(number)
