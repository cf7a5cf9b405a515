"""Arrays of a session to files and back: the driver decides which worker writes or reads each shard.

A stored array is one array of a session, or several that are its blocks of rows. No two workers write one chunk.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from minialpa.errors import CheckpointError, WorkerError
from minialpa.programs.mesh_program import ArrayType
from minialpa.programs.program import MeshShape
from minialpa.programs.resharding import Box, n_elements, shard_boxes
from minialpa.runtime.cluster.cluster_runtime import ClusterRuntime
from minialpa.runtime.cluster.distributed_array import Copy, DistributedArray, distributed_array
from minialpa.runtime.cluster.launcher import Reply, WorkerHandle
from minialpa.runtime.workers.array_files import ArrayToRead, PartToWrite, StoredArray
from minialpa.sharding import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayToWrite:
    """Arrays that make up a stored array.

    Attributes:
        blocks: each array, and its first row (dimension 0) in the stored array.
        stored: the files, by the shape of the chunks and the number of the writing worker.
    """

    shape: tuple[int, ...]
    blocks: tuple[tuple[DistributedArray, int], ...]
    stored: Callable[[tuple[int, ...], int], StoredArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedArray:
    """An array that workers read.

    Attributes:
        layouts: mesh and sharding of each copy.
        first_row: its first row in the stored array.
    """

    type: ArrayType
    layouts: tuple[tuple[MeshShape, PartitionSpec], ...]
    stored: StoredArray
    first_row: int


# ---- to files --------------------------------------------------------------------------------------------------------


def start_writing(runtime: ClusterRuntime, arrays: Sequence[ArrayToWrite]) -> Future[None]:
    """Copy arrays to the memory of their workers' hosts, and have the workers write the copies.

    Returns once the copies exist: a step may then take over the arrays. The future ends when all files are written. It
    raises CheckpointError if a worker could not write.
    """
    save = runtime.new_number()
    # One turn, so that no mesh ends between the copies and the files.
    with runtime.turn():
        runtime.check()
        parts = _parts(arrays)
        try:
            runtime.gather({w.actor.call("copy_to_host", save, mine): w for w, mine in parts.items()})
        except BaseException:
            for worker in parts:
                worker.actor.call("drop_copies", save)
            raise
        calls = {w.actor.call_aside("write_copies", save): w for w in parts}
        runtime.note_waiting(calls)

    # The workers write even if the caller never asks for the result.
    waiting = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    written = waiting.submit(_await_files, runtime, calls, "write a checkpoint; older ones stay as they were")
    waiting.shutdown(wait=False)
    return written


def _parts(arrays: Sequence[ArrayToWrite]) -> Mapping[WorkerHandle, list[PartToWrite]]:
    """Of several holders, the one with the fewest bytes so far writes a shard."""
    parts: dict[WorkerHandle, list[PartToWrite]] = defaultdict(list)
    n_bytes: dict[WorkerHandle, int] = defaultdict(int)
    for array in arrays:
        shards: dict[WorkerHandle, list[tuple[int, Box, Box]]] = defaultdict(list)
        for block, first_row in array.blocks:
            for box, holders in _holders(block).items():
                writer = min(holders, key=n_bytes.__getitem__)
                n_bytes[writer] += n_elements(box) * block.dtype.itemsize
                shards[writer].append((block.number, box, _moved_box(box, first_row)))

        chunks = _chunk_shape(array.shape, [place for mine in shards.values() for *_, place in mine])
        for i, (worker, mine) in enumerate(shards.items()):
            stored = array.stored(chunks, worker.number)
            parts[worker].append(PartToWrite(stored=stored, creates=i == 0, shards=tuple(mine)))
    return parts


def _holders(array: DistributedArray) -> dict[Box, list[WorkerHandle]]:
    """In the layout of the first live copy."""
    array.check_usable()
    shape = array.type.data_shape
    holders: dict[Box, list[WorkerHandle]] = {}
    for copy in array.copies:
        if not copy.mesh.alive:
            continue
        is_first = not holders
        for device, box in shard_boxes(shape, Spec.of(copy.spec, len(shape)), copy.shape).items():
            worker = next(w for w in copy.mesh.workers if w.first_device <= device < w.first_device + w.n_devices)
            of_box = holders.setdefault(box, []) if is_first else holders.get(box)
            if of_box is not None and worker not in of_box:
                of_box.append(worker)
    if not holders:
        raise WorkerError(
            f"An array of shape {array.shape} is lost, because the session that held it has ended. Restore it from a "
            "checkpoint; next time, call `jax.device_get` on values that you need before the session ends."
        )
    return holders


def _moved_box(box: Box, first_row: int) -> Box:
    return ((box[0][0] + first_row, box[0][1] + first_row), *box[1:]) if box else box


def _chunk_shape(shape: tuple[int, ...], boxes: Sequence[Box]) -> tuple[int, ...]:
    """The largest chunks that no box cuts: boxes that begin at rows 0, 4 and 6 of 10 give chunks of 2 rows."""
    chunks = []
    for dim, size in enumerate(shape):
        edges = {edge for box in boxes for edge in box[dim]} - {size}
        chunks.append(functools.reduce(math.gcd, edges, 0) or size)
    return tuple(chunks)


# ---- from files ------------------------------------------------------------------------------------------------------


def read_arrays(runtime: ClusterRuntime, requested: Sequence[RequestedArray]) -> list[DistributedArray]:
    """Starts missing meshes. Raises CheckpointError if a worker cannot read its shards."""
    made: list[DistributedArray] = []
    calls: dict[Reply, WorkerHandle] = {}
    with runtime.in_use():
        with runtime.turn():
            shapes = dict.fromkeys(shape for array in requested for shape, _ in array.layouts)
            runtime.meshes(dict.fromkeys((shape.first_device, math.prod(shape.logical_shape)) for shape in shapes))

            of_mesh: dict[MeshShape, list[ArrayToRead]] = defaultdict(list)
            for array in requested:
                number = runtime.new_number()
                for shape, spec in array.layouts:
                    of_mesh[shape].append(
                        ArrayToRead(
                            number=number,
                            type=array.type,
                            mesh_shape=shape.logical_shape,
                            sharding=spec,
                            stored=array.stored,
                            first_row=array.first_row,
                        )
                    )
                copies = tuple(Copy(runtime.mesh_of(shape), shape, spec) for shape, spec in array.layouts)
                made.append(distributed_array(runtime, number, array.type, copies))

            for shape, mine in of_mesh.items():
                for worker in runtime.mesh_of(shape).workers:
                    calls[worker.actor.call("read_files", mine)] = worker
            runtime.note_waiting(calls)

        _await_files(runtime, calls, "read the checkpoint")
    return made


def _await_files(runtime: ClusterRuntime, calls: dict[Reply, WorkerHandle], doing: str) -> None:
    try:
        runtime.gather_noted(calls)
    except WorkerError as error:
        raise CheckpointError(f"The workers could not {doing}. {error}") from error
