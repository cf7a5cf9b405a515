"""Arrays in blocks of rows, rows of arrays that a program reads in other blocks, and batches cut into micro-batches.

A caller holds a leaf in blocks as a `BlockedArray`, which goes from one call to the next without a copy. Where the
caller's leaf is not in the blocks of the program, `LeafRows` stand for these until a runtime asks for their values. A
`MicroBatchedArray` is a leaf of a batch, cut into the rows of each micro-batch before the step is called.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, Sharding

from minialpa.arrays import RemoteArray, prefetch
from minialpa.programs.program import MeshShape


class BlockedArray(RemoteArray):
    """An array whose rows, along dimension 0, are in `blocks` of any lengths, on devices or workers of their own.

    `np.asarray` and `jax.device_get` bring it to the host, `jnp.asarray` puts it together on the devices of its first
    block. Parallelized functions take it, and use matching blocks in place; functions of jax do not.
    """

    def __init__(self, blocks: Sequence[Any]) -> None:
        """`blocks`: jax arrays or remote arrays that differ in their number of rows at most."""
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

        Parts of remote blocks are fetched.
        """
        read = [
            (block, max(start - first, 0), min(stop, end) - first)
            for block, (first, end) in zip(self.blocks, self.ranges, strict=True)
            if first < stop and start < end
        ]
        # Fetch all at once: a step reads the rows of a leaf one block after the other.
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
        for block in self.blocks:
            if isinstance(block, jax.Array):
                block.copy_to_host_async()

    def is_deleted(self) -> bool:
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
    """The type of a `BlockedArray` to be made, with the rows (start, stop) and the sharding of each block."""

    shape: tuple[int, ...]
    dtype: Any
    rows: tuple[tuple[int, int], ...]
    shardings: tuple[Sharding, ...]


#: (start, stop, dimension) of the rows of a micro-batch, as `InputSlot.rows`; None for all rows.
MicroRows = tuple[int, int, int] | None


class MicroBatchedArray(RemoteArray):
    """A leaf of a batch, laid out on devices or workers and cut into the micro-batches of a step.

    A step in these micro-batches reads the rows in place; any other step reads the whole value, as `np.asarray` does.
    """

    def __init__(self, parts: Mapping[MicroRows, Sequence[Any]]) -> None:
        """parts: jax arrays or remote arrays of each micro-batch's rows; several if meshes read the same rows in
        different shardings. Together, they have all rows (`cover_all_rows`).
        """
        self._parts = {rows: tuple(arrays) for rows, arrays in parts.items()}
        first = next(iter(self._parts))
        (example, *_) = self._parts[first]
        self.shape = tuple(example.shape)
        if first is not None:
            dim = first[2]
            n_rows = max(rows[1] for rows in self._parts if rows is not None)
            self.shape = (*self.shape[:dim], n_rows, *self.shape[dim + 1 :])
        self.dtype, self.weak_type = example.dtype, _is_weak(example)

    def parts(self, rows: MicroRows) -> tuple[Any, ...]:
        """The arrays that hold these rows; empty if the array is in other micro-batches."""
        return self._parts.get(rows, ())

    @property
    def stored_as(self) -> tuple[Any, ...]:
        return tuple(array for arrays in self._parts.values() for array in arrays)

    def _fetch(self) -> Any:
        if None in self._parts:
            return _value_here(self._parts[None][0])
        in_order = [(rows, self._parts[rows][0]) for rows in sorted(rows for rows in self._parts if rows is not None)]
        prefetch([array for _, array in in_order])
        dim = in_order[0][0][2]
        join = jnp.concatenate if jnp.issubdtype(self.dtype, jax.dtypes.extended) else np.concatenate
        return join([_value_here(array) for _, array in in_order], axis=dim)

    @property
    def sharding(self) -> Any:
        return self.stored_as[0].sharding

    @property
    def addressable_shards(self) -> list[Any]:
        """The shards of all parts, in one process; the index of each is within its part."""
        return [shard for part in self.stored_as for shard in part.addressable_shards]

    @classmethod
    def _fetch_all(cls, arrays: Sequence[Any]) -> None:
        prefetch([part for array in arrays for part in array.stored_as])

    def block_until_ready(self) -> MicroBatchedArray:
        for part in self.stored_as:
            part.block_until_ready()
        return self

    def is_deleted(self) -> bool:
        return any(part.is_deleted() for part in self.stored_as)

    def delete(self) -> None:
        for part in self.stored_as:
            part.delete()


def cover_all_rows(parts: Collection[MicroRows], shape: Sequence[int]) -> bool:
    if None in parts:
        return True
    in_order = sorted(rows for rows in parts if rows is not None)
    ends = [0, *(stop for _, stop, _ in in_order)]
    is_without_gap = all(start == end for (start, _, _), end in zip(in_order, ends, strict=False))
    return bool(in_order) and is_without_gap and ends[-1] == shape[in_order[0][2]]


def _value_here(array: Any) -> Any:
    """The value of a part in this process: a NumPy array, or a jax array of typed keys."""
    return array if jnp.issubdtype(array.dtype, jax.dtypes.extended) else np.asarray(array)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedTarget:
    """The type of an array to be made on the workers of a session, in blocks or not.

    Attributes:
        session: the runtime of the session.
        rows: the rows (start, stop) of each block; empty if the array is not in blocks.
        layouts: for each block, or for the array, the mesh and the sharding of each of its copies.
    """

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool = False
    session: Any
    rows: tuple[tuple[int, int], ...] = ()
    layouts: tuple[tuple[tuple[MeshShape, PartitionSpec], ...], ...]


class LeafRows(RemoteArray):
    """Rows of an array that a caller holds, as a step reads them.

    Each read makes the value anew. It shares no memory with a jax array, so a step may take it over. Rows that no stage
    reads are never copied.
    """

    def __init__(self, leaf: jax.Array | RemoteArray, rows: tuple[int, int]) -> None:
        self._leaf, self._rows = leaf, rows
        self.shape = (rows[1] - rows[0], *leaf.shape[1:])
        self.dtype, self.weak_type = leaf.dtype, _is_weak(leaf)

    @property
    def stored_as(self) -> tuple[Any, ...]:
        """The arrays of all rows: a step that uses up some rows uses up the array."""
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
    """Whether an array is weakly typed. Arrays of random keys have no such attribute."""
    return bool(getattr(array, "weak_type", False))
