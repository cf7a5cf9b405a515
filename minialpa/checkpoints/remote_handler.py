"""orbax's handlers for arrays on workers and in blocks of rows.

On disk, each is one plain array. orbax calls a `TypeHandler` for each type of leaf; `state_handler` combines its own
with `RemoteArrayHandler`. Each worker writes to its own sub-folder, which orbax merges before it names the checkpoint.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from minialpa.arrays import RemoteArray
from minialpa.errors import CheckpointError
from minialpa.programs.mesh_program import KEY_NAMES, ArrayType
from minialpa.runtime.arrays import BlockedArray, BlockedTarget, DistributedTarget
from minialpa.runtime.cluster.array_files import ArrayToWrite, RequestedArray, read_arrays, start_writing
from minialpa.runtime.cluster.cluster_runtime import ClusterRuntime
from minialpa.runtime.cluster.distributed_array import DistributedArray
from minialpa.runtime.workers.array_files import StoredArray


@dataclass(slots=True)
class BytesRead:
    """Bytes of arrays that this process has read since a restore began."""

    n_bytes: int = 0


@dataclass
class RemoteRestoreArgs(ocp.RestoreArgs):
    """Asks for a `RemoteArray` in the placement of `target`."""

    target: BlockedTarget | DistributedTarget | None = None


class RemoteArrayHandler(type_handlers.NumpyHandler):
    def __init__(self, read: BytesRead) -> None:
        self._read = read
        # The arrays are fresh copies.
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """Copies arrays to the memory of their hosts. Threads write the files after the call."""
        pending: list[Any] = []
        on_workers: dict[ClusterRuntime, list[ArrayToWrite]] = {}
        for value, info, arg in zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True):
            runtime = runtime_of(value)
            if runtime is None:
                pending += await super().serialize([value.fetch_once()], [info], [arg])
            else:
                on_workers.setdefault(runtime, []).append(_array_to_write(value, info, arg))
        return pending + [start_writing(runtime, arrays) for runtime, arrays in on_workers.items()]

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Any]:
        """Workers read all of theirs at once. This process reads one after the other, to hold only one."""
        found: dict[int, Any] = {}
        on_workers: dict[ClusterRuntime, dict[int, list[RequestedArray]]] = {}
        for i, (info, arg) in enumerate(zip(infos, args or (), strict=True)):
            if isinstance(arg.target, DistributedTarget):
                on_workers.setdefault(arg.target.session, {})[i] = _blocks_to_read(arg.target, info)
            else:
                (whole,) = await super().deserialize([info], [ocp.RestoreArgs(restore_type=np.ndarray)])
                found[i] = _split_in_blocks(whole, arg.target)
                self._read.n_bytes += whole.nbytes

        for runtime, requested in on_workers.items():
            arrays = iter(read_arrays(runtime, [array for blocks in requested.values() for array in blocks]))
            for i, blocks in requested.items():
                made = [next(arrays) for _ in blocks]
                found[i] = made[0] if len(made) == 1 else BlockedArray(made)
        return [found[i] for i in range(len(infos))]


class _CountingLimiter:
    def __init__(self, limiter: Any, read: BytesRead) -> None:
        self.wait_for_bytes, self._release, self._read = limiter.wait_for_bytes, limiter.release_bytes, read

    async def release_bytes(self, n_bytes: int) -> None:
        self._read.n_bytes += n_bytes
        await self._release(n_bytes)


def _counting(handler: Any, read: BytesRead) -> Any:
    """orbax's handler of jax arrays, with a count of bytes."""

    async def deserialize(infos: Sequence[Any], args: Sequence[Any] | None = None) -> Any:
        counted = [info.replace(byte_limiter=_CountingLimiter(info.byte_limiter, read)) for info in infos]
        return await handler.deserialize(counted, args)

    counting = copy.copy(handler)
    counting.deserialize = deserialize
    return counting


