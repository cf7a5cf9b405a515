"""One micro-batch: a traced step in, a `SplitStep` whose loops run once out.

A loop has the forward and backward equations and their operands, and the update comes after it. In a pipeline, a
gradient that waits for another gradient, as in a sharpness-aware step, has a separate loop through all stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.extend.core import Var

from minialpa.inter.microbatch.batching import AGGREGATE, batch_kinds
from minialpa.inter.microbatch.split_step import LOOP, SplitStep, is_loop, operation
from minialpa.ir.equations import Atom, aval_of, is_inexact, is_literal, operand_vars, reading, renamed
from minialpa.ir.op import Op
from minialpa.tracing.gradients import gradient_p
from minialpa.tracing.new_equations import equations_for, unary_equation
from minialpa.tracing.trace import TracedStep

#: Floats of fewer bytes are summed over devices in float32.
_LEAST_REDUCED_BYTES = 2


def whole_batch(step: TracedStep, *, several_loops: bool) -> SplitStep:
    """`step` with one micro-batch. several_loops: whether a gradient that waits for others has a separate loop."""
    segments = _segments(step, _loops_of_calls(step) if several_loops else {})
    kinds = batch_kinds(step, 1)
    aggregates = [var for var in step.flat.outvars if not is_literal(var) and kinds.get(var) == AGGREGATE]

    ops: list[Op] = []
    copies: dict[Var, Atom] = {}
    for segment in range(LOOP, max(segments, default=0) + 2, 2):
        loop = _operations(step, segments, segment, copies)
        after = _operations(step, segments, segment + 1, copies)
        backward = {var for op in loop if op.origin.direction == "backward" for var in op.eqn.outvars}

        # The next segment, and the caller of gradients, read copies of the results of the loop.
        read = [var for op in after for var in operand_vars(op.eqn)]
        read += [var for var in aggregates if var in backward]
        marks, copy_of = _marking_copies(loop, segment + 1, read)
        ops += [*loop, *marks, *(replace(op, eqn=reading(op.eqn, copy_of)) for op in after)]
        copies.update((var, copy) for var, copy in copy_of.items() if var in backward)

    return SplitStep(
        traced=step,
        n_micro_batches=1,
        ops=tuple(ops),
        micro_inputs=(),
        micro_index=None,
        accumulators=(),
        concatenations=(),
        outvars=tuple(renamed(step.flat.outvars, copies)),
        batch_dims={var: kind for var, kind in kinds.items() if isinstance(kind, int)},
    )


def _operations(step: TracedStep, segments: Sequence[int], segment: int, copies: Mapping[Var, Atom]) -> list[Op]:
    numbers = [i for i, mine in enumerate(segments) if mine == segment]
    return [operation(step, reading(step.flat.eqns[i], copies), segment, i) for i in numbers]


def _loops_of_calls(step: TracedStep) -> dict[int, int]:
    """The loop of each call (gradient), after the loops of the gradients that it waits for."""
    # By variable, the gradients whose backward passes it depends on; by gradient, the others that it waits for.
    needs: dict[Var, frozenset[int]] = {}
    waits: dict[int, set[int]] = {}
    for eqn, origin in zip(step.flat.eqns, step.origins, strict=True):
        calls = frozenset[int]().union(*(needs.get(var, frozenset()) for var in operand_vars(eqn)))
        if origin.direction != "other":
            waits.setdefault(origin.call, set()).update(calls - {origin.call})
        if origin.direction == "backward":
            calls |= {origin.call}
        needs.update((var, calls) for var in eqn.outvars)

    loops: dict[int, int] = {}
    for call in sorted(waits):
        if not waits[call] <= loops.keys():
            return {}  # two gradients that wait for each other
        loops[call] = 1 + max((loops[other] for other in waits[call]), default=0)
    return loops


def _segments(step: TracedStep, loop_of_call: Mapping[int, int]) -> list[int]:
    """The segment of each equation: 2 l - 1 in loop l, 2 l after the loop.

    Forward and backward equations are in the loop of their gradient, by default loop 1. Other equations run in the loop
    that reads their results, or else after the last loop that they depend on.
    """
    origins = step.origins
    in_loop = {
        i: 2 * loop_of_call.get(origin.call, 1) - 1 for i, origin in enumerate(origins) if origin.direction != "other"
    }
    earliest = _earliest_segments(step, in_loop)
    return _latest_segments(step, in_loop, earliest)


def _earliest_segments(step: TracedStep, in_loop: Mapping[int, int]) -> list[int]:
    """The loop of each equation, or the first segment with its operands."""
    known: dict[Var, int] = {}  # the first segment that can read each variable
    earliest: list[int] = []
    for i, (eqn, origin) in enumerate(zip(step.flat.eqns, step.origins, strict=True)):
        segment = in_loop.get(i, max((known.get(var, 0) for var in operand_vars(eqn)), default=0))
        earliest.append(segment)
        # A backward result may be a gradient, which is complete after its loop.
        known.update((var, segment + (origin.direction == "backward")) for var in eqn.outvars)
    return earliest


def _latest_segments(step: TracedStep, in_loop: Mapping[int, int], earliest: Sequence[int]) -> list[int]:
    """The segment of each equation: its loop, the segment of its first reader, or the segment after its operands."""
    eqns = step.flat.eqns
    last = 1 + max(in_loop.values(), default=LOOP)
    segments = [last] * len(eqns)
    reader: dict[Var, int] = {}  # the first segment that reads each variable

    # Backwards, so that the readers of an equation have their segments first.
    for i in range(len(eqns) - 1, -1, -1):
        first_reader = min((reader.get(var, last) for var in eqns[i].outvars), default=last)
        if i in in_loop:
            segments[i] = in_loop[i]
        elif earliest[i] == 0 or first_reader <= earliest[i]:
            segments[i] = first_reader
        else:
            segments[i] = earliest[i] + is_loop(earliest[i])

        for var in operand_vars(eqns[i]):
            reader[var] = min(reader.get(var, last), segments[i])
    return segments


def _marking_copies(loop: Sequence[Op], segment: int, read: Sequence[Var]) -> tuple[list[Op], dict[Var, Atom]]:
    """Copies, in `segment`, of floats in `read` that the loop makes. They mark the place of the sum over devices."""
    made = {var: op for op in loop for var in op.eqn.outvars if is_inexact(var)}
    marked = unary_equation(lambda x: gradient_p.bind(x, call=0)[0])
    marks: list[Op] = []
    copies: dict[Var, Atom] = {}
    for var in dict.fromkeys(var for var in read if var in made):
        if aval_of(var).dtype.itemsize < _LEAST_REDUCED_BYTES:
            eqns, (copies[var],) = equations_for(_mark_wide, var)
        else:
            eqn, copies[var] = marked(var)
            eqns = [eqn]
        marks += [replace(made[var], eqn=eqn, segment=segment) for eqn in eqns]
    return marks, copies


def _mark_wide(x: Any) -> Any:
    """Sum a float of 8 bits or fewer over devices in 32 bits: in its own precision, small parts would vanish."""
    return gradient_p.bind(x.astype(np.float32), call=0)[0].astype(x.dtype)
