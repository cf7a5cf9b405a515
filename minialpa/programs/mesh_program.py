"""Programs of single meshes: what the workers of a mesh do, as a value that crosses process borders.

All workers of a mesh, one for each of its hosts, walk the same instructions. A transfer between meshes is a `Send` on
one and a `Receive` on the other; both look at the same `Resharding` for the parts that are theirs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from minialpa.programs.program import Accumulate, ConstantSlot, Free, InputSlot, MeshShape, Run
from minialpa.programs.resharding import Move, Resharding


@dataclass(frozen=True, slots=True)
class ArrayType:
    """Shape and dtype of a stored array. key: the implementation of typed random keys, whose integers `dtype` is of.

    weak_type: as jax means it: whether the array yields to the dtypes of others, as Python's numbers do.
    """

    shape: tuple[int, ...]
    dtype: str
    key: str | None = None
    weak_type: bool = False

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Shape of the integers of keys; `shape` of everything else."""
        return self.shape if self.key is None else (*self.shape, *KEY_SHAPES[self.key])

    @property
    def jax_dtype(self) -> Any:
        """The dtype that users see: that of keys, where `dtype` is that of their integers."""
        return np.dtype(self.dtype) if self.key is None else _key_dtype(self.key)

    def typed(self, data: Any) -> Any:
        """`data`, an array of `data_shape`, as an array of this type: typed keys of their integers."""
        return data if self.key is None else jax.random.wrap_key_data(data, impl=KEY_NAMES[self.key])

    def data(self, array: Any) -> Any:
        """The inverse of `typed`."""
        return array if self.key is None else jax.random.key_data(array)


#: Integers that make up one typed key, by implementation, and the names that the API of jax has for these.
KEY_SHAPES: Mapping[str, tuple[int, ...]] = {"fry": (2,), "rbg": (4,), "urbg": (4,)}
KEY_NAMES: Mapping[str, str] = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}


@functools.cache
def _key_dtype(key: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=KEY_NAMES[key])).dtype


#: Types that the format of `jax.export` has no name for. Where an exported function takes or returns them, wider
#: integers stand for them.
STAND_INS: Mapping[str, str] = {"int2": "int8", "uint2": "uint8"}


@dataclass(frozen=True, slots=True)
class MeshFunction:
    """A function of one mesh. code: what `jax.export` has made of it, with `STAND_INS`. donated: as in `Function`."""

    name: str
    code: bytes
    in_types: tuple[ArrayType, ...]
    in_specs: tuple[PartitionSpec, ...]
    out_types: tuple[ArrayType, ...]
    out_specs: tuple[PartitionSpec, ...]
    donated: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Send:
    """Start to send what `source` holds, by the resharding of transfer number `transfer`."""

    source: int
    transfer: int


@dataclass(frozen=True, slots=True)
class Receive:
    """target = the array of transfer number `transfer`, in the spec in which its resharding lands. Waits for it."""

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


@dataclass(frozen=True, slots=True, eq=False)
class MeshProgram:
    """What the workers of mesh number `mesh` do in a step. Function numbers are those of `inter.lower.task_functions`.

    transfers: by their number, those that this mesh takes part in. types, specs: of buffers. outputs: (number of the
    result, buffer) of each result, or copy of it, on this mesh. Blocks of rows of a result count as results.
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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker is: its mesh, and the devices of that mesh that it has, on one host."""

    mesh: int
    host: int
    first_device: int
    n_devices: int

    @property
    def devices(self) -> range:
        return range(self.first_device, self.first_device + self.n_devices)


def worker_places(meshes: Sequence[MeshShape], devices_per_host: int) -> tuple[Place, ...]:
    """The workers of a program, mesh by mesh, and host by host within a mesh."""
    places = []
    for number, mesh in enumerate(meshes):
        first, stop = mesh.first_device, mesh.first_device + math.prod(mesh.logical_shape)
        for host in range(first // devices_per_host, (stop - 1) // devices_per_host + 1):
            begin, end = max(first, host * devices_per_host), min(stop, (host + 1) * devices_per_host)
            places.append(Place(number, host, begin, end - begin))
    return tuple(places)


@dataclass(frozen=True, slots=True)
class Message:
    """The moves of one transfer from one worker (by its place in `worker_places`) to another, in order."""

    source: int
    target: int
    moves: tuple[Move, ...]


def messages(transfer: MeshTransfer, places: Sequence[Place]) -> tuple[Message, ...]:
    """What workers send each other for a transfer: the moves between each two of them travel together.

    The moves from one device come in the order of the resharding; so do messages, by their first move.
    """
    workers = {(p.mesh, device): i for i, p in enumerate(places) for device in p.devices}
    held: dict[tuple[int, int], list[Move]] = {}
    for move in transfer.resharding.moves:
        mesh = transfer.target if move.relayed else transfer.source
        pair = workers[mesh, move.source], workers[transfer.target, move.targets[0]]
        held.setdefault(pair, []).append(move)
    return tuple(Message(source, target, tuple(moves)) for (source, target), moves in held.items())


def links(programs: Sequence[MeshProgram], places: Sequence[Place]) -> tuple[tuple[int, int, int, int], ...]:
    """Ways between devices that transfers take: (sending worker, its device, receiving worker, its device), in order.

    Workers count by their place, devices from the first one of their worker.
    """
    transfers = {number: transfer for program in programs for number, transfer in program.transfers.items()}
    found = set()
    for transfer in transfers.values():
        for message in messages(transfer, places):
            first = places[message.source].first_device, places[message.target].first_device
            for move in message.moves:
                found.add((message.source, move.source - first[0], message.target, move.targets[0] - first[1]))
    return tuple(sorted(found))
