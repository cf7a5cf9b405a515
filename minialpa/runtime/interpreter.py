"""The interpreter of a worker: a mesh program and this process's devices in, steps out.

Instructions are issued in order and jax runs them asynchronously. Only a `Receive` waits, for what its readers need.
`Interpreter.position` tells another thread how far a step has come.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from minialpa.programs.mesh_program import (
    STAND_INS,
    ArrayType,
    MeshFunction,
    MeshInstruction,
    MeshProgram,
    Message,
    Place,
    Receive,
    Relayout,
    Send,
    messages,
)
from minialpa.programs.program import Accumulate, Free, Run
from minialpa.programs.resharding import Box
from minialpa.runtime.compiled import compiled_call
from minialpa.runtime.numpy_wire import from_plain
from minialpa.runtime.step_trace import FUNCTIONS, StepTrace, flagged
from minialpa.runtime.transport import Part, Piece, Transport
from minialpa.sharding import device_mesh

#: The track of a timeline that shows the thread that issues.
INSTRUCTIONS = "instructions"


@dataclass(frozen=True, slots=True)
class Given:
    """An argument that the caller sends: distinct shards, and for each device of the worker which of them it gets.

    Shards are as `to_plain` makes them. One that several workers get may be a number instead, of an array that comes
    beside the others.
    """

    shards: tuple[np.ndarray[Any, Any] | int, ...]
    shard_of_device: tuple[int, ...]


Argument = int | Given
"""A number is that of an array that the workers hold already. Thousands of them are pickled for every step."""


class Interpreter:
    """One mesh program on one worker.

    places, me: all workers of the program, and which of them this is; the transport numbers them so too.
    devices: those of the whole mesh, in its order; those of other processes included.
    compiled: functions that programs of this worker have compiled; equal ones are used again. May forget them.
    """

    def __init__(
        self,
        program: MeshProgram,
        places: Sequence[Place],
        me: int,
        devices: Sequence[jax.Device],
        transport: Transport,
        compiled: MutableMapping[Any, Any],
        timeout_s: float,
    ) -> None:
        self.program, self.me, self.places = program, me, tuple(places)
        self.transport, self.timeout_s = transport, timeout_s
        self.mesh = device_mesh(devices, program.shape.logical_shape)
        own = places[me]
        first = program.shape.first_device
        self.local = {device: devices[device - first] for device in own.devices}
        self._compiled = compiled
        self.functions = self._compile_all(compiled)
        self._flagged: list[Any] = []  # functions of traced steps
        self.relayouts = {i: self._relayout(i, compiled) for i in program.instructions if isinstance(i, Relayout)}
        self.messages = {number: messages(t, places) for number, t in program.transfers.items()}
        self.constants = {c.buffer: self._constant(c.value, program.types[c.buffer], c.spec) for c in program.constants}
        self._stays_plain = self._read_by_calls()
        self.sending: dict[int, list[Future[None]]] = {}
        self.position = -1
        self.step = -1

    # ---- steps ----------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Step number `step` is the next one to run."""
        self.step, self.position = step, -1

    def run(self, arguments: list[Any], trace: StepTrace | None = None) -> dict[int, jax.Array]:
        """Run a step on an array for each input of the program; returns the results by number.

        Empties `arguments`, so that nothing but the step holds what it may free. Where it raises, `position` is the
        instruction that failed. trace: gets notes of what the step does.
        """
        functions, issue = (self.functions, self._issue) if trace is None else self._tracing(trace)
        buffers: dict[int, Any] = dict(self.constants)
        self.sending.clear()
        buffers.update((slot.buffer, x) for slot, x in zip(self.program.inputs, arguments, strict=True))
        arguments.clear()
        try:
            for i, instruction in enumerate(self.program.instructions):
                self.position = i
                issue(instruction, buffers, functions)
            self.position = len(self.program.instructions)
            results = {number: buffers[b] for number, b in self.program.outputs}
            issued_s = time.perf_counter()
            jax.block_until_ready(list(results.values()))
            self._finish_sends(list(self.sending))
            if trace is not None:
                trace.note(self.program.mesh, INSTRUCTIONS, "await results", issued_s)
        except Exception:
            self.position = self._first_failed(buffers)
            raise
        self.position = -1
        return results

    def _first_failed(self, buffers: dict[int, Any]) -> int:
        """The first instruction whose results are still there and have failed: jax says so to who wants the result."""
        for i, instruction in enumerate(self.program.instructions[: self.position]):
            if any(b in buffers and _has_failed(buffers[b]) for b in _written(instruction)):
                return i
        return self.position

    def describe(self, i: int) -> str:
        """Instruction `i` in words."""
        if not 0 <= i < len(self.program.instructions):
            return "no instruction" if i < 0 else "the end of the step, where results are awaited"
        instruction = self.program.instructions[i]
        text = f"instruction {i}, {type(instruction).__name__}"
        match instruction:
            case Run(function, _, _) | Accumulate(function, _, _):
                text += f" `{self.program.functions[function].name}`"
            case Send(_, number):
                text += f" to stage {self.program.transfers[number].target}"
            case Receive(_, number):
                text += f" from stage {self.program.transfers[number].source}"
        return text

    def _issue(self, instruction: MeshInstruction, buffers: dict[int, Any], functions: Sequence[Any]) -> None:
        match instruction:
            case Run(function, inputs, outputs):
                self._finish_sends(self._overwritten(instruction))
                results = functions[function](*[buffers[b] for b in inputs])
                for b, array in zip(outputs, results, strict=True):
                    buffers[b] = array
            case Accumulate(function, totals, values):
                self._finish_sends(self._overwritten(instruction))
                results = functions[function](*[buffers[b] for b in (*totals, *values)])
                for b, array in zip(totals, results, strict=True):
                    buffers[b] = array
            case Free(freed):
                for b in freed:
                    del buffers[b]
            case Send(source, number):
                self._send(number, source, buffers[source])
            case Receive(target, number):
                buffers[target] = self._receive(number, target in self._stays_plain)
            case Relayout(source, target, _):
                buffers[target] = self.relayouts[instruction](buffers[source])

    def _overwritten(self, instruction: MeshInstruction) -> Sequence[int]:
        """Buffers whose memory the instruction takes over."""
        match instruction:
            case Run(function, inputs, _):
                return [inputs[k] for k in self.program.functions[function].donated]
            case Accumulate(_, totals, _):
                return totals
        return ()

    def _tracing(
        self, trace: StepTrace
    ) -> tuple[Sequence[Any], Callable[[MeshInstruction, dict[int, Any], Sequence[Any]], None]]:
        """What a traced step calls, and how it issues."""
        self._flagged = self._flagged or self._compile_all(self._compiled, with_flag=True)
        mesh = self.program.mesh
        trace.note(mesh, INSTRUCTIONS, "take arguments", trace.begun_s)

        def issue(instruction: MeshInstruction, buffers: dict[int, Any], functions: Sequence[Any]) -> None:
            begun_s = time.perf_counter()
            self._finish_sends(self._overwritten(instruction))
            issued_s = time.perf_counter()
            self._issue(instruction, buffers, functions)
            match instruction:
                case Run(number) | Accumulate(number):
                    name = self.program.functions[number].name
                    trace.note_array(mesh, FUNCTIONS, name, issued_s, trace.take_flag(), self.position)
                case Relayout(_, target, _):
                    trace.note_array(mesh, FUNCTIONS, "relayout", issued_s, buffers[target])
            trace.note(mesh, INSTRUCTIONS, self.describe(self.position).partition(", ")[2], begun_s)

        return [trace.watched(function) for function in self._flagged], issue

    # ---- transfers ------------------------------------------------------------------------------------------------

    def _send(self, number: int, source: int, array: jax.Array) -> None:
        transfer = self.program.transfers[number]
        shards = self._shards(array, transfer.type)
        boxes = dict(transfer.resharding.source_boxes)
        self.sending.setdefault(source, []).extend(
            self._post(number, message, shards, boxes)
            for message in self.messages[number]
            if message.source == self.me and not message.moves[0].relayed
        )

    def _post(self, number: int, message: Message, shards: dict[int, Any], boxes: dict[int, Box]) -> Future[None]:
        first = self.places[message.target].first_device
        parts = [Part(shards[m.source], _index_in(m.box, boxes[m.source]), m.targets[0] - first) for m in message.moves]
        return self.transport.send(message.target, self._tag(number), parts)

    def _finish_sends(self, buffers: Iterable[int]) -> None:
        """Wait until nothing is read of these buffers any more: a function is about to take over their memory."""
        for b in buffers:
            for sent in self.sending.pop(b, ()):
                sent.result()

    def _receive(self, number: int, stays_plain: bool) -> Any:
        """The array of a transfer; a NumPy array if it may stay what the transport gives."""
        transfer = self.program.transfers[number]
        boxes = {d: box for d, box in transfer.resharding.landing_boxes if d in self.local}
        got: dict[int, list[tuple[Box, Any]]] = {d: [] for d in boxes}
        for message in self.messages[number]:
            if message.target == self.me:
                first, dtype = min(self.local), np.dtype(transfer.type.dtype)
                pieces = [Piece(_shape(m.box), dtype, m.targets[0] - first) for m in message.moves]
                arrays = self.transport.receive(message.source, self._tag(number), pieces, self.timeout_s)
                for move, array in zip(message.moves, arrays, strict=True):
                    for device in move.targets:
                        # A transport between GPUs gives arrays on the first of them.
                        mine = jax.device_put(array, self.local[device]) if isinstance(array, jax.Array) else array
                        got[device].append((move.box, mine))
        landed = [_joined(got[d], boxes[d], transfer.type.dtype) for d in boxes]
        if stays_plain:
            return landed[0]
        shards = jax.device_put(landed, [self.local[d] for d in boxes])
        for message in self.messages[number]:
            if message.source == self.me and message.moves[0].relayed:  # others of this mesh get it from here
                self._post(number, message, dict(zip(boxes, shards, strict=True)), boxes)
        sharding = NamedSharding(self.mesh, transfer.resharding.landing)
        data = jax.make_array_from_single_device_arrays(transfer.type.data_shape, sharding, shards)
        typed: jax.Array = transfer.type.typed(data)
        return typed

    def _tag(self, number: int) -> int:
        return self.step << 32 | number

    def _shards(self, array: jax.Array, type_: ArrayType) -> dict[int, Any]:
        """The shard of each device of this worker, by device number."""
        by_device = {shard.device: shard.data for shard in type_.data(array).addressable_shards}
        return {number: by_device[device] for number, device in self.local.items()}

    def _read_by_calls(self) -> frozenset[int]:
        """Buffers of what comes from other processes that only functions on one CPU device read.

        Functions take NumPy arrays, and their memory without a copy, in a fraction of the time in which jax makes an
        array of them first; a device waits meanwhile.
        """
        if self.mesh.size > 1 or self.mesh.devices.flat[0].platform != "cpu":
            return frozenset()
        program = self.program
        received = {x.target for x in program.instructions if isinstance(x, Receive)}
        given = {slot.buffer for slot in program.inputs if slot.leaf not in program.donated_leaves}
        others = {x.source for x in program.instructions if isinstance(x, Send | Relayout)}
        results = {b for _, b in program.outputs}
        return frozenset(b for b in (received | given) - others - results if program.types[b].key is None)

    # ---- arrays ---------------------------------------------------------------------------------------------------

    def argument(
        self, number: int, given: Given, shared: Sequence[np.ndarray[Any, Any]], *, for_one_step: bool = False
    ) -> Any:
        """The array of input `number` of the program, from what the caller sent.

        for_one_step: nobody else wants it, so it stays a NumPy array where the step may take that.
        """
        slot = self.program.inputs[number]
        kind = self.program.types[slot.buffer]
        sent = [shared[shard] if isinstance(shard, int) else shard for shard in given.shards]
        shards = [from_plain(shard, kind.dtype) for shard in sent]
        if for_one_step and slot.buffer in self._stays_plain:
            return shards[0]
        # A caller's memory may be what lies on the device; a donated array must be the program's own.
        if slot.leaf in self.program.donated_leaves:
            shards = [np.array(shard) for shard in shards]
        return self._array([shards[k] for k in given.shard_of_device], kind, slot.spec)

    def _array(self, shards: Sequence[Any], type_: ArrayType, spec: PartitionSpec) -> jax.Array:
        """An array of a shard for each device of this worker."""
        placed = jax.device_put(list(shards), list(self.local.values()))
        sharding = NamedSharding(self.mesh, spec)
        typed: jax.Array = type_.typed(jax.make_array_from_single_device_arrays(type_.data_shape, sharding, placed))
        return typed

    def _constant(self, value: Any, type_: ArrayType, spec: PartitionSpec) -> jax.Array:
        cuts = NamedSharding(self.mesh, spec).devices_indices_map(type_.data_shape)
        return self._array([value[cuts[device]] for device in self.local.values()], type_, spec)

    # ---- programs -------------------------------------------------------------------------------------------------

    def _compile_all(self, compiled: MutableMapping[Any, Any], with_flag: bool = False) -> list[Any]:
        """Each function of the program; equal ones are compiled once. Lowering holds the interpreter lock, compiling
        does not. with_flag: as traced steps want them."""
        keys = [(f.code, f.in_specs, f.out_specs, f.donated, self.mesh, with_flag) for f in self.program.functions]
        made = {key: compiled.get(key) for key in keys}  # held from here: `compiled` does not
        missing = {key: f for key, f in zip(keys, self.program.functions, strict=True) if made[key] is None}
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            pending = {
                key: pool.submit(compiled_call, *self._lower(function, with_flag)) for key, function in missing.items()
            }
            made.update((key, future.result()) for key, future in pending.items())
        compiled.update(made)
        return [made[key] for key in keys]

    def _lower(self, function: MeshFunction, with_flag: bool) -> tuple[Any, Any]:
        """The function jitted, and lowered for the mesh."""
        exported = jax.export.deserialize(bytearray(function.code))
        narrow = any(kind.dtype in STAND_INS for kind in (*function.in_types, *function.out_types))
        call = _with_narrow(exported, function) if narrow else exported.call
        out_specs = (*function.out_specs, PartitionSpec()) if with_flag else function.out_specs
        jitted = jax.jit(
            flagged(call) if with_flag else call,
            in_shardings=tuple(NamedSharding(self.mesh, spec) for spec in function.in_specs),
            out_shardings=tuple(NamedSharding(self.mesh, spec) for spec in out_specs),
            donate_argnums=function.donated,
            keep_unused=True,
        )
        avals = [
            jax.ShapeDtypeStruct(aval.shape, kind.jax_dtype) if kind.dtype in STAND_INS else aval
            for aval, kind in zip(exported.in_avals, function.in_types, strict=True)
        ]
        return jitted, jitted.lower(*avals)

    def _relayout(self, instruction: Relayout, compiled: MutableMapping[Any, Any]) -> Any:
        sharding = NamedSharding(self.mesh, instruction.spec)
        made = compiled.get(sharding) or jax.jit(lambda x: x, out_shardings=sharding)
        compiled[sharding] = made
        return made


