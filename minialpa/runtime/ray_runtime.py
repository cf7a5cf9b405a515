"""The runtime of a session on Ray: meshes of workers, the steps that they run, and the arrays that they hold.

A step is one call to each worker. Calls return at once; what goes wrong shows in the answers, which every wait looks
at, whatever it waits for. One failed worker ends the session: the others are told, all are ended, the hosts are given
back, and whoever waits gets one WorkerError.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import ray
from jax.sharding import PartitionSpec
from ray.exceptions import RayActorError, RayError, RayTaskError

from minialpa.errors import WorkerError
from minialpa.mesh_program import ArrayType, MeshProgram
from minialpa.program import InputSlot, MeshShape, OutputSlot, Program, Transfer
from minialpa.runtime.distributed_array import Copy, DistributedArray, MeshWorkers
from minialpa.runtime.plain import from_plain
from minialpa.runtime.ray_cluster import RayCluster, WorkerHandle, end_workers
from minialpa.runtime.worker import Failure, Status

#: Steps that are under way at most: one runs, one waits at the workers.
_STEPS_AHEAD = 2
#: Seconds that other workers have to say what they know of a failure.
_GRACE_S = 2.0


class RayRuntime:
    """Meshes, steps and arrays of one session. Usable until `shutdown`, or until a worker fails.

    split: what each mesh of a program does. dropped: programs that nobody uses any more.
    """

    def __init__(
        self, cluster: RayCluster, split: Callable[[Program, Mapping[int, ArrayType]], Sequence[MeshProgram]]
    ) -> None:
        self.cluster, self.split = cluster, split
        self.dropped: deque[int] = deque()
        self._moves: dict[Any, Any] = {}
        self.failure: WorkerError | None = None
        self._meshes: dict[tuple[int, int], MeshWorkers] = {}
        self._numbers = itertools.count()
        self._steps: deque[dict[Any, WorkerHandle]] = deque()

    def new_number(self) -> int:
        """A number for an array, a program or a step; never given twice."""
        return next(self._numbers)

    # ---- meshes ---------------------------------------------------------------------------------------------------

    def meshes(self, wanted: Iterable[tuple[int, int]]) -> list[MeshWorkers]:
        """Running workers for each (first device, number of devices).

        Meshes of the same devices are used again. Others that share devices with those that are wanted are ended; the
        arrays that they hold come to this process.
        """
        self.check()
        keys = list(wanted)
        for key, mesh in list(self._meshes.items()):
            if key not in keys and any(
                first < mesh.devices.stop and mesh.first_device < first + n for first, n in keys
            ):
                self._retire(key, mesh)
        missing = [key for key in keys if key not in self._meshes]
        for key, workers in zip(missing, self.cluster.start_meshes(missing), strict=True):
            self._meshes[key] = MeshWorkers(*key, workers)
        return [self._meshes[key] for key in keys]

    def unload_dropped(self) -> None:
        """Have workers forget the programs that nobody uses any more."""
        numbers = [self.dropped.popleft() for _ in range(len(self.dropped))]
        for number in numbers:
            self.ask([w for mesh in self._meshes.values() for w in mesh.workers], "unload", number)

    def _retire(self, key: tuple[int, int], mesh: MeshWorkers) -> None:
        self.sync()
        self.fetch([a for a in list(mesh.arrays.values()) if not a.is_deleted() and not a.held_here])
        mesh.alive = False
        del self._meshes[key]
        end_workers(mesh.workers)

    # ---- calls ----------------------------------------------------------------------------------------------------

    def ask(self, workers: Sequence[WorkerHandle], method: str, *args: Any) -> list[Any]:
        """Call a method of each worker with the same arguments and wait for the answers."""
        return self.gather({getattr(w.actor, method).remote(*args): w for w in workers})

    def gather(self, calls: dict[Any, WorkerHandle]) -> list[Any]:
        """Answers of calls, in order. Raises WorkerError if one of them, or of the steps under way, fails."""
        self._wait(calls)
        return [self._answer(ref, worker) for ref, worker in calls.items()]

    def start_step(self, calls: dict[Any, WorkerHandle]) -> None:
        """Note a step under way. Waits while there are too many."""
        self._steps.append(calls)
        while len(self._steps) > _STEPS_AHEAD:
            self._wait(self._steps[0])
            self._steps.popleft()

    def sync(self) -> None:
        """Wait until every step has ended."""
        self.check()
        while self._steps:
            self._wait(self._steps[0])
            self._steps.popleft()

    def check(self) -> None:
        """Raise WorkerError if the session has ended."""
        if self.failure is not None:
            raise WorkerError(
                f"The session has ended: {self.failure}\nCall `minialpa.shutdown()` and `minialpa.init` for a new one, "
                "and restore the state from a checkpoint."
            )

    def _wait(self, calls: dict[Any, WorkerHandle]) -> None:
        """Wait for calls, and look at all steps under way: what waits behind a step that hangs is never answered."""
        watched = dict(calls)
        for step in self._steps:
            watched.update(step)
        waiting = set(calls)
        while waiting:
            done, _ = ray.wait(list(watched), num_returns=1, timeout=self.cluster.request.timeout_s)
            if not done:
                self._check_responsive()
            for ref in done:
                worker = watched.pop(ref)
                waiting.discard(ref)
                try:
                    answer = ray.get(ref)
                except RayActorError as error:
                    self._fail(_death(worker, error))
                except RayTaskError:
                    continue  # a call with bad arguments; whoever made it sees the error
                except RayError as error:
                    self._fail(_death(worker, error))
                else:
                    if isinstance(answer, Failure):
                        self._fail(answer)

    def _answer(self, ref: Any, worker: WorkerHandle) -> Any:
        try:
            return ray.get(ref)
        except RayTaskError as error:
            raise WorkerError(f"Worker {worker.number} on host {worker.host}: {error}") from error

    # ---- arrays ---------------------------------------------------------------------------------------------------

    def fetch(self, arrays: Sequence[DistributedArray]) -> None:
        """Bring the values of arrays to this process, all with one call to each worker."""
        self.check()
        by_mesh: dict[int, tuple[MeshWorkers, list[DistributedArray]]] = {}
        for array in arrays:
            mesh = next((copy.mesh for copy in array.copies if copy.mesh.alive), None)
            if mesh is None:
                raise WorkerError(f"The session that held an array of shape {array.shape} has ended.")
            by_mesh.setdefault(id(mesh), (mesh, []))[1].append(array)
        calls: dict[Any, WorkerHandle] = {}
        owners: list[list[DistributedArray]] = []
        for mesh, mine in by_mesh.values():
            for worker in mesh.workers:
                calls[worker.actor.fetch.remote([a.number for a in mine])] = worker
                owners.append(mine)
        values: dict[int, Any] = {}
        for mine, answer in zip(owners, self.gather(calls), strict=True):
            for array, shards in zip(mine, answer, strict=True):
                for box, sent in shards:
                    shard = from_plain(sent, array.type.dtype)
                    if array.number not in values:
                        whole = array.type.data_shape
                        values[array.number] = shard if shard.shape == whole else np.empty(whole, shard.dtype)
                    if values[array.number] is not shard:
                        values[array.number][tuple(slice(*ends) for ends in box)] = shard
        for array in arrays:
            array.keep(array.type.typed(values[array.number]))

    def move(self, moves: Sequence[tuple[DistributedArray, Copy, MeshShape, PartitionSpec]]) -> None:
        """Give each array another copy, made of one that it has: on the mesh of a shape, laid out by a spec.

        The workers of these meshes run, and send each other what they need.
        """
        from minialpa.runtime.ray_executable import RayExecutable

        key = tuple((array.type, copy.shape, copy.spec, shape, spec) for array, copy, shape, spec in moves)
        if key not in self._moves:
            self._moves[key] = RayExecutable(self, _moving_program(key), {i: kind for i, (kind, *_) in enumerate(key)})
        executable = self._moves[key]
        executable.move([array for array, _, _, _ in moves])
        for array, _, shape, spec in moves:
            mesh = self._meshes[shape.first_device, math.prod(shape.logical_shape)]
            array.add(Copy(mesh, shape, spec))

    # ---- the end --------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End all workers and give the hosts back. Arrays that were not fetched are lost."""
        for mesh in self._meshes.values():
            mesh.alive = False
            end_workers(mesh.workers)
        self._meshes.clear()
        self._steps.clear()
        self.cluster.release()

    def _check_responsive(self) -> None:
        """Raise WorkerError if a worker does not say where it is."""
        workers = [w for mesh in self._meshes.values() for w in mesh.workers]
        calls = {w.actor.status.options(concurrency_group="control").remote(): w for w in workers}
        _, silent = ray.wait(list(calls), num_returns=len(calls), timeout=min(10.0, self.cluster.request.timeout_s))
        if silent:
            worker = calls[silent[0]]
            reason = f"it has not answered for {self.cluster.request.timeout_s:.0f} s"
            self._fail(Failure(worker.number, worker.host, -1, -1, "unknown", (), reason, "", False))

    def _stage_of(self, worker: WorkerHandle) -> int:
        meshes = sorted(self._meshes.values(), key=lambda mesh: mesh.first_device)
        return next((i for i, mesh in enumerate(meshes) if worker in mesh.workers), -1)

    def _fail(self, first: Failure) -> None:
        """End the session for what `first` says, or for what turns out to be its cause; raises WorkerError."""
        found = [first, *self._other_failures()]
        # What a worker says of itself comes first, then deaths, then those that only lost a peer.
        cause = min(found, key=lambda f: (f.follows, not f.traceback))
        if cause.stage < 0:
            handles = {w.number: w for mesh in self._meshes.values() for w in mesh.workers}
            cause = dataclasses.replace(cause, stage=self._stage_of(handles[cause.worker]))
        statuses = self._statuses(exclude={f.worker for f in found if not f.traceback})
        self.failure = WorkerError(_story(cause, statuses))
        self.shutdown()
        raise self.failure

    def _other_failures(self) -> list[Failure]:
        calls = {ref: worker for step in self._steps for ref, worker in step.items()}
        found = []
        done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_GRACE_S) if calls else ([], [])
        for ref in done:
            try:
                answer = ray.get(ref)
            except RayError as error:
                found.append(_death(calls[ref], error))
            else:
                if isinstance(answer, Failure):
                    found.append(answer)
        return found

    def _statuses(self, exclude: set[int]) -> list[Status]:
        workers = [w for mesh in self._meshes.values() for w in mesh.workers if w.number not in exclude]
        calls = [w.actor.status.options(concurrency_group="control").remote() for w in workers]
        done, _ = ray.wait(calls, num_returns=len(calls), timeout=_GRACE_S) if calls else ([], [])
        statuses = []
        for ref in done:
            try:
                statuses.append(ray.get(ref))
            except RayError:
                continue
        return statuses


