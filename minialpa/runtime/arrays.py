"""Arrays that live in blocks of rows, each where it is used. They go from one call to the next as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
        self.shape = (sum(x.shape[0] for x in blocks), *blocks[0].shape[1:])
        self.dtype, self.weak_type = blocks[0].dtype, blocks[0].weak_type

    @property
    def sharding(self) -> tuple[Any, ...]:
        """That of each block; blocks of remote arrays have none."""
        return tuple(x.sharding for x in self.blocks)

    def block(self, start: int, stop: int) -> Any:
        """The block of rows `start` to `stop`, None if these are no block."""
        at = 0
        for block in self.blocks:
            if (start, stop) == (at, at + block.shape[0]):
                return block
            at += block.shape[0]
        return None

    def rows(self, start: int, stop: int) -> Any:
        """Rows `start` to `stop`: a block itself, or parts of blocks put together on the devices of the first.

        Those of remote blocks are fetched.
        """
        parts, at = [], 0
        for block in self.blocks:
            a, b = max(start - at, 0), min(stop - at, block.shape[0])
            if a < b:
                whole = (a, b) == (0, block.shape[0]) and isinstance(block, jax.Array)
                parts.append(block if whole else block[a:b])
            at += block.shape[0]
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
