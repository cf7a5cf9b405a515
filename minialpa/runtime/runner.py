"""Runners, which run a program in one process or on workers, and the border of blocks in front of them.

A step whose stages end inside a scan over layers keeps each stacked leaf in blocks of rows, on the meshes of its stages
(`LeafBlocks`). For the program, each block is a leaf. `BlockedCalls` splits the arguments of a call into blocks. It
joins results in blocks to `BlockedArray`s, which the next call takes apart without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from minialpa.arrays import RemoteArray
from minialpa.programs.program import BlockRows, LeafBlocks
from minialpa.runtime.arrays import BlockedArray, LeafRows
from minialpa.runtime.steps.step_trace import TaskTime


class Runner(Protocol):
    """A program on devices. A call runs a step on argument leaves and returns result leaves, without waiting.

    Leaves are leaves of the program: each block of rows is one.

    meshes: the devices of each mesh of the program; empty if they are not in this process. session: the runtime of the
    session whose workers have the devices; None if they are in this process. traced: note the times of the step, for
    `timeline`. The first such call compiles every function a second time.

    Threads may call it at the same time: steps have one order. A step whose argument another step has donated raises a
    DeletedArrayError and does nothing.
    """

    @property
    def meshes(self) -> Sequence[Mesh]: ...

    @property
    def session(self) -> Any: ...

    def __call__(self, leaves: Sequence[Any], /, *, traced: bool = False) -> list[Any]: ...

    def turn(self) -> AbstractContextManager[None]:
        """While this is open, no step of another thread begins on these devices."""

    def timeline(self) -> tuple[TaskTime, ...]:
        """The tasks of the last traced step, in order of their start. Waits for the end of the step."""

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Argument leaves laid out as the step reads them. Arrays that the step donates share no memory with `leaves`.

        A leaf that the step cuts becomes a `MicroBatchedArray`, if the step reads all of its rows. A leaf that is None
        stays None.
        """

    def homes(self, leaf: Any) -> tuple[tuple[int, PartitionSpec], ...]:
        """The meshes of the program that hold an array, by number, with its sharding on each; empty if none does."""

    def hlo_texts(self) -> list[str]:
        """Compiled HLO of each function of the program."""

    def allocation_sizes(self) -> list[int]:
        """Bytes per device of each function of the program: arguments, results and temporaries."""

    def function_seconds(self, repeats: int = 5) -> list[float]:
        """Seconds of each function of the program by itself: median of `repeats` calls."""

    def descriptions(self) -> Mapping[str, str]:
        """A description of each process that takes part, by a name for it."""

    def sync(self) -> None:
        """Wait until all calls that were started have ended."""


class BlockedCalls:
    """Calls of a program with leaves in blocks, by the leaves of its step. Threads may call it at the same time."""

    def __init__(self, runner: Runner, blocks: LeafBlocks) -> None:
        """`runner` runs the program; `blocks` belong to the program."""
        self._runner, self._blocks = runner, blocks

    def __call__(self, leaves: Sequence[Any], *, traced: bool = False) -> list[Any]:
        # Neither copies nor reads: the runner does both in its turn, after it has looked for deleted arrays.
        results = self._runner(split_leaves(leaves, self._blocks.arguments), traced=traced)
        return joined_leaves(results, self._blocks.results)

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Lay out argument leaves, as `Runner` does; leaves with rows that no stage reads stay unchanged."""
        blocks = self._blocks.arguments
        given = split_leaves(leaves, blocks)
        placed = iter(zip(given, self._runner.place(given), strict=True))
        return [
            next(placed)[1] if of_leaf is None else _placed_leaf(leaf, [next(placed) for _ in of_leaf])
            for leaf, of_leaf in zip(leaves, blocks or (None,) * len(leaves), strict=True)
        ]


def split_leaves(leaves: Sequence[Any], blocks: Sequence[BlockRows | None]) -> list[Any]:
    """The leaves of a program, from the leaves of its step. blocks: of each leaf; empty if none is cut."""
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
    """One block of a leaf that is not in the blocks of the program: a block with these rows, or a view.

    None for a leaf that is None.
    """
    if leaf is None:
        return None
    if isinstance(leaf, BlockedArray) and rows in leaf.ranges:
        return leaf.blocks[leaf.ranges.index(rows)]
    if isinstance(leaf, jax.Array | RemoteArray):
        return LeafRows(leaf, rows)
    return np.asarray(leaf)[slice(*rows)]


def joined_leaves(results: Sequence[Any], blocks: Sequence[BlockRows | None]) -> list[Any]:
    """The result leaves of a step, from the leaves of its program: a `BlockedArray` for each leaf in blocks.

    Typed keys in this process are put together: functions of `jax.random` take only jax's own arrays of keys.
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
    # The runner returns a view of rows that no stage reads: they have no place.
    if any(isinstance(placed, LeafRows | np.ndarray) for _, placed in blocks):
        return leaf
    is_in_place = all(placed is given for given, placed in blocks)
    return leaf if is_in_place else BlockedArray([placed for _, placed in blocks])
