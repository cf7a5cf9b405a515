"""Products that compute elementwise what comes after them, as the kernels of XLA for GPUs do.

A product takes in the one operation that reads it, if this is a view or elementwise, and if what it writes has no more
bytes than what it reads: a sum with a bias or a residual, a scale, a conversion to fewer bits. Then it looks at the
next one. A function that reads the product twice, such as gelu, stays outside. A product with a result of 16 bits takes
in nothing: XLA leaves it to libraries, or makes a kernel of it alone. Of 2,350 such products in programs that were
compiled for GPUs, 10 took something in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from minialpa.intra.memory.xla.operations import Operation


def with_epilogues(
    operations: Sequence[Operation], results: Sequence[int], sizes: Sequence[float], halves: Collection[int]
) -> tuple[Operation, ...]:
    """`operations` with those that products take in made part of them.

    sizes: bytes of values. halves: the values whose elements have 16 bits or fewer.
    """
    n_reads = Counter(v for op in operations for v in op.reads)
    n_reads.update(results)
    out: list[Operation | None] = []
    # For what a product writes for one reader, where the product is in `out`.
    products: dict[int, int] = {}
    # For what repeats elements, such as a bias for each row, the elements.
    repeated: dict[int, tuple[int, ...]] = {}
    for op in operations:
        if op.repeats or op.kind == "fill":
            repeated[op.writes[0]] = op.reads
        product = next((v for v in op.reads if v in products), None) if _is_epilogue(op, sizes) else None
        # With another array it computes sums only: what gates a product is a kernel of its own. Literals have no bytes.
        if op.sums != "add" and any(sizes[v] and v != product and v not in repeated for v in op.reads):
            product = None
        if product is not None:
            place = products.pop(product)
            before = out[place]
            assert before is not None
            others = (read for v in op.reads if v != product for read in repeated.get(v, (v,)))
            op = before._replace(reads=(*before.reads, *others), writes=op.writes)
            out[place] = None
        out.append(op)
        is_taking = op.is_product and (product is not None or op.writes[0] not in halves)
        if is_taking and len(op.writes) == 1 and n_reads[op.writes[0]] == 1:
            products[op.writes[0]] = len(out) - 1
    return tuple(op for op in out if op is not None)


def _is_epilogue(op: Operation, sizes: Sequence[float]) -> bool:
    if op.kind == "view":
        return len(op.reads) == 1 and not op.waits
    is_loop = op.kind == "loop" and op.elementwise and not op.reduces
    return is_loop and sum(sizes[v] for v in op.reads) >= sum(sizes[v] for v in op.writes)
