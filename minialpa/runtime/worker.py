"""A worker: the process that has the devices of one mesh on one host, and runs that mesh's programs on them.

`Worker` knows nothing of Ray; the launcher makes an actor of it. Methods return values, and what fails in a step
returns as a `Failure`, so that nothing has to be unpickled that only the worker knows.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minialpa.errors import WorkerError
from minialpa.programs.mesh_program import MeshProgram, Place
from minialpa.programs.resharding import Box
from minialpa.runtime.failures import Failure, Status, fault_of

#: Instructions before the present one that a status tells.
_N_RECENT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a worker is told when it starts.

    number: of the worker, unique in its session. host: name for messages. ip: address that it binds. secret: shared by
    the workers of a session. timeout_s: how long it waits for another worker. platform: "cpu" or "cuda".
    """

    number: int
    host: int
    ip: str
    secret: bytes
    timeout_s: float
    platform: str
    n_devices: int


class Worker:
    """Devices of one mesh on one host. Calls come one after the other, but for `status`, `live` and `stop`."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self._reserved: socket.socket | None = None
        self._coordinator = "none"
        self._arrays: dict[int, Any] = {}
        self._programs: dict[int, Any] = {}
        # What no program of this worker uses any more goes with the program.
        self._compiled: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
        self._running: Any = None
        self._failure: Failure | None = None
        self._trace: Any = None
        self._devices: list[Any] = []
        self._transports: dict[int, Any] = {}

    # ---- start ----------------------------------------------------------------------------------------------------

    def reserve_port(self) -> tuple[str, int]:
        """An address of this host on a port that is free: it is held, by a socket that shares it, until `join`."""
        held = socket.socket(socket.AF_INET6 if ":" in self.settings.ip else socket.AF_INET)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((self.settings.ip, 0))
        self._reserved = held
        return self.settings.ip, held.getsockname()[1]

    def join(self, coordinator: tuple[str, int] | None, n_workers: int, rank: int) -> None:
        """Start jax, as process `rank` of the mesh's workers."""
        # The threads of the transport would wait for up to 5 ms each time while another one runs Python.
        sys.setswitchinterval(2e-4)
        import jax

        from minialpa.support.private_jax import bind_gloo

        jax.config.update("jax_enable_x64", True)  # arrays keep the types that the traced step gave them
        jax.config.update("jax_platforms", self.settings.platform)
        if self.settings.platform == "cpu":
            jax.config.update("jax_num_cpu_devices", self.settings.n_devices)
        if n_workers > 1:
            assert coordinator is not None
            address = f"{coordinator[0]}:{coordinator[1]}"
            self._coordinator = address
            jax.distributed.initialize(
                address,
                n_workers,
                rank,
                cluster_detection_method="deactivate",
                initialization_timeout=60,
                # The caller finds out first who hangs. This would end the processes that wait for it.
                heartbeat_timeout_seconds=int(self.settings.timeout_s) + 60,
                coordinator_bind_address=address if rank == 0 else None,
            )
            if self.settings.platform == "cpu":
                bind_gloo(self.settings.ip)
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None
        self._devices = sorted(self._all_devices(), key=lambda d: (d.process_index, d.id))
        local = len(self._local_devices())
        if local != self.settings.n_devices:
            raise WorkerError(
                f"Host {self.settings.host} ({self.settings.ip}) has {local} {self.settings.platform} devices for a "
                f"worker of {self.settings.n_devices}."
            )

    def _all_devices(self) -> list[Any]:
        """Those of all workers of the mesh."""
        import jax

        try:
            return list(jax.devices())
        except (RuntimeError, AssertionError) as error:
            if self.settings.platform == "cpu":
                raise
            raise WorkerError(
                f"Ray has GPUs on host {self.settings.host} ({self.settings.ip}), and jax cannot use them ({error!r}). "
                "Is `minialpa[gpu]` installed there, and does `minialpa doctor` see them?"
            ) from error

    def _local_devices(self) -> list[Any]:
        import jax

        return [device for device in self._devices if device.process_index == jax.process_index()]

    # ---- programs -------------------------------------------------------------------------------------------------

    def open_transport(self, number: int, me: int) -> Any:
        """Prepare for program `number`, as its worker `me`; returns the address at which its other workers find it."""
        from minialpa.runtime.host_transport import HostTransport

        self.unload(number)  # of an earlier attempt that was broken off
        self._transports[number] = HostTransport(self.settings.secret, me, self.settings.ip)
        return self._transports[number].address

    def has_nccl(self) -> bool:
        """Whether this worker can send arrays from GPU to GPU."""
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
        """Compile program `number` and connect to its other workers. places, me: as in `Interpreter`.

        links: ways between GPUs of all workers, in the order of `mesh_program.links`; none to send through the hosts.
        """
        from minialpa.runtime.interpreter import Interpreter

        transport = self._transports[number]
        transport.connect(addresses, self.settings.timeout_s)
        if links:
            from minialpa.runtime.nccl import Link, NcclTransport

            transport = NcclTransport(transport, self._local_devices(), [Link(*link) for link in links])
            self._transports[number] = transport
        self._programs[number] = Interpreter(
            program=program,
            places=places,
            me=me,
            devices=self._devices,
            transport=transport,
            compiled=self._compiled,
            timeout_s=self.settings.timeout_s,
        )

    def unload(self, number: int) -> None:
        """Forget a program. Unknown numbers are no error."""
        self._programs.pop(number, None)
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
        """Run a step of a program.

        arguments: an `Argument` for each input of the program. results: result number -> number under which the array
        is kept. donated: arrays that the step uses up. freed: arrays that nobody needs any more. traced: keep notes for
        `timeline`. shared: arrays whose places are shards of arguments.
        """
        if self._failure is not None:
            return self._failure
        try:
            interpreter = self._running = self._programs[program]
            interpreter.begin(step)
            trace = self._new_trace() if traced else None
            self.free(freed)
            inputs = self._inputs(interpreter, arguments, set(donated), shared)
            self.free(donated)
            made = interpreter.run(inputs, trace)
            self._arrays.update((results[number], array) for number, array in made.items() if number in results)
        except Exception as error:
            self._failure = Failure(
                fault_of(error), self.status(), f"{type(error).__name__}: {error}", traceback.format_exc()
            )
            # Those who wait for this worker know then. The caller is not kept waiting for it.
            for transport in self._transports.values():
                threading.Thread(target=transport.close, daemon=True).start()
        return self._failure

    def _new_trace(self) -> Any:
        from minialpa.runtime.step_trace import StepTrace

        self._trace = StepTrace(self.settings.host)
        return self._trace

    def _inputs(
        self, interpreter: Any, arguments: Sequence[Any], donated: set[int], shared: Sequence[Any]
    ) -> list[Any]:
        inputs: list[Any] = []
        seen: set[int] = set()
        for i, argument in enumerate(arguments):
            if not isinstance(argument, int):
                inputs.append(interpreter.argument(i, argument, shared, for_one_step=True))
                continue
            array = self._arrays[argument]
            # One array for two arguments: only one of them can be taken over.
            inputs.append(array.copy() if argument in donated & seen else array)
            seen.add(argument)
        return inputs

    def status(self) -> Status:
        """Where the worker is now. Answers while a step runs."""
        own, at = self.settings, self._running
        if at is None:
            return Status(worker=own.number, host=own.host, pid=os.getpid())
        recent = tuple(at.describe(k) for k in range(max(0, at.position - _N_RECENT), at.position))
        return Status(
            worker=own.number,
            host=own.host,
            pid=os.getpid(),
            stage=at.program.mesh,
            step=at.step,
            instruction=at.describe(at.position),
            recent=recent,
        )

    def live(self) -> None:
        """Never returns: a call of this ends when the process does."""
        threading.Event().wait()

    def stop(self) -> None:
        """End this process."""
        os._exit(1)

    # ---- arrays ---------------------------------------------------------------------------------------------------

    def put(self, program: int, numbers: Mapping[int, int], arguments: Sequence[Any], *shared: Any) -> Failure | None:
        """Keep arrays, laid out as inputs of a program.

        numbers: input -> number under which it is kept, in the order of arguments. arguments, shared: as in `step`.
        """
        interpreter = self._programs[program]
        for (i, number), given in zip(numbers.items(), arguments, strict=True):
            self._arrays[number] = interpreter.argument(i, given, shared)
        return None

    def fetch(self, numbers: Sequence[int]) -> list[list[tuple[Box, Any]]] | Failure:
        """The distinct shards of arrays that this worker has, as `to_plain` makes them; integers for typed keys."""
        if self._failure is not None:
            return self._failure
        return [_shards(self._arrays[number]) for number in numbers]

    def free(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._arrays.pop(number, None)

    # ---- inspection -----------------------------------------------------------------------------------------------

    def hlo_texts(self, program: int) -> list[str]:
        return [compiled.as_text() for compiled in self._programs[program].functions]

    def allocation_sizes(self, program: int) -> list[int]:
        """Bytes per device of each function: arguments, results and temporaries."""
        from minialpa.runtime.local import allocation_size

        return [allocation_size(compiled) for compiled in self._programs[program].functions]

    def description(self, program: int) -> str:
        """Host, devices, settings and instructions of this worker, as text."""
        import jax

        interpreter, own = self._programs[program], self.settings
        lines = [
            f"worker {own.number} of stage {interpreter.program.mesh}, host {own.host} ({own.ip})",
            f"jax {jax.__version__}, {own.platform}, process {jax.process_index()} of {jax.process_count()}, "
            f"coordinator {self._coordinator}",
            f"devices {[str(d) for d in jax.local_devices()]} of mesh {interpreter.mesh.devices.tolist()}",
            *(f"{k}={os.environ.get(k, '')}" for k in ("XLA_FLAGS", "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")),
            *(interpreter.describe(i) for i in range(len(interpreter.program.instructions))),
        ]
        return "\n".join(lines)

    def function_seconds(self, program: int, repeats: int) -> list[float]:
        """Seconds of each function by itself, in `repeats` calls. All workers of a mesh have to be asked at once."""
        from minialpa.runtime.task_times import function_seconds

        return [function_seconds(compiled, repeats) for compiled in self._programs[program].functions]

    def timeline(self) -> list[Any]:
        """The `TaskTime`s of the last traced step, in the time of the clock on the wall, with instruction numbers of
        the mesh program. Forgets them."""
        trace, self._trace = self._trace, None
        assert trace is not None, "no step was traced"
        tasks: list[Any] = trace.tasks()
        return tasks

    def counts(self) -> dict[str, int]:
        """What this worker holds: arrays of the session, programs, their functions, and what `holdings` counts."""
        from minialpa.runtime.resource_usage import holdings

        own = {"arrays": self._arrays, "programs": self._programs, "compiled": self._compiled}
        return {name: len(held) for name, held in own.items()} | holdings()


def _shards(array: Any) -> list[tuple[Box, Any]]:
    import jax
    import numpy as np

    from minialpa.runtime.numpy_wire import to_plain

    if jax.numpy.issubdtype(array.dtype, jax.dtypes.extended):
        array = jax.random.key_data(array)
    found: list[tuple[Box, Any]] = []
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            ends = [cut.indices(size)[:2] for cut, size in zip(shard.index, array.shape, strict=True)]
            found.append((tuple(ends), to_plain(np.asarray(shard.data))))
    return found
