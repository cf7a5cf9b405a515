"""The local runtime: a program and this process's devices in, an executable that runs it out.

Each mesh is a `jax.sharding.Mesh` over some of the devices. Instructions are issued in order; jax runs them
asynchronously, so meshes that do not wait for each other's data work at the same time.

Threads issue one step after the other, whole: programs that talk between devices have to come to all devices in one
order, and an argument that a step donates is gone for the others before any of them begins.
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from minialpa.arrays import RemoteArray, own_copy
from minialpa.errors import ShardingError, WorkerError
from minialpa.programs.program import (
    Accumulate,
    ConstantSlot,
    Free,
    Function,
    InputSlot,
    Instruction,
    OutputSlot,
    Program,
    Run,
    Transfer,
    reads,
    writes,
)
from minialpa.runtime.arrays import BlockedArray
from minialpa.runtime.compiled import compiled_call
from minialpa.runtime.step_trace import FUNCTIONS, StepTrace, TaskTime, flagged, from_start
from minialpa.runtime.task_times import function_seconds
from minialpa.sharding import device_mesh
from minialpa.support.private_jax import addresses_of

#: Held by the thread that issues a step. The devices are those of this process, so there is one order for them.
_order = threading.RLock()


def make_meshes(program: Program, devices: Sequence[jax.Device]) -> list[Mesh]:
    """A jax mesh for each mesh of the program. Raises ShardingError if there are too few devices."""
    meshes = []
    for shape in program.meshes:
        n = int(np.prod(shape.logical_shape))
        if shape.first_device + n > len(devices):
            raise ShardingError(
                f"The plan needs devices {shape.first_device} to {shape.first_device + n - 1} and there are "
                f"{len(devices)}. Give it more devices or plan for fewer."
            )
        meshes.append(device_mesh(devices[shape.first_device : shape.first_device + n], shape.logical_shape))
    return meshes


class LocalExecutable:
    """A program compiled for local devices. Owns the constants; arguments and results belong to the caller."""

    def __init__(self, program: Program, devices: Sequence[jax.Device]) -> None:
        self.program = program
        self.meshes = make_meshes(program, devices)
        self.compiled = _compile_all(program.functions, self.meshes)
        self._input_shardings = [NamedSharding(self.meshes[s.mesh], s.spec) for s in program.inputs]
        results = {b for slot in program.outputs for b in slot.buffers}
        self._targets = {
            id(i): _target(self.meshes[i.mesh], i.spec, i.target in results)
            for i in program.instructions
            if isinstance(i, Transfer)
        }
        self._in_calls = _read_by_one_call(program)
        self._settled: list[Any] = []
        self._flagged: list[Any] = []  # functions of traced steps
        self._trace: StepTrace | None = None
        self._initial: list[Any] = [None] * program.n_buffers
        for slot in program.constants:
            sharding = NamedSharding(self.meshes[slot.mesh], slot.spec)
            self._initial[slot.buffer] = jax.device_put(slot.value, sharding)

    def __call__(self, leaves: Sequence[Any], *, traced: bool = False) -> list[Any]:
        """Run the program on argument leaves; returns one array for each result, on the result's first mesh, or a
        BlockedArray where the program leaves it in blocks. traced: see `Runner`."""
        with _order:
            _check_usable(leaves)
            return self._step(leaves, traced)

    def in_order(self) -> AbstractContextManager[Any]:
        """See `Runner`."""
        return _order

    def _step(self, leaves: Sequence[Any], traced: bool) -> list[Any]:
        functions, issue = self._tracing() if traced else (self.compiled, self._issue)
        buffers = list(self._initial)
        placed = self._place(leaves)
        for slot, array in zip(self.program.inputs, placed, strict=True):
            buffers[slot.buffer] = array
        del placed
        for i, instruction in enumerate(self.program.instructions):
            try:
                issue(instruction, buffers, functions)
            except Exception as error:
                raise self._failure(i, instruction, error) from error
        return [_result(slot, buffers) for slot in self.program.outputs]

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Argument leaves laid out as the program wants them, where it reads a leaf whole on one mesh, or in blocks.

        What the program donates never shares memory with `leaves`, and nothing does with a NumPy array.
        """
        with _order:
            _check_usable(leaves)
            return self._laid_out(leaves)

    def _laid_out(self, leaves: Sequence[Any]) -> list[Any]:
        out = list(leaves)
        blocks: dict[int, dict[int, tuple[InputSlot, NamedSharding]]] = defaultdict(dict)
        for slot, sharding in zip(self.program.inputs, self._input_shardings, strict=True):
            leaf = leaves[slot.leaf]
            if slot.is_block and slot.rows is not None:
                blocks[slot.leaf].setdefault(slot.rows[0], (slot, sharding))
            elif slot.rows is None and out[slot.leaf] is leaf and getattr(leaf, "sharding", None) != sharding:
                placed = jax.device_put(_owned_here(_in_one(leaf)), sharding)
                is_shared = isinstance(leaf, jax.Array) and slot.leaf in self.program.donated_leaves
                out[slot.leaf] = placed.copy() if is_shared else placed
        for i, found in blocks.items():
            out[i] = self._in_blocks(leaves[i], [found[start] for start in sorted(found)])
        return out

    def _in_blocks(self, leaf: Any, wanted: Sequence[tuple[InputSlot, NamedSharding]]) -> Any:
        """A leaf in blocks laid out as wanted; the leaf itself where it is that, or where some rows are not read."""
        values = [_rows(leaf, slot) for slot, _ in wanted]
        blocks = leaf.blocks if isinstance(leaf, BlockedArray) else ()
        lies = bool(blocks) and all(
            x is block and getattr(x, "sharding", None) == sharding
            for x, block, (_, sharding) in zip(values, blocks, wanted, strict=False)
        )
        if lies or sum(x.shape[0] for x in values) < np.shape(leaf)[0]:
            return leaf
        return BlockedArray([
            self._owned(jax.device_put(_owned_here(x), sharding), x if blocks else leaf, slot)
            for x, (slot, sharding) in zip(values, wanted, strict=True)
        ])  # fmt: skip

    def hlo_texts(self) -> list[str]:
        """Compiled HLO of each function."""
        return [compiled.as_text() for compiled in self.compiled]

    def allocation_sizes(self) -> list[int]:
        """Bytes per device of each function: arguments, results and temporaries."""
        return list(map(allocation_size, self.compiled))

    def function_seconds(self, repeats: int = 5) -> list[float]:
        """Seconds of each function by itself: median of `repeats` calls."""
        return [function_seconds(compiled, repeats) for compiled in self.compiled]

    def descriptions(self) -> dict[str, str]:
        """The devices of each mesh."""
        return {"devices": "\n".join(f"mesh {i}: {mesh.devices.tolist()}" for i, mesh in enumerate(self.meshes))}

    def sync(self) -> None:
        """Wait until the devices have made every array that was asked of them before."""
        mine = {device for mesh in self.meshes for device in mesh.devices.flat}
        for array in jax.live_arrays(next(iter(mine)).platform):
            try:
                if not array.is_deleted() and mine & array.sharding.device_set:
                    jax.block_until_ready(array)
            except RuntimeError:
                if not array.is_deleted():  # else another thread has just donated it
                    raise
        jax.effects_barrier()

    def _place(self, leaves: Sequence[Any]) -> list[Any]:
        """The array of each input slot. Leaves that already have the right sharding are used as they are.

        If all leaves have, and each is read as one array, later leaves with the same shardings skip the checks.
        """
        shardings = [getattr(leaf, "sharding", type(leaf)) for leaf in leaves]
        if shardings == self._settled and len(set(map(id, leaves))) == len(leaves):
            return [_owned_here(leaves[slot.leaf]) for slot in self.program.inputs]

        values = [_value(leaves[slot.leaf], slot) for slot in self.program.inputs]
        missing = [i for i, value in enumerate(values) if not self._is_placed(i, value)]
        copied = self._copy_for_donation(values, set(missing))
        if missing:
            self._put(values, missing, leaves)
        elif not copied and all(slot.rows is None for slot in self.program.inputs):
            self._settled = shardings
        return values

    def _is_placed(self, i: int, value: Any) -> bool:
        """Whether input `i` needs no `device_put`: its sharding is right, or its readers take NumPy arrays."""
        if isinstance(value, np.ndarray) and i in self._in_calls:
            return True
        return _lies(value, self._input_shardings[i])

    def _copy_for_donation(self, values: list[Any], missing: set[int]) -> bool:
        """Copy the donated inputs that a call must not take over, in place; whether there are any.

        One array passed for two donated arguments: only one of them can take over its buffer. And on one device, as on
        several, a caller keeps the arrays that no step or `preshard` has laid out.
        """
        copied = False
        seen: set[int] = set()
        for i, (slot, sharding) in enumerate(zip(self.program.inputs, self._input_shardings, strict=True)):
            value = values[i]
            if i in missing or isinstance(value, np.ndarray) or slot.leaf not in self.program.donated_leaves:
                continue
            if id(value) in seen or value.sharding != sharding:
                values[i], copied = value.copy(), True
            seen.add(id(values[i]))
        return copied

    def _put(self, values: list[Any], missing: Sequence[int], leaves: Sequence[Any]) -> None:
        """Put the inputs `missing` where the program reads them, in place."""
        shardings = [self._input_shardings[i] for i in missing]
        for i, array in zip(missing, jax.device_put([values[i] for i in missing], shardings), strict=True):
            slot = self.program.inputs[i]
            leaf = leaves[slot.leaf]
            source = values[i] if isinstance(leaf, BlockedArray) else leaf
            values[i] = self._owned(array, source, slot)

    def _owned(self, array: Any, leaf: Any, slot: InputSlot) -> Any:
        """`array`, not sharing memory with the caller's `leaf` if the program would donate it.

        `device_put` may keep the leaf's own buffer for the device where it already lies; donating that one would
        destroy an array that the caller has not given in this layout.
        """
        if slot.leaf not in self.program.donated_leaves or not isinstance(leaf, jax.Array):
            return array
        return array.copy() if _shares_buffer(array, leaf) else array

    def _issue(self, instruction: Instruction, buffers: list[Any], functions: Sequence[Any]) -> None:
        match instruction:
            case Run(function, inputs, outputs):
                for b, array in zip(outputs, functions[function](*[buffers[b] for b in inputs]), strict=True):
                    buffers[b] = array
            case Accumulate(function, totals, values):
                args = [buffers[b] for b in (*totals, *values)]
                for b, array in zip(totals, functions[function](*args), strict=True):
                    buffers[b] = array
            case Transfer(source, target):
                buffers[target] = jax.device_put(buffers[source], self._targets[id(instruction)])
            case Free(freed):
                for b in freed:
                    buffers[b] = None

    def _tracing(self) -> tuple[Sequence[Any], Callable[[Instruction, list[Any], Sequence[Any]], None]]:
        """What a traced step calls, and how it issues."""
        if not self._flagged:
            self._flagged = _compile_all([_flagged(function) for function in self.program.functions], self.meshes)
        self._trace = trace = StepTrace()
        numbers = {id(instruction): i for i, instruction in enumerate(self.program.instructions)}
        homes = _homes(self.program)

        def issue(instruction: Instruction, buffers: list[Any], functions: Sequence[Any]) -> None:
            issued_s = time.perf_counter()
            self._issue(instruction, buffers, functions)
            buffers_of = reads(instruction), writes(instruction)
            match instruction:
                case Run(number) | Accumulate(number):
                    function = self.program.functions[number]
                    where, number = (function.mesh, FUNCTIONS, function.name), numbers[id(instruction)]
                    trace.note_array(*where, issued_s, trace.take_flag(), number, *buffers_of)
                case Transfer(source, target, mesh):
                    track, name = f"from stage {homes[source]}", f"buffer {target}"
                    trace.note_array(mesh, track, name, issued_s, buffers[target], None, *buffers_of)

        return [trace.watched(compiled) for compiled in self._flagged], issue

    def timeline(self) -> tuple[TaskTime, ...]:
        """See `Runner`."""
        assert self._trace is not None, "no step was traced"
        return from_start(self._trace.tasks())

    def _failure(self, i: int, instruction: Instruction, error: Exception) -> WorkerError:
        name = type(instruction).__name__
        if isinstance(instruction, Run | Accumulate):
            name += f" `{self.program.functions[instruction.function].name}`"
        recent = ", ".join(type(x).__name__ for x in self.program.instructions[max(0, i - 4) : i])
        return WorkerError(
            f"Instruction {i} ({name}) failed: {error}\nInstructions before it: {recent or 'none'}. If an argument was "
            "donated to an earlier call, pass that call's result instead."
        )


