"""Which values of a program are ever in memory on a CPU, and in which order its kernels run.

A compiler joins chains of elementwise operations into one kernel, and only what leaves a kernel has a buffer. The rules
are those of XLA's instruction fusion, on the graph of operations before it:

    1. An operation joins a reader that is elementwise itself. Products, convolutions, collectives, sorts and loops are
       kernels of their own. A sum takes in an operation only if nothing else reads it.           -> _Graph.may_join
    2. Cheap operations are computed again for each reader; expensive ones (exp, division) only if there is one reader,
       and never inside a broadcast, which would compute them once for each copy.                 -> _Graph.may_join
    3. An operation that reads more than it writes is not computed twice unless it joins its readers on every path.
                                                                                                  -> _on_all_paths
    4. A kernel runs as soon as its operands are there, first come, first served.                 -> run_order
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from minialpa.intra.memory.compiler import Kernel
from minialpa.intra.memory.xla.graph import Graph, kernels_of
from minialpa.intra.memory.xla.operations import Operation

#: Operands of at most so many bytes, such as scalars, do not count as arrays that an operation reads.
_SMALL_BYTES = 16


# ---- fusion ---------------------------------------------------------------------------------------------------------


def fused(operations: Sequence[Operation], results: Sequence[int], sizes: Sequence[float]) -> list[Kernel]:
    """The kernels of a program that ends with `results`; `sizes` are bytes of values. What nobody reads is not run."""
    graph = _Graph(operations, results, sizes)
    stored = [op.is_apart for op in operations]
    joined: list[set[int]] = [set() for _ in operations]  # readers that an operation is joined to
    spread = [False] * len(operations)  # whether an operation may be computed once for each reader

    # Readers first, since whether an operation joins them depends on what they are joined to.
    for producer in range(len(operations) - 1, -1, -1):
        readers = graph.readers[producer]
        if graph.n_users(producer) < 2 or graph.is_cheap_to_repeat(producer) or _on_all_paths(graph, producer, spread):
            spread[producer] = True
            joined[producer] = {reader for reader in readers if graph.may_join(producer, reader)}

        if any(graph.in_sum[reader] for reader in joined[producer]):
            graph.in_sum[producer] = True
        if graph.is_result[producer] or len(joined[producer]) < len(readers):
            stored[producer] = True

    return kernels_of(graph, stored, joined)


class _Graph(Graph):
    """A graph with what the rules ask.

    Attributes:
        in_sum: whether the operation is a sum or joined to one; set from the last operation to the first.
        below: operations that the operation depends on, as bits.
    """

    def __init__(self, operations: Sequence[Operation], results: Sequence[int], sizes: Sequence[float]) -> None:
        super().__init__(operations, results, sizes)
        self.in_sum = [op.kind == "sum" for op in operations]
        self.below = [0] * len(operations)
        for reader in range(len(operations)):
            for producer in self.operands(reader):
                self.below[reader] |= self.below[producer] | 1 << producer

    def may_join(self, producer: int, reader: int) -> bool:
        """Rules 1 and 2."""
        source, target = self.operations[producer], self.operations[reader]
        if source.is_apart or source.kind == "sum" or target.is_apart:
            return False
        if self.in_sum[reader]:
            return source.joins_sum and self.n_users(producer) == 1
        return not (source.expensive and (target.repeats or self.n_users(producer) > 1))

    def is_cheap_to_repeat(self, producer: int) -> bool:
        """Whether it reads one array only, not counting repeated ones, or no more bytes than it writes."""
        reads = set(self.operations[producer].reads)
        arrays = [v for v in reads if self.sizes[v] > _SMALL_BYTES and not self._is_repeated(v)]
        written = sum(self.sizes[v] for v in self.operations[producer].writes)
        return len(arrays) < 2 or sum(self.sizes[v] for v in reads) <= written

    def _is_repeated(self, v: int) -> bool:
        maker = self.operations[self.maker[v]] if v in self.maker else None
        return maker is not None and (maker.kind == "fill" or maker.repeats)


def _on_all_paths(graph: _Graph, producer: int, spread: Sequence[bool]) -> bool:
    """Rule 3: whether `producer` joins each reader, and what lies between the two joins that reader as well."""
    if graph.is_result[producer]:
        return False

    seen: set[int] = set()
    waiting = list(graph.readers[producer])
    while waiting:
        reader = waiting.pop()
        if reader == producer or reader in seen:
            continue
        seen.add(reader)

        between = [o for o in graph.operands(reader) if o == producer or graph.below[o] >> producer & 1]
        if not all(graph.may_join(o, reader) and (o == producer or spread[o]) for o in between):
            return False
        waiting += between
    return True


# ---- order ----------------------------------------------------------------------------------------------------------


def run_order(kernels: Sequence[Kernel], inputs: Sequence[int], late: AbstractSet[int] = frozenset()) -> list[int]:
    """Rule 4: numbers of `kernels` in the order in which they run: a queue of those that are ready.

    late: values that are made after all other readers of the operands have run.
    """
    readers = _readers_in_turn(kernels, late)
    missing = [len(kernel.reads) for kernel in kernels]

    # Inputs start the queue, then constants, then kernels that read nothing.
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


def _readers_in_turn(kernels: Sequence[Kernel], late: AbstractSet[int]) -> dict[int, list[int]]:
    """For each value, the kernels that read it, late ones last."""
    readers: dict[int, list[int]] = {}
    for number, kernel in enumerate(kernels):
        for value in kernel.reads:
            readers.setdefault(value, []).append(number)
    for behind in readers.values():
        behind.sort(key=lambda number: kernels[number].writes[0] in late)
    return readers


def _constants(kernels: Sequence[Kernel], read: Mapping[int, object], inputs: Sequence[int]) -> list[int]:
    """Those of the `read` values that are neither inputs nor made by a kernel."""
    known = set(inputs).union(*(kernel.writes for kernel in kernels))
    return [value for value in read if value not in known]
