"""One program on the workers of a session: loaded where its meshes run, and started step by step."""

from __future__ import annotations

import math
import weakref
from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minialpa.arrays import RemoteArray
from minialpa.programs.mesh_program import ArrayType, MeshProgram, Place, links, worker_places
from minialpa.programs.program import InputSlot, Program
from minialpa.programs.resharding import Box, shard_boxes
from minialpa.runtime.arrays import BlockedArray
from minialpa.runtime.cluster_runtime import ClusterRuntime
from minialpa.runtime.distributed_array import DistributedArray, MeshWorkers
from minialpa.runtime.launcher import Launcher, Reply, WorkerHandle
from minialpa.runtime.numpy_wire import to_plain
from minialpa.runtime.worker_program import Argument, Given
from minialpa.sharding import Spec

#: Shards of this size, where several workers get them, are sent to each host once.
_SHARE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Cut:
    """The distinct shards of an input that one worker gets, and which of them each of its devices has."""

    boxes: tuple[Box, ...]
    shard_of_device: tuple[int, ...]


class ClusterProgram:
    """A program, split by mesh.

    Attributes:
        runtime: that of the session.
        number: by which workers know the program.
        programs: what each mesh does.
        places: the workers of all meshes, in order.
        meshes: the running workers of each mesh; empty until `load`.
        cuts: for each mesh, input and worker, what the worker gets of an argument that this process sends.
    """

    def __init__(self, runtime: ClusterRuntime, program: Program, types: Mapping[int, ArrayType]) -> None:
        """types: of buffers that no function of the program reads or writes."""
        self.runtime = runtime
        self.programs = runtime.split(program, types)
        self.number = runtime.new_number()
        self.places = worker_places(program.meshes, runtime.launcher.devices_per_host)
        self.meshes: list[MeshWorkers] = []
        self.cuts = [_cuts(own, [p for p in self.places if p.mesh == own.mesh]) for own in self.programs]
        self._keys = [(shape.first_device, math.prod(shape.logical_shape)) for shape in program.meshes]
        self._donated_leaves = program.donated_leaves
        weakref.finalize(self, runtime.dropped.append, self.number)  # also of what fails to load

    def load(self) -> None:
        """Start the meshes that do not run, and compile where they have not the program yet. To be called in a turn, in
        which the meshes are also used: another turn may end them."""
        if self.meshes and all(mesh.alive for mesh in self.meshes):
            return
        meshes = self.runtime.meshes(self._keys)
        self.runtime.unload_dropped()
        workers = [(worker, program) for program, mesh in zip(self.programs, meshes, strict=True)
                   for worker in mesh.workers]  # fmt: skip
        addresses = self.runtime.gather(
            {w.actor.call("open_transport", self.number, i): w for i, (w, _) in enumerate(workers)}
        )
        device_links: tuple[tuple[int, int, int, int], ...] = ()
        if self.runtime.launcher.platform == "cuda" and all(self.runtime.ask([w for w, _ in workers], "has_nccl")):
            device_links = links(self.programs, self.places)
        shared = {program.mesh: self.runtime.launcher.share(program) for program in self.programs}
        self.runtime.gather({
            w.actor.call("load", self.number, shared[program.mesh], self.places, i, addresses, device_links): w
            for i, (w, program) in enumerate(workers)
        })  # fmt: skip
        self.meshes = meshes

    def start(self, leaves: Sequence[Any], numbers: Sequence[int], traced: bool = False) -> None:
        """Start a step whose results the workers keep under `numbers`, in the turn of this thread."""
        step = self.runtime.new_step()
        values = Values(leaves)
        # All arguments first: fetching one waits for earlier steps, but not for a part of this one.
        arguments = [
            [self._argument(slot, own, cut[k], leaves, values) for slot, cut in zip(own.inputs, cuts, strict=True)]
            for own, mesh, cuts in zip(self.programs, self.meshes, self.cuts, strict=True)
            for k in range(len(mesh.workers))
        ]
        given = iter(share(self.runtime.launcher, arguments))
        calls: dict[Reply, WorkerHandle] = {}
        try:
            for own, mesh in zip(self.programs, self.meshes, strict=True):
                results = {number: numbers[number] for number, _ in own.outputs}
                freed, donated = mesh.take_freed(), self._donated(mesh, leaves)
                for worker in mesh.workers:
                    mine, shared = next(given)
                    ref = worker.actor.call("step", self.number, step, mine, results, donated, freed, traced, *shared)
                    calls[ref] = worker
            for array in self._given_away(leaves):
                self._use_up(array)
            self.runtime.note_step(calls)
        except BaseException:  # Ctrl-C, say
            if calls:
                self.runtime.abandon("A step was interrupted when only some workers had been told of it.")
            raise

    def _argument(self, slot: InputSlot, own: MeshProgram, cut: Cut, leaves: Sequence[Any], values: Values) -> Argument:
        array = array_of(leaves, slot)
        if array is not None and array.lies(own.shape, slot.spec):
            return array.number
        return values.given(slot, own, cut)

    def _given_away(self, leaves: Sequence[Any]) -> list[DistributedArray]:
        """Arrays on workers that the step uses up: arguments, and blocks of arguments."""
        given = [leaves[leaf] for leaf in sorted(self._donated_leaves)]
        parts = [part for x in given for part in (x.blocks if isinstance(x, BlockedArray) else (x,))]
        return [part for part in parts if isinstance(part, DistributedArray)]

    def _donated(self, mesh: MeshWorkers, leaves: Sequence[Any]) -> list[int]:
        """Those of them that are on `mesh`."""
        return [x.number for x in self._given_away(leaves) if any(c.mesh is mesh for c in x.copies)]

    def _use_up(self, array: DistributedArray) -> None:
        """Mark a donated array; copies on meshes that do not take part are freed."""
        for copy in array.copies:
            if copy.mesh.alive and all(copy.mesh is not mesh for mesh in self.meshes):
                copy.mesh.freed.append(array.number)
        array.used_up()


