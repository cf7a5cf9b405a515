"""Arrays in blocks of rows, each on the devices that use it, and rows of arrays that a program reads in other blocks.

A `BlockedArray` is what a caller holds of a leaf in blocks; it goes from one call to the next without a copy. Where the
caller's leaf is not in the blocks of the program, `LeafRows` stand for these until a runtime asks for their values.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from minialpa.arrays import RemoteArray, prefetch


class BlockedArray(RemoteArray):
    """An array whose rows, along dimension 0, are in `blocks` of any lengths, on devices or workers of their own.

    `np.asarray` and `jax.device_get` bring it to the host, `jnp.asarray` puts it together on the devices of its first
    block. Functions of jax do not take it as it is; parallelized functions do, and use blocks that lie right in place.
    """

    def __init__(self, blocks: Sequence[Any]) -> None:
        """`blocks`: jax arrays or remote arrays, alike but for their number of rows."""
        assert blocks and len({(x.shape[1:], x.dtype) for x in blocks}) == 1, [(x.shape, x.dtype) for x in blocks]
        self.blocks = tuple(blocks)
        self.ranges = tuple(itertools.pairwise(itertools.accumulate((x.shape[0] for x in blocks), initial=0)))
        self.shape = (self.ranges[-1][1], *blocks[0].shape[1:])
        self.dtype, self.weak_type = blocks[0].dtype, _is_weak(blocks[0])

    @property
    def shardings(self) -> tuple[Any, ...]:
        """The sharding of each block; blocks of remote arrays have none."""
        return tuple(x.sharding for x in self.blocks)

    @property
    def stored_as(self) -> tuple[Any, ...]:
        return self.blocks

    def rows(self, start: int, stop: int) -> Any:
        """Rows `start` to `stop`: a block itself, or parts of blocks put together on the devices of the first.

        Those of remote blocks are fetched.
        """
        read = [
            (block, max(start - first, 0), min(stop, behind) - first)
            for block, (first, behind) in zip(self.blocks, self.ranges, strict=True)
            if first < stop and start < behind
        ]
        # All at once, whatever is read first: a step reads the rows of a leaf one block after the other.
        prefetch(self.blocks)

        is_whole = [(a, b) == (0, block.shape[0]) and isinstance(block, jax.Array) for block, a, b in read]
        parts = [block if whole else block[a:b] for (block, a, b), whole in zip(read, is_whole, strict=True)]
        if len(parts) == 1:
            return parts[0]
        if any(isinstance(x, np.ndarray) for x in parts):
            return np.concatenate([np.asarray(x) for x in parts])
        near = [parts[0], *(jax.device_put(x, parts[0].sharding) for x in parts[1:])]
        return jnp.concatenate(near)

    def _fetch(self) -> Any:
        self._fetch_all([self])
        if jnp.issubdtype(self.dtype, jax.dtypes.extended):
            return self.rows(0, self.shape[0])
        return np.concatenate([np.asarray(block) for block in self.blocks])

    def fetch_once(self) -> Any:
        """The whole array on the host, filled block by block."""
        if jnp.issubdtype(self.dtype, jax.dtypes.extended):
            return self.rows(0, self.shape[0])
        whole = np.empty(self.shape, self.dtype)
        for block, (start, stop) in zip(self.blocks, self.ranges, strict=True):
            whole[start:stop] = block.fetch_once() if isinstance(block, RemoteArray) else np.asarray(block)
        return whole

    @classmethod
    def _fetch_all(cls, arrays: Sequence[Any]) -> None:
        for array in arrays:
            array.copy_to_host_async()
        prefetch([block for array in arrays for block in array.blocks])

    def block_until_ready(self) -> BlockedArray:
        for block in self.blocks:
            block.block_until_ready()
        return self

    def copy_to_host_async(self) -> None:
        """Start to bring the blocks to the host, those of jax arrays."""
        for block in self.blocks:
            if isinstance(block, jax.Array):
                block.copy_to_host_async()

    def is_deleted(self) -> bool:
        """Whether any block is."""
        return any(block.is_deleted() for block in self.blocks)

    def delete(self) -> None:
        for block in self.blocks:
            block.delete()

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.rows(0, self.shape[0]))

    def __repr__(self) -> str:
        rows = ", ".join(str(block.shape[0]) for block in self.blocks)
        return f"BlockedArray({self.dtype}{list(self.shape)} in blocks of {rows} rows)"


@dataclass(frozen=True, slots=True)
class BlockedTarget:
    """The type of a `BlockedArray` that is still to be made, as `jax.ShapeDtypeStruct` is that of a jax array.

    Attributes:
        shape: of the whole array.
        dtype: of the whole array.
        rows: the rows (start, stop) of each block.
        shardings: the sharding of each block.
    """

    shape: tuple[int, ...]
    dtype: Any
    rows: tuple[tuple[int, int], ...]
    shardings: tuple[Sharding, ...]


class LeafRows(RemoteArray):
    """Rows of an array that a caller holds, as a step reads them.

    The value is made anew each time that it is asked for and shares no memory with a jax array, so a step may take it
    over. Nothing is copied for rows that no stage reads.
    """

    def __init__(self, leaf: jax.Array | RemoteArray, rows: tuple[int, int]) -> None:
        self._leaf, self._rows = leaf, rows
        self.shape = (rows[1] - rows[0], *leaf.shape[1:])
        self.dtype, self.weak_type = leaf.dtype, _is_weak(leaf)

    @property
    def stored_as(self) -> tuple[Any, ...]:
        """Those of all rows: a step that uses up some of them uses up the array."""
        return self._leaf.stored_as if isinstance(self._leaf, RemoteArray) else (self._leaf,)

    def _fetch(self) -> Any:
        return self._leaf.rows(*self._rows) if isinstance(self._leaf, BlockedArray) else self._leaf[slice(*self._rows)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        # A jax array in the memory of the host is read there in place; a slice of it would be a copy.
        if isinstance(self._leaf, jax.Array) and not jnp.issubdtype(self.dtype, jax.dtypes.extended):
            return np.array(np.asarray(self._leaf)[slice(*self._rows)], dtype=dtype, copy=copy)
        return super().__array__(dtype, copy)

    def block_until_ready(self) -> LeafRows:
        self._leaf.block_until_ready()
        return self

    def is_deleted(self) -> bool:
        return self._leaf.is_deleted()


def _is_weak(array: Any) -> bool:
    """Whether an array is weakly typed. Arrays of random keys do not say."""
    return bool(getattr(array, "weak_type", False))