def _with_narrow(exported: Any, function: MeshFunction) -> Callable[..., tuple[Any, ...]]:
    """An exported function with the types that others stand for in it."""

    def call(*args: Any) -> tuple[Any, ...]:
        given = [
            x.astype(aval.dtype) if kind.dtype in STAND_INS else x
            for x, aval, kind in zip(args, exported.in_avals, function.in_types, strict=True)
        ]
        results = zip(exported.call(*given), function.out_types, strict=True)
        return tuple(x.astype(kind.jax_dtype) if kind.dtype in STAND_INS else x for x, kind in results)

    return call


def _written(instruction: MeshInstruction) -> tuple[int, ...]:
    match instruction:
        case Run(_, _, outputs):
            return tuple(outputs)
        case Accumulate(_, totals, _):
            return tuple(totals)
        case Receive(target, _) | Relayout(_, target, _):
            return (target,)
    return ()


def _has_failed(array: Any) -> bool:
    """Whether the computation of an array has ended with an error. Does not wait for it."""
    if isinstance(array, np.ndarray) or array.is_deleted() or not array.is_ready():
        return False
    try:
        array.block_until_ready()
    except Exception:
        return True
    return False


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _index_in(box: Box, outer: Box) -> tuple[slice, ...] | None:
    """`box` as an index of the part of the array that `outer` is; None for all of it."""
    if box == outer:
        return None
    return tuple(slice(start - base, stop - base) for (start, stop), (base, _) in zip(box, outer, strict=True))


def _joined(parts: list[tuple[Box, Any]], outer: Box, dtype: str) -> Any:
    """The part `outer` of an array, from the parts that it is made of."""
    if len(parts) == 1 and parts[0][0] == outer:
        return parts[0][1]
    if parts and isinstance(parts[0][1], jax.Array):
        joined = jnp.zeros(_shape(outer), dtype, device=parts[0][1].device)
        for box, array in parts:
            joined = joined.at[_index_in(box, outer) or ...].set(array)
        return joined
    out = np.empty(_shape(outer), dtype)
    for box, array in parts:
        out[_index_in(box, outer) or ...] = array
    return out
