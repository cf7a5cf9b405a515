"""The part of a `Program` for one mesh in, a value for the worker processes of that mesh out.

All workers of a mesh, one for each of its hosts, execute the same instructions. A `Transfer` becomes a `Send` on one
mesh and a `Receive` on the other. Each worker picks its moves from the shared `Resharding`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from minialpa.programs.program import Accumulate, ConstantSlot, Free, InputSlot, MeshShape, Program, Run
from minialpa.programs.resharding import Move, Resharding


@dataclass(frozen=True, slots=True)
class ArrayType:
    """Type of an array.

    Attributes:
        shape: as users see it.
        dtype: name of the dtype; of typed random keys, the dtype of their integers.
        key: implementation of typed random keys, a key of `KEY_SHAPES`; `None` for other arrays.
        weak_type: as in jax.
        in_host: whether it is in host memory.
    """

    shape: tuple[int, ...]
    dtype: str
    key: str | None = None
    weak_type: bool = False
    in_host: bool = False

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Shape of the stored array; of typed random keys, of their integers."""
        return self.shape if self.key is None else (*self.shape, *KEY_SHAPES[self.key])

    @property
    def jax_dtype(self) -> Any:
        return np.dtype(self.dtype) if self.key is None else _key_dtype(self.key)

    def typed(self, data: Any) -> Any:
        """The array of this type, from stored `data`."""
        return data if self.key is None else jax.random.wrap_key_data(data, impl=KEY_NAMES[self.key])

    def data(self, array: Any) -> Any:
        """The inverse of `typed`."""
        return array if self.key is None else jax.random.key_data(array)

    def shards(self, data: Sequence[Any], devices: Sequence[jax.Device]) -> list[jax.Array]:
        """The shards of an array on devices, in its memory."""
        kind = "pinned_host" if self.in_host else None
        placed: list[jax.Array] = jax.device_put(
            list(data), [SingleDeviceSharding(device, memory_kind=kind) for device in devices]
        )
        return placed

    def joined(self, shards: Sequence[jax.Array], sharding: NamedSharding) -> jax.Array:
        typed: jax.Array = self.typed(jax.make_array_from_single_device_arrays(self.data_shape, sharding, list(shards)))
        return typed


#: Shape of the integers of one typed key, by implementation.
KEY_SHAPES: Mapping[str, tuple[int, ...]] = {"fry": (2,), "rbg": (4,), "urbg": (4,)}
#: jax's name of each implementation.
KEY_NAMES: Mapping[str, str] = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}


@functools.cache
def _key_dtype(key: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=KEY_NAMES[key])).dtype