def _check_usable(leaves: Sequence[Any]) -> None:
    """Raise WorkerError if an argument is used up: another thread may have donated it since the call began."""
    for leaf in leaves:
        if isinstance(leaf, jax.Array | RemoteArray) and leaf.is_deleted():
            raise WorkerError(
                f"An argument of shape {leaf.shape} has been deleted: it was donated to another call, whose result "
                "took over its memory. Pass that result, or keep arguments alive with `donate_argnums=()`."
            )


def _target(mesh: Mesh, spec: PartitionSpec, is_result: bool) -> Any:
    """Where `device_put` lays an array. On one device, it takes half as long if it is told of that alone."""
    return mesh.devices.item() if mesh.size == 1 and not is_result else NamedSharding(mesh, spec)


def _flagged(function: Function) -> Function:
    return dataclasses.replace(function, fun=flagged(function.fun), out_specs=(*function.out_specs, PartitionSpec()))


def _homes(program: Program) -> dict[int, int]:
    """The mesh on which each buffer is."""
    slots: tuple[InputSlot | ConstantSlot, ...] = (*program.inputs, *program.constants)
    homes = {slot.buffer: slot.mesh for slot in slots}
    for instruction in program.instructions:
        match instruction:
            case Run(function, _, outputs):
                homes.update(dict.fromkeys(outputs, program.functions[function].mesh))
            case Transfer(_, target, mesh):
                homes[target] = mesh
    return homes


