"""Gathers of matrices along their columns, which XLA for GPUs makes gathers along rows of the transposed matrices.

A gather joins the shards along the outermost dimension in memory. What it gathers along another one has to be copied,
before or after. Products read a matrix in either order, so where only products read it, the copy is that of the shard:

    gather, copy of the whole    ->    copy of the shard, gather
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from minialpa.intra.memory.xla.operations import Operation


class ColumnGather(NamedTuple):
    """A gather along the columns of a matrix.

    Attributes:
        shard: the value that is gathered.
        exchanged: its copy in the other order, if there is one.
        gathered: what the gather writes.
    """

    shard: int
    exchanged: int
    gathered: int


def of_transposed(
    operations: Sequence[Operation], results: Sequence[int], gathers: dict[int, ColumnGather]
) -> tuple[tuple[Operation, ...], dict[int, int]]:
    """`operations` with such gathers replaced, and what they write now for what they wrote before.

    gathers: by the copy of the whole.
    """
    readers: dict[int, list[Operation]] = defaultdict(list)
    for op in operations:
        for v in op.reads:
            readers[v].append(op)
    chosen = {
        copy: gather
        for copy, gather in gathers.items()
        if copy not in results
        and len(readers[gather.gathered]) == 1
        and gather.gathered not in results
        and readers[copy]
        and all(reader.is_product for reader in readers[copy])
    }
    renamed = {gather.gathered: copy for copy, gather in chosen.items()}
    out: list[Operation] = []
    for op in operations:
        written = op.writes[0] if op.writes else -1
        if written in renamed:
            gather = chosen[renamed[written]]
            out.append(Operation("loop", (gather.shard,), (gather.exchanged,)))
            op = op._replace(reads=(gather.exchanged,), writes=(renamed[written],))
        elif written in chosen:
            continue
        out.append(op)
    return tuple(out), renamed
