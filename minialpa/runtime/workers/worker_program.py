"""One mesh program on one worker.

jax runs instructions asynchronously: only a `Receive`, the reuse of an array that is being sent, and the end of a step
    wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from minialpa.programs.mesh_program import (
    ArrayType,
    MeshFunction,
    MeshProgram,
    Place,
    Receive,
    Relayout,
    callable_of,
    overwritten_rows,
)
from minialpa.programs.program import Accumulate, Run
from minialpa.runtime.steps.compiled import LoweredFunction, compile_all, lower
from minialpa.runtime.steps.interpreter import Buffers, Callee, Interpreter
from minialpa.runtime.steps.step_trace import StepTrace
from minialpa.runtime.transports.transport import Transport
from minialpa.runtime.workers.arguments import Given, from_plain
from minialpa.runtime.workers.exchange import INSTRUCTIONS, Exchange
from minialpa.sharding import device_mesh, placed


class WorkerProgram:
    def __init__(
        self,
        *,
        program: MeshProgram,
        places: Sequence[Place],
        me: int,
        devices: Sequence[jax.Device],
        transport: Transport,
        compiled: MutableMapping[Any, Any],
        note: Callable[[int], object],
        timeout_s: float,
    ) -> None:
        """`compiled` has functions that programs share; it may forget them. `note` gets the number of compiled
        functions.

        Args:
            places: all workers, as the transport numbers them; `me` is one.
            devices: of the whole mesh, in order.
            transport: connected to the other workers.
            timeout_s: how long a `Receive` waits.
        """
        self.program = program
        self.mesh = device_mesh(devices, program.shape.logical_shape)
        first = program.shape.first_device
        self._devices = [devices[device - first] for device in places[me].devices]
        self.overwritten_rows = overwritten_rows(program)

        self._exchange = Exchange(
            program=program,
            places=places,
            me=me,
            devices=self._devices,
            mesh=self.mesh,
            transport=transport,
            compiled=compiled,
            timeout_s=timeout_s,
        )

        self.functions = self._compile(compiled, note, with_flag=False)
        self._interpreter = Interpreter(
            instructions=program.instructions,
            callees=[Callee(program.mesh, function.name, function.donated) for function in program.functions],
            compiled=self.functions,
            compile_flagged=lambda: self._compile(compiled, note, with_flag=True),
            backend=self._exchange,
        )
        self._constants = {
            c.buffer: self._constant(c.value, program.types[c.buffer], c.spec) for c in program.constants
        }

    # ---- steps ----------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self._exchange.step

    @property
    def position(self) -> int:
        """-1 between steps."""
        return self._interpreter.position

    def describe(self, i: int) -> str:
        return self._interpreter.describe(i)

    def begin(self, step: int) -> None:
        self._exchange.begin(step)
        self._interpreter.position = -1

    def run(self, arguments: list[Any], trace: StepTrace | None = None) -> dict[int, jax.Array]:
        """Run a step; returns this mesh's results by number, computed.

        Empties `arguments`, so that only the step holds arrays that it may free. After an error, `position` is the
        failed instruction.
        """
        buffers = dict(self._constants)
        buffers.update((slot.buffer, x) for slot, x in zip(self.program.inputs, arguments, strict=True))
        arguments.clear()
        if trace is not None:
            trace.note(self.program.mesh, INSTRUCTIONS, "take arguments", trace.begun_s)
        try:
            self._interpreter.run(buffers, trace)
            results = {number: buffers[b] for number, b in self.program.outputs}
            self._await(results, trace)
        except Exception:
            self._interpreter.position = self._first_failed(buffers)
            raise
        self._interpreter.position = -1
        return results

    def _await(self, results: dict[int, Any], trace: StepTrace | None) -> None:
        issued_s = time.perf_counter()
        jax.block_until_ready(list(results.values()))
        self._exchange.settle_all()
        if trace is not None:
            trace.note(self.program.mesh, INSTRUCTIONS, "wait for results", issued_s)

    def _first_failed(self, buffers: Buffers) -> int:
        """jax reports a failed computation when its result is read, perhaps many instructions later."""
        for i, instruction in enumerate(self.program.instructions[: self.position]):
            if any(b in buffers and _has_failed(buffers[b]) for b in _buffers_written(instruction)):
                return i
        return self.position

    # ---- arrays ---------------------------------------------------------------------------------------------------

    def argument(self, number: int, given: Given, shared: Sequence[np.ndarray[Any, Any]]) -> jax.Array:
        """Input `number`, made of sent shards."""
        slot = self.program.inputs[number]
        array_type = self.program.types[slot.buffer]
        sent = [shared[shard] if isinstance(shard, int) else shard for shard in given.shards]
        shards = [from_plain(shard, array_type.dtype) for shard in sent]
        # jax on CPU may use the caller's memory in place, and a step takes over donated arrays.
        if slot.leaf in self.program.donated_leaves:
            shards = [np.array(shard) for shard in shards]
        return self._array([shards[k] for k in given.shard_of_device], array_type, slot.spec)

    def _array(self, shards: Sequence[Any], type_: ArrayType, spec: PartitionSpec) -> jax.Array:
        sharding = placed(self.mesh, spec, in_host=type_.in_host)
        return type_.joined(type_.shards(shards, self._devices), sharding)

    def _constant(self, value: Any, type_: ArrayType, spec: PartitionSpec) -> jax.Array:
        index_of = NamedSharding(self.mesh, spec).devices_indices_map(type_.data_shape)
        return self._array([value[index_of[device]] for device in self._devices], type_, spec)

    # ---- functions ------------------------------------------------------------------------------------------------

    def _compile(
        self, compiled: MutableMapping[Any, Any], note: Callable[[int], object], *, with_flag: bool
    ) -> list[Any]:
        """Equal functions once. with_flag: for traced steps, see `lower`."""
        keys = [
            (f.code, f.in_specs, f.out_specs, f.donated, f.compiler_options, self.mesh, with_flag)
            for f in self.program.functions
        ]
        made = {key: compiled.get(key) for key in keys}  # held here, since `compiled` may forget them
        missing = {key: f for key, f in zip(keys, self.program.functions, strict=True) if made[key] is None}
        lowered = (self._lower(f, with_flag) for f in missing.values())
        n_known = len(keys) - len(missing)
        note(n_known)
        made.update(zip(missing, compile_all(lowered, lambda n: note(n_known + n)), strict=True))
        compiled.update(made)
        return [made[key] for key in keys]

    def _lower(self, function: MeshFunction, with_flag: bool) -> LoweredFunction:
        call, avals = callable_of(function)
        return lower(
            call,
            avals,
            mesh=self.mesh,
            in_shardings=_shardings(self.mesh, function.in_specs, function.in_types),
            out_shardings=_shardings(self.mesh, function.out_specs, function.out_types),
            donated=function.donated,
            compiler_options=function.compiler_options,
            with_flag=with_flag,
        )


def _shardings(mesh: Mesh, specs: Sequence[PartitionSpec], types: Sequence[ArrayType]) -> list[NamedSharding]:
    return [placed(mesh, spec, in_host=type_.in_host) for spec, type_ in zip(specs, types, strict=True)]


def _buffers_written(instruction: Any) -> tuple[int, ...]:
    match instruction:
        case Run(_, _, outputs):
            return tuple(outputs)
        case Accumulate(_, accumulators, _):
            return tuple(accumulators)
        case Receive(target, _) | Relayout(_, target, _):
            return (target,)
    return ()


def _has_failed(array: Any) -> bool:
    """Whether an array's computation has failed. Does not wait."""
    if array.is_deleted() or not array.is_ready():
        return False
    try:
        array.block_until_ready()
    except Exception:
        return True
    return False