def _read_by_one_call(program: Program) -> frozenset[int]:
    """Input slots that only one run reads, on one device: it takes NumPy arrays itself, faster than `device_put`."""
    readers = Counter(b for instruction in program.instructions for b in reads(instruction))
    by_run = {b for instruction in program.instructions if isinstance(instruction, Run) for b in instruction.inputs}
    results = {b for slot in program.outputs for b in slot.buffers}
    return frozenset(
        i
        for i, slot in enumerate(program.inputs)
        if slot.buffer in by_run - results
        and readers[slot.buffer] == 1
        and math.prod(program.meshes[slot.mesh].logical_shape) == 1
    )


def _result(slot: OutputSlot, buffers: Sequence[Any]) -> Any:
    if not slot.rows:
        return buffers[slot.buffers[0]]
    first = {rows: buffers[b] for rows, b in reversed(list(zip(slot.rows, slot.buffers, strict=True)))}
    return BlockedArray([first[rows] for rows in sorted(first)])


def _value(leaf: Any, slot: InputSlot) -> Any:
    """What an input slot is of a leaf."""
    return _owned_here(_in_one(leaf) if slot.rows is None else _rows(leaf, slot))


def _owned_here(value: Any) -> Any:
    """The value, if it is a NumPy array as a copy: the caller may write to its memory before jax has read it."""
    return own_copy(value) if isinstance(value, np.ndarray) else value