class Values:
    """Leaves as NumPy arrays and their shards, each converted and cut once."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._leaves = leaves
        self._known: dict[int, Any] = {}
        self._shards: dict[tuple[Any, ...], np.ndarray[Any, Any]] = {}

    def given(self, slot: InputSlot, program: MeshProgram, cut: Cut) -> Given:
        """The shards of input `slot` that one worker gets."""
        kind = program.types[slot.buffer]
        if slot.leaf not in self._known:
            leaf = self._leaves[slot.leaf]
            leaf = leaf[...] if isinstance(leaf, RemoteArray) else leaf
            self._known[slot.leaf] = np.asarray(kind.data(leaf), kind.dtype)
        return Given(tuple(self._shard(slot, box) for box in cut.boxes), cut.shard_of_device)

    def _shard(self, slot: InputSlot, box: Box) -> np.ndarray[Any, Any]:
        key = (slot.leaf, slot.rows, box)
        if key not in self._shards:
            value = self._known[slot.leaf]
            if slot.rows is not None:
                start, stop, dim = slot.rows
                value = value[(slice(None),) * dim + (slice(start, stop),)]
            shard = np.asarray(value[tuple(slice(*ends) for ends in box)], order="C")
            self._shards[key] = to_plain(shard)
        return self._shards[key]


def share(launcher: Launcher, arguments: Sequence[Sequence[Argument]]) -> list[tuple[Sequence[Argument], list[Any]]]:
    """The arguments of each worker, and what comes beside them.

    A large shard that several workers get is written to the object store once, and comes beside the arguments.
    """
    large = [
        {id(s): s for x in mine if isinstance(x, Given) for s in x.shards if np.asarray(s).nbytes >= _SHARE_BYTES}
        for mine in arguments
    ]
    users = Counter(key for shards in large for key in shards)
    refs = {key: launcher.share(shard) for key, shard in ChainMap(*large).items() if users[key] > 1}
    out: list[tuple[Sequence[Argument], list[Any]]] = []
    for mine, shards in zip(arguments, large, strict=True):
        shared = [key for key in shards if key in refs]
        numbers = {key: i for i, key in enumerate(shared)}
        if shared:
            mine = [
                Given(tuple(numbers.get(id(s), s) for s in x.shards), x.shard_of_device) if isinstance(x, Given) else x
                for x in mine
            ]
        out.append((mine, [refs[key] for key in shared]))
    return out


def array_of(leaves: Sequence[Any], slot: InputSlot) -> DistributedArray | None:
    """The array on workers that an input is: an argument, or a block of one."""
    leaf = leaves[slot.leaf]
    if slot.rows is not None:
        leaf = leaf.block(*slot.rows[:2]) if slot.is_block and isinstance(leaf, BlockedArray) else None
    return leaf if isinstance(leaf, DistributedArray) else None


def _cuts(program: MeshProgram, places: Sequence[Place]) -> list[list[Cut]]:
    """For each input and each worker of a mesh, what the worker gets."""
    out = []
    for slot in program.inputs:
        shape = program.types[slot.buffer].data_shape
        boxes = shard_boxes(shape, Spec.of(slot.spec, len(shape)), program.shape)
        cuts = []
        for place in places:
            mine = [boxes[device] for device in place.devices]
            distinct = tuple(dict.fromkeys(mine))
            cuts.append(Cut(distinct, tuple(distinct.index(box) for box in mine)))
        out.append(cuts)
    return out
