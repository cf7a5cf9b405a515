"""Arrays that hold a leaf in parts: blocks of rows, micro-batches; and types that a checkpoint restores."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec, Sharding

from minialpa.arrays import RemoteArray, prefetch
from minialpa.programs.mesh_program import ArrayType
from minialpa.programs.program import MeshShape
from minialpa.sharding import is_host_array


def dtype_named(name: str) -> Any:
    """Such as `float32` or `key<fry>`."""
    return ArrayType((), "uint32", name[4:-1]).jax_dtype if name.startswith("key<") else jnp.dtype(name)


class _ArrayOfParts(RemoteArray):
    """Its parts are `stored_as`."""

    def block_until_ready(self) -> Self:
        for part in self.stored_as:
            part.block_until_ready()
        return self

    def is_deleted(self) -> bool:
        return any(part.is_deleted() for part in self.stored_as)

    def delete(self) -> None:
        for part in self.stored_as:
            part.delete()


class BlockedArray(_ArrayOfParts):
    """An array in `blocks` of rows (dimension 0), each on its own devices or workers.

    `np.asarray` and `jax.device_get` fetch it; `jnp.asarray` joins it on the devices of its first block. Parallelized
    functions use matching blocks in place. Functions of jax do not accept it.
    """

    def __init__(self, blocks: Sequence[Any]) -> None:
        """blocks: jax or remote arrays that differ at most in their numbers of rows."""
        assert blocks and len({(x.shape[1:], x.dtype) for x in blocks}) == 1, [(x.shape, x.dtype) for x in blocks]
        self.blocks = tuple(blocks)
        self.ranges = tuple(itertools.pairwise(itertools.accumulate((x.shape[0] for x in blocks), initial=0)))
        self.shape = (self.ranges[-1][1], *blocks[0].shape[1:])
        self.dtype, self.weak_type, self.in_host = blocks[0].dtype, _is_weak(blocks[0]), _is_in_host(blocks[0])

    @property
    def shardings(self) -> tuple[Any, ...]:
        """Raises AttributeError for blocks on workers."""
        return tuple(x.sharding for x in self.blocks)

    @property
    def stored_as(self) -> tuple[Any, ...]:
        return self.blocks

    def rows(self, start: int, stop: int) -> Any:
        """One block, or parts joined on the devices of the first. Remote parts are fetched."""
        cuts = [
            (block, max(start - first, 0), min(stop, end) - first)
            for block, (first, end) in zip(self.blocks, self.ranges, strict=True)
            if first < stop and start < end
        ]
        prefetch(self.blocks)

        is_whole = [(a, b) == (0, block.shape[0]) and isinstance(block, jax.Array) for block, a, b in cuts]
        parts = [block if whole else block[a:b] for (block, a, b), whole in zip(cuts, is_whole, strict=True)]
        if len(parts) == 1:
            return parts[0]
        if any(isinstance(x, np.ndarray) for x in parts):
            return np.concatenate([np.asarray(x) for x in parts])
        on_first_devices = [parts[0], *(jax.device_put(x, parts[0].sharding) for x in parts[1:])]
        return jnp.concatenate(on_first_devices)

    def _fetch(self) -> Any:
        self._fetch_all([self])
        if jnp.issubdtype(self.dtype, jax.dtypes.extended):
            return self.rows(0, self.shape[0])
        return np.concatenate([np.asarray(block) for block in self.blocks])

    def fetch_once(self) -> Any:
        """The blocks keep no copies."""
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

    def copy_to_host_async(self) -> None:
        for block in self.blocks:
            if isinstance(block, jax.Array):
                block.copy_to_host_async()

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.rows(0, self.shape[0]))

    def __repr__(self) -> str:
        rows = ", ".join(str(block.shape[0]) for block in self.blocks)
        return f"BlockedArray({self.dtype}{list(self.shape)} in blocks of {rows} rows)"


@dataclass(frozen=True, slots=True)
class BlockedTarget:
    """(start, stop) and the sharding of each block."""

    shape: tuple[int, ...]
    dtype: Any
    rows: tuple[tuple[int, int], ...]
    shardings: tuple[Sharding, ...]


#: (start, stop, dimension) of the rows of a micro-batch, as `InputSlot.rows`; None for all rows.
MicroRows = tuple[int, int, int] | None


class MicroBatchedArray(_ArrayOfParts):
    """A leaf of a batch on devices or workers, in the rows of each micro-batch.

    A step with these micro-batches reads the rows in place; any other step reads the whole value.
    """

    def __init__(self, parts: Mapping[MicroRows, Sequence[Any]]) -> None:
        """parts: for each range of rows, jax or remote arrays, several for different shardings. Together they have all
        rows.
        """
        self._parts = {rows: tuple(arrays) for rows, arrays in parts.items()}
        first = next(iter(self._parts))
        (example, *_) = self._parts[first]
        self.shape = tuple(example.shape)
        if first is not None:
            dim = first[2]
            n_rows = max(rows[1] for rows in self._parts if rows is not None)
            self.shape = (*self.shape[:dim], n_rows, *self.shape[dim + 1 :])
        self.dtype, self.weak_type, self.in_host = example.dtype, _is_weak(example), _is_in_host(example)

    def parts(self, rows: MicroRows) -> tuple[Any, ...]:
        """Empty in other micro-batches."""
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
        """An index is within its part."""
        return [shard for part in self.stored_as for shard in part.addressable_shards]

    @classmethod
    def _fetch_all(cls, arrays: Sequence[Any]) -> None:
        prefetch([part for array in arrays for part in array.stored_as])


def cover_all_rows(parts: Collection[MicroRows], shape: Sequence[int]) -> bool:
    if None in parts:
        return True
    in_order = sorted(rows for rows in parts if rows is not None)
    ends = [0, *(stop for _, stop, _ in in_order)]
    is_without_gap = all(start == end for (start, _, _), end in zip(in_order, ends, strict=False))
    return bool(in_order) and is_without_gap and ends[-1] == shape[in_order[0][2]]


def _value_here(array: Any) -> Any:
    return array if jnp.issubdtype(array.dtype, jax.dtypes.extended) else np.asarray(array)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedTarget:
    """The type of an array to make on the workers of a session.

    Attributes:
        session: the runtime of the session.
        rows: (start, stop) of each block; empty for an array without blocks.
        layouts: for each block, or the array, mesh and sharding of each copy.
    """

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool = False
    in_host: bool = False
    session: Any
    rows: tuple[tuple[int, int], ...] = ()
    layouts: tuple[tuple[tuple[MeshShape, PartitionSpec], ...], ...]


class LeafRows(RemoteArray):
    """Each read makes the value in new memory, so a step may donate it."""

    def __init__(self, leaf: jax.Array | RemoteArray, rows: tuple[int, int]) -> None:
        self._leaf, self._rows = leaf, rows
        self.shape = (rows[1] - rows[0], *leaf.shape[1:])
        self.dtype, self.weak_type, self.in_host = leaf.dtype, _is_weak(leaf), _is_in_host(leaf)

    @property
    def stored_as(self) -> tuple[Any, ...]:
        """A step that donates some rows uses up the whole array."""
        return self._leaf.stored_as if isinstance(self._leaf, RemoteArray) else (self._leaf,)

    def _fetch(self) -> Any:
        return self._leaf.rows(*self._rows) if isinstance(self._leaf, BlockedArray) else self._leaf[slice(*self._rows)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        # On CPU, NumPy views a jax array in place; a slice by jax would be a copy.
        if isinstance(self._leaf, jax.Array) and not jnp.issubdtype(self.dtype, jax.dtypes.extended):
            return np.array(np.asarray(self._leaf)[slice(*self._rows)], dtype=dtype, copy=copy)
        return super().__array__(dtype, copy)

    def block_until_ready(self) -> LeafRows:
        self._leaf.block_until_ready()
        return self

    def is_deleted(self) -> bool:
        return self._leaf.is_deleted()


def _is_in_host(array: Any) -> bool:
    return array.in_host if isinstance(array, RemoteArray) else is_host_array(array)


def _is_weak(array: Any) -> bool:
    """Arrays of typed keys have no attribute `weak_type`."""
    return bool(getattr(array, "weak_type", False))


def device_order(sharding: Sharding) -> tuple[jax.Device, ...]:
    """In the order of the mesh, the same for all arrays of a program."""
    mesh: Any = getattr(sharding, "mesh", None)
    devices: Any = sharding.device_set
    return tuple(mesh.devices.flat if isinstance(mesh, Mesh) else sorted(devices, key=lambda device: device.id))
