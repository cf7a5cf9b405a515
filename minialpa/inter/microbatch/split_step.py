"""`SplitStep`: operations in segments, and the combination of values over micro-batches. The output of this package.

With one loop, segment 0 (prologue) runs once, segment 1 (loop) n times, segment 2 (update) once. Loop l is segment
2 l - 1; segment 2 l runs after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jax.extend.core import JaxprEqn, Var

from minialpa.ir.equations import Atom, is_literal
from minialpa.ir.op import Op
from minialpa.rules.factors import Reduction
from minialpa.tracing.trace import TracedStep

#: The segments of a step with one loop.
PROLOGUE, LOOP, UPDATE = 0, 1, 2


def is_loop(segment: int) -> bool:
    return segment % 2 == 1


def operation(step: TracedStep, eqn: JaxprEqn, segment: int, source: int) -> Op:
    """`eqn` in a segment, with the facts of operation `source` of `step` unless `source` is -1."""
    if source < 0:
        return Op(eqn, segment=segment)
    return replace(step.flat.ops[source], eqn=eqn, segment=segment, source=source)


@dataclass(frozen=True, slots=True)
class Accumulator:
    """`complete` = `reduction` over micro-batches of `loop`. The dtype of `complete` may be wider."""

    loop: Var
    complete: Var
    reduction: Reduction


@dataclass(frozen=True, slots=True)
class Concatenation:
    """`complete` = concatenation over micro-batches of `loop` along dimension `dim`."""

    loop: Var
    complete: Var
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitStep:
    """A step as a chain of segments: loops over micro-batches, and the equations before and after each; see `segments`.

    Attributes:
        ops: the operations, segment after segment.
        micro_inputs: pairs (batch argument, variable that holds the examples of one micro-batch).
        micro_index: an int32 scalar, the number of the micro-batch; None if unused.
        accumulators: reductions over the micro-batches of all loops; each is complete after its loop.
        concatenations: concatenations over the micro-batches of all loops; each is complete after its loop.
        batch_dims: for variables of the loops and for inputs, the dimension of the examples.
        per_micro_batch: descriptions of the statistics that each micro-batch computes for itself.
    """

    traced: TracedStep
    n_micro_batches: int
    ops: tuple[Op, ...]
    micro_inputs: tuple[tuple[Var, Var], ...]
    micro_index: Var | None
    accumulators: tuple[Accumulator, ...]
    concatenations: tuple[Concatenation, ...]
    outvars: tuple[Atom, ...]
    batch_dims: dict[Var, int]
    per_micro_batch: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[Var, ...]:
        """The inputs of the step: constants first, then arguments."""
        return (*self.traced.flat.constvars, *self.traced.flat.invars)

    @property
    def results(self) -> list[Var]:
        """The results without literals; a variable that is returned twice is listed twice."""
        return [v for v in self.outvars if not is_literal(v)]

    @property
    def combined(self) -> list[tuple[Var, Var]]:
        """(value of one micro-batch, value of the whole batch), for accumulators and concatenations."""
        return [
            *((a.loop, a.complete) for a in self.accumulators),
            *((s.loop, s.complete) for s in self.concatenations),
        ]

    @property
    def n_loops(self) -> int:
        return max([1, *((op.segment + 1) // 2 for op in self.ops)])

    @property
    def recomputes_values(self) -> bool:
        """Whether a loop recomputes per-example values of an earlier loop."""
        places = {(op.source, op.segment) for op in self.ops if is_loop(op.segment) and op.source >= 0}
        return len(places) > len({source for source, _ in places})

    def in_segment(self, segment: int) -> Sequence[Op]:
        return [op for op in self.ops if op.segment == segment]
