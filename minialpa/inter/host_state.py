"""Optimizer state in host memory: a step in; the same step, which fetches its state for the update, out.

    state in host memory -> wait for its gradient -> device_put -> update -> device_put -> result in host memory

Without the wait, XLA would fetch the state before the backward pass, whose activations need the memory.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import jax
from jax.extend.core import JaxprEqn, Var

from minialpa.inter.layers.offload import moved
from minialpa.inter.layers.remat import barrier_of
from minialpa.inter.plan_details import argument_roles
from minialpa.ir.block import Block
from minialpa.ir.equations import (
    aval_of,
    fresh_var,
    host_type,
    is_in_host,
    is_inexact,
    is_literal,
    operand_vars,
    reading,
    shape_of,
)
from minialpa.ir.op import Op
from minialpa.tracing.trace import TracedStep


@dataclass(frozen=True, slots=True)
class _HostedState:
    """The numbers of an argument, of the result that replaces it, and of the first equation that reads it.

    gradient: the one nearest to the new value.
    """

    invar: int
    outvar: int
    old: Var
    new: Var
    first: int
    gradient: Var


def with_state_in_host(step: TracedStep) -> TracedStep:
    """Scalars, and state that is read before its gradient is there, stay on the devices.

    Returns `step` itself if all of its state stays there.
    """
    flat = step.flat
    invars, outvars = list(flat.invars), list(flat.outvars)
    before: dict[int, list[JaxprEqn]] = defaultdict(list)
    after: dict[int, list[JaxprEqn]] = defaultdict(list)
    names: dict[int, dict[Var, Var]] = defaultdict(dict)  # by the first equation that has them
    of_gradient: dict[Var, list[_HostedState]] = defaultdict(list)
    for one in _states(step):
        of_gradient[one.gradient].append(one)
    if not of_gradient:
        return step

    for gradient, own in of_gradient.items():
        in_host = {one: fresh_var(host_type(shape_of(one.old), aval_of(one.old).dtype)) for one in own}
        start = min(one.first for one in own)
        barrier, waited = barrier_of([*in_host.values(), gradient])
        before[start] += barrier
        names[start][gradient] = waited[gradient]
        for one, v in in_host.items():
            fetch, names[one.first][one.old] = moved(waited[v], jax.memory.Space.Device)
            before[one.first].append(fetch)
            back, outvars[one.outvar] = moved(one.new, jax.memory.Space.Host)
            after[flat.made_by[one.new]].append(back)
            invars[one.invar] = v

    ops: list[Op] = []
    known: dict[Var, Var] = {}
    for i, op in enumerate(flat.ops):
        known |= names[i]
        ops += [replace(op, eqn=one) for one in (*before[i], reading(op.eqn, known), *after[i])]
    return replace(step, flat=replace(flat, invars=tuple(invars), ops=tuple(ops), outvars=tuple(outvars)))


def _states(step: TracedStep) -> Iterator[_HostedState]:
    """State that the step reads only after the nearest gradient of its new value."""
    flat = step.flat
    first = {v: i for i in reversed(range(len(flat.eqns))) for v in operand_vars(flat.eqns[i])}
    gradients = flat.made_by.keys() & set(step.gradients)
    for invar, outvar in _replaced(step):
        old, new = flat.invars[invar], flat.outvars[outvar]
        if is_literal(new) or new not in flat.made_by or old not in first:  # passed on, or not read
            continue
        gradient = _nearest(flat, new, gradients)
        if gradient is not None and flat.made_by[gradient] < first[old]:
            yield _HostedState(invar, outvar, old, new, first[old], gradient)


def _replaced(step: TracedStep) -> Iterator[tuple[int, int]]:
    """The numbers of arrays on the devices that are no weights, and of the results that replace them."""
    roles = argument_roles(step)
    replaced = {invar: outvar for outvar, invar in enumerate(step.layouts) if invar is not None}
    for invar, outvar in replaced.items():
        # Without donation, also the optimizer has the role "other".
        if roles[invar] not in ("optimizer", "other"):
            continue
        both = step.flat.invars[invar], step.flat.outvars[outvar]
        if is_inexact(both[0]) and shape_of(both[0]) and not any(is_in_host(aval_of(atom)) for atom in both):
            yield invar, outvar


def _nearest(flat: Block, new: Var, gradients: AbstractSet[Var]) -> Var | None:
    """The first gradient among the operands of `new`, their operands, and so on."""
    seen, queue = {new}, deque([new])
    while queue:
        v = queue.popleft()
        if v in gradients:
            return v
        if v in flat.made_by:
            operands = [one for one in operand_vars(flat.eqns[flat.made_by[v]]) if one not in seen]
            seen.update(operands)
            queue.extend(operands)
    return None
