"""Signs of failures at workers go in, an error that names the likeliest cause comes out.

When a worker dies, its peers lose a connection, jax ends the other processes of its mesh, and processes that wait for
these lose a connection, too. `Fault` orders the signs:

    worker 0 LOST_PEER, then worker 1 DIED, then worker 2 DIED    ->    worker 1 DIED is the cause

All functions are pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from minialpa.errors import WorkerError


class Fault(IntEnum):
    """How a failure shows, the likeliest cause first."""

    LOST_HOST = 1
    """The worker's host accepts no connection."""
    DIED = 2
    """The worker's process has ended."""
    RAISED = 3
    """An instruction raised an error of the worker's own."""
    SILENT = 4
    """The worker's process does not answer."""
    STUCK = 5
    """The worker answers, but its step makes no progress."""
    LOST_PEER = 6
    """An instruction failed because another worker is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The position of a worker at its last report.

    Attributes:
        stage: number of its mesh; -1 before the first step.
        step, instruction: the present or last ones; step is -1 before the first.
        recent: the instructions before, the oldest first.
        compiled: the last program, and the number of its compiled functions.
    """

    worker: int
    host: int
    pid: int | None = None
    stage: int = -1
    step: int = -1
    instruction: str = "no instruction"
    recent: tuple[str, ...] = ()
    compiled: tuple[int, int] = (-1, 0)


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure at one worker.

    Attributes:
        where: the last known position.
        traceback: of the worker, if it raised an error.
    """

    fault: Fault
    where: Status
    message: str
    traceback: str = ""


# In errors of collectives and jax's coordination service after another process is lost.
_PEER_IS_LOST = re.compile(r"gloo|nccl|coordination service|connection (reset|closed|refused)", re.IGNORECASE)


def fault_of(error: Exception) -> Fault:
    """RAISED or LOST_PEER, by the text of the error."""
    lost = isinstance(error, WorkerError) or _PEER_IS_LOST.search(str(error)) is not None
    return Fault.LOST_PEER if lost else Fault.RAISED


def lost_host(last: Status, ip: str) -> Failure:
    return Failure(Fault.LOST_HOST, last, f"its host is lost ({ip} accepts no connection).")


def died(last: Status, reason: str) -> Failure:
    return Failure(Fault.DIED, last, f"its process died. {reason}")


def call_raised(last: Status, method: str | None, message: str, traceback: str) -> Failure:
    """The failure of a call that is not a step, such as `load`."""
    where = replace(last, instruction=f"the call of `{method}`" if method else "a call", recent=())
    return Failure(Fault.RAISED, where, message, traceback)


def silent(last: Status, seconds: float) -> Failure:
    message = (
        f"it has not answered for {seconds:.0f} s. Its process or its network hangs, or it is slow: then raise "
        "`worker_timeout_s` of `minialpa.init`."
    )
    return Failure(Fault.SILENT, last, message)


def hung_worker(unanswered: Iterable[tuple[Status, float]], timeout_s: float) -> Failure | None:
    """The first worker that has not answered for more than `timeout_s` seconds.

    unanswered: for each open call, the last status of its worker and the seconds since the call.
    """
    return next((silent(last, seconds) for last, seconds in unanswered if seconds > timeout_s), None)


def stalled_step(statuses: Sequence[Status], seconds: float, timeout_s: float) -> Failure | None:
    """A failure if no worker has made progress for `seconds` > `timeout_s`.

    The suspect is the worker in the earliest step among the workers that do not wait for a message.
    """
    if not statuses or seconds <= timeout_s:
        return None
    suspect = min(statuses, key=lambda status: ("Receive" in status.instruction, status.step, status.worker))
    message = (
        f"no worker has made progress for {timeout_s:g} s, though all of them answer. A collective hangs, or the step "
        "is slow: then raise `worker_timeout_s` of `minialpa.init`."
    )
    return Failure(Fault.STUCK, suspect, message)


def root_cause(found: Sequence[Failure]) -> Failure:
    """The failure with the smallest `Fault` likely caused the others. `found` is in the order of notice.

    - Of equal faults, the first: jax ends the processes of a mesh after the one that died.
    - A lost host before a death: when a host is lost, Ray first reports processes elsewhere that jax ends.
    - An error that a worker has reported, not its later death.
    """
    reported = {f.where.worker for f in found if f.traceback}
    return min((f for f in found if f.traceback or f.where.worker not in reported), key=lambda f: f.fault)


def session_error(found: Sequence[Failure], heard: Iterable[Status]) -> WorkerError:
    """heard: the status of the other workers."""
    places = {f.where.worker: f.where for f in found} | {status.worker: status for status in heard}
    lost = {f.where.worker: f.message for f in found if f.fault is Fault.LOST_HOST}
    return worker_error(root_cause(found), places.values(), lost)


def worker_error(
    cause: Failure, others: Iterable[Status], lost: Mapping[int, str] | None = None, has_ended: bool = True
) -> WorkerError:
    """lost: messages of workers whose hosts are lost, by worker.
    has_ended: whether the session ends with this error.
    """
    others, lost = list(others), lost or {}
    at = cause.where
    process = "" if at.pid is None else f", process {at.pid}"
    failed = "failed with" if cause.traceback else "failed:"
    lines = [f"Worker {at.worker}, stage {at.stage} on host {at.host}{process}, {failed} {cause.message}"]
    if at.step >= 0:
        seen = "was last heard of" if cause.fault in (Fault.LOST_HOST, Fault.DIED, Fault.SILENT) else "was"
        lines.append(
            f"It {seen} in step {at.step} at {at.instruction}; before that: {'; '.join(at.recent) or 'nothing'}."
        )

    for status in sorted(others, key=lambda status: status.worker):
        if status.worker != at.worker:
            place = f"was in step {status.step} at {status.instruction}" if status.step >= 0 else "had run no step"
            also = f" Also {lost[status.worker]}" if status.worker in lost else ""
            lines.append(f"Worker {status.worker}, stage {status.stage} on host {status.host}, {place}.{also}")

    if cause.traceback:
        lines.append(f"Traceback of the worker:\n{cause.traceback}")
    if has_ended:
        lines.append(
            "All workers have ended and their hosts are given back. `minialpa.restart()` starts a new session on the "
            "hosts that answer, `minialpa.init` one on as many hosts as before; restore the state from a checkpoint."
        )

    return WorkerError(
        "\n".join(lines),
        worker=at.worker,
        host=at.host,
        stage=at.stage,
        instruction=at.instruction,
        recent=at.recent,
        remote_traceback=cause.traceback or None,
        lost_hosts=tuple(sorted({status.host for status in (at, *others) if status.worker in lost})),
    )


def ended(error: WorkerError) -> WorkerError:
    """The error of later calls, with all attributes of `error`."""
    later = WorkerError(f"The session has ended. {error}")
    later.__dict__.update(error.__dict__)
    later.__cause__ = error
    return later


def with_stage(status: Status, stage: int) -> Status:
    return replace(status, stage=stage) if status.stage < 0 else status
