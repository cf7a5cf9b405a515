"""`Runner`, the interface of both runtimes, and `BlockedCalls`, which turns leaves of a step into leaves of a program.

A step whose stages end inside a scan over layers keeps each stacked leaf in blocks of rows, which are leaves of the
program. With 8 layers on two stages:

    leaves of the step       w [8, 512, 512]               ->  w' [8, 512, 512], a BlockedArray
    leaves of the program    w[0:4], w[4:8], on 2 meshes   ->  w'[0:4], w'[4:8]

The next call takes the `BlockedArray` apart without a copy.
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
from minialpa.programs.resharding import Resharding
from minialpa.runtime.arrays import BlockedArray, LeafRows
from minialpa.runtime.steps.step_trace import TaskTime


class Runner(Protocol):
    """A program on devices. A call starts one step on leaves of the program and returns result leaves without waiting.

    With `traced=True`, it also records the times of the step. The first such call compiles each function a second time.
    Threads may call it at the same time: steps have one order. A call whose argument another step has donated raises
    DeletedArrayError and has no effect.

    Attributes:
        meshes: devices of each mesh; empty if they belong to other processes.
        session: the runtime of the workers; None in one process.
        reshardings: how arrays move between meshes, by target buffer; empty in one process.
    """

    @property
    def meshes(self) -> Sequence[Mesh]: ...

    @property
    def session(self) -> Any: ...

    @property
    def reshardings(self) -> Mapping[int, Resharding]: ...

    def __call__(self, leaves: Sequence[Any], /, *, traced: bool = False) -> list[Any]: ...

    def turn(self) -> AbstractContextManager[None]:
        """No other thread starts a step on these devices."""

    def timeline(self) -> tuple[TaskTime, ...]:
        """The last traced step, by start. Waits for its end."""

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Argument leaves, laid out as the step reads them. Donated arrays share no memory with `leaves`.

        A leaf that the step cuts into micro-batches becomes a `MicroBatchedArray`, if the step reads all of its rows.
        None stays None.
        """

    def homes(self, leaf: Any) -> tuple[tuple[int, PartitionSpec], ...]:
        """The number of each mesh that holds an array, and its sharding there."""

    def hlo_texts(self) -> list[str]:
        """Compiled HLO of each function."""

    def allocation_sizes(self) -> list[int]:
        """For each function, bytes per device of arguments, results and temporaries."""

    def function_seconds(self, repeats: int = 5) -> list[float]:
        """For each function, the median seconds of `repeats` calls of it alone."""

    def descriptions(self) -> Mapping[str, str]:
        """A description of each process, by its name."""

    def sync(self) -> None:
        """Wait until all started calls have ended."""


class BlockedCalls:
    """Calls of a program by the leaves of its step. Thread-safe."""

    def __init__(self, runner: Runner, blocks: LeafBlocks) -> None:
        self._runner, self._blocks = runner, blocks

    def __call__(self, leaves: Sequence[Any], *, traced: bool = False) -> list[Any]:
        # The runner copies and reads in its turn, after its check for deleted arrays.
        results = self._runner(split_leaves(leaves, self._blocks.arguments), traced=traced)
        return joined_leaves(results, self._blocks.results)

    def turn(self) -> AbstractContextManager[None]:
        return self._runner.turn()

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """A leaf with rows that no stage reads stays unchanged."""
        blocks = self._blocks.arguments
        parts = split_leaves(leaves, blocks)
        placed = iter(zip(parts, self._runner.place(parts), strict=True))
        return [
            next(placed)[1] if of_leaf is None else _placed_leaf(leaf, [next(placed) for _ in of_leaf])
            for leaf, of_leaf in zip(leaves, blocks or (None,) * len(leaves), strict=True)
        ]


def split_leaves(leaves: Sequence[Any], blocks: Sequence[BlockRows | None]) -> list[Any]:
    """The leaves of a program, from the leaves of its step.

    blocks: (start, stop) of each block of each leaf, None for a whole leaf; empty if all are whole.
    """
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
    """These rows: the leaf's own block, or a view. None stays None."""
    if leaf is None:
        return None
    if isinstance(leaf, BlockedArray) and rows in leaf.ranges:
        return leaf.blocks[leaf.ranges.index(rows)]
    if isinstance(leaf, jax.Array | RemoteArray):
        return LeafRows(leaf, rows)
    return np.asarray(leaf)[slice(*rows)]


def joined_leaves(results: Sequence[Any], blocks: Sequence[BlockRows | None]) -> list[Any]:
    """The result leaves of a step. Typed keys in this process are joined: functions of `jax.random` accept only jax's
    own arrays of keys.
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
    """blocks: each block before and after `Runner.place`."""
    # The runner returns a view of rows that no stage reads.
    if any(isinstance(placed, LeafRows | np.ndarray) for _, placed in blocks):
        return leaf
    is_in_place = all(placed is given for given, placed in blocks)
    return leaf if is_in_place else BlockedArray([placed for _, placed in blocks])
