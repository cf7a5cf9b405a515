"""Which values of a program ever lie in memory: operations in, kernels out, in the order in which they run.

A compiler joins chains of elementwise operations into one kernel, and only what leaves a kernel has a buffer. The rules
are those of XLA's instruction fusion, on the graph of operations before it:

    1. An operation joins a reader that is elementwise itself. Dots, convolutions, collectives, sorts and loops are
       kernels of their own; a sum takes in what only it reads.
    2. Cheap operations are computed again for each reader; expensive ones (exp, division) only if there is one reader,
       and never inside a broadcast, which would compute them once for each copy.
    3. What reads more than it writes is not computed twice unless it is joined on every path.        -> _spread
    4. A kernel runs as soon as its operands are there, first come, first served.                      -> run_order

In: `Operation`s over values numbered from 0. Out: `Kernel`s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

#: loop: elementwise, layouts and slices. view: the same bytes in another shape. fill: made from nothing, as an iota.
#: sum: a reduction by a library kernel. own: always a kernel of its own.
Kind = Literal["loop", "view", "fill", "sum", "own"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation.

    reads, writes: values. expensive: too dear to compute twice. repeats: each element of an operand is read many times.
    elementwise: reads its operands element by element. late: comes behind all other readers of its operands, as what a
    compiler has rewritten does.
    joins_sum: may be joined to a sum. scratch_bytes: what it needs while it runs. in_place: the operand whose buffer
    the result takes over. waits: a view that is there only when all that it reads is.
    sums: whether it adds its two operands, or adds the others into the first as a scatter.
    """

    kind: Kind
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    expensive: bool = False
    repeats: bool = False
    elementwise: bool = False
    late: bool = False
    joins_sum: bool = False
    scratch_bytes: float = 0.0
    in_place: int | None = None
    waits: bool = False
    sums: Literal["add", "scatter"] | None = None

    @property
    def is_apart(self) -> bool:
        """Whether it is always a kernel of its own."""
        return self.kind == "own" or self.waits


@dataclass(frozen=True, slots=True)
class Kernel:
    """An operation that is run, with everything that is joined to it: `reads` and `writes` are in memory.

    alias: the value whose buffer the result is, for a view of one that is in memory anyway, or one changed `in_place`.
    shares: those of `reads` that are read element by element, whose buffer the result may take over.
    """

    operation: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    alias: int | None = None
    in_place: bool = False
    scratch_bytes: float = 0.0
    shares: tuple[int, ...] = ()
    late: bool = False


def kernels_of(operations: Sequence[Operation], results: Sequence[int], sizes: Sequence[float]) -> list[Kernel]:
    """The kernels of a program that ends with `results`; `sizes` are bytes of values. What nobody reads is not run."""
    graph = _Graph(operations, results, sizes)
    stored = [op.is_apart for op in operations]
    joined: list[set[int]] = [set() for _ in operations]  # readers that an operation is joined to
    spread = [False] * len(operations)
    for p in range(len(operations) - 1, -1, -1):
        readers = graph.readers[p]
        joins = {c for c in readers if graph.may_join(p, c)}
        spread[p] = graph.n_users(p) < 2 or graph.cheap_to_repeat(p) or _on_all_paths(graph, p, spread)
        joined[p] = joins if spread[p] else set()
        graph.in_sum[p] = operations[p].kind == "sum" or any(graph.in_sum[c] for c in joined[p])
        stored[p] = stored[p] or graph.is_result[p] or len(joined[p]) < len(readers)
    return _collect(graph, stored, joined)


