"""The tree of errors that minialpa raises. A message says what arrived, what was expected and what to change."""


class MinialpaError(Exception):
    """Base class of every error that minialpa raises on purpose."""


class TraceError(MinialpaError, ValueError):
    """The training step cannot be traced, or its meaning over micro-batches is not clear."""


class ShardingError(MinialpaError, ValueError):
    """A sharding spec, mesh or device request does not fit the arrays or the devices."""


class InfeasibleError(MinialpaError, RuntimeError):
    """No plan exists under the given limits."""


class VerifyError(MinialpaError, AssertionError):
    """A plan, program or other value that one part of minialpa hands to another breaks one of its invariants."""


class WorkerError(MinialpaError, RuntimeError):
    """An instruction of a program failed while it ran, or a worker of the session was lost.

    What is not known is None or empty. jax runs instructions asynchronously, so one of `recent` may have failed.

    Attributes:
        worker: number of the worker in the session.
        host: number of its host in the session.
        stage: the pipeline stage that the worker ran when it failed or last answered.
        instruction: the instruction that it was at.
        recent: the instructions before that one, in order.
        remote_traceback: the traceback of the worker.
        lost_hosts: numbers of the hosts in the session on which nothing answered any more.
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
    """The caller passes an array that it donated to an earlier call, whose result took over the array's memory."""


class CheckpointError(MinialpaError, RuntimeError):
    """A checkpoint cannot be written or read."""