#: Dtypes that `jax.export` cannot write, with the wider integers that exported functions use instead.
STAND_INS: Mapping[str, str] = {"int2": "int8", "uint2": "uint8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshFunction:
    """A `Function` for worker processes. code: from `jax.export`, with `STAND_INS` as dtypes."""

    name: str
    code: bytes
    in_types: tuple[ArrayType, ...]
    in_specs: tuple[PartitionSpec, ...]
    out_types: tuple[ArrayType, ...]
    out_specs: tuple[PartitionSpec, ...]
    donated: tuple[int, ...]
    compiler_options: tuple[tuple[str, bool], ...] = ()


def callable_of(function: MeshFunction) -> tuple[Callable[..., Any], list[Any]]:
    """The function for `jax.jit`, and shape and dtype of each argument, with the true dtypes instead of `STAND_INS`."""
    exported = jax.export.deserialize(bytearray(function.code))
    if not any(kind.dtype in STAND_INS for kind in (*function.in_types, *function.out_types)):
        return exported.call, list(exported.in_avals)

    def call(*args: Any) -> tuple[Any, ...]:
        given = [
            x.astype(aval.dtype) if kind.dtype in STAND_INS else x
            for x, aval, kind in zip(args, exported.in_avals, function.in_types, strict=True)
        ]
        results = zip(exported.call(*given), function.out_types, strict=True)
        return tuple(x.astype(kind.jax_dtype) if kind.dtype in STAND_INS else x for x, kind in results)

    avals = [
        jax.ShapeDtypeStruct(aval.shape, kind.jax_dtype) if kind.dtype in STAND_INS else aval
        for aval, kind in zip(exported.in_avals, function.in_types, strict=True)
    ]
    return call, avals


@dataclass(frozen=True, slots=True)
class Send:
    """Start to send buffer `source` by the resharding of `MeshProgram.transfers[transfer]`."""

    source: int
    transfer: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for the array of `MeshProgram.transfers[transfer]`; target = the array, in `Resharding.landing`."""

    target: int
    transfer: int


@dataclass(frozen=True, slots=True)
class Relayout:
    """target = source, laid out by `spec` on the same mesh."""

    source: int
    target: int
    spec: PartitionSpec


MeshInstruction = Run | Accumulate | Free | Send | Receive | Relayout


@dataclass(frozen=True, slots=True)
class MeshTransfer:
    """One array that crosses from mesh `source` to mesh `target`."""

    source: int
    target: int
    type: ArrayType
    resharding: Resharding


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MeshProgram:
    """The part of a `Program` that the workers of one mesh run.

    Attributes:
        functions: numbered for this mesh.
        outputs: (number of the result, buffer) for each result, or copy of a result, on this mesh.
        transfers: by number, the transfers from and to this mesh.
        types, specs: of each buffer.
        donated_leaves: numbers of the argument leaves that a call invalidates.
    """

    mesh: int
    shape: MeshShape
    functions: tuple[MeshFunction, ...]
    instructions: tuple[MeshInstruction, ...]
    inputs: tuple[InputSlot, ...]
    constants: tuple[ConstantSlot, ...]
    outputs: tuple[tuple[int, int], ...]
    transfers: Mapping[int, MeshTransfer]
    types: Mapping[int, ArrayType]
    specs: Mapping[int, PartitionSpec]
    donated_leaves: frozenset[int]


def overwritten_rows(program: Program | MeshProgram) -> frozenset[int]:
    """Positions in `program.inputs` of micro-batches whose buffers a function overwrites.

    The runtime has to copy rows that the caller cut before the call: batches are not donated.
    """
    overwritten = {
        run.inputs[k]
        for run in program.instructions
        if isinstance(run, Run)
        for k in program.functions[run.function].donated
    }  # fmt: skip
    return frozenset(i for i, slot in enumerate(program.inputs) if slot.rows is not None and slot.buffer in overwritten)


@dataclass(frozen=True, slots=True)
class Place:
    """The mesh, host and consecutive devices of a worker."""

    mesh: int
    host: int
    first_device: int
    n_devices: int

    @property
    def devices(self) -> range:
        return range(self.first_device, self.first_device + self.n_devices)


def worker_places(meshes: Sequence[MeshShape], devices_per_host: int) -> tuple[Place, ...]:
    """The workers of a program: one for each mesh and host with devices of the mesh, mesh by mesh."""
    places = []
    for number, mesh in enumerate(meshes):
        first, stop = mesh.first_device, mesh.first_device + math.prod(mesh.logical_shape)
        for host in range(first // devices_per_host, (stop - 1) // devices_per_host + 1):
            begin, end = max(first, host * devices_per_host), min(stop, (host + 1) * devices_per_host)
            places.append(Place(number, host, begin, end - begin))
    return tuple(places)


@dataclass(frozen=True, slots=True)
class Message:
    """The moves of one transfer from one worker to another, in order. Workers are indices in `worker_places`."""

    source: int
    target: int
    moves: tuple[Move, ...]


def messages(transfer: MeshTransfer, places: Sequence[Place]) -> tuple[Message, ...]:
    """One message for each pair of workers with moves between them, in the order of their first moves."""
    workers = {(place.mesh, device): i for i, place in enumerate(places) for device in place.devices}
    by_pair: dict[tuple[int, int], list[Move]] = {}
    for move in transfer.resharding.moves:
        mesh = transfer.target if move.relayed else transfer.source
        pair = workers[mesh, move.source], workers[transfer.target, move.targets[0]]
        by_pair.setdefault(pair, []).append(move)
    return tuple(Message(source, target, tuple(moves)) for (source, target), moves in by_pair.items())


def links(programs: Sequence[MeshProgram], places: Sequence[Place]) -> tuple[tuple[int, int, int, int], ...]:
    """The connections of all transfers, sorted: (sending worker, its device, receiving worker, its device).

    Each worker numbers its devices from 0.
    """
    transfers = {number: transfer for program in programs for number, transfer in program.transfers.items()}
    found = set()
    for transfer in transfers.values():
        for message in messages(transfer, places):
            first = places[message.source].first_device, places[message.target].first_device
            for move in message.moves:
                found.add((message.source, move.source - first[0], message.target, move.targets[0] - first[1]))
    return tuple(sorted(found))
