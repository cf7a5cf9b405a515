"""The order in which kernels run: kernels in, their numbers in order out.

CPUs run kernels as soon as their operands exist, so they compute and keep recomputed values early, unless the program
waits at barriers. For GPUs, XLA takes the best of three orders:

list         of the kernels that are ready, the one that frees most bytes, less the bytes it writes     -> _list_order
program      the order of the operations in the program
depth first  each kernel right after its operands, the largest operand first                     -> _depth_first_order
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from minialpa.intra.memory.buffers import homes
from minialpa.intra.memory.compiler import Kernel


def order_on_cpu(kernels: Sequence[Kernel], inputs: Sequence[int]) -> list[int]:
    """First come, first served."""
    readers: dict[int, list[int]] = {}
    for number, kernel in enumerate(kernels):
        for value in kernel.reads:
            readers.setdefault(value, []).append(number)
    missing = [len(kernel.reads) for kernel in kernels]

    # Inputs start the queue, then constants, then kernels without operands.
    available = [*inputs, *_constants(kernels, readers, inputs)]
    queue: deque[tuple[int | None, tuple[int, ...]]] = deque((None, (value,)) for value in available)
    queue.extend((number, kernel.writes) for number, kernel in enumerate(kernels) if not kernel.reads)

    order = []
    while queue:
        done, values = queue.popleft()
        if done is not None:
            order.append(done)
        for reader in (number for value in values for number in readers.get(value, ())):
            missing[reader] -= 1
            if not missing[reader]:
                queue.append((reader, kernels[reader].writes))

    assert len(order) == len(kernels), (len(order), len(kernels))
    return order


def _constants(kernels: Sequence[Kernel], read: Mapping[int, object], inputs: Sequence[int]) -> list[int]:
    """Without inputs."""
    known = set(inputs).union(*(kernel.writes for kernel in kernels))
    return [value for value in read if value not in known]


def order_on_gpu(kernels: Sequence[Kernel], results: Sequence[int], sizes: Sequence[float]) -> list[int]:
    """With the least memory. sizes: bytes of values."""
    buffers = _Buffers(kernels, results, sizes)
    orders = (_list_order(kernels, buffers), list(range(len(kernels))), _depth_first_order(kernels, buffers, results))
    return min(orders, key=buffers.peak_bytes)


def _depth_first_order(kernels: Sequence[Kernel], buffers: _Buffers, results: Sequence[int]) -> list[int]:
    """The kernels that `results` wait for, and then the others, each after the kernels that it reads from.

    Of these, the one with the most other readers comes first, or else with the most bytes. Both counts include all
    kernels that they wait for.
    """
    made = {v: k for k, kernel in enumerate(kernels) for v in kernel.writes}
    waits = [list(dict.fromkeys(made[v] for v in kernel.reads if v in made)) for kernel in kernels]
    weights = _weights(waits, buffers)
    order: dict[int, None] = {}
    roots = list(dict.fromkeys(made[v] for v in results if v in made))
    stack = [*range(len(kernels) - 1, -1, -1), *sorted(roots, key=weights.__getitem__)]
    while stack:
        k = stack[-1]
        left = [one for one in waits[k] if one not in order] if k not in order else []
        if left:
            stack += sorted(left, key=weights.__getitem__)
        else:
            order[stack.pop()] = None
    return list(order)


def _weights(waits: Sequence[Sequence[int]], buffers: _Buffers) -> list[tuple[float, float]]:
    """For each kernel and all that it waits for, other readers and bytes. waits: the kernels that it reads."""
    n_readers = [0] * len(waits)
    for k in (k for of_kernel in waits for k in of_kernel):
        n_readers[k] += 1
    # Bounded, because a kernel counts once for each path to it.
    weights: list[tuple[float, float]] = []
    for k, of_kernel in enumerate(waits):
        below = [weights[one] for one in of_kernel]
        others = max(n_readers[k] - 1, 0) + sum(n for n, _ in below)
        weights.append((min(others, 1e15), min(buffers.writes[k] + sum(n for _, n in below), 1e30)))
    return weights


class _Buffers:
    """Buffers that kernels write and read, by their first value; without arguments, and without results that may take
    the place of an argument: accumulators.

    writes, reads: bytes written, and buffers read, by each kernel.
    n_readers: kernels that read each buffer, and one more for a result.
    """

    def __init__(self, kernels: Sequence[Kernel], results: Sequence[int], sizes: Sequence[float]) -> None:
        home = homes(kernels)
        made = {v for kernel in kernels for v in kernel.writes} - home.keys()
        made -= _replacements(kernels, results, sizes, made)
        self.sizes, self._kernels = sizes, kernels
        self.made = [[v for v in kernel.writes if v in made] for kernel in kernels]
        self.writes = [sum(sizes[v] for v in values) for values in self.made]
        self.reads = [{home.get(v, v) for v in kernel.reads} & made for kernel in kernels]
        self.n_readers: dict[int, int] = defaultdict(int)
        for read in (*self.reads, {home.get(v, v) for v in results}):
            for v in read:
                self.n_readers[v] += 1

    def peak_bytes(self, order: Sequence[int]) -> float:
        left, in_use, peak = dict(self.n_readers), 0.0, 0.0
        for k in order:
            in_use += self.writes[k]
            peak = max(peak, in_use + sum(self._kernels[k].scratch))
            for v in self.reads[k]:
                left[v] -= 1
                in_use -= 0.0 if left[v] else self.sizes[v]
            in_use -= sum(self.sizes[v] for v in self.made[k] if not left.get(v))
        return peak


def _replacements(
    kernels: Sequence[Kernel], results: Sequence[int], sizes: Sequence[float], made: AbstractSet[int]
) -> set[int]:
    """The results of kernels that alone read an argument of the same size."""
    n_readers = Counter(v for kernel in kernels for v in dict.fromkeys(kernel.reads) if v not in made)
    found, kept = set[int](), set(results)
    for kernel in kernels:
        free = Counter(sizes[v] for v in dict.fromkeys(kernel.reads) if n_readers.get(v) == 1)
        for v in kernel.writes:
            if v in kept and free[sizes[v]]:
                free[sizes[v]] -= 1
                found.add(v)
    return found


def _list_order(kernels: Sequence[Kernel], buffers: _Buffers) -> list[int]:
    after, missing = _later_kernels(kernels)
    readers: dict[int, set[int]] = defaultdict(set)
    for k, values in enumerate(buffers.reads):
        for v in values:
            readers[v].add(k)
    left = dict(buffers.n_readers)

    def grows(k: int) -> float:
        return buffers.writes[k] - sum(buffers.sizes[v] for v in buffers.reads[k] if left[v] == 1)

    # A kernel frees more with time, so its newer entries come first.
    ready = [(grows(k), k) for k, n in enumerate(missing) if not n]
    heapq.heapify(ready)
    order: list[int] = []
    done = [False] * len(kernels)
    while ready:
        _, k = heapq.heappop(ready)
        if done[k]:
            continue
        done[k] = True
        order.append(k)

        for v in buffers.reads[k]:
            left[v] -= 1
        for other in after[k]:
            missing[other] -= 1
        # Kernels that became ready, and ready ones that now free more.
        last_readers = {other for v in buffers.reads[k] if left[v] == 1 for other in readers[v]}
        for other in {*after[k], *last_readers}:
            if not done[other] and not missing[other]:
                heapq.heappush(ready, (grows(other), other))
    return order


def _later_kernels(kernels: Sequence[Kernel]) -> tuple[dict[int, list[int]], list[int]]:
    """For each kernel, the readers of its results, and the number of kernels before it."""
    made = {v: k for k, kernel in enumerate(kernels) for v in kernel.writes}
    waits = [{made[v] for v in kernel.reads if v in made} for kernel in kernels]
    after: dict[int, list[int]] = defaultdict(list)
    for k, before in enumerate(waits):
        for other in before:
            after[other].append(k)
    return after, [len(before) for before in waits]
