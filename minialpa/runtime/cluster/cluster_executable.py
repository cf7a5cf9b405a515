"""The cluster's `Runner`: results stay on the workers of a session."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import Mesh, PartitionSpec

from minialpa.programs.mesh_program import ArrayType, MeshProgram
from minialpa.programs.program import Accumulate, InputSlot, Program, Run
from minialpa.programs.resharding import Resharding
from minialpa.runtime.arrays import MicroBatchedArray, MicroRows, cover_all_rows
from minialpa.runtime.cluster.cluster_program import (
    ClusterProgram,
    CopyRequest,
    HostValues,
    WorkerShards,
    array_of,
    arrays_on_workers,
    move_arrays,
    share,
)
from minialpa.runtime.cluster.cluster_runtime import ClusterRuntime
from minialpa.runtime.cluster.distributed_array import Copy, DistributedArray, distributed_array
from minialpa.runtime.cluster.launcher import Reply, WorkerHandle
from minialpa.runtime.steps.step_trace import TaskTime, from_start
from minialpa.runtime.workers.arguments import Argument, InputRead, ReadOrder
from minialpa.samples import BatchForm, SampleFunction, UnreadArray, merged_ranges

Part = tuple[int, MicroRows]
"""The number of an argument leaf, and the rows of a micro-batch."""


class ClusterExecutable:
    """The constructor starts the meshes and compiles. A call repeats this if a program with other meshes has ended the
    meshes.
    """

    #: The workers have the devices.
    meshes: Sequence[Mesh] = ()

    def __init__(self, runtime: ClusterRuntime, program: Program, types: Mapping[int, ArrayType] | None = None) -> None:
        """types: of buffers that no function reads or writes."""
        self.session = runtime
        self._program = ClusterProgram(runtime, program, types or {})
        self._mesh_of_function = [function.mesh for function in program.functions]
        self._calls = _calls_by_mesh(program)
        self._n_results = len(program.outputs)
        self._functions = FunctionsSent(runtime)
        self._readers = _readers(self._program.programs)
        with runtime.turn():
            self._program.load()

    @property
    def reshardings(self) -> dict[int, Resharding]:
        programs = self._program.programs
        return {number: one.resharding for program in programs for number, one in program.transfers.items()}

    # ---- steps ----------------------------------------------------------------------------------------------------

    def __call__(self, leaves: Sequence[Any], *, traced: bool = False) -> list[Any]:
        self.session.free_unused_arrays()
        with self.session.turn():
            self.session.check()
            self._check_usable(leaves)
            self._program.load()
            self._bring_arguments(leaves)
            numbers = [self.session.new_number() for _ in range(self._n_results)]
            self._program.start(leaves, numbers, traced)
            return self._results(numbers)

    def turn(self) -> AbstractContextManager[None]:
        return self.session.turn()

    def timeline(self) -> tuple[TaskTime, ...]:
        workers = [worker for mesh in self._program.meshes for worker in mesh.workers]
        tasks = []
        for place, mine in zip(self._program.places, self.session.ask(workers, "timeline"), strict=True):
            numbers = iter(self._calls[place.mesh])
            tasks += [task if task.instruction is None else replace(task, instruction=next(numbers)) for task in mine]
        return from_start(tasks)

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Workers keep the arrays, and read `UnreadArray`s themselves."""
        with self.session.in_use():
            with self.session.turn():
                self.session.check()
                self._check_usable(leaves)
                self._program.load()
                placed, calls = self._place(leaves)
                self.session.note_waiting(calls)

            # Outside the turn: workers take the arrays after earlier steps.
            self.session.gather_noted(calls)
            self._functions.note(leaves, calls.values())
            return placed

    def _place(self, leaves: Sequence[Any]) -> tuple[list[Any], dict[Reply, WorkerHandle]]:
        """The placed leaves, and the calls that bring them to workers. Call it in a turn, on loaded meshes."""
        programs, meshes = self._program.programs, self._program.meshes
        missing = [
            leaf
            for leaf, readers in self._readers.items()
            if leaves[leaf] is not None
            and cover_all_rows(readers.keys(), np.shape(leaves[leaf]))
            and not all(_is_placed(leaves, *reader) for of_rows in readers.values() for reader in of_rows)
        ]
        numbers = {(leaf, rows): self.session.new_number() for leaf in missing for rows in self._readers[leaf]}

        values = HostValues(leaves)
        # (worker, number of the array for each input, shards of these inputs)
        puts: list[tuple[WorkerHandle, dict[int, int], list[Argument]]] = []
        for mesh_program, mesh, shards in zip(programs, meshes, self._program.shards, strict=True):
            kept = {
                i: numbers[slot.leaf, slot.rows]
                for i, slot in enumerate(mesh_program.inputs)
                if (slot.leaf, slot.rows) in numbers and not isinstance(leaves[slot.leaf], UnreadArray)
            }
            for k, worker in enumerate(mesh.workers):
                puts.append(
                    (worker, kept, [values.given(mesh_program.inputs[i], mesh_program, shards[i][k]) for i in kept])
                )

        arguments = share(self.session.launcher, [mine for *_, mine in puts])
        calls = {
            worker.actor.call("put", self._program.number, kept, mine, *shared): worker
            for (worker, kept, _), (mine, shared) in zip(puts, arguments, strict=True)
            if kept
        }
        calls |= read_calls(self._program, self._functions, leaves, numbers)
        return self._with_parts(leaves, numbers), calls

    def _with_parts(self, leaves: Sequence[Any], numbers: Mapping[Part, int]) -> list[Any]:
        out = list(leaves)
        for leaf in {leaf for leaf, _ in numbers}:
            readers = self._readers[leaf]
            parts = {rows: [self._placed_array(readers[rows], numbers[leaf, rows])] for rows in readers}
            out[leaf] = parts[None][0] if parts.keys() == {None} else MicroBatchedArray(parts)
        return out

    def _placed_array(self, readers: Sequence[tuple[MeshProgram, InputSlot]], number: int) -> DistributedArray:
        copies = tuple(
            Copy(self._program.meshes[mesh_program.mesh], mesh_program.shape, slot.spec)
            for mesh_program, slot in readers
        )
        mesh_program, slot = readers[-1]
        return distributed_array(self.session, number, mesh_program.types[slot.buffer], copies)

    def homes(self, leaf: Any) -> tuple[tuple[int, PartitionSpec], ...]:
        """Includes ended meshes, which the next call restarts."""
        if not isinstance(leaf, DistributedArray):
            return ()
        number_of = {program.shape: program.mesh for program in self._program.programs}
        return tuple((number_of[copy.shape], copy.spec) for copy in leaf.copies if copy.shape in number_of)

    @staticmethod
    def _check_usable(leaves: Sequence[Any]) -> None:
        for leaf in leaves:
            for array in arrays_on_workers(leaf):
                array.check_usable()

    def _bring_arguments(self, leaves: Sequence[Any]) -> None:
        """Workers send each other arguments that the step reads elsewhere."""
        requested: dict[tuple[int, Any, Any], CopyRequest] = {}
        for mesh_program in self._program.programs:
            for slot in mesh_program.inputs:
                array = array_of(leaves, slot)
                if array is None or _is_placed(leaves, mesh_program, slot) or array.held_here:
                    continue
                copy = next((copy for copy in array.copies if copy.mesh.alive), None)
                if copy is not None:
                    requested[array.number, mesh_program.shape, slot.spec] = CopyRequest(
                        array, copy, mesh_program.shape, slot.spec
                    )

        # If one mesh has two shapes here, the arrays come through this process.
        moves = list(requested.values())
        shapes = {move.copy.shape for move in moves} | {move.shape for move in moves}
        if moves and len({shape.first_device for shape in shapes}) == len(shapes):
            move_arrays(self.session, moves)

    def _results(self, numbers: Sequence[int]) -> list[DistributedArray]:
        held: dict[int, list[Copy]] = {}
        types: dict[int, Any] = {}
        for program, mesh in zip(self._program.programs, self._program.meshes, strict=True):
            for number, buffer in program.outputs:
                held.setdefault(number, []).append(Copy(mesh, program.shape, program.specs[buffer]))
                types[number] = program.types[buffer]
        return [distributed_array(self.session, n, types[i], tuple(held[i])) for i, n in enumerate(numbers)]

    # ---- programs on workers --------------------------------------------------------------------------------------

    def hlo_texts(self) -> list[str]:
        return self._per_function("hlo_texts")

    def allocation_sizes(self) -> list[int]:
        return self._per_function("allocation_sizes")

    def descriptions(self) -> dict[str, str]:
        out = {}
        with self.session.turn():
            self._program.load()
            for number, mesh in enumerate(self._program.meshes):
                texts = self.session.ask(mesh.workers, "description", self._program.number)
                for worker, text in zip(mesh.workers, texts, strict=True):
                    out[f"stage{number}-host{worker.host}-worker"] = text
        return out

    def function_seconds(self, repeats: int = 5) -> list[float]:
        return self._per_function("function_seconds", repeats)

    def _per_function(self, method: str, *args: Any) -> list[Any]:
        """The answer of the first worker. Meshes answer one after the other, workers of a mesh at once."""
        with self.session.turn():
            self._program.load()
            number, meshes = self._program.number, self._program.meshes
            answers = [iter(self.session.ask(mesh.workers, method, number, *args)[0]) for mesh in meshes]
        return [next(answers[mesh]) for mesh in self._mesh_of_function]

    def sync(self) -> None:
        self.session.sync()


