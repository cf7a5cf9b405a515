"""The cluster's `Runner`: steps on argument leaves, whose results stay on the workers of a session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from minialpa.programs.mesh_program import ArrayType, MeshProgram
from minialpa.programs.program import Accumulate, InputSlot, Program, Run
from minialpa.runtime.arrays import MicroBatchedArray, MicroRows, cover_all_rows
from minialpa.runtime.cluster.array_moves import Move, move_arrays
from minialpa.runtime.cluster.cluster_program import ClusterProgram, Values, array_of, arrays_on_workers, share
from minialpa.runtime.cluster.cluster_runtime import ClusterRuntime
from minialpa.runtime.cluster.distributed_array import Copy, DistributedArray, distributed_array
from minialpa.runtime.cluster.launcher import Reply, WorkerHandle
from minialpa.runtime.cluster.sample_calls import FunctionsSent, note_functions, read_calls
from minialpa.runtime.steps.step_trace import TaskTime, from_start
from minialpa.runtime.workers.worker_program import Argument
from minialpa.samples import UnreadArray

Part = tuple[int, MicroRows]
"""The number of an argument leaf, and the rows of it that a micro-batch reads."""


class ClusterExecutable:
    """A program on the workers of a session: a `Runner`.

    Its meshes start, and its functions are compiled, when it is made; and again if another program with meshes of other
    shapes has ended them since.
    """

    def __init__(self, runtime: ClusterRuntime, program: Program, types: Mapping[int, ArrayType] | None = None) -> None:
        """types: of buffers that no function of the program reads or writes."""
        self.runtime = runtime
        self._program = ClusterProgram(runtime, program, types or {})
        self._mesh_of_function = [function.mesh for function in program.functions]
        self._calls = _calls_by_mesh(program)
        self._n_results = len(program.outputs)
        self._functions = FunctionsSent(runtime)
        self._readers = _readers(self._program.programs)
        with runtime.turn():
            self._program.load()

    @property
    def meshes(self) -> tuple[()]:
        """See `Runner`: the devices are those of the workers."""
        return ()

    @property
    def session(self) -> ClusterRuntime:
        """See `Runner`."""
        return self.runtime

    # ---- steps ----------------------------------------------------------------------------------------------------

    def __call__(self, leaves: Sequence[Any], *, traced: bool = False) -> list[Any]:
        """Start a step on argument leaves; returns an array for each result at once. traced: see `Runner`."""
        self.runtime.make_room()
        with self.runtime.turn():
            self.runtime.check()
            self._check_usable(leaves)
            self._program.load()
            self._bring(leaves)
            numbers = [self.runtime.new_number() for _ in range(self._n_results)]
            self._program.start(leaves, numbers, traced)
            return self._results(numbers)

    def turn(self) -> AbstractContextManager[None]:
        """See `Runner`."""
        return self.runtime.turn()

    def timeline(self) -> tuple[TaskTime, ...]:
        """See `Runner`. Times of workers are those of the clocks of their hosts, counted from the earliest."""
        workers = [worker for mesh in self._program.meshes for worker in mesh.workers]
        tasks = []
        for place, mine in zip(self._program.places, self.runtime.ask(workers, "timeline"), strict=True):
            numbers = iter(self._calls[place.mesh])
            tasks += [task if task.instruction is None else replace(task, instruction=next(numbers)) for task in mine]
        return from_start(tasks)

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Argument leaves on the workers, as `DistributedArray`s or `MicroBatchedArray`s
        of these. See `Runner`. The workers read `UnreadArray`s themselves."""
        with self.runtime.in_use():
            with self.runtime.turn():
                self.runtime.check()
                self._check_usable(leaves)
                self._program.load()
                placed, calls = self._place(leaves)
                self.runtime.note_waiting(calls)

            # Other threads may have their turn while this one waits: workers take the arrays behind earlier steps.
            self.runtime.gather_noted(calls)
            note_functions(self._functions, leaves, calls.values())
            return placed

    def _place(self, leaves: Sequence[Any]) -> tuple[list[Any], dict[Reply, WorkerHandle]]:
        """The leaves as `place` returns them, and the calls that bring them there. In a turn, on loaded meshes."""
        programs, meshes = self._program.programs, self._program.meshes
        given = {
            leaf
            for leaf, readers in self._readers.items()
            if leaves[leaf] is not None and cover_all_rows(readers.keys(), np.shape(leaves[leaf]))
        }
        missing = dict.fromkeys(
            (slot.leaf, slot.rows)
            for own in programs
            for slot in own.inputs
            if slot.leaf in given and not _is_placed(leaves, own, slot)
        )  # fmt: skip
        numbers = {part: self.runtime.new_number() for part in sorted(missing, key=str)}

        # What each worker is to keep, and under which number.
        values = Values(leaves)
        puts: list[tuple[WorkerHandle, dict[int, int], list[Argument]]] = []
        for own, mesh, shards in zip(programs, meshes, self._program.shards, strict=True):
            kept = {
                i: numbers[slot.leaf, slot.rows]
                for i, slot in enumerate(own.inputs)
                if (slot.leaf, slot.rows) in numbers and not isinstance(leaves[slot.leaf], UnreadArray)
            }
            for k, worker in enumerate(mesh.workers):
                puts.append((worker, kept, [values.given(own.inputs[i], own, shards[i][k]) for i in kept]))

        arguments = share(self.runtime.launcher, [mine for *_, mine in puts])
        calls = {
            worker.actor.call("put", self._program.number, kept, mine, *shared): worker
            for (worker, kept, _), (mine, shared) in zip(puts, arguments, strict=True)
            if kept
        }
        calls |= read_calls(self._program, self._functions, leaves, numbers)
        return self._with_parts(leaves, numbers), calls

    def _with_parts(self, leaves: Sequence[Any], numbers: Mapping[Part, int]) -> list[Any]:
        """The leaves, with those parts in place that the workers are about to keep under these numbers."""
        out = list(leaves)
        for leaf in {leaf for leaf, _ in numbers}:
            parts: dict[MicroRows, list[DistributedArray]] = {}
            for rows, readers in self._readers[leaf].items():
                if (leaf, rows) in numbers:
                    parts[rows] = [self._placed(readers, numbers[leaf, rows])]
                else:
                    old = array_of(leaves, readers[0][1])
                    assert old is not None, (leaf, rows)
                    parts[rows] = [old]
            out[leaf] = parts[None][0] if parts.keys() == {None} else MicroBatchedArray(parts)
        return out

    def _placed(self, readers: Sequence[tuple[MeshProgram, InputSlot]], number: int) -> DistributedArray:
        """The array that the workers of all these inputs keep under a number."""
        copies = tuple(Copy(self._program.meshes[own.mesh], own.shape, slot.spec) for own, slot in readers)
        own, slot = readers[-1]
        return distributed_array(self.runtime, number, own.types[slot.buffer], copies)

    def homes(self, leaf: Any) -> tuple[tuple[int, PartitionSpec], ...]:
        """See `Runner`. Meshes that another program has ended since count: a call of this one starts them again."""
        if not isinstance(leaf, DistributedArray):
            return ()
        number_of = {program.shape: program.mesh for program in self._program.programs}
        return tuple((number_of[copy.shape], copy.spec) for copy in leaf.copies if copy.shape in number_of)

    @staticmethod
    def _check_usable(leaves: Sequence[Any]) -> None:
        """Raise WorkerError if an argument is used up: another thread may have donated it since the call began."""
        for leaf in leaves:
            for array in arrays_on_workers(leaf):
                array.check_usable()

    def _bring(self, leaves: Sequence[Any]) -> None:
        """Have workers send each other the arguments that the step reads on another mesh, or in another sharding."""
        wanted: dict[tuple[int, Any, Any], Move] = {}
        for own in self._program.programs:
            for slot in own.inputs:
                array = array_of(leaves, slot)
                if array is None or _is_placed(leaves, own, slot) or array.held_here:
                    continue
                copy = next((copy for copy in array.copies if copy.mesh.alive), None)
                if copy is not None:
                    wanted[array.number, own.shape, slot.spec] = Move(array, copy, own.shape, slot.spec)

        # One group of workers that is seen in two shapes: such an array comes through this process.
        moves = list(wanted.values())
        shapes = {move.copy.shape for move in moves} | {move.shape for move in moves}
        if moves and len({shape.first_device for shape in shapes}) == len(shapes):
            move_arrays(self.runtime, moves)

    def _results(self, numbers: Sequence[int]) -> list[DistributedArray]:
        held: dict[int, list[Copy]] = {}
        types: dict[int, Any] = {}
        for program, mesh in zip(self._program.programs, self._program.meshes, strict=True):
            for number, buffer in program.outputs:
                held.setdefault(number, []).append(Copy(mesh, program.shape, program.specs[buffer]))
                types[number] = program.types[buffer]
        return [distributed_array(self.runtime, n, types[i], tuple(held[i])) for i, n in enumerate(numbers)]

    # ---- programs on workers --------------------------------------------------------------------------------------

    def hlo_texts(self) -> list[str]:
        """Compiled HLO of each function of the program."""
        return self._per_function("hlo_texts")

    def allocation_sizes(self) -> list[int]:
        """Bytes per device of each function of the program."""
        return self._per_function("allocation_sizes")

    def descriptions(self) -> dict[str, str]:
        """Host, devices and instructions of every worker."""
        out = {}
        with self.runtime.turn():
            self._program.load()
            for number, mesh in enumerate(self._program.meshes):
                texts = self.runtime.ask(mesh.workers, "description", self._program.number)
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
        with self.runtime.turn():
            self._program.load()
            number, meshes = self._program.number, self._program.meshes
            answers = [iter(self.runtime.ask(mesh.workers, method, number, *args)[0]) for mesh in meshes]
        return [next(answers[mesh]) for mesh in self._mesh_of_function]

    def sync(self) -> None:
        """Wait until all steps that were started have ended."""
        self.runtime.sync()


def _calls_by_mesh(program: Program) -> list[list[int]]:
    """For each mesh, the instructions of the program that call its functions: it makes these calls in this order."""
    calls: list[list[int]] = [[] for _ in program.meshes]
    for i, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run | Accumulate):
            calls[program.functions[instruction.function].mesh].append(i)
    return calls


def _readers(programs: Sequence[MeshProgram]) -> dict[int, dict[MicroRows, list[tuple[MeshProgram, InputSlot]]]]:
    """For each argument leaf and the rows of it that inputs are, these inputs, with their meshes."""
    readers: dict[int, dict[MicroRows, list[tuple[MeshProgram, InputSlot]]]] = {}
    for own in programs:
        for slot in own.inputs:
            readers.setdefault(slot.leaf, {}).setdefault(slot.rows, []).append((own, slot))
    return readers


def _is_placed(leaves: Sequence[Any], own: MeshProgram, slot: InputSlot) -> bool:
    """Whether the argument of an input is on the mesh of the program, in the sharding that the program reads."""
    array = array_of(leaves, slot)
    return array is not None and array.is_on(own.shape, slot.spec)
