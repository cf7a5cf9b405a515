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
    """A value that crosses a border breaks one of its invariants."""


class WorkerError(MinialpaError, RuntimeError):
    """An instruction of a program failed while it ran."""


class CheckpointError(MinialpaError, RuntimeError):
    """A checkpoint cannot be written or read."""