def _calls_by_mesh(program: Program) -> list[list[int]]:
    calls: list[list[int]] = [[] for _ in program.meshes]
    for i, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run | Accumulate):
            calls[program.functions[instruction.function].mesh].append(i)
    return calls


def _readers(programs: Sequence[MeshProgram]) -> dict[int, dict[MicroRows, list[tuple[MeshProgram, InputSlot]]]]:
    readers: dict[int, dict[MicroRows, list[tuple[MeshProgram, InputSlot]]]] = {}
    for mesh_program in programs:
        for slot in mesh_program.inputs:
            readers.setdefault(slot.leaf, {}).setdefault(slot.rows, []).append((mesh_program, slot))
    return readers


def _is_placed(leaves: Sequence[Any], mesh_program: MeshProgram, slot: InputSlot) -> bool:
    array = array_of(leaves, slot)
    return array is not None and array.is_on(mesh_program.shape, slot.spec)


# ---- batches that workers read ---------------------------------------------------------------------------------------


class FunctionsSent:
    """Each worker gets a function once."""

    def __init__(self, runtime: ClusterRuntime) -> None:
        self._runtime = runtime
        self._sent: weakref.WeakKeyDictionary[SampleFunction, tuple[int, set[int]]] = weakref.WeakKeyDictionary()

    def number(self, function: SampleFunction) -> int:
        if function not in self._sent:
            number = self._runtime.new_number()
            self._sent[function] = number, set()
            weakref.finalize(function, self._runtime.dropped.append, number)
        return self._sent[function][0]

    def has(self, worker: WorkerHandle, function: SampleFunction) -> bool:
        return worker.number in self._sent[function][1]

    def note(self, leaves: Sequence[Any], workers: Collection[WorkerHandle]) -> None:
        """These workers have answered the calls of `read_calls`."""
        for leaf in leaves:
            if isinstance(leaf, UnreadArray):
                self._sent[leaf.batch.function][1].update(worker.number for worker in workers)


