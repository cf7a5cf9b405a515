"""A worker: runs the programs of one mesh on the mesh's devices of one host.

Methods return plain values. A failed step returns a `Failure`, because the caller might be unable to unpickle an
exception.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minialpa.programs.mesh_program import MeshProgram, Place
from minialpa.programs.resharding import Box
from minialpa.runtime.workers.failures import Failure, Status, fault_of
from minialpa.runtime.workers.worker_process import OwnProcess, Process, WorkerSettings

if TYPE_CHECKING:
    from minialpa.runtime.workers.arguments import ReadOrder
    from minialpa.samples import ReadSamples

#: Earlier instructions that a status lists.
_N_RECENT = 4


class Worker:
    """Runs calls one after the other in one thread; `status`, `live`, `stop`, `read` and `write_copies` in other
    threads.
    """

    def __init__(self, settings: WorkerSettings, process: Process | None = None) -> None:
        self.settings = settings
        self._process = process or OwnProcess(settings)
        self._devices: list[Any] = []

        # By numbers of the driver. Programs share compiled functions.
        self._arrays: dict[int, Any] = {}
        self._programs: dict[int, Any] = {}
        self._transports: dict[int, Any] = {}
        self._functions: dict[int, Any] = {}
        self._compiled: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
        self._copies: dict[int, Any] = {}  # to be written to files, by the number of the save

        self._loading = (-1, 0)  # see `Status.compiled`
        self._running: Any = None  # the program of the last step
        self._failure: Failure | None = None
        self._trace: Any = None

    # ---- start ----------------------------------------------------------------------------------------------------

    def reserve_port(self) -> tuple[str, int] | None:
        return self._process.reserve_port()

    def join(self, coordinator: tuple[str, int] | None, n_workers: int, rank: int) -> None:
        self._devices = self._process.start_jax(coordinator, n_workers, rank)

    # ---- programs -------------------------------------------------------------------------------------------------

    def open_transport(self, number: int, me: int) -> Any:
        """For program `number`, as its worker `me`; returns its address."""
        self.unload(number)  # of an earlier attempt that failed
        self._transports[number] = self._process.open_transport(me)
        return self._transports[number].address

    def has_nccl(self) -> bool:
        return self.settings.platform == "cuda" and importlib.util.find_spec("cupy") is not None

    def load(
        self,
        number: int,
        program: MeshProgram,
        places: Sequence[Place],
        me: int,
        addresses: Sequence[Any],
        links: Sequence[tuple[int, int, int, int]],
    ) -> None:
        """Compile program `number` and connect to its other workers.

        Args:
            places: all workers of the program; number `me` is this one.
            links: (worker, its GPU, receiving worker, its GPU), as in `DeviceLink`; empty to send through the hosts.
        """
        from minialpa.runtime.workers.worker_program import WorkerProgram

        transport = self._transports[number]
        transport.connect(addresses, self.settings.timeout_s)

        if links:
            import jax

            from minialpa.runtime.transports.nccl import DeviceLink, NcclTransport

            mine = [device for device in self._devices if device.process_index == jax.process_index()]
            transport = NcclTransport(transport, mine, [DeviceLink(*link) for link in links])
            self._transports[number] = transport

        def note_compiled(n: int) -> None:
            self._loading = number, n

        self._programs[number] = WorkerProgram(
            program=program,
            places=places,
            me=me,
            devices=self._devices,
            transport=transport,
            compiled=self._compiled,
            note=note_compiled,
            timeout_s=self.settings.timeout_s,
        )

    def unload(self, number: int) -> None:
        """Forget a program or a function. Unknown numbers are no error."""
        self._programs.pop(number, None)
        self._functions.pop(number, None)
        if number in self._transports:
            self._transports.pop(number).close()

    def step(
        self,
        program: int,
        step: int,
        arguments: Sequence[Any],
        results: Mapping[int, int],
        donated: Sequence[int],
        freed: Sequence[int],
        traced: bool,
        *shared: Any,
    ) -> Failure | None:
        """Returns the failure of the worker, in this or an earlier step, if any.

        Args:
            step: equal on all workers.
            arguments: an `Argument` for each input of the program.
            results: by number of the result, the number of the array to keep.
            donated: arrays that the step uses up.
            freed: arrays without references.
            traced: keep notes for `timeline`.
            shared: see `Given`.
        """
        if self._failure is not None:
            return self._failure

        try:
            running = self._running = self._programs[program]
            running.begin(step)
            trace = None
            if traced:
                from minialpa.runtime.steps.step_trace import StepTrace

                trace = self._trace = StepTrace(self.settings.host)

            # Only the step holds donated arrays: their memory is free after the last read.
            self.free(freed)
            inputs = self._inputs(running, arguments, set(donated), shared)
            self.free(donated)

            made = running.run(inputs, trace)
            self._arrays.update((results[number], array) for number, array in made.items() if number in results)
        except Exception as error:
            self._failure = Failure(
                fault_of(error), self.status(), f"{type(error).__name__}: {error}", traceback.format_exc()
            )
            # Waiting peers notice at once. The caller does not wait for the close.
            for transport in self._transports.values():
                threading.Thread(target=transport.close, daemon=True).start()
        return self._failure

    def _inputs(self, running: Any, arguments: Sequence[Any], donated: set[int], shared: Sequence[Any]) -> list[Any]:
        inputs: list[Any] = []
        seen: set[int] = set()
        for i, argument in enumerate(arguments):
            if not isinstance(argument, int):
                inputs.append(running.argument(i, argument, shared))
                continue

            array = self._arrays[argument]
            # Of one array in two donated arguments, only one can take over the memory. The caller keeps the rows of a
            # batch.
            is_copied = i in running.overwritten_rows or argument in donated & seen
            inputs.append(array.copy() if is_copied else array)
            seen.add(argument)
        return inputs

    def status(self) -> Status:
        """Answers while a step runs."""
        settings, at = self.settings, self._running
        if at is None:
            return Status(worker=settings.number, host=settings.host, pid=os.getpid(), compiled=self._loading)
        recent = tuple(at.describe(k) for k in range(max(0, at.position - _N_RECENT), at.position))
        return Status(
            worker=settings.number,
            host=settings.host,
            pid=os.getpid(),
            stage=at.program.mesh,
            step=at.step,
            instruction=at.describe(at.position),
            recent=recent,
            compiled=self._loading,
        )

    def live(self) -> None:
        """Never returns: the call ends with the process."""
        threading.Event().wait()

    def stop(self) -> None:
        self._process.end()

    # ---- arrays ---------------------------------------------------------------------------------------------------

    def put(self, program: int, numbers: Mapping[int, int], arguments: Sequence[Any], *shared: Any) -> Failure | None:
        """Keep arrays, laid out as inputs of a program.

        numbers: for each input, the number under which to keep its array.
        arguments: shards, in the order of `numbers`.
        """
        loaded = self._programs[program]
        for (i, number), given in zip(numbers.items(), arguments, strict=True):
            self._arrays[number] = loaded.argument(i, given, shared)
        return None

    def read(
        self,
        function: int,
        sent: ReadSamples | None,
        program: int,
        order: ReadOrder,
        first: int,
        numbers: Sequence[int],
    ) -> None:
        """Read samples and keep them, laid out as inputs of a program.

        Args:
            function: number of the user's function.
            sent: the function itself, in its first call.
            first: the first sample of the batch.
            numbers: as in `put`.
        """
        from minialpa.runtime.workers.arguments import read_inputs

        if sent is not None:
            self._functions[function] = sent
        loaded = self._programs[program]
        for of_input, given, number in zip(
            order.inputs, read_inputs(self._functions[function], order, first), numbers, strict=True
        ):
            self._arrays[number] = loaded.argument(of_input.input, given, ())

    def fetch(self, numbers: Sequence[int]) -> list[list[tuple[Box, Any]]] | Failure:
        """The distinct shards of each array, plain; integers for typed keys. After a failed step, the failure."""
        if self._failure is not None:
            return self._failure
        return [_shards(self._arrays[number]) for number in numbers]

    def free(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._arrays.pop(number, None)

    # ---- files ----------------------------------------------------------------------------------------------------

    def copy_to_host(self, save: int, parts: Sequence[Any]) -> None:
        """`PartToWrite`s, for `write_copies`."""
        from minialpa.runtime.workers.array_files import copies_on_host

        self._copies[save] = [(part, copies_on_host(self._arrays, part)) for part in parts]

    def write_copies(self, save: int) -> None:
        from minialpa.runtime.workers.array_files import write

        write(self._copies.pop(save))

    def drop_copies(self, save: int) -> None:
        self._copies.pop(save, None)

    def read_files(self, arrays: Sequence[Any]) -> None:
        """`ArrayToRead`s: the shards of this worker's devices."""
        from minialpa.runtime.workers.array_files import read

        self._arrays.update(read(arrays, self._devices))

    # ---- inspection -----------------------------------------------------------------------------------------------

    def hlo_texts(self, program: int) -> list[str]:
        return [compiled.as_text() for compiled in self._programs[program].functions]

    def allocation_sizes(self, program: int) -> list[int]:
        from minialpa.runtime.steps.compiled import allocation_size

        return [allocation_size(compiled) for compiled in self._programs[program].functions]

    def description(self, program: int) -> str:
        import jax

        loaded, settings = self._programs[program], self.settings
        lines = [
            f"worker {settings.number} of stage {loaded.program.mesh}, host {settings.host} ({settings.ip})",
            f"jax {jax.__version__}, {settings.platform}, process {jax.process_index()} of {jax.process_count()}, "
            f"coordinator {self._process.coordinator}",
            f"devices {[str(d) for d in jax.local_devices()]} of mesh {loaded.mesh.devices.tolist()}",
            *(f"{k}={os.environ.get(k, '')}" for k in ("XLA_FLAGS", "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")),
            *(loaded.describe(i) for i in range(len(loaded.program.instructions))),
        ]
        return "\n".join(lines)

    def function_seconds(self, program: int, repeats: int) -> list[float]:
        from minialpa.runtime.steps.compiled import function_seconds

        return [function_seconds(compiled, repeats) for compiled in self._programs[program].functions]

    def timeline(self) -> list[Any]:
        """The `TaskTime`s of the last traced step, once."""
        trace, self._trace = self._trace, None
        assert trace is not None, "no step was traced"
        tasks: list[Any] = trace.tasks()
        return tasks

    def counts(self) -> dict[str, int]:
        return {
            "arrays": len(self._arrays),
            "programs": len(self._programs),
            "compiled": len(self._compiled),
            "transports": len(self._transports),
        }


def _shards(array: Any) -> list[tuple[Box, Any]]:
    """One copy of each shard, with its place in the array."""
    import jax
    import numpy as np

    from minialpa.runtime.workers.arguments import to_plain

    if jax.numpy.issubdtype(array.dtype, jax.dtypes.extended):
        array = jax.random.key_data(array)
    found: list[tuple[Box, Any]] = []
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            ends = [cut.indices(size)[:2] for cut, size in zip(shard.index, array.shape, strict=True)]
            found.append((tuple(ends), to_plain(np.asarray(shard.data))))
    return found
