"""Which values of a program are ever in memory: operations in, the kernels that remain out.

XLA for GPUs lets the k kernels that read an operation compute it if that costs no more bytes than storing it:

    stored    in + work + out + k out      its operands are read, its result is written and read
    joined    k (in + work)                each of the kernels computes it

`in` and `work` include all operations that are computed for it alone; work counts as the bytes that the GPU moves in
that time. Fills have no cost.                                                                           -> _Chains
Products, convolutions, collectives, sorts and loops are separate kernels, and a reduction ends one. A product takes
in a conversion of its operand if it then reads no more bytes, or if the operand is an argument without other
readers.                                                                                                 -> _may_join
A kernel is a stored operation with all operations that it computes.                                     -> _kernels_of
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from minialpa.intra.memory.compiler import Kernel
from minialpa.intra.memory.xla.operations import Operation, makers_of


def fused(graph: Graph) -> list[Kernel]:
    """Without dead operations."""
    operations = graph.operations
    chains = _Chains(graph)
    stored = [False] * len(operations)
    kernels = [frozenset[int]()] * len(operations)  # the stored operations that compute each operation

    # Readers first: they decide the kernels of an operation.
    for producer in range(len(operations) - 1, -1, -1):
        readers = graph.readers[producer]
        joined = frozenset[int]().union(*(kernels[reader] for reader in readers))
        if not graph.live[producer]:
            continue
        # A view of a stored value is no kernel, so the value is in memory, too.
        is_kept = graph.is_result[producer] or any(
            not _may_join(graph, producer, reader) or (stored[reader] and operations[reader].kind == "view")
            for reader in readers
        )
        if is_kept or not chains.joining_pays(producer, len(joined)):
            stored[producer], joined = True, frozenset([producer])
        kernels[producer] = joined
    return _kernels_of(graph, stored, [() if s else r for s, r in zip(stored, graph.readers, strict=True)])


def _may_join(graph: Graph, producer: int, reader: int) -> bool:
    source, target = graph.operations[producer], graph.operations[reader]
    if source.is_apart:
        return False
    if target.is_product:
        return _feeds_product(graph, producer)
    return not target.is_apart and not source.reduces


def _feeds_product(graph: Graph, producer: int) -> bool:
    """Whether `producer` is a conversion, or a view of one."""
    op = graph.operations[producer]
    if op.kind == "view":
        return all(_feeds_product(graph, p) for p in graph.operands(producer)) and bool(graph.operands(producer))
    if not op.converts:
        return False
    (operand,) = op.reads
    if graph.sizes[operand] <= graph.sizes[op.writes[0]]:
        return True
    return operand not in graph.maker and graph.n_readers(operand) == 1 and graph.n_users(producer) == 1


class _Chains:
    """Costs of each operation with all operations that are computed for it alone.

    read_bytes: bytes of the stored values that each operation starts from.
    work_bytes: bytes that a GPU moves in the time of its work.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.read_bytes: list[float] = []
        self.work_bytes: list[float] = []
        # Until another operation includes them: otherwise memory grows with the square of the length of a chain.
        self._reads: dict[int, set[int]] = {}
        for number, op in enumerate(graph.operations):
            reads, work_bytes = _Reads(graph.sizes), op.work_bytes
            for v in op.reads if graph.live[number] else ():
                producer = graph.maker.get(v)
                if producer is None or not self._is_only_for(producer, number):
                    reads.add({v})
                elif graph.operations[producer].kind == "fill":
                    reads.add(set(self._reads[producer]))
                    work_bytes += self.work_bytes[producer]
                else:
                    # Gone if it is an operand twice.
                    reads.add(self._reads.pop(producer, set()), self.read_bytes[producer])
                    work_bytes += self.work_bytes[producer]
            self._reads[number] = reads.values
            self.read_bytes.append(reads.n_bytes)
            self.work_bytes.append(work_bytes)

    def _is_only_for(self, producer: int, reader: int) -> bool:
        op = self._graph.operations[producer]
        is_alone = self._graph.n_users(producer) == 1 and _may_join(self._graph, producer, reader)
        return op.kind == "fill" or is_alone

    def joining_pays(self, producer: int, n_kernels: int) -> bool:
        """Whether `n_kernels` kernels that compute the operation cost no more than storing its result."""
        op, sizes = self._graph.operations[producer], self._graph.sizes
        if op.kind in ("fill", "view"):
            return True
        n_in = self.read_bytes[producer] + self.work_bytes[producer]
        n_out = sum(sizes[v] for v in op.writes)
        return n_kernels * n_in <= n_in + (1 + n_kernels) * n_out


class _Reads:
    """`add` merges the smaller set into the larger one, and takes over the set."""

    def __init__(self, sizes: Sequence[float]) -> None:
        self._sizes = sizes
        self.values: set[int] = set()
        self.n_bytes = 0.0

    def add(self, values: set[int], n_bytes: float | None = None) -> None:
        if n_bytes is None:
            n_bytes = sum(self._sizes[v] for v in values)
        if len(values) > len(self.values):
            self.values, values, self.n_bytes = values, self.values, n_bytes
        for v in values - self.values:
            self.values.add(v)
            self.n_bytes += self._sizes[v]


# ---- graphs ----------------------------------------------------------------------------------------------------------


class Graph:
    """The operations of a program.

    operations: each after the makers of its operands.
    readers: live operations that read its results.
    """

    def __init__(self, operations: Sequence[Operation], results: Sequence[int], sizes: Sequence[float]) -> None:
        self.operations, self.sizes = operations, sizes
        self.maker = makers_of(operations)
        required = set(results)
        self.is_result = [any(v in required for v in op.writes) for op in operations]
        self.live = _live_operations(operations, results)
        self._n_readers: Counter[int] | None = None
        self.readers: list[list[int]] = [[] for _ in operations]
        for reader in range(len(operations)):
            for producer in self.operands(reader) if self.live[reader] else ():
                self.readers[producer].append(reader)

    def operands(self, reader: int) -> list[int]:
        return list(dict.fromkeys(self.maker[v] for v in self.operations[reader].reads if v in self.maker))

    def n_readers(self, value: int) -> int:
        if self._n_readers is None:
            self._n_readers = Counter(
                v for op, live in zip(self.operations, self.live, strict=True) if live for v in set(op.reads)
            )
        return self._n_readers[value]

    def n_users(self, producer: int) -> int:
        return len(self.readers[producer]) + self.is_result[producer]


def _live_operations(operations: Sequence[Operation], results: Sequence[int]) -> list[bool]:
    live = [False] * len(operations)
    needed = set(results)
    for number in range(len(operations) - 1, -1, -1):
        live[number] = any(v in needed for v in operations[number].writes)
        if live[number]:
            needed.update(operations[number].reads)
    return live


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _kernels_of(graph: Graph, stored: Sequence[bool], joined: Sequence[Collection[int]]) -> list[Kernel]:
    """joined: readers that compute each operation."""
    # See `_stored_reads`. Kept until the last reader, to save memory.
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
    """The values in memory that `reader` reads, and whether element by element. reads: of earlier calls."""
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
    """reads: see `_stored_reads`."""
    # A view of a stored value is in its buffer, a view of a joined value in a new one.
    is_view = op.kind == "view" and op.reads[0] in reads
    return Kernel(
        reads=tuple(reads),
        writes=op.writes,
        alias=op.reads[0] if is_view else op.in_place,
        in_place=op.in_place is not None,
        scratch=op.scratch,
        shares=tuple(v for v, once in reads.items() if once),
        carries=op.carries,
    )
