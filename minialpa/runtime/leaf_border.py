"""The border between the leaves of a step and those of its program, in which blocks of rows are leaves of their own.

A step whose stages end inside a scan over layers keeps each stacked leaf in blocks of rows, on the meshes of its stages
(`LeafBlocks`). Here the arguments of a call are split into these blocks, and results in blocks become `BlockedArray`s,
which the next call takes apart again without a copy. Behind the border, runtimes know leaves only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from minialpa.arrays import RemoteArray
from minialpa.programs.program import BlockRows, LeafBlocks
from minialpa.runtime.arrays import BlockedArray, LeafRows
from minialpa.runtime.runner import Runner


class BlockedCalls:
    """Calls of a program with leaves in blocks, by the leaves of its step. Threads may call it at the same time."""

    def __init__(self, runner: Runner, blocks: LeafBlocks) -> None:
        """`runner` runs the program; `blocks` are those of the program."""
        self._runner, self._blocks = runner, blocks

    def __call__(self, leaves: Sequence[Any], *, traced: bool = False) -> list[Any]:
        """Run a step, as `Runner` does."""
        # Nothing is copied or read here. The runner does both in its turn, after it has looked for deleted arrays.
        results = self._runner(split_leaves(leaves, self._blocks.arguments), traced=traced)
        return joined_leaves(results, self._blocks.results)

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Lay out argument leaves, as `Runner` does; those that have rows which no stage reads stay as they are."""
        blocks = self._blocks.arguments
        given = split_leaves(leaves, blocks)
        placed = iter(zip(given, self._runner.place(given), strict=True))
        return [
            next(placed)[1] if of_leaf is None else _placed_leaf(leaf, [next(placed) for _ in of_leaf])
            for leaf, of_leaf in zip(leaves, blocks or (None,) * len(leaves), strict=True)
        ]


def split_leaves(leaves: Sequence[Any], blocks: Sequence[BlockRows | None]) -> list[Any]:
    """The leaves of a program, from those of its step. `blocks` has the blocks of each leaf; empty if none is cut."""
    if not blocks:
        return list(leaves)
    split: list[Any] = []
    for leaf, of_leaf in zip(leaves, blocks, strict=True):
        if of_leaf is None:
            split.append(leaf)
        elif isinstance(leaf, BlockedArray) and leaf.ranges == of_leaf:
            split += leaf.blocks
        else:
            split += [_block(leaf, rows) for rows in of_leaf]
    return split


def _block(leaf: Any, rows: tuple[int, int]) -> Any:
    """One block of a leaf that is not in the blocks of the program: one of its own that has these rows, or a view.

    None for a leaf that is not given."""
    if leaf is None:
        return None
    if isinstance(leaf, BlockedArray) and rows in leaf.ranges:
        return leaf.blocks[leaf.ranges.index(rows)]
    if isinstance(leaf, jax.Array | RemoteArray):
        return LeafRows(leaf, rows)
    return np.asarray(leaf)[slice(*rows)]


def joined_leaves(results: Sequence[Any], blocks: Sequence[BlockRows | None]) -> list[Any]:
    """The result leaves of a step, from those of its program: a `BlockedArray` for each that is in blocks.

    Typed keys in this process are put together: functions of `jax.random` take jax's own arrays of them, and no others.
    """
    if not blocks:
        return list(results)
    parts = iter(results)
    return [next(parts) if of_leaf is None else _joined([next(parts) for _ in of_leaf]) for of_leaf in blocks]


def _joined(blocks: Sequence[Any]) -> Any:
    array = BlockedArray(blocks)
    are_keys = jax.numpy.issubdtype(array.dtype, jax.dtypes.extended)
    is_here = not any(isinstance(block, RemoteArray) for block in blocks)
    return array.rows(0, array.shape[0]) if are_keys and is_here else array


def _placed_leaf(leaf: Any, blocks: Sequence[tuple[Any, Any]]) -> Any:
    """A leaf in blocks after these were placed. blocks: each as the runner got it and as it gave it back."""
    # The runner gives back a view of rows that no stage reads: there is no place for them.
    if any(isinstance(placed, LeafRows | np.ndarray) for _, placed in blocks):
        return leaf
    is_in_place = all(placed is given for given, placed in blocks)
    return leaf if is_in_place else BlockedArray([placed for _, placed in blocks])