def _in_one(leaf: Any) -> Any:
    """An array that is in blocks and wanted whole is put together on the host: no device need have room for it. One of
    another session comes from there."""
    return leaf[...] if isinstance(leaf, RemoteArray) else leaf


def _rows(leaf: Any, slot: InputSlot) -> Any:
    assert slot.rows is not None
    start, stop, dim = slot.rows
    if isinstance(leaf, BlockedArray) and dim == 0:
        return leaf.rows(start, stop)
    leaf = _in_one(leaf)
    index = (slice(None),) * dim + (slice(start, stop),)
    return leaf[index] if isinstance(leaf, jax.Array | np.ndarray) else np.asarray(leaf)[index]


def _lies(value: Any, sharding: NamedSharding) -> bool:
    if not isinstance(value, jax.Array):
        return False
    own = value.sharding
    return own is sharding or own == sharding or (
        len(own.device_set) == len(sharding.device_set) == 1
        and own.device_set == sharding.device_set
    )  # fmt: skip


def _shares_buffer(array: jax.Array, leaf: jax.Array) -> bool:
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.extended):
        return True
    return not addresses_of(array).isdisjoint(addresses_of(leaf))


def allocation_size(compiled: Any) -> int:
    """Bytes per device that a compiled function needs: arguments, results and temporaries."""
    stats = compiled.memory_analysis()
    used = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    return int(used - stats.alias_size_in_bytes)


def _compile_all(functions: Sequence[Function], meshes: Sequence[Mesh]) -> list[Any]:
    """Compile each function for its mesh. Lowering holds the interpreter lock, compiling does not."""

    def lower(function: Function) -> Any:
        mesh = meshes[function.mesh]
        jitted = jax.jit(
            function.fun,
            in_shardings=tuple(NamedSharding(mesh, spec) for spec in function.in_specs),
            out_shardings=tuple(NamedSharding(mesh, spec) for spec in function.out_specs),
            donate_argnums=function.donated,
            keep_unused=True,
        )
        return jitted, jitted.lower(*function.in_avals)

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        pending = [pool.submit(compiled_call, *lowered) for lowered in map(lower, functions)]
        return [future.result() for future in pending]
