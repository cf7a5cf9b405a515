"""One program on the workers of a session: loaded where its meshes run, and started step by step."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from minialpa.arrays import RemoteArray
from minialpa.programs.mesh_program import ArrayType, MeshProgram, Place, links, worker_places
from minialpa.programs.program import InputSlot, MeshShape, OutputSlot, Program, Transfer
from minialpa.programs.resharding import Box, shard_boxes
from minialpa.runtime.arrays import MicroBatchedArray
from minialpa.runtime.cluster.cluster_runtime import ClusterRuntime
from minialpa.runtime.cluster.distributed_array import Copy, DistributedArray, MeshWorkers
from minialpa.runtime.cluster.launcher import Launcher, Reply, WorkerHandle
from minialpa.runtime.workers.arguments import Argument, Given, to_plain
from minialpa.sharding import Spec
from minialpa.support.identity import ById
from minialpa.support.progress import phase

#: Least bytes of shards for several workers that go to each host once.
_SHARE_BYTES = 1 << 20
#: Kept programs that move arrays. Each has its own connections.
_MOVERS_KEPT = 16


@dataclass(frozen=True, slots=True)
class WorkerShards:
    """The shards of an input on one worker. `shard_of_device` is as in `Given`."""

    boxes: tuple[Box, ...]
    shard_of_device: tuple[int, ...]


class ClusterProgram:
    """A program, split by mesh.

    Attributes:
        number: by which workers know the program.
        places: the workers of all meshes, in order.
        meshes: the running workers of each mesh; empty until `load`.
        shards: of arguments from this process, for each mesh, input and worker.
    """

    def __init__(self, runtime: ClusterRuntime, program: Program, types: Mapping[int, ArrayType]) -> None:
        self.runtime = runtime
        self.programs = runtime.split(program, types)
        self.number = runtime.new_number()
        self.places = worker_places(program.meshes, runtime.launcher.devices_per_host)
        self.meshes: list[MeshWorkers] = []
        self.shards = [
            worker_shards(mesh_program, [p for p in self.places if p.mesh == mesh_program.mesh])
            for mesh_program in self.programs
        ]
        # (first device, number of devices) of each mesh
        self._keys = [(shape.first_device, math.prod(shape.logical_shape)) for shape in program.meshes]
        self._donated_leaves = program.donated_leaves
        weakref.finalize(self, runtime.dropped.append, self.number)  # also if loading fails

    def load(self) -> None:
        """Start missing meshes, and compile on workers that lack the program.

        Call it in the turn (`Turns.turn`) that uses the meshes: another turn may end them.
        """
        if self.meshes and all(mesh.alive for mesh in self.meshes):
            return
        meshes = self.runtime.meshes(self._keys)
        self.runtime.unload_dropped()
        launcher = self.runtime.launcher
        workers = [
            (worker, program)
            for program, mesh in zip(self.programs, meshes, strict=True)
            for worker in mesh.workers
        ]  # fmt: skip

        # All workers must listen before the first one loads.
        addresses = self.runtime.gather(
            {w.actor.call("open_transport", self.number, i): w for i, (w, _) in enumerate(workers)}
        )
        device_links: tuple[tuple[int, int, int, int], ...] = ()
        if launcher.platform == "cuda" and all(self.runtime.ask([w for w, _ in workers], "has_nccl")):
            device_links = links(self.programs, self.places)

        shared = {program.mesh: launcher.share(program) for program in self.programs}
        with self._compiling(meshes):
            self.runtime.gather({
                w.actor.call("load", self.number, shared[program.mesh], self.places, i, addresses, device_links): w
                for i, (w, program) in enumerate(workers)
            })  # fmt: skip
        self.meshes = meshes

    @contextmanager
    def _compiling(self, meshes: Sequence[MeshWorkers]) -> Iterator[None]:
        """All workers of a mesh compile the same functions."""
        n_functions = sum(len(program.functions) for program in self.programs)
        if n_functions == 0:  # the program only moves arrays
            yield
            return

        def look() -> tuple[str, int, int]:
            n_compiled = self.runtime.n_compiled
            done = sum(min(n_compiled(worker, self.number) for worker in mesh.workers) for mesh in meshes)
            return "programs", done, n_functions

        with phase("compiling on workers", look=look) as report:
            yield
            report("programs", n_functions, n_functions)

    def start(self, leaves: Sequence[Any], numbers: Sequence[int], traced: bool = False) -> None:
        """Start a step, in the turn of this thread. Workers keep the results under `numbers`."""
        step = self.runtime.new_step()
        # Before the first call: a fetch must not wait for half of this step.
        arguments = iter(share(self.runtime.launcher, self._arguments(leaves)))
        donated_arrays = self._donated_arrays(leaves)

        calls: dict[Reply, WorkerHandle] = {}
        try:
            for mesh_program, mesh in zip(self.programs, self.meshes, strict=True):
                results = {number: numbers[number] for number, _ in mesh_program.outputs}
                donated = [array.number for array in donated_arrays if any(copy.mesh is mesh for copy in array.copies)]
                freed = mesh.take_freed()
                for worker in mesh.workers:
                    mine, shared = next(arguments)
                    call = worker.actor.call("step", self.number, step, mine, results, donated, freed, traced, *shared)
                    calls[call] = worker
            for array in donated_arrays:
                self._use_up(array)
            self.runtime.note_step(calls)
        except BaseException:  # such as Ctrl-C
            if calls:
                self.runtime.abandon(
                    "A step was interrupted when only some workers had begun it. Call `minialpa.restart()`, and "
                    "restore the state from a checkpoint."
                )
            raise

    def _arguments(self, leaves: Sequence[Any]) -> list[list[Argument]]:
        values = HostValues(leaves)
        return [
            [
                self._argument(slot, mesh_program, of_slot[k], leaves, values)
                for slot, of_slot in zip(mesh_program.inputs, shards, strict=True)
            ]
            for mesh_program, mesh, shards in zip(self.programs, self.meshes, self.shards, strict=True)
            for k in range(len(mesh.workers))
        ]

    def _argument(
        self,
        slot: InputSlot,
        mesh_program: MeshProgram,
        shards: WorkerShards,
        leaves: Sequence[Any],
        values: HostValues,
    ) -> Argument:
        array = array_of(leaves, slot)
        if array is not None and array.is_on(mesh_program.shape, slot.spec):
            return array.number
        return values.given(slot, mesh_program, shards)

    def _donated_arrays(self, leaves: Sequence[Any]) -> list[DistributedArray]:
        arrays = (array for leaf in sorted(self._donated_leaves) for array in arrays_on_workers(leaves[leaf]))
        return list({array.number: array for array in arrays}.values())

    def _use_up(self, array: DistributedArray) -> None:
        """Frees copies outside the step, too."""
        for copy in array.copies:
            if copy.mesh.alive and all(copy.mesh is not mesh for mesh in self.meshes):
                copy.mesh.freed.append(array.number)
        array.used_up()


# ---- moves -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class CopyRequest:
    """An array, one of its copies, and mesh and sharding of the new copy."""

    array: DistributedArray
    copy: Copy
    shape: MeshShape
    spec: PartitionSpec


_Route = tuple[ArrayType, MeshShape, PartitionSpec, MeshShape, PartitionSpec]
"""The type of an array, its mesh and sharding, and the mesh and sharding of the copy."""


def move_arrays(runtime: ClusterRuntime, moves: Sequence[CopyRequest]) -> None:
    """Make copies by a step of a program without functions. Call it in a turn, on running meshes."""
    key = tuple((move.array.type, move.copy.shape, move.copy.spec, move.shape, move.spec) for move in moves)
    mover = runtime.movers.pop(key, None)
    if mover is None:
        mover = ClusterProgram(runtime, _moving_program(key), {i: kind for i, (kind, *_) in enumerate(key)})
    runtime.movers[key] = mover  # last used at the end
    if len(runtime.movers) > _MOVERS_KEPT:
        del runtime.movers[next(iter(runtime.movers))]

    mover.load()
    arrays = [move.array for move in moves]
    mover.start(arrays, [array.number for array in arrays])
    for move in moves:
        move.array.add(Copy(runtime.mesh_of(move.shape), move.shape, move.spec))


def _moving_program(moves: Sequence[_Route]) -> Program:
    """Each result is a copy of an argument."""
    meshes = tuple(dict.fromkeys(shape for _, source, _, target, _ in moves for shape in (source, target)))
    number = {shape: i for i, shape in enumerate(meshes)}
    n = len(moves)
    return Program(
        meshes=meshes,
        functions=(),
        inputs=tuple(
            InputSlot(buffer=i, leaf=i, rows=None, mesh=number[source], spec=spec)
            for i, (_, source, spec, _, _) in enumerate(moves)
        ),
        constants=(),
        instructions=tuple(Transfer(i, n + i, number[target], spec) for i, (_, _, _, target, spec) in enumerate(moves)),
        outputs=tuple(OutputSlot((n + i,), (number[target],)) for i, (_, _, _, target, _) in enumerate(moves)),
        donated_leaves=frozenset(),
        n_buffers=2 * n,
    )


# ---- arguments -------------------------------------------------------------------------------------------------------


class HostValues:
    """Converts and cuts each leaf once."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._leaves = leaves
        self._leaf_values: dict[int, Any] = {}
        self._shards: dict[tuple[Any, ...], np.ndarray[Any, Any]] = {}

    def given(self, slot: InputSlot, program: MeshProgram, shards: WorkerShards) -> Given:
        kind = program.types[slot.buffer]
        if slot.leaf not in self._leaf_values:
            leaf = self._leaves[slot.leaf]
            data = leaf if kind.key is None else kind.data(leaf[...])
            self._leaf_values[slot.leaf] = np.asarray(data, kind.dtype)
        return Given(tuple(self._shard(slot, box) for box in shards.boxes), shards.shard_of_device)

    def _shard(self, slot: InputSlot, box: Box) -> np.ndarray[Any, Any]:
        """The part `box` of the rows of an input, plain."""
        key = (slot.leaf, slot.rows, box)
        if key not in self._shards:
            value = self._leaf_values[slot.leaf]
            if slot.rows is not None:
                start, stop, dim = slot.rows
                value = value[(slice(None),) * dim + (slice(start, stop),)]
            shard = np.asarray(value[tuple(slice(*ends) for ends in box)], order="C")
            self._shards[key] = to_plain(shard)
        return self._shards[key]


