"""Products that compute elementwise what comes after them, as the kernels of XLA for GPUs do.

A product takes in the one operation that reads it, if this is a view or elementwise and writes no more bytes than
it reads: a bias, a scale, the update of a weight by its gradient. Then the product looks at the next operation. A
function that reads the product twice, such as gelu, stays outside.

The other operands have to be arguments of the program, or repeat arguments. An array that another kernel makes, such as
a residual of a layer before or a bias that is converted, keeps the operation outside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from minialpa.intra.memory.xla.operations import Operation


def with_epilogues(
    operations: Sequence[Operation], inputs: Sequence[int], results: Sequence[int], sizes: Sequence[float]
) -> tuple[Operation, ...]:
    """`operations` with those that products take in made part of them.

    inputs: the arguments of the program. sizes: bytes of values; literals have none.
    """
    n_reads = Counter(v for op in operations for v in op.reads)
    n_reads.update(results)
    out: list[Operation | None] = []
    # For what a product writes for one reader, where the product is in `out`.
    products: dict[int, int] = {}
    # For arguments, views of them and arrays that repeat them, the arguments that a kernel reads.
    loaded: dict[int, tuple[int, ...]] = {v: (v,) for v in inputs}
    for op in operations:
        others = {v for v in op.reads if v not in loaded and sizes[v]}
        if not others and (op.repeats or op.kind in ("fill", "view")):
            reads = tuple(read for v in op.reads for read in loaded.get(v, (v,)))
            loaded.update(dict.fromkeys(op.writes, reads))
        # All that it reads besides one product, once, are arguments.
        (product,) = others if len(others) == 1 else (None,)
        if product in products and op.reads.count(product) == 1 and _is_epilogue(op, sizes):
            place = products.pop(product)
            before = out[place]
            assert before is not None
            arguments = (read for v in op.reads if v != product for read in loaded.get(v, (v,)))
            op = before._replace(reads=(*before.reads, *arguments), writes=op.writes)
            out[place] = None
        out.append(op)
        if op.is_product and len(op.writes) == 1 and n_reads[op.writes[0]] == 1:
            products[op.writes[0]] = len(out) - 1
    return tuple(op for op in out if op is not None)


def _is_epilogue(op: Operation, sizes: Sequence[float]) -> bool:
    if op.kind == "view":
        return len(op.reads) == 1 and not op.waits
    is_loop = op.kind == "loop" and op.elementwise and not op.reduces
    return is_loop and sum(sizes[v] for v in op.reads) >= sum(sizes[v] for v in op.writes)
