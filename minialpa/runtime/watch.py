"""The watch over the workers of a session: whether they live, answer and get on.

A call of `Worker.live` ends when its process does, so whoever waits for anything waits for these calls too. While that
takes long, `beat` asks the workers where they are: their answers show who hangs, and where one was that dies.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Any

import ray
from ray.exceptions import RayError

from minialpa.runtime.failures import Failure, Fault, Status
from minialpa.runtime.ray_cluster import WorkerHandle


class Watch:
    """timeout_s: how long a worker may take to answer, and a step to get on. interval_s: time between two beats."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.interval_s = min(1.0, timeout_s / 4)
        self.lives: dict[Any, WorkerHandle] = {}
        self._known: dict[int, Status] = {}
        self._asked: dict[Any, tuple[WorkerHandle, float]] = {}
        self._last_move = time.monotonic()

    def add(self, workers: Iterable[WorkerHandle]) -> None:
        """Watch workers that have just started."""
        started = list(workers)
        self.lives.update((w.actor.live.options(concurrency_group="life").remote(), w) for w in started)
        now = time.monotonic()
        self._asked.update((_ask(w), (w, now)) for w in started)  # which process each of them is

    def remove(self, workers: Iterable[WorkerHandle]) -> None:
        """Forget workers that are about to end."""
        gone = {w.number for w in workers}
        self.lives = {ref: w for ref, w in self.lives.items() if w.number not in gone}
        self._asked = {ref: asked for ref, asked in self._asked.items() if asked[0].number not in gone}

    def watches(self, worker: WorkerHandle) -> bool:
        """Whether nobody has asked to forget the worker."""
        return any(w.number == worker.number for w in self.lives.values())

    def status(self, worker: WorkerHandle) -> Status:
        """Where the worker was when it last said so."""
        self._read()
        return self._known.get(worker.number) or Status(worker=worker.number, host=worker.host)

    def moved(self) -> None:
        """Something has got on."""
        self._last_move = time.monotonic()

    def ask(self, but: Collection[int] = ()) -> dict[Any, WorkerHandle]:
        """Ask the workers, but for those with these numbers, for their status."""
        asked = [w for w in self.lives.values() if w.number not in but]
        return {_ask(w): w for w in asked}

    def beat(self, is_stepping: bool) -> Failure | None:
        """Read the answers to the last beat and ask again; who does not answer, or does not get on in a step."""
        self._read()
        now = time.monotonic()
        waiting = {w.number for w, _ in self._asked.values()}
        self._asked.update((ref, (w, now)) for ref, w in self.ask(waiting).items())
        for worker, asked in self._asked.values():
            if now - asked > self.timeout_s:
                return silent(self.status(worker), now - asked)
        if is_stepping and self._known and now - self._last_move > self.timeout_s:
            return _stuck(list(self._known.values()), self.timeout_s)
        return None

    def _read(self) -> None:
        """Read the answers that have come. One that is not as the last one shows that its worker gets on."""
        done, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0) if self._asked else ([], [])
        for ref in done:
            del self._asked[ref]
            try:
                status = ray.get(ref)
            except RayError:
                continue  # it has died, and its call of `live` says so
            if self._known.get(status.worker) != status:
                self._known[status.worker] = status
                self.moved()


def _ask(worker: WorkerHandle) -> Any:
    return worker.actor.status.options(concurrency_group="control").remote()


def silent(status: Status, seconds: float) -> Failure:
    """The failure of a worker that does not answer."""
    return Failure(Fault.SILENT, status, f"it has not answered for {seconds:.0f} s. Its process hangs, or its network.")


def _stuck(statuses: list[Status], seconds: float) -> Failure:
    # Who waits for a message is not the one who holds up the others.
    first = min(statuses, key=lambda s: ("Receive" in s.instruction, s.step, s.worker))
    message = (
        f"no worker has got on for {seconds:g} s, though all of them answer. A collective hangs, or the step takes so "
        "long: then raise `worker_timeout_s` of `minialpa.init`."
    )
    return Failure(Fault.STUCK, first, message)