class _Graph:
    """Operations with their readers; a class for what is computed once."""

    def __init__(self, operations: Sequence[Operation], results: Sequence[int], sizes: Sequence[float]) -> None:
        self.operations, self.sizes = operations, sizes
        self.maker = {v: p for p, op in enumerate(operations) for v in op.writes}
        wanted = set(results)
        self.live = [False] * len(operations)
        self.is_result = [any(v in wanted for v in op.writes) for op in operations]
        self.readers: list[list[int]] = [[] for _ in operations]
        self.in_sum = [op.kind == "sum" for op in operations]
        self.below = [0] * len(operations)  # operations that a value comes from, as bits
        needed = set(results)
        for p in range(len(operations) - 1, -1, -1):
            self.live[p] = any(v in needed for v in operations[p].writes)
            if self.live[p]:
                needed.update(operations[p].reads)
        for c, op in enumerate(operations):
            makers = dict.fromkeys(self.maker[v] for v in op.reads if v in self.maker)
            for p in makers:
                self.below[c] |= self.below[p] | 1 << p
                if self.live[c]:
                    self.readers[p].append(c)

    def operands(self, c: int) -> list[int]:
        """Operations whose results `c` reads."""
        return list(dict.fromkeys(self.maker[v] for v in self.operations[c].reads if v in self.maker))

    def may_join(self, p: int, c: int) -> bool:
        """Rules 1 and 2."""
        producer, consumer = self.operations[p], self.operations[c]
        if producer.is_apart or producer.kind == "sum" or consumer.is_apart:
            return False
        if self.in_sum[c]:
            return producer.joins_sum and self.n_users(p) == 1
        return not (producer.expensive and (consumer.repeats or self.n_users(p) > 1))

    def n_users(self, p: int) -> int:
        """Readers, and one more for a result."""
        return len(self.readers[p]) + self.is_result[p]

    def cheap_to_repeat(self, p: int) -> bool:
        """Whether it reads one array only, not counting repeated ones, or no more bytes than it writes."""
        reads = set(self.operations[p].reads)
        arrays = [v for v in reads if self.sizes[v] > 16 and not self._is_repeated(v)]
        written = sum(self.sizes[v] for v in self.operations[p].writes)
        return len(arrays) < 2 or sum(self.sizes[v] for v in reads) <= written

    def _is_repeated(self, v: int) -> bool:
        maker = self.operations[self.maker[v]] if v in self.maker else None
        return maker is not None and (maker.kind == "fill" or maker.repeats)


def _on_all_paths(graph: _Graph, p: int, spread: Sequence[bool]) -> bool:
    """Rule 3: whether `p` is joined to each reader, and what lies between `p` and a reader is joined to it as well."""
    if graph.is_result[p]:
        return False
    seen: set[int] = set()
    waiting = list(graph.readers[p])
    while waiting:
        c = waiting.pop()
        if c == p or c in seen:
            continue
        seen.add(c)
        between = [o for o in graph.operands(c) if o == p or graph.below[o] >> p & 1]
        if any(not graph.may_join(o, c) or (o != p and not spread[o]) for o in between):
            return False
        waiting += between
    return True


def _collect(graph: _Graph, stored: Sequence[bool], joined: Sequence[set[int]]) -> list[Kernel]:
    """Kernels of the operations whose results are stored, with what they read through those joined to them."""
    operations = graph.operations
    # For each operation, the stored values that computing it reads, and whether element by element.
    reads: list[dict[int, bool]] = []
    kernels: list[Kernel] = []
    for c, op in enumerate(operations):
        own: dict[int, bool] = {}
        for v in op.reads:
            p = graph.maker.get(v)
            if p is None or c not in joined[p]:
                own[v] = own.get(v, True) and op.elementwise
            else:
                own.update((u, own.get(u, True) and once and op.elementwise) for u, once in reads[p].items())
        reads.append(own)
        if stored[c] and graph.live[c]:
            source = next(iter(op.reads), None)
            alias = source if op.kind == "view" and source in own else op.in_place
            kernels.append(
                Kernel(
                    c,
                    tuple(own),
                    op.writes,
                    alias,
                    op.in_place is not None,
                    op.scratch_bytes,
                    tuple(v for v in own if own[v]),
                    op.late,
                )
            )
    return kernels


def run_order(kernels: Sequence[Kernel], inputs: Sequence[int]) -> list[int]:
    """Numbers of `kernels` in the order in which they run: a queue of those that are ready, which `inputs` start."""
    maker = {v: k for k, kernel in enumerate(kernels) for v in kernel.writes}
    readers: dict[int, list[int]] = {}
    missing = []
    for k, kernel in enumerate(kernels):
        for v in kernel.reads:
            readers.setdefault(v, []).append(k)
        missing.append(len(kernel.reads))
    waiting: deque[tuple[int | None, tuple[int, ...]]] = deque((None, (v,)) for v in inputs)
    for behind in readers.values():
        behind.sort(key=lambda k: kernels[k].late)
    known = set(inputs)
    waiting.extend((None, (v,)) for v in readers if v not in maker and v not in known)
    waiting.extend((k, kernel.writes) for k, kernel in enumerate(kernels) if not kernel.reads)
    order = []
    while waiting:
        done, values = waiting.popleft()
        if done is not None:
            order.append(done)
        for v in values:
            for k in readers.get(v, ()):
                missing[k] -= 1
                if not missing[k]:
                    waiting.append((k, kernels[k].writes))
    assert len(order) == len(kernels), (len(order), len(kernels))
    return order