def read_calls(
    program: ClusterProgram,
    functions: FunctionsSent,
    leaves: Sequence[Any],
    numbers: Mapping[Part, int],
) -> dict[Reply, WorkerHandle]:
    """Workers read an unread batch, in a thread beside running steps.

    Call it in a turn, on loaded meshes. `numbers` has the number of each input, by leaf and rows.
    """
    unread = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, UnreadArray)}
    batches = {leaf.batch for leaf in unread.values()}
    if not batches:
        return {}
    assert len(batches) == 1, "the leaves of a batch are read together"
    (batch,) = batches
    function = functions.number(batch.function)

    calls: dict[Reply, WorkerHandle] = {}
    for mesh_program, mesh, shards in zip(program.programs, program.meshes, program.shards, strict=True):
        for k, worker in enumerate(mesh.workers):
            leaf_of = {number: leaf.leaf for number, leaf in unread.items()}
            order = read_order(mesh_program, [of_input[k] for of_input in shards], leaf_of, batch.form)
            if not order.inputs:
                continue
            slots = [mesh_program.inputs[x.input] for x in order.inputs]
            kept = [numbers[slot.leaf, slot.rows] for slot in slots]
            sent = None if functions.has(worker, batch.function) else batch.function.read
            calls[worker.actor.call_aside("read", function, sent, program.number, order, batch.first, kept)] = worker
    return calls


def read_order(
    program: MeshProgram, shards: Sequence[WorkerShards], leaf_of: Mapping[int, int], form: BatchForm
) -> ReadOrder:
    """The order for one worker: the rows of its devices, in the micro-batches that its mesh reads.

    leaf_of: for each argument leaf to read, its number in the batch.
    """
    inputs = [
        InputRead(
            input=i,
            leaf=leaf_of[slot.leaf],
            dtype=program.types[slot.buffer].dtype,
            boxes=tuple(_box_in_leaf(box, slot.rows) for box in of_worker.boxes),
            shard_of_device=of_worker.shard_of_device,
        )
        for i, (slot, of_worker) in enumerate(zip(program.inputs, shards, strict=True))
        if slot.leaf in leaf_of
    ]
    return ReadOrder(form, merged_ranges([box[0] for x in inputs for box in x.boxes]), tuple(inputs))


def _box_in_leaf(box: Any, rows: MicroRows) -> Any:
    if rows is None:
        return box
    first, _, dim = rows
    return tuple((a + first, b + first) if i == dim else (a, b) for i, (a, b) in enumerate(box))