def state_handler(read: BytesRead) -> Any:
    default_handlers = [(kind, type_handlers.get_type_handler(kind)) for kind in (int, float, np.number, np.ndarray)]
    registry = type_handlers.create_type_handler_registry(
        (RemoteArray, RemoteArrayHandler(read)),
        (jax.Array, _counting(type_handlers.get_type_handler(jax.Array), read)),
        *default_handlers,
    )
    # Compressing weights takes most of the time and saves few bytes.
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)


def runtime_of(value: Any) -> ClusterRuntime | None:
    """The runtime whose live workers hold an array; None for other values and for typed keys."""
    parts = value.stored_as if isinstance(value, RemoteArray) else ()
    runtimes = {_runtime_of_part(part) for part in parts}
    return runtimes.pop() if len(runtimes) == 1 else None


def _runtime_of_part(part: Any) -> ClusterRuntime | None:
    if not isinstance(part, DistributedArray) or part.type.key is not None:
        return None
    runtime = part.runtime if any(copy.mesh.alive for copy in part.copies) else None
    return runtime if isinstance(runtime, ClusterRuntime) else None


def target_of(value: RemoteArray, runtime: ClusterRuntime) -> DistributedTarget:
    return DistributedTarget(
        shape=value.shape,
        dtype=value.dtype,
        in_host=value.in_host,
        session=runtime,
        rows=value.ranges if isinstance(value, BlockedArray) else (),
        layouts=tuple(
            tuple((copy.shape, copy.spec) for copy in part.copies if copy.mesh.alive) for part in value.stored_as
        ),
    )


def _array_to_write(value: RemoteArray, info: Any, arg: Any) -> ArrayToWrite:
    """info, arg: of orbax, for this leaf."""

    def stored(chunk_shape: tuple[int, ...], worker: int) -> StoredArray:
        spec = type_handlers.get_json_tspec_write(
            info,
            use_ocdbt=True,
            global_shape=value.shape,
            local_shape=chunk_shape,
            dtype=value.dtype,
            process_index=f"worker{worker}",
            arg=arg,
        )
        return StoredArray(str(info.parent_dir), _context(), spec)

    first_rows = [start for start, _ in value.ranges] if isinstance(value, BlockedArray) else [0]
    return ArrayToWrite(shape=value.shape, blocks=tuple(zip(value.stored_as, first_rows, strict=True)), stored=stored)


def _blocks_to_read(target: DistributedTarget, info: Any) -> list[RequestedArray]:
    spec = type_handlers.get_json_tspec_read(info, use_ocdbt=info.is_ocdbt_checkpoint)
    stored = StoredArray(str(info.parent_dir), _context(), spec)
    requested = []
    for (start, stop), layouts in zip(target.rows or ((0, 0),), target.layouts, strict=True):
        shape = (stop - start, *target.shape[1:]) if target.rows else target.shape
        kind = ArrayType(shape, str(target.dtype), weak_type=target.weak_type, in_host=target.in_host)
        requested.append(RequestedArray(type=kind, layouts=layouts, stored=stored, first_row=start))
    return requested


@functools.cache
def _context() -> Any:
    return type_handlers.get_ts_context(use_ocdbt=True).spec.to_json()


def _split_in_blocks(whole: np.ndarray[Any, Any], target: BlockedTarget) -> BlockedArray:
    """Files hold stacked weights whole; a plan may cut them by layers.

    whole: as read from a file; uint32 for typed random keys. Raises CheckpointError for another dtype.
    """
    is_key = jax.numpy.issubdtype(target.dtype, jax.dtypes.extended)
    stored_dtype = np.uint32 if is_key else target.dtype
    if whole.dtype != stored_dtype:
        raise CheckpointError(
            f"The checkpoint is damaged: a file has an array of {whole.dtype}, and the metadata records "
            f"{target.dtype}. Restore another step."
        )
    blocks = []
    for (start, stop), sharding in zip(target.rows, target.shardings, strict=True):
        rows: Any = whole[start:stop]
        if is_key:
            implementation = str(target.dtype)[4:-1]  # `fry` in `key<fry>`
            rows = jax.random.wrap_key_data(rows, impl=KEY_NAMES[implementation])
        blocks.append(jax.device_put(rows, sharding))
    return BlockedArray(blocks)
