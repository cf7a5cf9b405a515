"""Programs of single meshes: what the workers of a mesh do, as a value that can be sent to other processes.

All workers of a mesh, one for each of its hosts, execute the same instructions. A transfer between meshes is a `Send`
on one mesh and a `Receive` on the other; each worker picks the moves of the shared `Resharding` that it takes part in.
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

from minialpa.programs.program import Accumulate, ConstantSlot, Free, InputSlot, MeshShape, Program, Run
from minialpa.programs.resharding import Move, Resharding


@dataclass(frozen=True, slots=True)
class ArrayType:
    """Shape and dtype of a stored array.

    Attributes:
        shape: as users see it.
        dtype: name of the dtype; for typed random keys, that of their integers.
        key: implementation of typed random keys, a key of `KEY_SHAPES`; None for other arrays.
        weak_type: as in jax: whether the array takes on the dtype of what it is combined with, as Python numbers do.
    """

    shape: tuple[int, ...]
    dtype: str
    key: str | None = None
    weak_type: bool = False

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Shape of the array that is stored: for random keys, that of their integers."""
        return self.shape if self.key is None else (*self.shape, *KEY_SHAPES[self.key])

    @property
    def jax_dtype(self) -> Any:
        """The dtype that users see; for random keys, the key dtype."""
        return np.dtype(self.dtype) if self.key is None else _key_dtype(self.key)

    def typed(self, data: Any) -> Any:
        """`data`, an array of `data_shape`, as an array of this type; integers of random keys become keys."""
        return data if self.key is None else jax.random.wrap_key_data(data, impl=KEY_NAMES[self.key])

    def data(self, array: Any) -> Any:
        """The inverse of `typed`: the array that is stored."""
        return array if self.key is None else jax.random.key_data(array)


#: Shape of the integers that make up one typed key, by implementation.
KEY_SHAPES: Mapping[str, tuple[int, ...]] = {"fry": (2,), "rbg": (4,), "urbg": (4,)}
#: What the API of jax calls each implementation.
KEY_NAMES: Mapping[str, str] = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}


@functools.cache
def _key_dtype(key: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=KEY_NAMES[key])).dtype


#: Dtypes that the format of `jax.export` has no name for, and the wider integers that exported functions take and
#: return in their place.
STAND_INS: Mapping[str, str] = {"int2": "int8", "uint2": "uint8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshFunction:
    """A function of one mesh, exported.

    Attributes:
        name: for messages and timelines.
        code: the function as serialised by `jax.export`, with `STAND_INS`.
        in_types: type of each input.
        in_specs: sharding of each input.
        out_types: type of each output.
        out_specs: sharding of each output.
        donated: positions of the inputs whose buffers the outputs may reuse.
        compiler_options: names and values of options that XLA compiles it with.
    """

    name: str
    code: bytes
    in_types: tuple[ArrayType, ...]
    in_specs: tuple[PartitionSpec, ...]
    out_types: tuple[ArrayType, ...]
    out_specs: tuple[PartitionSpec, ...]
    donated: tuple[int, ...]
    compiler_options: tuple[tuple[str, bool], ...] = ()


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending buffer `source`, by the resharding of transfer number `transfer`."""

    source: int
    transfer: int


@dataclass(frozen=True, slots=True)
class Receive:
    """target = the array of transfer number `transfer`, in the spec `landing` of its resharding. Waits for it."""

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
    """What the workers of one mesh do in a step.

    Attributes:
        mesh: number of the mesh.
        shape: its devices.
        functions: by the number that instructions call them by.
        instructions: in order; all workers execute the same ones.
        inputs: buffers that hold argument leaves when the step begins.
        constants: buffers that hold constants when the step begins.
        outputs: (number of the result, buffer) for each result, or copy of one, on this mesh.
        transfers: the transfers that this mesh takes part in, by number.
        types: type of each buffer.
        specs: sharding of each buffer.
        donated_leaves: numbers of the argument leaves that a step invalidates.
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
    """Inputs, by position, that are rows of micro-batches and whose buffers functions write over.

    A step may write over rows that it has cut itself. Rows that were cut before the call are the caller's, since
    batches are never donated, and have to be copied.
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
    """The mesh and host of a worker, and its devices: consecutive ones, from `first_device` on."""

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
    """What workers send each other for a transfer: one message for each pair of workers with moves between them.

    The moves of a message are in the order of the resharding, and messages in the order of their first moves.
    """
    workers = {(place.mesh, device): i for i, place in enumerate(places) for device in place.devices}
    by_pair: dict[tuple[int, int], list[Move]] = {}
    for move in transfer.resharding.moves:
        mesh = transfer.target if move.relayed else transfer.source
        pair = workers[mesh, move.source], workers[transfer.target, move.targets[0]]
        by_pair.setdefault(pair, []).append(move)
    return tuple(Message(source, target, tuple(moves)) for (source, target), moves in by_pair.items())


def links(programs: Sequence[MeshProgram], places: Sequence[Place]) -> tuple[tuple[int, int, int, int], ...]:
    """Connections that transfers use: sorted (sending worker, its device, receiving worker, its device).

    Workers are numbered as in `places`, and devices from the first one of their worker.
    """
    transfers = {number: transfer for program in programs for number, transfer in program.transfers.items()}
    found = set()
    for transfer in transfers.values():
        for message in messages(transfer, places):
            first = places[message.source].first_device, places[message.target].first_device
            for move in message.moves:
                found.add((message.source, move.source - first[0], message.target, move.targets[0] - first[1]))
    return tuple(sorted(found))
