"""The local runtime: runs a program on the devices of this process.

jax runs issued instructions asynchronously, so independent meshes work at the same time.

Threads issue one whole step after another, under one lock: collectives must reach all devices in the same order, and a
step deletes its donated arguments before the next step begins.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from minialpa.arrays import RemoteArray
from minialpa.errors import DeletedArrayError, MinialpaError, ShardingError, WorkerError
from minialpa.ir.equations import is_in_host
from minialpa.programs.program import ConstantSlot, Free, InputSlot, Program, Run, Transfer
from minialpa.programs.resharding import Resharding
from minialpa.runtime.local_arguments import LocalArguments
from minialpa.runtime.steps.compiled import allocation_size, compile_all, function_seconds, lower
from minialpa.runtime.steps.interpreter import Action, Buffers, Callee, Interpreter
from minialpa.runtime.steps.step_trace import StepTrace, TaskTime, from_start
from minialpa.sharding import device_mesh, is_host_array, placed
from minialpa.support.private_jax import ArrayImpl
from minialpa.support.progress import phase

#: Held by the thread that issues a step: all executables share the devices.
_step_lock = threading.RLock()


def make_meshes(program: Program, devices: Sequence[jax.Device]) -> list[Mesh]:
    """Raises ShardingError for too few devices."""
    meshes = []
    for shape in program.meshes:
        n = int(np.prod(shape.logical_shape))
        if shape.first_device + n > len(devices):
            raise ShardingError(
                f"The plan needs devices {shape.first_device} to {shape.first_device + n - 1}, counted from 0, and "
                f"there are {len(devices)} devices. Plan for {len(devices)} devices, or start the session with more."
            )
        meshes.append(device_mesh(devices[shape.first_device : shape.first_device + n], shape.logical_shape))
    return meshes


class LocalExecutable:
    """A `Runner` in this process. It owns the constants; the caller owns arguments and results."""

    reshardings: Mapping[int, Resharding] = MappingProxyType({})

    def __init__(self, program: Program, devices: Sequence[jax.Device]) -> None:
        self.program = program
        self.meshes, self.session = make_meshes(program, devices), None
        self.compiled = _compile(program, self.meshes, with_flag=False)
        self._arguments = LocalArguments(program, self.meshes)
        self._interpreter = Interpreter(
            instructions=program.instructions,
            callees=[Callee(function.mesh, function.name, function.donated) for function in program.functions],
            compiled=self.compiled,
            compile_flagged=lambda: _compile(program, self.meshes, with_flag=True),
            backend=DevicePuts(program, self.meshes),
        )
        self._constants = {
            slot.buffer: jax.device_put(slot.value, NamedSharding(self.meshes[slot.mesh], slot.spec))
            for slot in program.constants
        }
        self._trace: StepTrace | None = None
        self._whole_function_number = _whole_function(program)

    def __call__(self, leaves: Sequence[Any], *, traced: bool = False) -> list[Any]:
        """Each result is on the first of its meshes."""
        with _step_lock:
            _check_usable(leaves)
            return self._step(leaves, traced)

    def turn(self) -> AbstractContextManager[Any]:
        return _step_lock

    def _step(self, leaves: Sequence[Any], traced: bool) -> list[Any]:
        if self._whole_function_number is not None and not traced:
            arguments = self._arguments.of_step(leaves)
            try:
                return list(self.compiled[self._whole_function_number](*arguments))
            except Exception as error:
                self._raise(error, 0)

        buffers: Buffers = dict(self._constants)
        # Only `buffers` may hold arrays that the step frees.
        buffers.update(zip(self._arguments.buffers, self._arguments.of_step(leaves), strict=True))
        trace = self._trace = StepTrace() if traced else None
        try:
            self._interpreter.run(buffers, trace)
        except Exception as error:
            self._raise(error, self._interpreter.position)
        return [buffers[slot.buffers[0]] for slot in self.program.outputs]

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        # A loader that places NumPy arrays does not delay steps.
        has_arrays = any(isinstance(leaf, jax.Array | RemoteArray) for leaf in leaves)
        with _step_lock if has_arrays else nullcontext():
            _check_usable(leaves)
            return self._arguments.kept(leaves)

    def homes(self, leaf: Any) -> tuple[tuple[int, PartitionSpec], ...]:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return ()
        return tuple((i, sharding.spec) for i, mesh in enumerate(self.meshes) if mesh == sharding.mesh)

    def hlo_texts(self) -> list[str]:
        return [compiled.as_text() for compiled in self.compiled]

    def allocation_sizes(self) -> list[int]:
        return list(map(allocation_size, self.compiled))

    def function_seconds(self, repeats: int = 5) -> list[float]:
        return [function_seconds(compiled, repeats) for compiled in self.compiled]

    def descriptions(self) -> dict[str, str]:
        return {"devices": "\n".join(f"mesh {i}: {mesh.devices.tolist()}" for i, mesh in enumerate(self.meshes))}

    def sync(self) -> None:
        """Wait for all live arrays on these devices."""
        mine = {device for mesh in self.meshes for device in mesh.devices.flat}
        for array in jax.live_arrays(next(iter(mine)).platform):
            try:
                if not array.is_deleted() and mine & array.sharding.device_set:
                    jax.block_until_ready(array)
            except RuntimeError:
                if not array.is_deleted():  # else another thread has just donated it
                    raise
        jax.effects_barrier()

    def timeline(self) -> tuple[TaskTime, ...]:
        assert self._trace is not None, "no step was traced"
        return from_start(self._trace.tasks())

    def _raise(self, error: Exception, i: int) -> NoReturn:
        """Raise `error` as a WorkerError. Errors of callbacks into Python, and of Python numbers that are too large for
        their dtypes, pass unchanged.
        """
        if _is_of_callback(error) or isinstance(error, OverflowError):
            raise error
        recent = ", ".join(type(x).__name__ for x in self.program.instructions[max(0, i - 4) : i])
        raise WorkerError(
            f"The step failed at instruction {i} ({self._interpreter.name(i)}). {error}\nInstructions before it: "
            f"{recent or 'none'}. If memory ran out, raise `num_micro_batches` or use more devices; if an argument was "
            "donated to an earlier call, pass that call's result instead."
        ) from error


class DevicePuts:
    """The interpreter's back end in one process: a `Transfer` is a `jax.device_put`."""

    def __init__(self, program: Program, meshes: Sequence[Mesh]) -> None:
        self._meshes = meshes
        self._mesh_of_buffer = _mesh_of_buffer(program)
        self._results = {b for slot in program.outputs for b in slot.buffers}

    def action(self, instruction: Any) -> Action:
        assert isinstance(instruction, Transfer), instruction
        source, target = instruction.source, instruction.target
        mesh, spec = self._meshes[instruction.mesh], instruction.spec
        place = _placement(mesh, spec, is_result=target in self._results)
        in_host = placed(mesh, spec, in_host=True)

        def put(buffers: Buffers) -> None:
            array = buffers[source]
            buffers[target] = jax.device_put(array, in_host if is_host_array(array) else place)

        return put

    def settle(self, buffers: Sequence[int]) -> None:
        """jax orders the readers of an array before a call that takes it over."""

    def describe(self, instruction: Any) -> str:
        return f"to stage {instruction.mesh}"

    def note(
        self, trace: StepTrace, instruction: Any, buffers: Buffers, *, name: str, begun_s: float, issued_s: float
    ) -> None:
        """An array is under way from when it is ready until it has arrived."""
        if isinstance(instruction, Transfer):
            source, target = instruction.source, instruction.target
            trace.note_array(
                instruction.mesh,
                f"from stage {self._mesh_of_buffer[source]}",
                f"buffer {target}",
                issued_s,
                buffers[target],
                reads=(source,),
                writes=(target,),
            )


