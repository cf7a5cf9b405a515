"""The cluster's `Runner`: steps on argument leaves, whose results stay on the workers of a session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

from minialpa.programs.mesh_program import ArrayType, MeshProgram
from minialpa.programs.program import Accumulate, InputSlot, Program, Run
from minialpa.runtime.array_moves import Move, move_arrays
from minialpa.runtime.arrays import BlockedArray
from minialpa.runtime.cluster_program import ClusterProgram, Values, array_of, share
from minialpa.runtime.cluster_runtime import ClusterRuntime
from minialpa.runtime.distributed_array import Copy, DistributedArray
from minialpa.runtime.launcher import WorkerHandle
from minialpa.runtime.step_trace import TaskTime, from_start
from minialpa.runtime.worker_program import Argument


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
        self._outputs = program.outputs
        with runtime.turn():
            self._program.load()

    # ---- steps ----------------------------------------------------------------------------------------------------

    def __call__(self, leaves: Sequence[Any], *, traced: bool = False) -> list[Any]:
        """Start a step on argument leaves; returns an array for each result at once, or a BlockedArray where the
        program leaves it in blocks. traced: see `Runner`."""
        self.runtime.make_room()
        with self.runtime.turn():
            self.runtime.check()
            self._check_usable(leaves)
            self._program.load()
            self._bring(leaves)
            numbers = [self.runtime.new_number() for slot in self._outputs for _ in slot.blocks]
            self._program.start(leaves, numbers, traced)
            arrays = iter(self._results(numbers))
        return [BlockedArray([next(arrays) for _ in x.blocks]) if x.rows else next(arrays) for x in self._outputs]

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
        """Argument leaves on the workers, laid out as the step reads them; what is cut into micro-batches stays."""
        with self.runtime.turn():
            self.runtime.check()
            self._check_usable(leaves)
            self._program.load()
            return self._place(leaves)

    def _place(self, leaves: Sequence[Any]) -> list[Any]:
        values = Values(leaves)
        slots = [(own, slot) for own in self._program.programs for slot in own.inputs if _is_state(slot)]
        moved = {slot.leaf for own, slot in slots if not _lies(leaves, own, slot)}
        copies: dict[_Part, list[Copy]] = {}
        types: dict[_Part, ArrayType] = {}
        numbers: dict[_Part, int] = {}
        puts: list[tuple[WorkerHandle, dict[int, int], list[Argument]]] = []
        for own, mesh, cuts in zip(self._program.programs, self._program.meshes, self._program.cuts, strict=True):
            mine = [i for i, slot in enumerate(own.inputs) if slot.leaf in moved and _is_state(slot)]
            for slot in (own.inputs[i] for i in mine):
                numbers.setdefault(_part(slot), self.runtime.new_number())
                types[_part(slot)] = own.types[slot.buffer]
                copies.setdefault(_part(slot), []).append(Copy(mesh, own.shape, slot.spec))
            kept = {i: numbers[_part(own.inputs[i])] for i in mine}
            for k, worker in enumerate(mesh.workers):
                puts.append((worker, kept, [values.given(own.inputs[i], own, cuts[i][k]) for i in mine]))
        arguments = share(self.runtime.launcher, [given for *_, given in puts])
        calls = {
            worker.actor.call("put", self._program.number, kept, given, *shared): worker
            for (worker, kept, _), (given, shared) in zip(puts, arguments, strict=True)
            if kept
        }
        self.runtime.gather(calls)
        arrays = {p: DistributedArray(self.runtime, n, types[p], tuple(copies[p])) for p, n in numbers.items()}
        return _with_arrays(leaves, arrays)

    @staticmethod
    def _check_usable(leaves: Sequence[Any]) -> None:
        """Raise WorkerError if an argument is used up: another thread may have donated it since the call began."""
        for leaf in leaves:
            for part in leaf.blocks if isinstance(leaf, BlockedArray) else (leaf,):
                if isinstance(part, DistributedArray):
                    part.check_usable()

    def _bring(self, leaves: Sequence[Any]) -> None:
        """Have workers send each other what lies elsewhere, or in another layout, than the step reads it."""
        wanted: dict[tuple[int, Any, Any], Move] = {}
        for own in self._program.programs:
            for slot in own.inputs:
                array = array_of(leaves, slot)
                if array is None or _lies(leaves, own, slot) or array.held_here:
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
        return [DistributedArray(self.runtime, n, types[i], tuple(held[i])) for i, n in enumerate(numbers)]

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


_Part = tuple[int, tuple[int, int, int] | None]  # an argument leaf, or rows of it


def _part(slot: InputSlot) -> _Part:
    return slot.leaf, slot.rows


def _is_state(slot: InputSlot) -> bool:
    """Whether what an input reads may stay on the workers between calls; else it is cut into micro-batches."""
    return slot.rows is None or slot.is_block


def _with_arrays(leaves: Sequence[Any], arrays: Mapping[_Part, DistributedArray]) -> list[Any]:
    """The leaves, with arrays in the place of those that they are, or that they are all rows of."""
    out = list(leaves)
    blocks: dict[int, list[DistributedArray]] = {}
    for (leaf, rows), array in sorted(arrays.items(), key=lambda item: item[0]):
        if rows is None:
            out[leaf] = array
        else:
            blocks.setdefault(leaf, []).append(array)
    for leaf, found in blocks.items():
        blocked = BlockedArray(found)
        if blocked.shape == np.shape(leaves[leaf]):  # else some rows are not read
            out[leaf] = blocked
    return out


def _lies(leaves: Sequence[Any], own: MeshProgram, slot: InputSlot) -> bool:
    """Whether the argument of an input lies on the mesh of the program as the program reads it."""
    array = array_of(leaves, slot)
    return array is not None and array.lies(own.shape, slot.spec)
