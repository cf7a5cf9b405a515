"""Sessions whose workers are processes of this machine, without Ray: for what needs meshes over several hosts."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import pickle
import queue
import secrets
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from typing import Any

import minialpa
from minialpa.cluster import ClusterSpec
from minialpa.inter.lower.mesh_programs import split_by_mesh
from minialpa.runtime.cluster.cluster_runtime import ClusterRuntime
from minialpa.runtime.cluster.launcher import CallRaised, Reply, WorkerEnded, WorkerHandle
from minialpa.runtime.workers.worker import Worker
from minialpa.runtime.workers.worker_process import WorkerSettings
from minialpa.session import Session, _Current


def _serve(connection: Any, settings: WorkerSettings) -> None:
    """A worker: answers calls one after the other, and those aside in threads of their own."""
    os.environ.pop("XLA_FLAGS", None)
    worker, lock = Worker(settings), threading.Lock()
    calls: queue.SimpleQueue[tuple[int, str, tuple[Any, ...]]] = queue.SimpleQueue()

    def answer(number: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            reply = number, True, getattr(worker, method)(*args)
        except Exception as error:
            reply = number, False, (method, repr(error), traceback.format_exc())
        with lock:
            connection.send_bytes(pickle.dumps(reply))

    def answer_in_order() -> None:
        while True:
            answer(*calls.get())

    threading.Thread(target=answer_in_order, daemon=True).start()
    while True:
        aside, *call = pickle.loads(connection.recv_bytes())
        if not aside:
            calls.put(tuple(call))
        elif call[1] != "live":  # which is answered by the end of the process alone
            threading.Thread(target=answer, args=call, daemon=True).start()


class ProcessActor:
    """A worker in a process of its own. See `launcher.Actor`.

    Attributes:
        n_bytes: the bytes of all calls so far.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, child = context.Pipe()
        self.process = context.Process(target=_serve, args=(child, settings), daemon=True)
        self.process.start()
        child.close()
        self._numbers, self._pending, self._lock = itertools.count(), dict[int, Future[Any]](), threading.Lock()
        self.n_bytes = 0
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, method: str, *args: Any) -> Reply:
        return self._call(False, method, args)

    def call_aside(self, method: str, *args: Any) -> Reply:
        return self._call(True, method, args)

    def _call(self, aside: bool, method: str, args: tuple[Any, ...]) -> Reply:
        reply: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            message = pickle.dumps((aside, number, method, args))
            self.n_bytes += len(message)
            self._pending[number] = reply
            try:
                self._connection.send_bytes(message)
            except OSError:
                self._pending.pop(number).set_exception(WorkerEnded("it had ended before."))
        return reply

    def _read(self) -> None:
        try:
            while True:
                number, is_value, value = pickle.loads(self._connection.recv_bytes())
                reply = self._pending.pop(number)
                if is_value:
                    reply.set_result(value)
                else:
                    reply.set_exception(CallRaised(*value))
        except (EOFError, OSError):
            with self._lock:
                pending, self._pending = self._pending, {}
            for reply in pending.values():
                reply.set_exception(WorkerEnded("it was killed."))


class ProcessLauncher:
    """Launches workers as processes. See `launcher.Launcher`."""

    platform = "cpu"
    timeout_s = 60.0

    def __init__(self, devices_per_host: int) -> None:
        self.devices_per_host = devices_per_host
        self._secret, self._numbers = secrets.token_bytes(16), itertools.count()

    def start_meshes(self, wanted: Sequence[tuple[int, int]], check: Callable[[], None]) -> list[list[WorkerHandle]]:
        return [self._start(*key) for key in wanted]

    def _start(self, first_device: int, n_devices: int) -> list[WorkerHandle]:
        per_host = self.devices_per_host
        assert first_device % per_host == 0 and n_devices % per_host == 0, "whole hosts"
        workers = []
        for first in range(first_device, first_device + n_devices, per_host):
            settings = WorkerSettings(
                number=next(self._numbers),
                host=first // per_host,
                ip="127.0.0.1",
                secret=self._secret,
                timeout_s=self.timeout_s,
                platform=self.platform,
                n_devices=per_host,
            )
            workers.append(
                WorkerHandle(
                    number=settings.number,
                    host=settings.host,
                    first_device=first,
                    n_devices=per_host,
                    actor=ProcessActor(settings),
                )
            )
        address = workers[0].actor.call("reserve_port").result()
        joining = [worker.actor.call("join", address, len(workers), k) for k, worker in enumerate(workers)]
        for reply in joining:
            reply.result(timeout=120)
        return workers

    def end(self, workers: Sequence[WorkerHandle]) -> None:
        for worker in workers:
            assert isinstance(worker.actor, ProcessActor)
            worker.actor.process.kill()
            worker.actor.process.join()

    def release(self) -> None:
        """The processes have ended."""

    def share(self, value: Any) -> Any:
        return value

    def wait(self, replies: Sequence[Reply], timeout_s: float) -> list[Reply]:
        return list(wait(replies, timeout_s, return_when=FIRST_COMPLETED)[0])

    def ready(self, replies: Sequence[Reply]) -> list[Reply]:
        return [reply for reply in replies if reply.done()]

    def answer(self, reply: Reply) -> Any:
        return reply.result()

    def check(self) -> None:
        """Workers can always start."""

    def fault(self) -> str | None:
        return None

    def lost_hosts(self, numbers: Iterable[int]) -> Mapping[int, str]:
        return {}


@contextmanager
def process_session(n_hosts: int, devices_per_host: int) -> Iterator[ClusterRuntime]:
    """The session of this process, ended behind the block. A mesh has whole hosts."""
    spec = ClusterSpec.preset("cpu", num_hosts=n_hosts, devices_per_host=devices_per_host)
    split = functools.partial(split_by_mesh, cluster=spec, platform="cpu")
    runtime = ClusterRuntime(ProcessLauncher(devices_per_host), split)
    minialpa.shutdown()
    _Current.session = Session((), spec, None, runtime)
    try:
        yield runtime
    finally:
        minialpa.shutdown()
