"""Mesh programs on a session's workers: argument leaves in, results that stay on the workers out."""

from __future__ import annotations

import math
import weakref
from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from minialpa.arrays import RemoteArray
from minialpa.programs.mesh_program import ArrayType, MeshProgram, Place, links, worker_places
from minialpa.programs.program import Accumulate, InputSlot, Program, Run
from minialpa.programs.resharding import Box, shard_boxes
from minialpa.runtime.distributed_array import Copy, DistributedArray, MeshWorkers
from minialpa.runtime.numpy_wire import to_plain
from minialpa.runtime.ray_cluster import WorkerHandle
from minialpa.runtime.ray_runtime import RayRuntime
from minialpa.runtime.step_trace import TaskTime, from_start
from minialpa.runtime.worker_program import Argument, Given
from minialpa.sharding import Spec

#: Shards of this size, where several workers get them, are put into the object store by themselves.
_SHARE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Cut:
    """The distinct shards of an input that one worker gets, and which of them each of its devices has."""

    boxes: tuple[Box, ...]
    shard_of_device: tuple[int, ...]


class RayExecutable:
    """A program on the workers of a session.

    types: of buffers that no function of the program reads or writes. Its meshes start, and its functions are compiled,
    when it is made; and again if another program with meshes of other shapes has ended them since.
    """

    def __init__(self, runtime: RayRuntime, program: Program, types: Mapping[int, ArrayType] | None = None) -> None:
        self.runtime = runtime
        self.programs = runtime.split(program, types or {})
        self.number = runtime.new_number()
        self.places = worker_places(program.meshes, runtime.cluster.devices_per_host)
        self._mesh_of_function = [function.mesh for function in program.functions]
        self._calls = _calls_by_mesh(program)
        self._keys = [(shape.first_device, math.prod(shape.logical_shape)) for shape in program.meshes]
        self._cuts = [_cuts(own, [p for p in self.places if p.mesh == own.mesh]) for own in self.programs]
        self._n_results = len(program.outputs)
        self._donated_leaves = program.donated_leaves
        self._meshes: list[MeshWorkers] = []
        weakref.finalize(self, runtime.dropped.append, self.number)  # also of what fails to load
        with runtime.ordered():
            self._load()

    # ---- steps ----------------------------------------------------------------------------------------------------

    def __call__(self, leaves: Sequence[Any], *, traced: bool = False) -> list[Any]:
        """Start a step on argument leaves; returns an array for each result at once. traced: see `Runner`."""
        self.runtime.make_room()
        with self.runtime.ordered():
            self.runtime.check()
            self._check_usable(leaves)
            self._load()
            self._bring(leaves)
            numbers = [self.runtime.new_number() for _ in range(self._n_results)]
            self._start(leaves, numbers, traced)
            return self._results(numbers)

    def in_order(self) -> AbstractContextManager[None]:
        """See `Runner`."""
        return self.runtime.ordered()

    def move(self, arrays: Sequence[DistributedArray]) -> None:
        """Start a step of which every result is a copy of an argument and is kept under its number. To be called in
        order."""
        self._load()
        self._start(arrays, [array.number for array in arrays])

    def _start(self, leaves: Sequence[Any], numbers: Sequence[int], traced: bool = False) -> None:
        """Start a step whose results the workers keep under `numbers`, in the turn of this thread."""
        step = self.runtime.new_step()
        values = _Values(leaves)
        # All arguments first: fetching one waits for earlier steps, but not for a part of this one.
        arguments = [
            [self._argument(slot, own, cut[k], leaves, values) for slot, cut in zip(own.inputs, cuts, strict=True)]
            for own, mesh, cuts in zip(self.programs, self._meshes, self._cuts, strict=True)
            for k in range(len(mesh.workers))
        ]
        given, used_up = iter(_share(arguments)), self._given_away(leaves)
        calls: dict[Any, WorkerHandle] = {}
        try:
            for own, mesh in zip(self.programs, self._meshes, strict=True):
                results = {number: numbers[number] for number, _ in own.outputs}
                freed, donated = mesh.take_freed(), [x.number for x in used_up if any(c.mesh is mesh for c in x.copies)]
                for worker in mesh.workers:
                    mine, shared = next(given)
                    ref = worker.actor.step.remote(self.number, step, mine, results, donated, freed, traced, *shared)
                    calls[ref] = worker
            for array in used_up:
                self._use_up(array)
            self.runtime.note_step(calls)
        except BaseException:  # Ctrl-C, say
            if calls:
                self.runtime.abandon("A step was interrupted when only some workers had been told of it.")
            raise

    def timeline(self) -> tuple[TaskTime, ...]:
        """See `Runner`. Times of workers are those of the clocks of their hosts, counted from the earliest."""
        workers = [worker for mesh in self._meshes for worker in mesh.workers]
        tasks = []
        for place, mine in zip(self.places, self.runtime.ask(workers, "timeline"), strict=True):
            numbers = iter(self._calls[place.mesh])
            tasks += [task if task.instruction is None else replace(task, instruction=next(numbers)) for task in mine]
        return from_start(tasks)

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Argument leaves on the workers, laid out as the step reads them; what is cut into micro-batches stays."""
        with self.runtime.ordered():
            self.runtime.check()
            self._check_usable(leaves)
            self._load()
            return self._place(leaves)

    def _place(self, leaves: Sequence[Any]) -> list[Any]:
        values = _Values(leaves)
        slots = [(own, slot) for own in self.programs for slot in own.inputs if slot.rows is None]
        moved = {slot.leaf for own, slot in slots if not _lies(leaves, own, slot)}
        copies: dict[int, list[Copy]] = {}
        types: dict[int, ArrayType] = {}
        numbers: dict[int, int] = {}
        puts: list[tuple[WorkerHandle, dict[int, int], list[Argument]]] = []
        for own, mesh, cuts in zip(self.programs, self._meshes, self._cuts, strict=True):
            mine = [i for i, slot in enumerate(own.inputs) if slot.leaf in moved and slot.rows is None]
            for slot in (own.inputs[i] for i in mine):
                numbers.setdefault(slot.leaf, self.runtime.new_number())
                types[slot.leaf] = own.types[slot.buffer]
                copies.setdefault(slot.leaf, []).append(Copy(mesh, own.shape, slot.spec))
            kept = {i: numbers[own.inputs[i].leaf] for i in mine}
            for k, worker in enumerate(mesh.workers):
                puts.append((worker, kept, [values.given(own.inputs[i], own, cuts[i][k]) for i in mine]))
        calls = {
            worker.actor.put.remote(self.number, kept, given, *shared): worker
            for (worker, kept, _), (given, shared) in zip(puts, _share([given for *_, given in puts]), strict=True)
            if kept
        }
        self.runtime.gather(calls)
        out = list(leaves)
        for leaf, number in numbers.items():
            out[leaf] = DistributedArray(self.runtime, number, types[leaf], tuple(copies[leaf]))
        return out

    @staticmethod
    def _check_usable(leaves: Sequence[Any]) -> None:
        """Raise WorkerError if an argument is used up: another thread may have donated it since the call began."""
        for leaf in leaves:
            for array in _arrays_on_workers(leaf):
                array.check_usable()

    def _bring(self, leaves: Sequence[Any]) -> None:
        """Have workers send each other what lies elsewhere, or in another layout, than the step reads it."""
        wanted: dict[tuple[int, Any, Any], tuple[DistributedArray, Copy]] = {}
        for own in self.programs:
            for slot in own.inputs:
                array = _array(leaves, slot)
                if array is None or _lies(leaves, own, slot) or array.held_here:
                    continue
                copy = next((copy for copy in array.copies if copy.mesh.alive), None)
                if copy is not None:
                    wanted[array.number, own.shape, slot.spec] = array, copy
        moves = [(array, copy, shape, spec) for (_, shape, spec), (array, copy) in wanted.items()]
        # One group of workers that is seen in two shapes: such an array comes through this process.
        shapes = {copy.shape for _, copy, _, _ in moves} | {shape for _, _, shape, _ in moves}
        if moves and len({shape.first_device for shape in shapes}) == len(shapes):
            self.runtime.move(moves)

    def _argument(
        self, slot: InputSlot, own: MeshProgram, cut: _Cut, leaves: Sequence[Any], values: _Values
    ) -> Argument:
        array = _array(leaves, slot)
        if array is not None and array.lies(own.shape, slot.spec):
            return array.number
        return values.given(slot, own, cut)

    def _given_away(self, leaves: Sequence[Any]) -> list[DistributedArray]:
        """Arrays on workers that the step uses up, each once."""
        arrays = (array for leaf in sorted(self._donated_leaves) for array in _arrays_on_workers(leaves[leaf]))
        return list({id(array): array for array in arrays}.values())

    def _use_up(self, array: DistributedArray) -> None:
        """Mark a donated array; copies on meshes that do not take part are freed."""
        for copy in array.copies:
            if copy.mesh.alive and all(copy.mesh is not mesh for mesh in self._meshes):
                copy.mesh.freed.append(array.number)
        array.used_up()

    def _results(self, numbers: Sequence[int]) -> list[DistributedArray]:
        held: dict[int, list[Copy]] = {}
        types: dict[int, Any] = {}
        for program, mesh in zip(self.programs, self._meshes, strict=True):
            for number, buffer in program.outputs:
                held.setdefault(number, []).append(Copy(mesh, program.shape, program.specs[buffer]))
                types[number] = program.types[buffer]
        return [DistributedArray(self.runtime, n, types[i], tuple(held[i])) for i, n in enumerate(numbers)]

    # ---- programs on workers --------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Start the meshes that do not run, and compile where they have not the program yet. To be called in order, and
        what uses the meshes in the same turn: another one may end them."""
        if self._meshes and all(mesh.alive for mesh in self._meshes):
            return
        meshes = self.runtime.meshes(self._keys)
        self.runtime.unload_dropped()
        workers = [(worker, program) for program, mesh in zip(self.programs, meshes, strict=True)
                   for worker in mesh.workers]  # fmt: skip
        addresses = self.runtime.gather(
            {w.actor.open_transport.remote(self.number, i): w for i, (w, _) in enumerate(workers)}
        )
        ways: tuple[tuple[int, int, int, int], ...] = ()
        if self.runtime.cluster.platform == "cuda" and all(self.runtime.ask([w for w, _ in workers], "has_nccl")):
            ways = links(self.programs, self.places)
        shared = {program.mesh: ray.put(program) for program in self.programs}
        self.runtime.gather({
            w.actor.load.remote(self.number, shared[program.mesh], self.places, i, addresses, ways): w
            for i, (w, program) in enumerate(workers)
        })  # fmt: skip
        self._meshes = meshes

    def hlo_texts(self) -> list[str]:
        """Compiled HLO of each function of the program."""
        return self._per_function("hlo_texts")

    def allocation_sizes(self) -> list[int]:
        """Bytes per device of each function of the program."""
        return self._per_function("allocation_sizes")

    def descriptions(self) -> dict[str, str]:
        """Host, devices and instructions of every worker."""
        out = {}
        with self.runtime.ordered():
            self._load()
            for number, mesh in enumerate(self._meshes):
                texts = self.runtime.ask(mesh.workers, "description", self.number)
                for worker, text in zip(mesh.workers, texts, strict=True):
                    out[f"stage{number}-host{worker.host}-worker"] = text
        return out

    def function_seconds(self, repeats: int = 5) -> list[float]:
        """Seconds of each function of the program by itself: median of `repeats` calls."""
        return self._per_function("function_seconds", repeats)

    def _per_function(self, method: str, *args: Any) -> list[Any]:
        """Answers of the first worker of each mesh, a list for its functions, in the order of the whole program.

        One mesh after the other, and all workers of a mesh at once.
        """
        with self.runtime.ordered():
            self._load()
            found = [iter(self.runtime.ask(mesh.workers, method, self.number, *args)[0]) for mesh in self._meshes]
        return [next(found[mesh]) for mesh in self._mesh_of_function]

    def sync(self) -> None:
        """Wait until all steps that were started have ended."""
        self.runtime.sync()


