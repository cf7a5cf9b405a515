"""Failures: what workers say, and signs that one says nothing any more, in; their cause, as one WorkerError, out.

One fault shows in many places. A worker dies: its peers lose a connection, jax ends the other processes of its mesh,
and whoever waits for these loses a connection, too. `Fault` orders what is seen by how likely it is the cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from minialpa.errors import WorkerError


class Fault(IntEnum):
    """How a failure shows, the likeliest cause first.

    LOST_HOST: nothing on the host answers. DIED: the process has ended. RAISED: an instruction raised an error of its
    own. SILENT: the process does not answer. STUCK: it answers, and the step does not get on. LOST_PEER: it misses
    another worker.
    """

    LOST_HOST = 1
    DIED = 2
    RAISED = 3
    SILENT = 4
    STUCK = 5
    LOST_PEER = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Where a worker is: its process, the step that it runs, or ran last, the instruction and those before it.

    stage, step: -1 where there has been no step.
    """

    worker: int
    host: int
    pid: int | None = None
    stage: int = -1
    step: int = -1
    instruction: str = "no instruction"
    recent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong with a worker, and where it was, as far as that is known."""

    fault: Fault
    where: Status
    message: str
    traceback: str = ""


# What the collectives of a mesh, and jax's own service, say when another process is gone.
_PEER_IS_LOST = re.compile(r"gloo|nccl|coordination service|connection (reset|closed|refused)", re.IGNORECASE)


def fault_of(error: Exception) -> Fault:
    """Whether an error of a step is the worker's own, as far as the error tells."""
    lost = isinstance(error, WorkerError) or _PEER_IS_LOST.search(str(error)) is not None
    return Fault.LOST_PEER if lost else Fault.RAISED


def lost_host(last: Status, ip: str) -> Failure:
    """The failure of a worker whose host is gone."""
    return Failure(Fault.LOST_HOST, last, f"its host is lost: nothing answers at {ip}.")


def root_cause(found: Sequence[Failure]) -> Failure:
    """The failure that the others follow from. found: in the order in which they were noticed.

    - Of two failures that show alike, the first one: jax ends the processes of a mesh after the one that died.
    - Where a host is lost, Ray tells of the processes that jax ends elsewhere before it tells of those there.
    - What a worker has said counts more than that it died afterwards.
    """
    spoke = {f.where.worker for f in found if f.traceback}
    return min((f for f in found if f.traceback or f.where.worker not in spoke), key=lambda f: f.fault)


def session_error(found: Sequence[Failure], heard: Iterable[Status]) -> WorkerError:
    """The error that ends a session, for all failures that were found and what was heard of workers besides."""
    places = {f.where.worker: f.where for f in found} | {status.worker: status for status in heard}
    return worker_error(root_cause(found), places.values())


def worker_error(cause: Failure, others: Iterable[Status], has_ended: bool = True) -> WorkerError:
    """The error for the user: what failed, where it was, where the others are, and the traceback of the worker.

    has_ended: whether the session ends with it.
    """
    at = cause.where
    process = "" if at.pid is None else f", process {at.pid}"
    lines = [f"Worker {at.worker}, stage {at.stage} on host {at.host}{process}, failed: {cause.message}"]
    if at.step >= 0:
        seen = "was last heard of" if cause.fault in (Fault.LOST_HOST, Fault.DIED, Fault.SILENT) else "was"
        lines.append(
            f"It {seen} in step {at.step} at {at.instruction}; before that: {'; '.join(at.recent) or 'nothing'}."
        )
    for status in sorted(others, key=lambda status: status.worker):
        if status.worker != at.worker:
            place = f"was in step {status.step} at {status.instruction}" if status.step >= 0 else "had run no step"
            lines.append(f"Worker {status.worker}, stage {status.stage} on host {status.host}, {place}.")
    if cause.traceback:
        lines.append(f"Traceback of the worker:\n{cause.traceback}")
    if has_ended:
        lines.append(
            "All workers have ended and their hosts are given back. `minialpa.init` starts a new session; restore the "
            "state from a checkpoint."
        )
    return WorkerError(
        "\n".join(lines),
        worker=at.worker,
        host=at.host,
        stage=at.stage,
        instruction=at.instruction,
        recent=at.recent,
        remote_traceback=cause.traceback or None,
    )


def ended(error: WorkerError) -> WorkerError:
    """What a later call of the session that `error` has ended raises."""
    later = WorkerError(f"The session has ended: {error}")
    later.__dict__.update(error.__dict__)
    later.__cause__ = error
    return later


def with_stage(status: Status, stage: int) -> Status:
    """`status` with a stage if it has none."""
    return replace(status, stage=stage) if status.stage < 0 else status