def share(launcher: Launcher, arguments: Sequence[Sequence[Argument]]) -> list[tuple[Sequence[Argument], list[Any]]]:
    """The arguments of each worker, and the large shards that it shares with others.

    The launcher copies these to each host once. Arguments refer to them by position.
    """
    given = [{ById(s) for x in mine if isinstance(x, Given) for s in x.shards} for mine in arguments]
    sizes = {shard: np.asarray(shard.value).nbytes for shards in given for shard in shards}
    if sum(sizes.values()) >= _SHARE_BYTES:
        launcher.check_memory(sum(sizes.values()))
    large = [[shard for shard in shards if sizes[shard] >= _SHARE_BYTES] for shards in given]
    users = Counter(shard for shards in large for shard in shards)
    refs = {shard: launcher.share(shard.value) for shard, n_users in users.items() if n_users > 1}

    out: list[tuple[Sequence[Argument], list[Any]]] = []
    for mine, shards in zip(arguments, large, strict=True):
        shared = [shard for shard in shards if shard in refs]
        out.append((_with_references(mine, shared), [refs[shard] for shard in shared]))
    return out


def _with_references(arguments: Sequence[Argument], shared: Sequence[ById[Any]]) -> Sequence[Argument]:
    """With positions in `shared` in place of shared shards."""
    if not shared:
        return arguments
    numbers = {shard: i for i, shard in enumerate(shared)}
    return [
        Given(tuple(numbers.get(ById(s), s) for s in x.shards), x.shard_of_device) if isinstance(x, Given) else x
        for x in arguments
    ]