def _moving_program(moves: Sequence[tuple[ArrayType, MeshShape, PartitionSpec, MeshShape, PartitionSpec]]) -> Program:
    """The program that takes arrays from mesh to mesh and does nothing else."""
    meshes = tuple(dict.fromkeys(shape for _, source, _, target, _ in moves for shape in (source, target)))
    number = {shape: i for i, shape in enumerate(meshes)}
    n = len(moves)
    return Program(
        meshes,
        (),
        tuple(InputSlot(i, i, None, number[source], spec) for i, (_, source, spec, _, _) in enumerate(moves)),
        (),
        tuple(Transfer(i, n + i, number[target], spec) for i, (_, _, _, target, spec) in enumerate(moves)),
        tuple(OutputSlot((n + i,), (number[target],)) for i, (_, _, _, target, _) in enumerate(moves)),
        frozenset(),
        2 * n,
    )


def _death(worker: WorkerHandle, error: Exception) -> Failure:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = "its process died: " + " ".join(lines)[:600]
    return Failure(worker.number, worker.host, -1, -1, "unknown", (), reason, "", False)


def _story(cause: Failure, statuses: Sequence[Status]) -> str:
    """What happened, for the user: worker, host, stage, instruction, the last ones, and the remote traceback."""
    where = f"Worker {cause.worker} of stage {cause.stage} on host {cause.host}"
    lines = [f"{where} failed: {cause.message}"]
    if cause.step >= 0:
        lines.append(f"It was at {cause.instruction}; before that: {'; '.join(cause.recent) or 'nothing'}.")
    for status in statuses:
        if status.worker != cause.worker:
            lines.append(
                f"Worker {status.worker} of stage {status.stage} on host {status.host}: at {status.instruction}."
            )
    if cause.traceback:
        lines.append(f"Traceback of the worker:\n{cause.traceback}")
    return "\n".join(lines)
