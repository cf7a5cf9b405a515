"""Workers as threads of this process: a cluster without processes and networks.

Workers act and fail as on Ray. A mesh is on one host here, since jax joins only processes. Arguments and answers are
pickled, so the two sides share no memory.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import jax
import numpy as np

from minialpa.cluster import ClusterSpec
from minialpa.errors import WorkerError
from minialpa.runtime.cluster.launcher import CallRaised, Reply, WorkerEnded, WorkerHandle
from minialpa.runtime.transports.mailbox import Mailbox
from minialpa.runtime.transports.transport import ExpectedPart, Part
from minialpa.runtime.workers.worker import Worker
from minialpa.runtime.workers.worker_process import WorkerSettings

#: Arrays of one message.
_Arrays = list[np.ndarray[Any, Any]]


@dataclass(slots=True)
class Hub:
    """The mailbox at each address."""

    mailboxes: dict[int, Mailbox[_Arrays]] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=itertools.count)


class InProcessTransport:
    """Puts copies of arrays into the mailboxes of peers."""

    def __init__(self, hub: Hub, number: int) -> None:
        self.number, self.address = number, next(hub.numbers)
        self._hub = hub
        self._addresses: Sequence[int] = ()
        self._mailbox: Mailbox[_Arrays] = Mailbox(number)
        hub.mailboxes[self.address] = self._mailbox
        # One thread, so that messages leave in order.
        self._sender = ThreadPoolExecutor(1, f"minialpa-send-{number}")

    def connect(self, addresses: Sequence[int], timeout_s: float = 60.0) -> None:
        self._addresses = addresses

    def send(self, peer: int, tag: int, parts: Sequence[Part]) -> Future[None]:
        self._mailbox.check()
        return self._sender.submit(self._deliver, peer, tag, parts)

    def receive(self, peer: int, tag: int, expected: Sequence[ExpectedPart], timeout_s: float) -> _Arrays:
        arrays = self._mailbox.take(peer, tag, timeout_s)
        sent = [(array.shape, array.dtype) for array in arrays]
        if sent != [(part.shape, part.dtype) for part in expected]:
            raise WorkerError(
                f"Worker {self.number} expected arrays of types {expected} from worker {peer} (tag {tag}), and got "
                f"{sent}. This is a bug in minialpa: report it with this message."
            )
        return arrays

    def close(self) -> None:
        self._sender.shutdown()
        self._leave(lambda peer: peer.leave(self.number))

    def lose(self) -> None:
        """As if the process died: waiting peers get an error."""
        self._leave(lambda peer: peer.fail(WorkerError(f"Worker {self.number} is lost: its process has ended.")))

    def _leave(self, notify: Callable[[Mailbox[_Arrays]], None]) -> None:
        """Call `notify` with each peer's mailbox."""
        self._hub.mailboxes.pop(self.address, None)
        self._mailbox.fail(WorkerError(f"Worker {self.number} has closed its connections to other workers."))
        for address in self._addresses:
            if address in self._hub.mailboxes:
                notify(self._hub.mailboxes[address])

    def _deliver(self, peer: int, tag: int, parts: Sequence[Part]) -> None:
        arrays = []
        for part in parts:
            array = np.asarray(part.array)  # waits until it is computed
            arrays.append(np.array(array if part.index is None else array[part.index]))
        mailbox = self._hub.mailboxes.get(self._addresses[peer])
        if mailbox is None:
            raise WorkerError(
                f"Worker {self.number} cannot send arrays to worker {peer} (tag {tag}), which has closed its "
                "connections."
            )
        mailbox.put(self.number, tag, arrays)


class SharedProcess:
    """A `worker_process.Process` for a worker in a thread."""

    coordinator = "none"

    def __init__(self, devices: Sequence[jax.Device], hub: Hub) -> None:
        self._devices, self._hub = devices, hub
        self._transports: list[InProcessTransport] = []

    def reserve_port(self) -> None: ...

    def start_jax(self, coordinator: tuple[str, int] | None, n_workers: int, rank: int) -> list[jax.Device]:
        assert n_workers == 1, "a mesh of several hosts needs a process for each"
        return list(self._devices)

    def open_transport(self, me: int) -> InProcessTransport:
        self._transports.append(InProcessTransport(self._hub, me))
        return self._transports[-1]

    def end(self) -> None:
        for transport in self._transports:
            transport.lose()


class ThreadActor:
    """A `launcher.Actor` in its own thread."""

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
        if method != "live":  # the end of the actor answers it
            threading.Thread(target=self._answer, args=(reply, method, pickle.dumps(args)), daemon=True).start()
        return reply

    def end(self) -> None:
        """As if killed: open calls fail, and peers lose the worker."""
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
        """args: pickled."""
        answer, error = b"", None
        try:
            with jax.enable_x64(True):  # as in a worker's own process
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
    """A `launcher.Launcher` of threads, on `devices` of this process."""

    platform = "cpu"

    def __init__(self, devices: Sequence[jax.Device], devices_per_host: int, timeout_s: float = 60.0) -> None:
        self.devices_per_host, self.timeout_s = devices_per_host, timeout_s
        self._devices, self._hub = tuple(devices), Hub()
        self._numbers = itertools.count()

    def start_meshes(self, requested: Sequence[tuple[int, int]], check: Callable[[], None]) -> list[list[WorkerHandle]]:
        check()
        return [[self._start(first, n)] for first, n in requested]

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

    def release(self) -> None: ...

    def describe(self) -> ClusterSpec:
        n_hosts = len(self._devices) // self.devices_per_host
        return ClusterSpec.preset("cpu", num_hosts=n_hosts, devices_per_host=self.devices_per_host)

    def available_hosts(self) -> int:
        return len(self._devices) // self.devices_per_host

    def restarted(self) -> InProcessLauncher:
        return InProcessLauncher(self._devices, self.devices_per_host, self.timeout_s)

    def check_memory(self, n_bytes: int) -> None:
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

    def check(self) -> None: ...

    def fault(self) -> str | None:
        return None

    def lost_hosts(self, numbers: Iterable[int]) -> Mapping[int, str]:
        return {}