def arrays_on_workers(leaf: Any) -> list[DistributedArray]:
    """Empty if the data is in this process."""
    if isinstance(leaf, DistributedArray):
        return [leaf]
    stored = leaf.stored_as if isinstance(leaf, RemoteArray) else ()
    return [array for array in stored if isinstance(array, DistributedArray)]


def array_of(leaves: Sequence[Any], slot: InputSlot) -> DistributedArray | None:
    """The array on workers that an input reads, if any.

    A `MicroBatchedArray` on workers has one array for each micro-batch, with copies on all meshes that read it.
    """
    leaf = leaves[slot.leaf]
    found = leaf if slot.rows is None else None
    if isinstance(leaf, MicroBatchedArray):
        found = next(iter(leaf.parts(slot.rows)), None)
    return found if isinstance(found, DistributedArray) else None


def worker_shards(program: MeshProgram, places: Sequence[Place]) -> list[list[WorkerShards]]:
    """For each input and worker of a mesh."""
    out = []
    for slot in program.inputs:
        shape = program.types[slot.buffer].data_shape
        boxes = shard_boxes(shape, Spec.of(slot.spec, len(shape)), program.shape)
        shards = []
        for place in places:
            mine = [boxes[device] for device in place.devices]
            distinct = tuple(dict.fromkeys(mine))
            shards.append(WorkerShards(distinct, tuple(distinct.index(box) for box in mine)))
        out.append(shards)
    return out
