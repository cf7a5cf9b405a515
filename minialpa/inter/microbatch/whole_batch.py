"""One micro-batch: a traced step in, the same equations as a split step whose loops run once.

A loop is what forward and backward equations need, the update what runs behind it. In a pipeline, a gradient that waits
for another one, as the second of a sharpness-aware step does, has a loop of its own: it passes all stages once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.batching import AGGREGATE, batch_kinds
from minialpa.inter.microbatch.split_step import LOOP, Op, SplitStep, is_loop
from minialpa.tracing.gradients import gradient_p
from minialpa.tracing.jaxprs import Atom, aval_of, equations_for, is_inexact, is_literal, operand_vars, unary_equation
from minialpa.tracing.trace import TracedStep

#: Floats of fewer bytes are summed over devices as wider ones.
_SUM_BYTES = 2


def whole_batch(step: TracedStep, *, several_loops: bool) -> SplitStep:
    """`step` as a split step with one micro-batch.

    several_loops: whether gradients that wait for each other have loops of their own, or all of them share one.
    """
    segments = _segments(step, _loops_of_calls(step) if several_loops else {})
    kinds = batch_kinds(step, 1)
    dims = {v: kind for v, kind in kinds.items() if isinstance(kind, int)}
    results = [v for v in step.flat.outvars if not is_literal(v)]

    ops: list[Op] = []
    copies: dict[Var, Atom] = {}
    for segment in range(LOOP, max(segments, default=0) + 2, 2):
        loop, behind = (_operations(step, segments, number, copies) for number in (segment, segment + 1))
        backward = {v for op in loop if step.origins[op.source].direction == "backward" for v in op.eqn.outvars}
        gradients = [v for v in results if v in backward and kinds.get(v) == AGGREGATE]
        read = [*(v for op in behind for v in operand_vars(op.eqn)), *gradients]
        marks, marked = _marks(loop, segment + 1, read)
        ops += [*loop, *marks, *(replace(op, eqn=_reading(op.eqn, marked)) for op in behind)]
        copies.update((v, copy) for v, copy in marked.items() if v in backward)
    outvars = tuple(v if is_literal(v) else copies.get(v, v) for v in step.flat.outvars)
    return SplitStep(step, 1, tuple(ops), (), None, (), (), outvars, dims)


def _operations(step: TracedStep, segments: Sequence[int], segment: int, copies: Mapping[Var, Atom]) -> list[Op]:
    """The operations of a segment, which read the copies of what earlier loops have left."""
    numbered = zip(step.flat.eqns, segments, strict=True)
    return [Op(_reading(eqn, copies), segment, i) for i, (eqn, mine) in enumerate(numbered) if mine == segment]


def _loops_of_calls(step: TracedStep) -> dict[int, int]:
    """The loop of each gradient of a step: behind those of all gradients that it waits for."""
    behind: dict[Var, frozenset[int]] = {}  # the gradients whose backward passes a variable depends on
    waits: dict[int, set[int]] = {}
    for eqn, origin in zip(step.flat.eqns, step.origins, strict=True):
        calls = frozenset[int]().union(*(behind.get(v, frozenset()) for v in operand_vars(eqn)))
        if origin.direction != "other":
            waits.setdefault(origin.call, set()).update(calls - {origin.call})
        if origin.direction == "backward":
            calls |= {origin.call}
        behind.update((v, calls) for v in eqn.outvars)

    loops: dict[int, int] = {}
    for call in sorted(waits):
        if not waits[call] <= loops.keys():
            return {}  # two gradients that wait for each other
        loops[call] = 1 + max((loops[other] for other in waits[call]), default=0)
    return loops


def _segments(step: TracedStep, loop_of_call: Mapping[int, int]) -> list[int]:
    """The segment of each equation: forward and backward ones are in the loop of their gradient, the first by default.

    Others run in a loop where one of its passes needs them, or else behind the last loop that they depend on.
    """
    eqns, origins = step.flat.eqns, step.origins
    in_loop = {i: 2 * loop_of_call.get(o.call, 1) - 1 for i, o in enumerate(origins) if o.direction != "other"}

    # The first segment that may read each variable, and that may run each equation.
    known: dict[Var, int] = {}
    earliest: list[int] = []
    for i, (eqn, origin) in enumerate(zip(eqns, origins, strict=True)):
        earliest.append(in_loop.get(i, max((known.get(v, 0) for v in operand_vars(eqn)), default=0)))
        known.update((v, earliest[i] + (origin.direction == "backward")) for v in eqn.outvars)

    # The first segment that reads each variable.
    last = 1 + max(in_loop.values(), default=LOOP)
    segments = [last] * len(eqns)
    reader: dict[Var, int] = {}
    for i in range(len(eqns) - 1, -1, -1):
        first_reader = min((reader.get(v, last) for v in eqns[i].outvars), default=last)
        if i in in_loop:
            segments[i] = in_loop[i]
        elif earliest[i] == 0 or first_reader <= earliest[i]:
            segments[i] = first_reader
        else:
            segments[i] = earliest[i] + is_loop(earliest[i])
        for v in operand_vars(eqns[i]):
            reader[v] = min(reader.get(v, last), segments[i])
    return segments


def _marks(loop: Sequence[Op], segment: int, read: Sequence[Var]) -> tuple[list[Op], dict[Var, Atom]]:
    """Copies in `segment`, by variable, of the floats that the loop leaves for it: where to sum them over devices."""
    made = {v: op.source for op in loop for v in op.eqn.outvars if is_inexact(v)}
    marked = unary_equation(lambda x: gradient_p.bind(x, call=0)[0])
    marks: list[Op] = []
    copies: dict[Var, Atom] = {}
    for v in dict.fromkeys(v for v in read if v in made):
        if aval_of(v).dtype.itemsize < _SUM_BYTES:
            eqns, (copies[v],) = equations_for(_marked_wide, v)
        else:
            eqn, copies[v] = marked(v)
            eqns = [eqn]
        marks += [Op(eqn, segment, made[v]) for eqn in eqns]
    return marks, copies


def _reading(eqn: JaxprEqn, copies: Mapping[Var, Atom]) -> JaxprEqn:
    invars: list[Atom] = [v if is_literal(v) else copies.get(v, v) for v in eqn.invars]
    copy: JaxprEqn = eqn.replace(invars=invars)
    return copy


def _marked_wide(x: Any) -> Any:
    """A float of 8 bits or fewer is summed over devices in 32: in its own precision, small parts would vanish."""
    return gradient_p.bind(x.astype(np.float32), call=0)[0].astype(x.dtype)
