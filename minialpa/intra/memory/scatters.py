"""Sums with a scatter become scatters into the other operand: operations in, operations out.

    scatter_add(base, i, u) + x   ->   scatter_add(base + x, i, u),   and base + x is x where base is zeros

So does the compiler where nothing else reads the scatter: the gradient of a table that is read twice, by rows and as
a matrix, lies in one buffer, and the zeros in none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from minialpa.intra.memory.fusion import Operation


def absorb(operations: Sequence[Operation], results: Sequence[int], zeros: AbstractSet[int]) -> tuple[Operation, ...]:
    """`operations` with such sums replaced, in a valid order; `zeros` are values that are zero throughout."""
    n_readers = Counter([v for op in operations for v in op.reads] + list(results))
    out: dict[int, Operation] = {}  # by their first results; some have none
    for number, op in enumerate(operations):
        scattered = _scattered(op, out, n_readers)
        if scattered is None:
            out[op.writes[0] if op.writes else -1 - number] = op
            continue
        scatter = out.pop(scattered)
        base = next(v for v in op.reads if v != scattered)
        if scatter.reads[0] not in zeros:
            # What was the result of the scatter is now its first operand.
            out[scattered] = replace(op, reads=(scatter.reads[0], base), writes=(scattered,))
            base = scattered
        out[op.writes[0]] = replace(scatter, reads=(base, *scatter.reads[1:]), writes=op.writes, in_place=base)
    return tuple(out.values())


def _scattered(op: Operation, made: Mapping[int, Operation], n_readers: Mapping[int, int]) -> int | None:
    """The operand of the sum `op` that is a scatter which nothing else reads."""
    if op.sums != "add":
        return None
    return next((v for v in op.reads if v in made and made[v].sums == "scatter" and n_readers[v] == 1), None)
