"""One micro-batch: a traced step in, the same equations as a split step whose loop runs once.

The loop is what forward and backward equations need, the update the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.gradients import gradient_p
from minialpa.inter.batching import AGGREGATE, batch_kinds
from minialpa.inter.split_step import LOOP, UPDATE, Op, SplitStep
from minialpa.jaxprs import Atom, aval_of, equations_for, is_inexact, is_literal, operand_vars, unary_equation
from minialpa.trace import TracedStep

#: Floats of fewer bytes are summed over devices as wider ones.
_SUM_BYTES = 2


def whole_batch(step: TracedStep) -> SplitStep:
    """`step` as a split step with one micro-batch."""
    in_loop = _in_loop(step)
    loop = [Op(eqn, LOOP, i) for i, eqn in enumerate(step.flat.eqns) if in_loop[i]]
    update = [Op(eqn, UPDATE, i) for i, eqn in enumerate(step.flat.eqns) if not in_loop[i]]
    kinds = batch_kinds(step, 1)
    dims = {v: kind for v, kind in kinds.items() if isinstance(kind, int)}
    backward = {v for op in loop if step.origins[op.source].direction == "backward" for v in op.eqn.outvars}
    results = [v for v in step.flat.outvars if not is_literal(v)]
    gradients = [v for v in results if v in backward and kinds.get(v) == AGGREGATE]
    marks, copies = _marks(loop, [*(v for op in update for v in operand_vars(op.eqn)), *gradients])
    ops = (*loop, *marks, *(replace(op, eqn=_reading(op.eqn, copies)) for op in update))
    outvars = tuple(v if is_literal(v) or v not in backward else copies.get(v, v) for v in step.flat.outvars)
    return SplitStep(step, 1, ops, (), None, (), (), outvars, dims)


def _in_loop(step: TracedStep) -> list[bool]:
    """Which equations forward and backward passes consist of, or need."""
    out = [origin.direction != "other" for origin in step.origins]
    needed = {v for eqn, mine in zip(step.flat.eqns, out, strict=True) if mine for v in operand_vars(eqn)}
    for i in range(len(out) - 1, -1, -1):
        eqn = step.flat.eqns[i]
        if not out[i] and any(v in needed for v in eqn.outvars):
            out[i] = True
            needed.update(operand_vars(eqn))
    return out


def _marks(loop: Sequence[Op], read: Sequence[Var]) -> tuple[list[Op], dict[Var, Atom]]:
    """Copies, by variable, of the floats that the loop leaves for others: the one place to sum them over devices."""
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
        marks += [Op(eqn, UPDATE, made[v]) for eqn in eqns]
    return marks, copies


def _reading(eqn: JaxprEqn, copies: Mapping[Var, Atom]) -> JaxprEqn:
    invars: list[Atom] = [v if is_literal(v) else copies.get(v, v) for v in eqn.invars]
    copy: JaxprEqn = eqn.replace(invars=invars)
    return copy


def _marked_wide(x: Any) -> Any:
    """A float of 8 bits or fewer is summed over devices in 32: in its own precision, small parts would vanish."""
    return gradient_p.bind(x.astype(np.float32), call=0)[0].astype(x.dtype)