class _Values:
    """Leaves as NumPy arrays and their shards, each converted and cut once."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._leaves = leaves
        self._known: dict[int, Any] = {}
        self._shards: dict[tuple[Any, ...], np.ndarray[Any, Any]] = {}

    def given(self, slot: InputSlot, program: MeshProgram, cut: _Cut) -> Given:
        """The shards of input `slot` that one worker gets."""
        kind = program.types[slot.buffer]
        if slot.leaf not in self._known:
            leaf = self._leaves[slot.leaf]
            data = leaf if kind.key is None else kind.data(leaf[...])
            self._known[slot.leaf] = np.asarray(data, kind.dtype)
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


def _share(arguments: Sequence[Sequence[Argument]]) -> list[tuple[Sequence[Argument], list[Any]]]:
    """The arguments of each worker, and what comes beside them.

    A large shard that several workers get is written to the object store once, and comes beside the arguments.
    """
    large = [
        {id(s): s for x in mine if isinstance(x, Given) for s in x.shards if np.asarray(s).nbytes >= _SHARE_BYTES}
        for mine in arguments
    ]
    users = Counter(key for shards in large for key in shards)
    refs = {key: ray.put(shard) for key, shard in ChainMap(*large).items() if users[key] > 1}
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


def _calls_by_mesh(program: Program) -> list[list[int]]:
    """For each mesh, the instructions of the program that call its functions: it makes these calls in this order."""
    calls: list[list[int]] = [[] for _ in program.meshes]
    for i, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run | Accumulate):
            calls[program.functions[instruction.function].mesh].append(i)
    return calls


def _arrays_on_workers(leaf: Any) -> list[DistributedArray]:
    """The arrays on workers that hold the data of an argument; none if it is in this process."""
    if isinstance(leaf, DistributedArray):
        return [leaf]
    stored = leaf.stored_as if isinstance(leaf, RemoteArray) else ()
    return [array for array in stored if isinstance(array, DistributedArray)]


def _array(leaves: Sequence[Any], slot: InputSlot) -> DistributedArray | None:
    """The array on workers that an input is, unless it is cut into micro-batches."""
    leaf = leaves[slot.leaf]
    return leaf if slot.rows is None and isinstance(leaf, DistributedArray) else None


def _lies(leaves: Sequence[Any], own: MeshProgram, slot: InputSlot) -> bool:
    """Whether the argument of an input lies on the mesh of the program as the program reads it."""
    array = _array(leaves, slot)
    return array is not None and array.lies(own.shape, slot.spec)


def _cuts(program: MeshProgram, places: Sequence[Place]) -> list[list[_Cut]]:
    """For each input and each worker of a mesh, what the worker gets."""
    out = []
    for slot in program.inputs:
        shape = program.types[slot.buffer].data_shape
        boxes = shard_boxes(shape, Spec.of(slot.spec, len(shape)), program.shape)
        cuts = []
        for place in places:
            mine = [boxes[device] for device in place.devices]
            distinct = tuple(dict.fromkeys(mine))
            cuts.append(_Cut(distinct, tuple(distinct.index(box) for box in mine)))
        out.append(cuts)
    return out
