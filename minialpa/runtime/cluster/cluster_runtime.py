"""The runtime of a session on a cluster: meshes of workers, the steps that they run, and the arrays that they hold.

A step is one call to each worker, and calls return at once. Every wait also watches all running steps and all workers.
A failed step or a lost worker ends the session with one WorkerError that names the cause. Other calls may fail, for
example for lack of memory, without ending the session.

Threads make calls in turns (`Turns`), and wait at the same time.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np

from minialpa.errors import WorkerError
from minialpa.programs.mesh_program import ArrayType, MeshProgram
from minialpa.programs.program import MeshShape, Program
from minialpa.runtime.cluster.distributed_array import DistributedArray, MeshWorkers
from minialpa.runtime.cluster.launcher import CallRaised, Launcher, Reply, WorkerEnded, WorkerHandle
from minialpa.runtime.cluster.turns import Turns
from minialpa.runtime.cluster.watch import Watch
from minialpa.runtime.workers.arguments import from_plain
from minialpa.runtime.workers.failures import (
    Failure,
    Fault,
    Status,
    call_raised,
    died,
    lost_host,
    session_error,
    silent,
    with_stage,
    worker_error,
)
from minialpa.support.progress import phase

#: Steps under way when another may start: one runs, one waits.
_STEPS_AHEAD = 2
#: Seconds for other workers to report failures.
_GRACE_S = 2.0
#: Seconds without an answer before a worker's host is probed. Busy workers answer late, too.
_LATE_S = 2.0


class ClusterRuntime:
    """The workers, steps and arrays of one session.

    Attributes:
        split: the program of each mesh, given the types of buffers that no function reads or writes.
        dropped: programs without references.
        movers: see `move_arrays`; last used at the end.
        turn, in_use, turn_even_if_ended: see `Turns`.
    """

    def __init__(
        self, launcher: Launcher, split: Callable[[Program, Mapping[int, ArrayType]], Sequence[MeshProgram]]
    ) -> None:
        self.launcher, self.split = launcher, split
        self.dropped: deque[int] = deque()
        self.movers: dict[Any, Any] = {}
        self._turns = Turns(self._stop, self._release)
        self.turn, self.in_use, self.turn_even_if_ended = (
            self._turns.turn,
            self._turns.in_use,
            self._turns.turn_even_if_ended,
        )
        self._watch = Watch(launcher)
        self._meshes: dict[tuple[int, int], MeshWorkers] = {}
        self._numbers, self._step_numbers = itertools.count(), itertools.count()

        # Protects the watch and these lists. Threads hold it for moments only.
        self._lock = threading.RLock()
        self._steps: deque[dict[Reply, WorkerHandle]] = deque()
        self._noted_calls: deque[dict[Reply, WorkerHandle]] = deque()
        self._beat_at_s = time.monotonic()

    def new_number(self) -> int:
        return next(self._numbers)

    def new_step(self) -> int:
        """Moves of arrays are steps, too."""
        return next(self._step_numbers)

    # ---- meshes ---------------------------------------------------------------------------------------------------

    def meshes(self, requested: Iterable[tuple[int, int]]) -> list[MeshWorkers]:
        """Running workers for each (first device, number of devices). Call it in a turn.

        Ends other meshes that share a device; their arrays come to this process.
        """
        self.check()
        keys = list(requested)
        missing = [key for key in keys if key not in self._meshes]
        if missing:
            self.launcher.check()

        for key, mesh in list(self._meshes.items()):
            if key not in keys and any(_overlap(mesh, *other) for other in keys):
                self._retire(key, mesh)

        for key, workers in zip(missing, self._start(missing), strict=True):
            self._meshes[key] = MeshWorkers(*key, workers)
            with self._lock:
                self._watch.add(workers)
        return [self._meshes[key] for key in keys]

    def _start(self, keys: Sequence[tuple[int, int]]) -> Sequence[list[WorkerHandle]]:
        if not keys:
            return ()
        with phase("starting workers"):
            return self.launcher.start_meshes(keys, self._turns.check)

    def n_compiled(self, worker: WorkerHandle, program: int) -> int:
        return self._watch.n_compiled(worker, program)

    @property
    def workers(self) -> list[WorkerHandle]:
        return [worker for mesh in list(self._meshes.values()) for worker in mesh.workers]

    def unload_dropped(self) -> None:
        numbers = [self.dropped.popleft() for _ in range(len(self.dropped))]
        for number in numbers:
            self.ask(self.workers, "unload", number)

    def _retire(self, key: tuple[int, int], mesh: MeshWorkers) -> None:
        """End the workers of a mesh, and keep the values of their arrays here."""
        self.sync()
        with self._lock:
            waiting = list(self._noted_calls)
        for calls in waiting:  # of other threads
            self._wait(calls)

        self.fetch([a for a in list(mesh.arrays.values()) if not a.is_deleted() and not a.held_here])
        mesh.alive = False
        del self._meshes[key]

        # Before the workers end: the watch would report a failure.
        with self._lock:
            self._watch.remove(mesh.workers)
        self.launcher.end(mesh.workers)

    # ---- calls ----------------------------------------------------------------------------------------------------

    def ask(self, workers: Sequence[WorkerHandle], method: str, *args: Any) -> list[Any]:
        """The answers of all workers to one call, made in one turn."""
        with self.turn():
            return self.gather({w.actor.call(method, *args): w for w in workers})

    def gather(self, calls: dict[Reply, WorkerHandle]) -> list[Any]:
        """Raises WorkerError if a call, or a step under way, fails."""
        with self._turns.in_use():
            self._wait(calls)
            return [self._answer(ref, worker) for ref, worker in calls.items()]

    def note_waiting(self, calls: dict[Reply, WorkerHandle]) -> None:
        """Calls that this thread awaits after its turn (`gather_noted`). Their workers do not end before."""
        with self._lock:
            self._noted_calls.append(calls)

    def gather_noted(self, calls: dict[Reply, WorkerHandle]) -> list[Any]:
        try:
            return self.gather(calls)
        finally:
            with self._lock, suppress(ValueError):
                self._noted_calls.remove(calls)

    def free_unused_arrays(self) -> None:
        """Wait while too many steps are under way. Call it before a turn, not in it."""
        with self._turns.in_use():
            while True:
                with self._lock:
                    oldest = self._steps[0] if len(self._steps) > _STEPS_AHEAD else None
                if oldest is None:
                    return
                self._finish(oldest)

    def note_step(self, calls: dict[Reply, WorkerHandle]) -> None:
        with self._lock:
            self._steps.append(calls)

    def sync(self) -> None:
        """Wait until all started steps have ended."""
        with self._turns.in_use():
            self.check()
            with self._lock:
                steps = list(self._steps)
            for step in steps:
                self._finish(step)

    def _finish(self, step: dict[Reply, WorkerHandle]) -> None:
        self._wait(step)
        with self._lock, suppress(ValueError):  # another thread may have waited for it, too
            self._steps.remove(step)

    def check(self) -> None:
        """Raise WorkerError if the session has ended, a worker is lost or a step has failed."""
        with self._turns.in_use():
            watched = self._watched_calls()
            for reply in self.launcher.ready(list(watched)):
                self._look_at(reply, watched[reply])

    def _watched_calls(self) -> dict[Reply, WorkerHandle]:
        with self._lock:
            watched = dict(self._watch.lives)
            for step in self._steps:
                watched.update(step)
            return watched

    def _wait(self, calls: dict[Reply, WorkerHandle]) -> None:
        """Raises WorkerError if a step or a worker fails: a call after a hanging step is never answered."""
        waiting, seen = set(calls), set[Reply]()
        with self._lock:
            self._watch.note_progress()

        while waiting:
            watched = {ref: worker for ref, worker in (self._watched_calls() | calls).items() if ref not in seen}
            done = self.launcher.wait(list(watched), self._watch.interval_s)
            self._turns.check()

            for ref in done:
                with self._lock:
                    self._watch.note_progress()
                self._look_at(ref, watched[ref])
                seen.add(ref)
                waiting.discard(ref)

            # With very short steps, no wait may reach the interval.
            if not done or time.monotonic() - self._beat_at_s >= self._watch.interval_s:
                self._beat()

    def _look_at(self, ref: Reply, worker: WorkerHandle) -> None:
        """Raises WorkerError if a reply shows a failure. A retired worker may end."""
        failure = self._failure_in(ref, worker)
        with self._lock:
            was_retired = not self._watch.watches(worker)
        if failure is not None and not was_retired:
            self._fail(failure)

    def _failure_in(self, reply: Reply, worker: WorkerHandle) -> Failure | None:
        """The failure of a step, or by the end of the worker, if any."""
        try:
            answer = self.launcher.answer(reply)
        except CallRaised as error:
            # Otherwise, the caller of the method gets this error.
            with self._lock:
                is_of_step = any(reply in step for step in self._steps)
            if not is_of_step:
                return None
            return call_raised(self._status(worker), error.method, error.message, error.traceback)
        except WorkerEnded as error:
            return died(self._status(worker), str(error))
        return answer if isinstance(answer, Failure) else None

    def _answer(self, reply: Reply, worker: WorkerHandle) -> Any:
        """Raises WorkerError if the call raised; the session goes on."""
        try:
            return self.launcher.answer(reply)
        except CallRaised as error:
            failure = call_raised(self._status(worker), error.method, error.message, error.traceback)
            raise worker_error(failure, (), has_ended=False) from error

    def _status(self, worker: WorkerHandle) -> Status:
        with self._lock:
            return self._with_known_stage(self._watch.status(worker))

    def _with_known_stage(self, status: Status) -> Status:
        """Adds the stage of a worker that has not run a step."""
        meshes = sorted(list(self._meshes.values()), key=lambda mesh: mesh.first_device)
        numbers = [[worker.number for worker in mesh.workers] for mesh in meshes]
        return with_stage(status, next((i for i, mesh in enumerate(numbers) if status.worker in mesh), -1))

    # ---- arrays ---------------------------------------------------------------------------------------------------

    def fetch(self, arrays: Sequence[DistributedArray]) -> list[Any]:
        """The values of arrays, which keep them.

        One turn makes all calls, so the values belong together. Other threads may donate or delete arrays meanwhile.
        """
        calls: dict[Reply, WorkerHandle] = {}
        owners: list[list[DistributedArray]] = []
        with self._turns.in_use():
            with self.turn():
                self.check()
                # Another thread may have fetched some and ended their mesh.
                values = {array.number: array.kept for array in arrays if array.held_here}
                missing = [array for array in arrays if array.number not in values]

                for mesh, mine in _by_mesh(missing):
                    for worker in mesh.workers:
                        calls[worker.actor.call("fetch", [a.number for a in mine])] = worker
                        owners.append(mine)
                self.note_waiting(calls)

            answers = self.gather_noted(calls)

        values |= _join_shards(zip(owners, answers, strict=True))
        for array in missing:
            array.keep(values[array.number])
        return [values[array.number] for array in arrays]

    def mesh_of(self, shape: MeshShape) -> MeshWorkers:
        return self._meshes[shape.first_device, math.prod(shape.logical_shape)]

    # ---- hosts ----------------------------------------------------------------------------------------------------

    def available_hosts(self) -> int:
        """Works after the end of the session, too."""
        try:
            with self._turns.in_use():
                return self.launcher.available_hosts()
        except WorkerError:
            # Another thread may be about to close the connection to the cluster.
            self.shutdown()
        return self.launcher.available_hosts()

    def restarted(self) -> Launcher:
        """Ends this session."""
        self.shutdown(
            "`minialpa.restart()` was called. Compile the step anew, and restore the state from a checkpoint."
        )
        return self.launcher.restarted()

    # ---- the end --------------------------------------------------------------------------------------------------

    def shutdown(
        self,
        reason: str = "`minialpa.shutdown()` was called. Call `minialpa.init`, and compile the step anew.",
    ) -> None:
        """End all workers and give the hosts back. A second call has no effect.

        Waiting threads raise a WorkerError with `reason`.
        """
        self._turns.shutdown(WorkerError(reason))

    def abandon(self, message: str) -> None:
        """End the session; its next use raises a WorkerError with `message`. Call it in a turn."""
        with suppress(WorkerError):
            self._turns.end(WorkerError(message))

    def _stop(self) -> None:
        for mesh in list(self._meshes.values()):
            mesh.alive = False
        self.launcher.end(self.workers)

    def _release(self) -> None:
        with self._lock:
            self._watch.remove(list(self._watch.lives.values()))
            self._steps.clear()
        self._meshes.clear()
        self.launcher.release()

    def _beat(self) -> None:
        """Ends the session if a worker, a host or the cluster has failed."""
        with self._lock:
            self._beat_at_s = time.monotonic()
            failure = self._watch.heartbeat(bool(self._steps))
            late = self._watch.late(_LATE_S)

        # A host that is cut off ends no connection. Probes wait, so not in the lock.
        lost = self.launcher.lost_hosts(worker.host for worker in late) if late else {}
        if lost:
            self._fail(*(lost_host(self._status(w), lost[w.host]) for w in late if w.host in lost))
        if failure is not None:
            self._fail(dataclasses.replace(failure, where=self._with_known_stage(failure.where)))
        fault = self.launcher.fault()
        if fault is not None:
            self._turns.end(WorkerError(fault))

    def _fail(self, *first: Failure) -> NoReturn:
        """End the session. Other workers may report the cause."""
        self._turns.end(session_error(first, []), lambda: session_error(*self._hear_of_failures(first)))

    def _hear_of_failures(self, first: Sequence[Failure]) -> tuple[list[Failure], list[Status]]:
        """Failures within `_GRACE_S` seconds, and the status of the other workers: the first report may come from a
        victim.
        """
        found, statuses = list(first), []
        with self._lock:
            status_calls = self._watch.ask({f.where.worker for f in first})
        watched = self._watched_calls() | status_calls
        deadline = time.monotonic() + _GRACE_S

        # Workers never answer `live`.
        while watched.keys() - self._watch.lives.keys() and (left := deadline - time.monotonic()) > 0:
            for ref in self.launcher.wait(list(watched), left):
                worker = watched.pop(ref)
                failure = self._failure_in(ref, worker)
                if failure is not None:
                    found.append(failure)
                elif status_calls.pop(ref, None) is not None:
                    statuses.append(self._with_known_stage(self.launcher.answer(ref)))

        known = {f.where.worker for f in found}
        with self._lock:
            seconds = {w.number: self._watch.unanswered_s(w, _GRACE_S) for w in status_calls.values()}
        unheard = [w for w in status_calls.values() if w.number not in known]
        found += [silent(self._status(w), seconds[w.number]) for w in unheard]
        return self._with_lost_hosts(found), statuses

    def _with_lost_hosts(self, found: list[Failure]) -> list[Failure]:
        """A dead or silent worker whose host is lost has the fault LOST_HOST."""
        lost = self.launcher.lost_hosts(f.where.host for f in found if f.fault in (Fault.DIED, Fault.SILENT))
        return [lost_host(f.where, lost[f.where.host]) if f.where.host in lost else f for f in found]


def _overlap(mesh: MeshWorkers, first_device: int, n_devices: int) -> bool:
    return first_device < mesh.devices.stop and mesh.first_device < first_device + n_devices


def _by_mesh(arrays: Sequence[DistributedArray]) -> list[tuple[MeshWorkers, list[DistributedArray]]]:
    found: dict[MeshWorkers, list[DistributedArray]] = {}
    for array in arrays:
        array.check_usable()
        mesh = next((copy.mesh for copy in array.copies if copy.mesh.alive), None)
        if mesh is None:
            raise WorkerError(
                f"An array of shape {array.shape} is lost, because the session that held it has ended. Restore it from "
                "a checkpoint; next time, call `jax.device_get` on values that you need before the session ends."
            )
        found.setdefault(mesh, []).append(array)
    return list(found.items())


def _join_shards(answers: Iterable[tuple[Sequence[DistributedArray], Any]]) -> dict[int, Any]:
    """answers: for each worker, its arrays and the shards that it sent."""
    data: dict[int, Any] = {}
    types: dict[int, ArrayType] = {}

    for arrays, answer in answers:
        for array, shards in zip(arrays, answer, strict=True):
            types[array.number] = array.type
            for box, sent in shards:
                shard = from_plain(sent, array.type.dtype)
                # Without a copy if one shard covers the array.
                if array.number not in data:
                    shape = array.type.data_shape
                    data[array.number] = shard if shard.shape == shape else np.empty(shape, shard.dtype)
                if data[array.number] is not shard:
                    data[array.number][tuple(slice(*ends) for ends in box)] = shard
    return {number: kind.typed(data[number]) for number, kind in types.items()}