def _is_of_callback(error: Exception) -> bool:
    text = str(error)
    is_from_jax = not isinstance(error, MinialpaError)
    # jax puts the traceback of the callback into its message.
    return is_from_jax and "callback" in text and "Traceback (most recent call last)" in text


def _check_usable(leaves: Sequence[Any]) -> None:
    """Raises DeletedArrayError: another step may have donated an argument since the call began."""
    # Usually all are jax's own arrays, whose check is fast.
    others = [leaf for leaf in leaves if type(leaf) is not ArrayImpl]
    arrays = [leaf for leaf in leaves if type(leaf) is ArrayImpl] if others else leaves
    if not any(map(ArrayImpl.is_deleted, arrays)):
        leaves = others
    for leaf in leaves:
        if isinstance(leaf, jax.Array | RemoteArray) and leaf.is_deleted():
            raise DeletedArrayError(
                f"An argument of shape {leaf.shape} has been deleted: it was donated to another call, whose result "
                "took over its memory. Pass that result, or keep arguments alive with `donate_argnums=()`."
            )


def _whole_function(program: Program) -> int | None:
    """The function of a program that only calls it, with inputs and results in order.

    Such a call needs no buffers, which take 0.4 microseconds for each leaf.
    """
    match program.instructions:
        case (Run(function, inputs, outputs), *others) if all(isinstance(other, Free) for other in others):
            slots = [slot.buffers[0] for slot in program.outputs]
            is_whole = list(inputs) == [slot.buffer for slot in program.inputs] and list(outputs) == slots
            return function if is_whole else None
    return None


def _placement(mesh: Mesh, spec: PartitionSpec, *, is_result: bool) -> Any:
    """A device takes half as long as its sharding, which only results need."""
    return mesh.devices.item() if mesh.size == 1 and not is_result else NamedSharding(mesh, spec)


def _mesh_of_buffer(program: Program) -> dict[int, int]:
    slots: tuple[InputSlot | ConstantSlot, ...] = (*program.inputs, *program.constants)
    homes = {slot.buffer: slot.mesh for slot in slots}
    for instruction in program.instructions:
        match instruction:
            case Run(function, _, outputs):
                homes.update(dict.fromkeys(outputs, program.functions[function].mesh))
            case Transfer(_, target, mesh):
                homes[target] = mesh
    return homes


def _shardings(mesh: Mesh, specs: Sequence[PartitionSpec], types: Sequence[Any]) -> list[NamedSharding]:
    return [placed(mesh, spec, in_host=is_in_host(type_)) for spec, type_ in zip(specs, types, strict=True)]


def _compile(program: Program, meshes: Sequence[Mesh], *, with_flag: bool) -> list[Any]:
    """with_flag: for traced steps, see `lower`."""
    lowered = (
        lower(
            function.fun,
            function.in_avals,
            mesh=meshes[function.mesh],
            in_shardings=_shardings(meshes[function.mesh], function.in_specs, function.in_avals),
            out_shardings=_shardings(meshes[function.mesh], function.out_specs, function.out_avals),
            donated=function.donated,
            compiler_options=function.compiler_options,
            with_flag=with_flag,
        )
        for function in program.functions
    )
    with phase("compiling") as report:
        return compile_all(lowered, lambda n: report("programs", n, len(program.functions)))
