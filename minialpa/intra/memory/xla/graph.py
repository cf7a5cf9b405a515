"""A program as a graph of operations, and the kernels that are left of it once each operation is stored or joined.

What a compiler fuses says which operations have a buffer, and which readers the others are computed in; `kernels_of`
makes the kernels of that: each stored operation with all that is computed inside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from minialpa.intra.memory.compiler import Kernel
from minialpa.intra.memory.xla.operations import Operation, makers_of


class Graph:
    """The operations of a program with their readers.

    Attributes:
        operations: each behind those that make what it reads.
        sizes: bytes of values.
        maker: for each value that an operation writes, that operation.
        live: whether a result depends on the operation.
        is_result: whether the operation writes a result.
        readers: live operations that read what the operation writes.
    """

    def __init__(self, operations: Sequence[Operation], results: Sequence[int], sizes: Sequence[float]) -> None:
        self.operations, self.sizes = operations, sizes
        self.maker = makers_of(operations)
        wanted = set(results)
        self.is_result = [any(v in wanted for v in op.writes) for op in operations]
        self.live = _live(operations, results)
        self._n_readers: Counter[int] | None = None
        self.readers: list[list[int]] = [[] for _ in operations]
        for reader in range(len(operations)):
            for producer in self.operands(reader) if self.live[reader] else ():
                self.readers[producer].append(reader)

    def operands(self, reader: int) -> list[int]:
        """Operations whose results `reader` reads, each once."""
        return list(dict.fromkeys(self.maker[v] for v in self.operations[reader].reads if v in self.maker))

    def n_readers(self, value: int) -> int:
        """The number of live operations that read a value, such as an argument."""
        if self._n_readers is None:
            self._n_readers = Counter(
                v for op, live in zip(self.operations, self.live, strict=True) if live for v in set(op.reads)
            )
        return self._n_readers[value]

    def n_users(self, producer: int) -> int:
        """The number of readers, and one more for a result."""
        return len(self.readers[producer]) + self.is_result[producer]


def _live(operations: Sequence[Operation], results: Sequence[int]) -> list[bool]:
    """Whether `results` depend on each operation."""
    live = [False] * len(operations)
    needed = set(results)
    for number in range(len(operations) - 1, -1, -1):
        live[number] = any(v in needed for v in operations[number].writes)
        if live[number]:
            needed.update(operations[number].reads)
    return live


def kernels_of(graph: Graph, stored: Sequence[bool], joined: Sequence[Collection[int]]) -> list[Kernel]:
    """The kernels of live operations whose results are `stored`. joined: readers that compute each operation."""
    # The stored values that an operation reads, and whether element by element. Kept until its last reader: memory
    # would grow with the square of the length of a chain.
    reads: dict[int, dict[int, bool]] = {}
    last_reader = [max(readers, default=-1) for readers in joined]
    kernels: list[Kernel] = []
    for number, op in enumerate(graph.operations):
        own = _stored_reads(graph, number, joined, reads, last_reader)
        if stored[number] and graph.live[number]:
            kernels.append(_kernel(op, own))
        if last_reader[number] >= 0:
            reads[number] = own
    return kernels


def _stored_reads(
    graph: Graph,
    reader: int,
    joined: Sequence[Collection[int]],
    reads: dict[int, dict[int, bool]],
    last_reader: Sequence[int],
) -> dict[int, bool]:
    """What `reader` reads from memory, and whether element by element.

    reads: the same for operations that later ones compute, too; entries that no later reader needs are removed.
    """
    op = graph.operations[reader]
    own: dict[int, bool] = {}
    computed = [p for p in map(graph.maker.get, op.reads) if p is not None and reader in joined[p]]
    for value in op.reads:
        producer = graph.maker.get(value)
        if producer not in computed or producer is None:
            own[value] = own.get(value, True) and op.elementwise
        elif not own and op.elementwise and last_reader[producer] == reader and computed.count(producer) == 1:
            own = reads.pop(producer)
        else:
            for v, once in reads[producer].items():
                own[v] = own.get(v, True) and once and op.elementwise
    for producer in computed:
        if last_reader[producer] == reader:
            reads.pop(producer, None)
    return own


def _kernel(op: Operation, reads: Mapping[int, bool]) -> Kernel:
    # A view of a stored value is in its buffer; one of a joined value is computed into a buffer of its own.
    is_view = op.kind == "view" and op.reads[0] in reads
    return Kernel(
        reads=tuple(reads),
        writes=op.writes,
        alias=op.reads[0] if is_view else op.in_place,
        in_place=op.in_place is not None,
        scratch=op.scratch,
        shares=tuple(v for v, once in reads.items() if once),
    )
