"""The errors that minialpa raises. A message states the value that arrived, the expected one and what to change."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near_names(name: object, known: Iterable[str]) -> list[str]:
    """The names in `known` that the unknown `name` may stand for: without case, longer, or similar."""
    lower, by_lower = str(name).lower(), {one.lower(): one for one in known}
    longer = [one for one in by_lower if lower and one.startswith(lower)]
    near = [lower] if lower in by_lower else longer or difflib.get_close_matches(lower, by_lower, n=3)
    return [by_lower[one] for one in near[:5]]


def meant(name: object, known: Iterable[str]) -> str:
    """A question for the message about an unknown name, such as " Do you mean `1f1b`?"; empty if no name is near."""
    near = near_names(name, known)
    return f" Do you mean {' or '.join(f'`{one}`' for one in near)}?" if near else ""


class MinialpaError(Exception):
    """Base class of all errors that minialpa raises on purpose."""


class TraceError(MinialpaError, ValueError):
    """The training step cannot be traced, or its meaning over micro-batches is not clear."""


class ShardingError(MinialpaError, ValueError):
    """A sharding spec, mesh or device request does not fit the arrays or the devices."""


class InfeasibleError(MinialpaError, RuntimeError):
    """No plan exists under the given limits."""


class VerifyError(MinialpaError, AssertionError):
    """A plan, program or other value between two parts of minialpa breaks one of its invariants."""


class WorkerError(MinialpaError, RuntimeError):
    """An instruction of a program failed while it ran, or a worker of the session was lost.

    Unknown attributes are `None` or empty. jax runs instructions asynchronously, so one of `recent` may have failed.

    Attributes:
        worker, host: their numbers in the session.
        stage: the pipeline stage that the worker ran when it failed or last answered.
        instruction: the instruction that the worker had reached.
        recent: the instructions before `instruction`, in order.
        remote_traceback: the traceback of the worker.
        lost_hosts: numbers of the hosts that stopped answering.
    """

    def __init__(
        self,
        message: str = "",
        *,
        worker: int | None = None,
        host: int | None = None,
        stage: int | None = None,
        instruction: str | None = None,
        recent: tuple[str, ...] = (),
        remote_traceback: str | None = None,
        lost_hosts: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.worker, self.host, self.stage = worker, host, stage
        self.instruction, self.recent, self.remote_traceback = instruction, recent, remote_traceback
        self.lost_hosts = lost_hosts


class DeletedArrayError(WorkerError):
    """The caller passes an array that it donated to an earlier call. The result of that call has the memory."""


class CheckpointError(MinialpaError, RuntimeError):
    """A checkpoint cannot be written or read."""
