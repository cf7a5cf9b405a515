"""Sums with a scatter, which XLA turns into scatters into the other operand.

    scatter_add(base, i, u) + x   ->   scatter_add(base + x, i, u),   and base + x is x where base is zeros

XLA does so where nothing else reads the scatter. The gradient of a table that is read twice, by rows and as a matrix,
is then in one buffer, and the zeros in none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from minialpa.intra.memory.xla.operations import Operation


def absorb(operations: Sequence[Operation], results: Sequence[int], zeros: AbstractSet[int]) -> tuple[Operation, ...]:
    """`operations` with such sums replaced, in a valid order; `zeros` are values that are zero throughout."""
    n_readers = Counter([value for op in operations for value in op.reads] + list(results))
    out: dict[int, Operation] = {}  # by their first results; negative keys for those that have none

    for number, op in enumerate(operations):
        scattered = _scattered(op, out, n_readers)
        if scattered is None:
            out[op.writes[0] if op.writes else -1 - number] = op
            continue

        scatter = out.pop(scattered)
        base = next(value for value in op.reads if value != scattered)
        if scatter.reads[0] not in zeros:
            # The value that the scatter wrote is now its first operand.
            out[scattered] = op._replace(reads=(scatter.reads[0], base), writes=(scattered,))
            base = scattered
        out[op.writes[0]] = scatter._replace(reads=(base, *scatter.reads[1:]), writes=op.writes, in_place=base)

    return tuple(out.values())


def _scattered(op: Operation, made: Mapping[int, Operation], n_readers: Mapping[int, int]) -> int | None:
    """The operand of the sum `op` that is a scatter which nothing else reads; None if there is no such operand."""
    if op.sums != "add":
        return None
    return next(
        (value for value in op.reads if value in made and made[value].sums == "scatter" and n_readers[value] == 1), None
    )
