"""Which values of a program are ever in memory.

XLA for GPUs weighs for each operation what its readers save if they compute it themselves, k kernels of them:

    stored    in + work + out + k out      its operands are read, its result is written and read
    joined    k (in + work)                each of the kernels does that

and joins it where that is not more. `in` and `work` are those of the operation with all that is computed for it alone;
work counts as the bytes that the GPU moves in that time. What is made of nothing costs nothing.         -> _Chains
Products, convolutions, collectives, sorts and loops are kernels of their own, and reductions end one: they take in what
they read, and nothing takes them in. A product takes in a conversion of its operand if it then reads no more bytes, or
if the operand is an argument that nothing else reads.                                                  -> _may_join
"""

from __future__ import annotations

from collections.abc import Sequence

from minialpa.intra.memory.compiler import Kernel
from minialpa.intra.memory.xla.graph import Graph, kernels_of


def fused(graph: Graph) -> list[Kernel]:
    """The kernels of a program. What nobody reads is not run."""
    operations = graph.operations
    chains = _Chains(graph)
    stored = [False] * len(operations)
    kernels = [frozenset[int]()] * len(operations)  # the stored operations in whose kernels each one is computed

    # Readers first, since an operation is computed wherever they are.
    for producer in range(len(operations) - 1, -1, -1):
        readers = graph.readers[producer]
        joined = frozenset[int]().union(*(kernels[reader] for reader in readers))
        if not graph.live[producer]:
            continue
        # A view of what is in memory is no kernel, so what it is a view of is in memory, too.
        is_kept = graph.is_result[producer] or any(
            not _may_join(graph, producer, reader) or (stored[reader] and operations[reader].kind == "view")
            for reader in readers
        )
        if is_kept or not chains.is_worth_joining(producer, len(joined)):
            stored[producer], joined = True, frozenset([producer])
        kernels[producer] = joined
    return kernels_of(graph, stored, [() if s else r for s, r in zip(stored, graph.readers, strict=True)])


def _may_join(graph: Graph, producer: int, reader: int) -> bool:
    """Whether the kernel of `reader` can compute what `producer` does."""
    source, target = graph.operations[producer], graph.operations[reader]
    if source.is_apart:
        return False
    if target.is_product:
        return _feeds_product(graph, producer)
    return not target.is_apart and not source.reduces


def _feeds_product(graph: Graph, producer: int) -> bool:
    """Whether a product takes in `producer`: a conversion, or a view of one."""
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
    """What each operation costs with all that is computed for it alone; a class because one follows from others.

    Attributes:
        read_bytes: for each operation, the bytes of the values from memory that it starts from.
        work_bytes: what computing it costs, as the bytes that a GPU moves in that time.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.read_bytes: list[float] = []
        self.work_bytes: list[float] = []
        # The values that operations start from, until they are part of another operation's: else memory would grow with
        # the square of the length of a chain.
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
                    # Gone, if the same operand was read before.
                    reads.add(self._reads.pop(producer, set()), self.read_bytes[producer])
                    work_bytes += self.work_bytes[producer]
            self._reads[number] = reads.values
            self.read_bytes.append(reads.n_bytes)
            self.work_bytes.append(work_bytes)

    def _is_only_for(self, producer: int, reader: int) -> bool:
        op = self._graph.operations[producer]
        is_alone = self._graph.n_users(producer) == 1 and _may_join(self._graph, producer, reader)
        return op.kind == "fill" or is_alone

    def is_worth_joining(self, producer: int, n_kernels: int) -> bool:
        """Whether `n_kernels` kernels that compute the operation cost no more than storing its result."""
        op, sizes = self._graph.operations[producer], self._graph.sizes
        if op.kind in ("fill", "view"):
            return True
        n_in = self.read_bytes[producer] + self.work_bytes[producer]
        n_out = sum(sizes[v] for v in op.writes)
        return n_kernels * n_in <= n_in + (1 + n_kernels) * n_out


class _Reads:
    """Values and their bytes, of which the smaller part is added to the larger one."""

    def __init__(self, sizes: Sequence[float]) -> None:
        self._sizes = sizes
        self.values: set[int] = set()
        self.n_bytes = 0.0

    def add(self, values: set[int], n_bytes: float | None = None) -> None:
        """Add values. Takes over the set."""
        if n_bytes is None:
            n_bytes = sum(self._sizes[v] for v in values)
        if len(values) > len(self.values):
            self.values, values, self.n_bytes = values, self.values, n_bytes
        for v in values - self.values:
            self.values.add(v)
            self.n_bytes += self._sizes[v]
