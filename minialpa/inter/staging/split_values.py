"""Variables of a split step that several modules of this package ask for: its inputs, its results and its totals."""

from __future__ import annotations

from jax.extend.core import Var

from minialpa.inter.microbatch.split_step import SplitStep
from minialpa.ir.equations import is_literal


def step_inputs(split: SplitStep) -> tuple[Var, ...]:
    """The inputs of the step: constants first, then arguments."""
    return (*split.traced.flat.constvars, *split.traced.flat.invars)


def step_results(split: SplitStep) -> list[Var]:
    """The results of the step, without literals. A variable that is returned twice is listed twice."""
    return [v for v in split.outvars if not is_literal(v)]


def combined_values(split: SplitStep) -> list[tuple[Var, Var]]:
    """(value of one micro-batch, value of the whole batch that it is combined into), for accumulators and stacks."""
    return [*((a.loop, a.total) for a in split.accumulators), *((s.loop, s.total) for s in split.stacks)]
