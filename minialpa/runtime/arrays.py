"""Arrays that live in blocks of rows, each where it is used. They go from one call to the next as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class BlockedArray:
    """An array whose rows, along dimension 0, are in `blocks` of any lengths, on devices of their own.

    `np.asarray` and `jax.device_get` bring it to the host, `jnp.asarray` puts it together on the devices of its first
    block. Functions of jax do not take it as it is; parallelized functions do, and use blocks that lie right in place.
    """

    def __init__(self, blocks: Sequence[jax.Array]) -> None:
        assert blocks and len({(x.shape[1:], x.dtype) for x in blocks}) == 1, [jax.typeof(x) for x in blocks]
        self.blocks = tuple(blocks)
        self.shape: tuple[int, ...] = (sum(x.shape[0] for x in blocks), *blocks[0].shape[1:])
        self.dtype = blocks[0].dtype
        self.aval = blocks[0].aval.update(shape=self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return sum(x.size for x in self.blocks)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.blocks)

    @property
    def sharding(self) -> tuple[jax.sharding.Sharding, ...]:
        """That of each block."""
        return tuple(x.sharding for x in self.blocks)

    def rows(self, start: int, stop: int) -> Any:
        """Rows `start` to `stop`: a block itself, or parts of blocks put together on the devices of the first."""
        parts, at = [], 0
        for block in self.blocks:
            a, b = max(start - at, 0), min(stop - at, block.shape[0])
            if a < b:
                parts.append(block if (a, b) == (0, block.shape[0]) else block[a:b])
            at += block.shape[0]
        if len(parts) == 1:
            return parts[0]
        near = [parts[0], *(jax.device_put(x, parts[0].sharding) for x in parts[1:])]
        return jnp.concatenate(near)

    def copy(self) -> BlockedArray:
        return BlockedArray([block.copy() for block in self.blocks])

    def block_until_ready(self) -> BlockedArray:
        jax.block_until_ready(self.blocks)
        return self

    def copy_to_host_async(self) -> None:
        for block in self.blocks:
            block.copy_to_host_async()

    def is_deleted(self) -> bool:
        """Whether any block is."""
        return any(block.is_deleted() for block in self.blocks)

    def delete(self) -> None:
        for block in self.blocks:
            block.delete()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return jnp.asarray(self)[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        out = np.concatenate([np.asarray(block) for block in self.blocks])
        return out if dtype is None else out.astype(dtype, copy=False)

    def __jax_array__(self) -> jax.Array:
        out: jax.Array = self.rows(0, self.shape[0])
        return out

    def __repr__(self) -> str:
        rows = ", ".join(str(block.shape[0]) for block in self.blocks)
        return f"BlockedArray({self.dtype}{list(self.shape)} in blocks of {rows} rows)"
