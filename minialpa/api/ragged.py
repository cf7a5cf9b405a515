"""Batches that `num_micro_batches` does not divide: a batch size and that number go in; the numbers to try come out.

For example, 10 examples in 4 micro-batches: planning tries 2, then 1.
"""

from __future__ import annotations

from typing import Literal

from minialpa.errors import InfeasibleError
from minialpa.options import PlanOptions
from minialpa.plan import Plan
from minialpa.plan.text import count
from minialpa.support.divisors import divisors
from minialpa.support.private_jax import warn
from minialpa.tracing.trace import TracedStep

OnRagged = Literal["fewer", "error"]


def numbers_to_try(traced: TracedStep, asked: int, on_ragged: OnRagged) -> tuple[int, ...]:
    """`(asked,)` if `asked` divides the batch or `on_ragged` is "error", else smaller divisors of the batch, largest
    first.

    Planning with a number that does not divide the batch raises a TraceError.
    """
    size = traced.batch_size
    if on_ragged == "error" or size is None or size % asked == 0:
        return (asked,)
    return tuple(n for n in reversed(divisors(size)) if n <= asked)


def explain_fewer(traced: TracedStep, asked: int, n: int) -> str:
    size = traced.batch_size or 0
    return (
        f"A batch of {size} examples cannot be split into {asked} equal micro-batches (`num_micro_batches`). It runs "
        f"in {count(n, 'micro-batch')} of {count(size // n, 'example')} each."
    )


def warn_of_fewer(traced: TracedStep, asked: int, plan: Plan) -> None:
    """Warn if the number asked does not divide the batch."""
    if traced.batch_size is None or traced.batch_size % asked == 0:
        return
    warn(
        f"{explain_fewer(traced, asked, plan.n_micro_batches)} Memory has to hold the activations of these examples. "
        f'Pass batches whose size {asked} divides, or `parallelize(..., on_ragged="error")` to get an error instead.',
    )


def explain_most(traced: TracedStep, options: PlanOptions, error: InfeasibleError) -> str | None:
    """Why the advice in `error` to use more micro-batches is impossible; None if it is possible, or not in `error`."""
    if "micro-batches" not in str(error) and "num_micro_batches" not in str(error):
        return None
    if options.choose_micro_batches:
        return "More micro-batches are impossible: the search has tried all numbers of micro-batches."
    if traced.batch_size == options.n_micro_batches:
        return f"More micro-batches are impossible: each of the {options.n_micro_batches} has one example."
    return None


def is_uneven(error: InfeasibleError) -> bool:
    """Whether the devices do not divide the examples as required."""
    from minialpa.intra.graph.option_constraints import UnevenBatchError

    return _is_caused_by(UnevenBatchError, error)


def _is_caused_by(kind: type[Exception], error: BaseException) -> bool:
    """An error may be its own cause."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__
    return any(isinstance(cause, kind) for cause in causes)
