"""Shards of a worker's devices to files of tensorstore, and back.

The driver decides which worker holds which shard (`runtime/cluster/array_files.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from minialpa.errors import CheckpointError
from minialpa.programs.mesh_program import ArrayType
from minialpa.programs.resharding import Box
from minialpa.sharding import device_mesh, placed

#: Bytes at a time: tensorstore copies each part that it writes.
_BYTES_AT_A_TIME = 1 << 29
#: Seconds until the driver's folder must appear on a worker's host.
_FOLDER_S = 60.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredArray:
    """For tensorstore: `context` (threads and caches, equal in a folder) and `spec` are JSON."""

    folder: str
    context: Mapping[str, Any]
    spec: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartToWrite:
    """The part of a stored array that one worker writes.

    Attributes:
        creates: whether this worker writes the metadata; one does.
        shards: for each shard, number of an array of the worker, box in it, and box in the stored array.
    """

    stored: StoredArray
    creates: bool
    shards: tuple[tuple[int, Box, Box], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayToRead:
    """An array to keep under `number`. `first_row` is its first row in the stored array."""

    number: int
    type: ArrayType
    mesh_shape: tuple[int, ...]
    sharding: PartitionSpec
    stored: StoredArray
    first_row: int


def copies_on_host(arrays: Mapping[int, jax.Array], part: PartToWrite) -> list[np.ndarray[Any, Any]]:
    """Copies stay valid when a step takes over the arrays."""
    found = []
    for number, box, _ in part.shards:
        array = arrays[number]
        shard = next(shard for shard in array.addressable_shards if _box(shard.index, array.shape) == box)
        shard.data.copy_to_host_async()
        found.append(shard.data)
    return [np.array(data) for data in found]


def write(parts: Sequence[tuple[PartToWrite, Sequence[np.ndarray[Any, Any]]]]) -> None:
    """Write copies of shards and wait. Raises CheckpointError if the folder does not appear on this host."""
    tensorstore = _tensorstore()
    first = parts[0][0].stored
    _await_folder(first.folder, _FOLDER_S)
    context = tensorstore.Context(dict(first.context))
    # One of the writers writes the metadata. The others know it.
    opened = [
        tensorstore.open(
            dict(part.stored.spec), context=context, open=True, create=part.creates, assume_metadata=not part.creates
        )
        for part, _ in parts
    ]
    stores = [future.result() for future in opened]

    shards = [
        (store, place, copy)
        for store, (part, copies) in zip(stores, parts, strict=True)
        for (*_, place), copy in zip(part.shards, copies, strict=True)
    ]
    for some in _some_at_a_time(shards, lambda shard: shard[2].nbytes):
        # These copies are private, so tensorstore need not copy them.
        writes = [
            store[_slices(place)].write(copy, can_reference_source_data_indefinitely=True)
            for store, place, copy in some
        ]
        for written in writes:
            written.result()


def read(arrays: Sequence[ArrayToRead], devices: Sequence[jax.Device]) -> dict[int, jax.Array]:
    """Arrays by number, on the mesh of `devices`: this process reads its own shards.

    Raises CheckpointError if this host does not see the folder.
    """
    tensorstore = _tensorstore()
    first = arrays[0].stored
    _await_folder(first.folder, 0.0)
    context = tensorstore.Context(dict(first.context))
    opened = [tensorstore.open(dict(array.stored.spec), context=context, open=True) for array in arrays]
    stores = [future.result() for future in opened]

    made = {}
    for some in _some_at_a_time(list(zip(arrays, stores, strict=True)), lambda pair: _n_bytes(pair[0])):
        reads = [_start_reading(array, store, devices) for array, store in some]
        for (array, _), (sharding, shards) in zip(some, reads, strict=True):
            made[array.number] = _array(array, sharding, shards)
    return made


_Shards = Sequence[tuple[Any, Sequence[jax.Device]]]
"""The future of each distinct shard, and its devices."""


def _start_reading(array: ArrayToRead, store: Any, devices: Sequence[jax.Device]) -> tuple[NamedSharding, _Shards]:
    sharding = placed(device_mesh(devices, array.mesh_shape), array.sharding, in_host=array.type.in_host)
    shape = array.type.data_shape
    readers: dict[Box, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        readers.setdefault(_box(index or (), shape), []).append(device)

    first = (array.first_row,) + (0,) * (len(shape) - 1) if shape else ()
    shards = []
    for box, of_box in readers.items():
        place = tuple((start + k, stop + k) for (start, stop), k in zip(box, first, strict=True))
        shards.append((store[_slices(place)].read(), of_box))
    return sharding, shards


def _array(array: ArrayToRead, sharding: NamedSharding, shards: _Shards) -> jax.Array:
    made: list[jax.Array] = []
    for future, devices in shards:
        value = future.result()
        # A CPU device uses the memory in place, and a step may take it over: each device gets its own.
        made += array.type.shards([np.array(value) if i else value for i in range(len(devices))], devices)
    return jax.make_array_from_single_device_arrays(array.type.data_shape, sharding, made)


def _n_bytes(array: ArrayToRead) -> int:
    return int(np.prod(array.type.data_shape)) * np.dtype(array.type.dtype).itemsize


def _tensorstore() -> Any:
    try:
        import tensorstore
    except ImportError as error:
        raise CheckpointError(
            "The host of a worker has no tensorstore, with which workers read and write checkpoints. Install "
            "`minialpa[checkpoint]` on every host."
        ) from error
    return tensorstore


def _await_folder(folder: str, seconds: float) -> None:
    """Wait for a folder. Otherwise tensorstore would make one that only this host sees."""
    deadline = time.monotonic() + seconds
    while not _sees(folder):
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"A worker does not see the folder `{folder}`. Its host writes and reads its own shards: pass a folder "
                "on a file system that this process and all hosts of the cluster share."
            )
        time.sleep(0.01)


def _sees(folder: str) -> bool:
    """Addresses such as gs://bucket/folder are the same for all hosts."""
    return "://" in folder or Path(folder).is_dir()


def _some_at_a_time(items: Iterable[T], n_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    """In lists of at most `_BYTES_AT_A_TIME` bytes, or of one item."""
    some: list[T] = []
    left = _BYTES_AT_A_TIME
    for item in items:
        if some and n_bytes(item) > left:
            yield some
            some, left = [], _BYTES_AT_A_TIME
        some.append(item)
        left -= n_bytes(item)
    if some:
        yield some


def _box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    return tuple(cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in box)
