"""A batch that the micro-batches of a method do not divide, such as the last one of an epoch.

The size of the batch and the number that the method asks for in; the numbers to plan with out, in the order in which
they are tried.
"""

from __future__ import annotations

import warnings
from typing import Literal

from minialpa.errors import InfeasibleError
from minialpa.plan import Plan
from minialpa.plan.text import count
from minialpa.support.divisors import divisors
from minialpa.tracing.trace import TracedStep

#: Fewer micro-batches, or an error.
OnRagged = Literal["fewer", "error"]


def numbers_to_try(traced: TracedStep, asked: int, on_ragged: OnRagged) -> tuple[int, ...]:
    """Numbers of micro-batches for a step: `asked`, or if it does not divide the batch, the smaller ones that do.

    The largest is first.
    Planning with a number that does not divide the batch raises a TraceError, which is what "error" asks for.
    """
    size = traced.batch_size
    if on_ragged == "error" or size is None or size % asked == 0:
        return (asked,)
    return tuple(n for n in reversed(divisors(size)) if n <= asked)


def explain_fewer(traced: TracedStep, asked: int, n: int) -> str:
    """Why a step has `n` micro-batches."""
    size = traced.batch_size or 0
    return (
        f"A batch of {size} examples cannot be split into {asked} equal micro-batches, as `num_micro_batches` says. It "
        f"runs in {count(n, 'micro-batch')} of {count(size // n, 'example')} each."
    )


def warn_of_fewer(traced: TracedStep, asked: int, plan: Plan) -> None:
    """Warn if a plan has another number of micro-batches than was asked for because of the size of the batch."""
    if traced.batch_size is None or traced.batch_size % asked == 0:
        return
    warnings.warn(
        f"{explain_fewer(traced, asked, plan.n_micro_batches)} Memory has to hold the activations of these examples. "
        'With `parallelize(..., on_ragged="error")` this is an error.',
        UserWarning,
        stacklevel=2,
    )


def is_uneven(error: InfeasibleError) -> bool:
    """Whether there is no plan because the devices do not divide the examples as the options want."""
    from minialpa.intra.graph.option_constraints import UnevenBatchError

    return _is_caused_by(UnevenBatchError, error)


def _is_caused_by(kind: type[Exception], error: BaseException) -> bool:
    """Whether an error is of a kind, or was raised for one that is. An error may be raised for itself."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__
    return any(isinstance(cause, kind) for cause in causes)
