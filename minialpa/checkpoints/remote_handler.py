"""How orbax writes and reads arrays that are no jax arrays: those in blocks of rows, and those on workers.

On disk each is one array like any other. orbax calls a `TypeHandler` for each type of leaf; here is one for
`RemoteArray`, and the handler of the pytree that uses it besides orbax's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from minialpa.arrays import RemoteArray
from minialpa.errors import CheckpointError
from minialpa.programs.mesh_program import KEY_NAMES
from minialpa.runtime.arrays import BlockedArray, BlockedTarget


@dataclass
class BlockedRestoreArgs(ocp.RestoreArgs):
    """Asks for a `BlockedArray`. orbax defines the fields; `target` says where the blocks go."""

    target: BlockedTarget | None = None


class RemoteArrayHandler(type_handlers.NumpyHandler):
    """Writes a `RemoteArray` as orbax writes NumPy arrays, and reads `BlockedArray`s."""

    def __init__(self) -> None:
        # What it writes was made for it, so nobody changes it meanwhile.
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """Bring the arrays to the host. Blocks in this process are written behind the call, as jax arrays are.

        Arrays on workers are written in the call, one after the other, so that this host never holds all of them: it
        need not have room for the state of a cluster.
        """
        pending: list[Any] = []
        for value, info, arg in zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True):
            futures = await super().serialize([value.fetch_once()], [info], [arg])
            if _is_in_this_process(value):
                pending += futures
                continue
            for future in futures:
                await asyncio.to_thread(future.result)
        return pending

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Any]:
        """Read arrays into blocks, one array after the other: the host holds one, each device its own blocks."""
        arrays = []
        for info, arg in zip(infos, args or (), strict=True):
            (whole,) = await super().deserialize([info], [ocp.RestoreArgs(restore_type=np.ndarray)])
            arrays.append(_in_blocks(whole, arg.target))
        return arrays


def state_handler() -> Any:
    """The handler of a state: orbax's own for pytrees, and `RemoteArrayHandler`."""
    kept = [(kind, type_handlers.get_type_handler(kind)) for kind in (int, float, np.number, np.ndarray, jax.Array)]
    registry = type_handlers.create_type_handler_registry((RemoteArray, RemoteArrayHandler()), *kept)
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def _is_in_this_process(array: RemoteArray) -> bool:
    return all(isinstance(part, jax.Array) for part in array.stored_as)


def _in_blocks(whole: np.ndarray[Any, Any], target: BlockedTarget) -> BlockedArray:
    if whole.dtype != (np.uint32 if jax.numpy.issubdtype(target.dtype, jax.dtypes.extended) else target.dtype):
        raise CheckpointError(f"An array of {whole.dtype} was read where {target.dtype} is stored. It is damaged.")
    blocks = []
    for (start, stop), sharding in zip(target.rows, target.shardings, strict=True):
        rows: Any = whole[start:stop]
        if jax.numpy.issubdtype(target.dtype, jax.dtypes.extended):
            rows = jax.random.wrap_key_data(rows, impl=KEY_NAMES[str(target.dtype)[4:-1]])
        blocks.append(jax.device_put(rows, sharding))
    return BlockedArray(blocks)
