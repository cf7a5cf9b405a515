"""Workers as threads of this process: the runtime of a cluster without a cluster.

Everything but the processes is real: workers compile mesh programs, exchange messages, keep arrays and fail as they do
on Ray, on devices of this process. A mesh is on one host here, since jax can join only processes. Tests of what the
cluster's runtime does run on this; those of processes, networks and hosts run on Ray.

Arguments and answers are pickled on their way, as between processes, so that no two sides share memory by accident.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from queue import SimpleQueue
from typing import Any

import jax

from minialpa.cluster import ClusterSpec
from minialpa.runtime.cluster.launcher import CallRaised, Reply, WorkerEnded, WorkerHandle
from minialpa.runtime.transports.in_process_transport import Hub, InProcessTransport
from minialpa.runtime.workers.worker import Worker
from minialpa.runtime.workers.worker_process import WorkerSettings


class SharedProcess:
    """This process, for a worker in one of its threads. See `worker_process.Process`."""

    coordinator = "none"

    def __init__(self, devices: Sequence[jax.Device], hub: Hub) -> None:
        self._devices, self._hub = devices, hub
        self._transports: list[InProcessTransport] = []

    def reserve_port(self) -> None:
        """There is no other process to meet."""

    def start_jax(self, coordinator: tuple[str, int] | None, n_workers: int, rank: int) -> list[jax.Device]:
        assert n_workers == 1, "a mesh of several hosts needs a process for each"
        return list(self._devices)

    def open_transport(self, me: int) -> InProcessTransport:
        self._transports.append(InProcessTransport(self._hub, me))
        return self._transports[-1]

    def end(self) -> None:
        """The worker's peers lose it; its thread ends after the call that it is in."""
        for transport in self._transports:
            transport.lose()


class ThreadActor:
    """A worker whose calls run in a thread of their own, one after the other. See `launcher.Actor`."""

    def __init__(self, settings: WorkerSettings, process: SharedProcess) -> None:
        self._worker, self._process = Worker(settings, process), process
        self._calls: SimpleQueue[tuple[Future[bytes], str, bytes] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._pending: set[Future[bytes]] = set()
        self._has_ended = False
        threading.Thread(target=self._serve, daemon=True).start()

    def call(self, method: str, *args: Any) -> Reply:
        reply = self._new_reply()
        self._calls.put((reply, method, pickle.dumps(args)))
        return reply

    def call_aside(self, method: str, *args: Any) -> Reply:
        reply = self._new_reply()
        if method != "live":  # which is answered by the end of the actor alone
            threading.Thread(target=self._answer, args=(reply, method, pickle.dumps(args)), daemon=True).start()
        return reply

    def end(self) -> None:
        """End as a process does that is killed: nothing is answered any more, and peers lose it."""
        with self._lock:
            self._has_ended = True
            pending, self._pending = self._pending, set()
        self._calls.put(None)
        for reply in pending:
            reply.set_exception(WorkerEnded("it was killed."))
        self._process.end()

    def _new_reply(self) -> Future[bytes]:
        reply: Future[bytes] = Future()
        with self._lock:
            if self._has_ended:
                reply.set_exception(WorkerEnded("it had ended before."))
            else:
                self._pending.add(reply)
        return reply

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None and not self._has_ended:
            self._answer(*call)

    def _answer(self, reply: Future[bytes], method: str, args: bytes) -> None:
        answer, error = b"", None
        try:
            with jax.enable_x64(True):  # as a worker in a process of its own has it
                answer = pickle.dumps(getattr(self._worker, method)(*pickle.loads(args)))
        except Exception as raised:
            error = CallRaised(method, repr(raised), traceback.format_exc())
        with self._lock:
            if reply not in self._pending:
                return
            self._pending.remove(reply)
        if error is None:
            reply.set_result(answer)
        else:
            reply.set_exception(error)


class InProcessLauncher:
    """Launches workers as threads, on `devices` of this process. See `launcher.Launcher`."""

    platform = "cpu"

    def __init__(self, devices: Sequence[jax.Device], devices_per_host: int, timeout_s: float = 60.0) -> None:
        self.devices_per_host, self.timeout_s = devices_per_host, timeout_s
        self._devices, self._hub = tuple(devices), Hub()
        self._numbers = itertools.count()

    def start_meshes(self, wanted: Sequence[tuple[int, int]], check: Callable[[], None]) -> list[list[WorkerHandle]]:
        check()
        return [[self._start(first, n)] for first, n in wanted]

    def _start(self, first_device: int, n_devices: int) -> WorkerHandle:
        host = first_device // self.devices_per_host
        assert (first_device + n_devices - 1) // self.devices_per_host == host, "a mesh of several hosts needs Ray"
        settings = WorkerSettings(
            number=next(self._numbers),
            host=host,
            ip="127.0.0.1",
            secret=b"",
            timeout_s=self.timeout_s,
            platform=self.platform,
            n_devices=n_devices,
        )
        devices = self._devices[first_device : first_device + n_devices]
        actor = ThreadActor(settings, SharedProcess(devices, self._hub))
        self.answer(actor.call("join", None, 1, 0))
        return WorkerHandle(
            number=settings.number, host=host, first_device=first_device, n_devices=n_devices, actor=actor
        )

    def end(self, workers: Sequence[WorkerHandle]) -> None:
        for worker in workers:
            assert isinstance(worker.actor, ThreadActor)
            worker.actor.end()

    def release(self) -> None:
        """The devices belong to this process."""

    def describe(self) -> ClusterSpec:
        n_hosts = len(self._devices) // self.devices_per_host
        return ClusterSpec.preset("cpu", num_hosts=n_hosts, devices_per_host=self.devices_per_host)

    def available_hosts(self) -> int:
        return len(self._devices) // self.devices_per_host

    def restarted(self) -> InProcessLauncher:
        return InProcessLauncher(self._devices, self.devices_per_host, self.timeout_s)

    def check_room(self, n_bytes: int) -> None:
        pass

    def share(self, value: Any) -> Any:
        return value

    def wait(self, replies: Sequence[Reply], timeout_s: float) -> list[Reply]:
        done, _ = wait(replies, timeout_s, return_when=FIRST_COMPLETED)
        return list(done)

    def ready(self, replies: Sequence[Reply]) -> list[Reply]:
        return [reply for reply in replies if reply.done()]

    def answer(self, reply: Reply) -> Any:
        return pickle.loads(reply.result())

    def check(self) -> None:
        """Workers can always start."""

    def fault(self) -> str | None:
        return None

    def lost_hosts(self, numbers: Iterable[int]) -> Mapping[int, str]:
        return {}
