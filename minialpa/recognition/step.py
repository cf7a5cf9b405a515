"""`recognise` maps a `TracedStep` to the same step, in which attentions are operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from minialpa.ir.op import Origin
from minialpa.recognition.bodies import with_rewritten_bodies
from minialpa.recognition.emission import Operands
from minialpa.recognition.rewriting import NewEquation, Written, rewrite
from minialpa.tracing.trace import TracedStep

#: Query positions times key positions. So few scores fit into a cache or registers: the program as written, fused by
#: XLA, is faster than a loop over blocks.
_FEW_SCORES = 128 * 128


def recognise(step: TracedStep, *, everywhere: bool = False) -> TracedStep:
    """Replace attentions by `attention_p`, and their derivatives by `attention_gradient_p`.

    everywhere: also small attentions. An attention across a pipeline boundary stays as written.
    """
    flat = step.flat

    def should_rewrite(operands: Operands) -> bool:
        return everywhere or operands.n_scores > _FEW_SCORES

    def accept(operands: Operands, dropped: Sequence[int]) -> bool:
        layers = {step.origins[i].layer for i in dropped if step.origins[i].direction != "other"}
        return should_rewrite(operands) and len(layers) <= 1

    def rewrite_body(eqns: Any, results: Any, written: Written, section: Any) -> list[NewEquation] | None:
        return rewrite(eqns, results, written, lambda operands, _: should_rewrite(operands), section)

    outvars = (*flat.outvars, *step.gradients)
    consts = dict(zip(flat.constvars, flat.consts, strict=True))
    new = rewrite(flat.eqns, outvars, Written(consts=consts), accept)
    if new is not None:
        step = with_equations(step, new)
    bodies = with_rewritten_bodies(step.flat, outvars, rewrite_body)
    return _without_gaps(step if bodies is None else with_equations(step, bodies))


def with_equations(step: TracedStep, new: Sequence[NewEquation]) -> TracedStep:
    """Groups keep their numbers, which may then have gaps."""
    old = step.flat.ops
    ops = [replace(old[one.place], eqn=one.eqn, origin=_origin(one, step.origins)) for one in new]
    return replace(step, flat=replace(step.flat, ops=tuple(ops)))


def _without_gaps(step: TracedStep) -> TracedStep:
    """The same step, with the numbers 0, 1, ... of its groups."""
    groups = sorted({origin.group for origin in step.origins if origin.group is not None})
    if len(groups) == step.n_groups:
        return step
    number: dict[int | None, int | None] = {None: None, **{group: i for i, group in enumerate(groups)}}
    ops = [replace(op, origin=replace(op.origin, group=number[op.origin.group])) for op in step.flat.ops]
    return replace(step, flat=replace(step.flat, ops=tuple(ops)))


def _origin(one: NewEquation, origins: Sequence[Origin]) -> Origin:
    own = origins[one.place]
    if one.forward is None or own.group is None or origins[one.forward].group is None:
        return own
    # Of its attention, not of a product in it.
    return replace(own, group=origins[one.forward].group)
