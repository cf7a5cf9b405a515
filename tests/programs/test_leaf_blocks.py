"""Leaf blocks: which are leaves in order, and how the leaves of a program are numbered."""

from __future__ import annotations

import pytest

from minialpa.errors import VerifyError
from minialpa.programs.leaf_blocks import BlockRows, LeafBlocks, numbered_leaves


@pytest.mark.parametrize(
    "rows", [(), ((0, 2), (3, 5)), ((1, 2), (2, 4)), ((0, 2),), ((0, 1), (0, 2)), ((0, 2), (2, 2)), ((2, 3), (0, 2))]
)
def test_blocks_are_the_rows_of_a_leaf_in_order(rows: BlockRows) -> None:
    with pytest.raises(VerifyError, match=r"Argument leaf 1 is cut into the rows .* which do not make a leaf"):
        LeafBlocks(arguments=(None, rows))
    with pytest.raises(VerifyError, match="Result leaf 0"):
        LeafBlocks(results=(rows,))


def test_steps_without_blocks_are_told_apart() -> None:
    assert not LeafBlocks()
    assert LeafBlocks(arguments=(((0, 1), (1, 3)), None)) and LeafBlocks(results=(((0, 1), (1, 3)),))


def test_each_block_has_a_number() -> None:
    assert list(numbered_leaves("abc", (None, ((0, 2), (2, 5)), None))) == [
        ("a", None), ("b", (0, 2)), ("b", (2, 5)), ("c", None)
    ]  # fmt: skip
    assert list(numbered_leaves("ab", ())) == [("a", None), ("b", None)]
