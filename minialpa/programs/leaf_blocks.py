"""Leaf blocks: which leaves of a step a program has in blocks of rows.

Where a stage ends inside a scan over layers, each stacked leaf is cut into blocks of rows, one or more for each stage.
Inside a program a block is a leaf like any other, with a number of its own: a leaf that is not cut has one number, a
leaf that is cut has one for each block, in the order of the leaves and of their rows. In the runtime, only
`runner.py` looks at the blocks: it splits the arguments of a call and joins its results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from minialpa.errors import VerifyError

#: The rows (start, stop) along dimension 0 of each block of a leaf, in order.
BlockRows = tuple[tuple[int, int], ...]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LeafBlocks:
    """The blocks of the leaves of a step, numbered as its caller sees them.

    Raises VerifyError unless each cut leaf has several blocks, which are its rows in order, without gaps or overlaps.

    Attributes:
        arguments: for each argument leaf, its blocks; None if it is not cut. Empty if no argument leaf is cut.
        results: the same for result leaves.
    """

    arguments: tuple[BlockRows | None, ...] = ()
    results: tuple[BlockRows | None, ...] = ()

    def __post_init__(self) -> None:
        for kind, leaves in (("Argument", self.arguments), ("Result", self.results)):
            for number, blocks in enumerate(leaves):
                if blocks is not None and not _make_a_leaf(blocks):
                    raise VerifyError(f"{kind} leaf {number} is cut into the rows {blocks}, which do not make a leaf.")

    def __bool__(self) -> bool:
        """Whether any leaf is cut."""
        return bool(self.arguments or self.results)


def _make_a_leaf(blocks: BlockRows) -> bool:
    stops = [0, *(stop for _, stop in blocks)]
    return len(blocks) > 1 and all(start == before < stop for before, (start, stop) in zip(stops, blocks, strict=False))


def numbered_leaves(
    leaves: Sequence[T], blocks: Sequence[BlockRows | None]
) -> Iterator[tuple[T, tuple[int, int] | None]]:
    """For each leaf of a program, in order: the caller's leaf that it is, and its rows of that; None for all rows."""
    for leaf, of_leaf in zip(leaves, blocks or (None,) * len(leaves), strict=True):
        for rows in of_leaf or (None,):
            yield leaf, rows
