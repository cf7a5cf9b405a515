"""The watch over the workers of a session: whether they live, answer and make progress.

A call of `Worker.live` ends with its process, so every wait includes these calls. During a long wait, the runtime calls
`heartbeat` about once a second, which asks all workers for their status. The answers show which worker hangs, and the
last position of a worker that dies later.

The runtime uses it under its lock.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from minialpa.runtime.cluster.launcher import CallRaised, Launcher, Reply, WorkerEnded, WorkerHandle
from minialpa.runtime.workers.failures import Failure, Status, hung_worker, stalled_step


class Watch:
    """The workers to watch.

    Attributes:
        timeout_s: time for a worker to answer, and for a step to make progress.
        lives: the calls of `Worker.live`.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.timeout_s = launcher.timeout_s
        self.interval_s = min(1.0, self.timeout_s / 4)
        self.lives: dict[Reply, WorkerHandle] = {}
        self._launcher = launcher
        self._last_statuses: dict[int, Status] = {}  # The last status of each worker.
        self._open_calls: dict[Reply, tuple[WorkerHandle, float]] = {}  # Unanswered calls, and when they were made.
        self._last_progress_s = time.monotonic()

    def add(self, workers: Iterable[WorkerHandle]) -> None:
        started = list(workers)
        self.lives.update((w.actor.call_aside("live"), w) for w in started)
        # Their first status has the number of the process.
        now = time.monotonic()
        self._open_calls.update((_ask(w), (w, now)) for w in started)

    def remove(self, workers: Iterable[WorkerHandle]) -> None:
        removed = {w.number for w in workers}
        self.lives = {ref: w for ref, w in self.lives.items() if w.number not in removed}
        self._open_calls = {ref: asked for ref, asked in self._open_calls.items() if asked[0].number not in removed}

    def watches(self, worker: WorkerHandle) -> bool:
        return any(w.number == worker.number for w in self.lives.values())

    def status(self, worker: WorkerHandle) -> Status:
        self._read_answers()
        return self._last_status(worker)

    def n_compiled(self, worker: WorkerHandle, program: int) -> int:
        last, n = self._last_status(worker).compiled
        return n if last == program else 0

    def note_progress(self) -> None:
        """The time for progress restarts."""
        self._last_progress_s = time.monotonic()

    def ask(self, but: Collection[int] = ()) -> dict[Reply, WorkerHandle]:
        """Ask for status, except the numbers in `but`; returns the calls."""
        asked = [w for w in self.lives.values() if w.number not in but]
        return {_ask(w): w for w in asked}

    def heartbeat(self, is_stepping: bool) -> Failure | None:
        """Read answers and ask once more; returns the failure that the answers show, if any.

        is_stepping: whether a step is under way. Only then must workers make progress.
        """
        self._read_answers()
        now = time.monotonic()
        waiting = {w.number for w, _ in self._open_calls.values()}
        self._open_calls.update((ref, (w, now)) for ref, w in self.ask(waiting).items())

        unanswered = [(self._last_status(w), now - asked_s) for w, asked_s in self._open_calls.values()]
        failure = hung_worker(unanswered, self.timeout_s)
        if failure is None and is_stepping:
            failure = stalled_step(list(self._last_statuses.values()), now - self._last_progress_s, self.timeout_s)
        return failure

    def late(self, seconds: float) -> list[WorkerHandle]:
        """Without an answer for so long: busy, or gone with their hosts."""
        now = time.monotonic()
        return [w for w, asked_s in self._open_calls.values() if now - asked_s >= seconds]

    def unanswered_s(self, worker: WorkerHandle, least_s: float) -> float:
        """Since the oldest unanswered call, at least `least_s`."""
        self._read_answers()
        now = time.monotonic()
        return max([least_s, *(now - asked_s for w, asked_s in self._open_calls.values() if w.number == worker.number)])

    def _last_status(self, worker: WorkerHandle) -> Status:
        return self._last_statuses.get(worker.number) or Status(worker=worker.number, host=worker.host)

    def _read_answers(self) -> None:
        """A changed status is progress."""
        for ref in self._launcher.ready(list(self._open_calls)):
            del self._open_calls[ref]
            try:
                status = self._launcher.answer(ref)
            except (CallRaised, WorkerEnded):
                continue  # The worker has died, as its call of `live` shows.
            if self._last_statuses.get(status.worker) != status:
                self._last_statuses[status.worker] = status
                self.note_progress()


def _ask(worker: WorkerHandle) -> Reply:
    return worker.actor.call_aside("status")
