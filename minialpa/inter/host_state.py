"""Optimizer state in host memory: a step in; the same step, which fetches its state for the update, out.

    state in host memory -> wait for its gradient -> device_put -> update -> device_put -> result in host memory

Without the wait, XLA would fetch the state before the backward pass, whose activations need the memory.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
from jax.extend.core import JaxprEqn, Var

from minialpa.inter.layers.offload import moved
from minialpa.inter.layers.remat import barrier_of, renamed
from minialpa.inter.plan_details import argument_roles
from minialpa.ir.equations import (
    aval_of,
    fresh_var,
    host_type,
    is_in_host,
    is_inexact,
    is_literal,
    operand_vars,
    shape_of,
)
from minialpa.ir.op import Op
from minialpa.tracing.trace import TracedStep


@dataclass(frozen=True, slots=True)
class _HostedState:
    """The numbers of an argument, of the result that replaces it, and of the first equation that reads it."""

    invar: int
    outvar: int
    old: Var
    new: Var
    first: int


def with_state_in_host(step: TracedStep) -> TracedStep:
    """Scalars, and state that passes of micro-batches read, stay on the devices."""
    flat, states = step.flat, _states(step)
    invars, outvars = list(flat.invars), list(flat.outvars)
    before: dict[int, list[JaxprEqn]] = defaultdict(list)
    after: dict[int, list[JaxprEqn]] = defaultdict(list)
    names: dict[int, dict[Var, Var]] = defaultdict(dict)  # by the first equation that has them
    for gradient, own in _by_gradient(step, states).items():
        in_host = {one: fresh_var(host_type(shape_of(one.old), aval_of(one.old).dtype)) for one in own}
        waited: Mapping[Var, Var] = {}
        if gradient is not None:
            start = min(one.first for one in own)
            barrier, waited = barrier_of([*in_host.values(), gradient])
            before[start] += barrier
            names[start][gradient] = waited[gradient]
        for one, v in in_host.items():
            fetch, names[one.first][one.old] = moved(waited.get(v, v), jax.memory.Space.Device)
            before[one.first].append(fetch)
            back, outvars[one.outvar] = moved(one.new, jax.memory.Space.Host)
            after[flat.made_by[one.new]].append(back)
            invars[one.invar] = v

    ops: list[Op] = []
    known: dict[Var, Var] = {}
    for i, op in enumerate(flat.ops):
        known |= names[i]
        own_eqn = op.eqn.replace(invars=renamed(op.eqn.invars, known))
        ops += [replace(op, eqn=eqn) for eqn in (*before[i], own_eqn, *after[i])]
    return replace(step, flat=replace(flat, invars=tuple(invars), ops=tuple(ops), outvars=tuple(outvars)))


def _states(step: TracedStep) -> list[_HostedState]:
    flat = step.flat
    first: dict[Var, int] = {}
    for i, eqn in enumerate(flat.eqns):
        for v in operand_vars(eqn):
            first.setdefault(v, i)
    replaced = {i: o for o, i in enumerate(step.layouts) if i is not None}
    found = []
    for i, role in enumerate(argument_roles(step) if step.n_groups else ()):
        if role not in ("optimizer", "other") or i not in replaced:  # without donation, all roles are "other"
            continue
        old, new = flat.invars[i], flat.outvars[replaced[i]]
        is_array = is_inexact(old) and shape_of(old) and not is_in_host(aval_of(old))
        if not is_array or is_literal(new) or new not in flat.made_by or is_in_host(aval_of(new)):
            continue
        if old in first and step.origins[first[old]].direction == "other":
            found.append(_HostedState(i, replaced[i], old, new, first[old]))
    return found


def _by_gradient(step: TracedStep, states: list[_HostedState]) -> dict[Var | None, list[_HostedState]]:
    """None: state that is read before a gradient of its update, or that has none."""
    found: dict[Var | None, list[_HostedState]] = defaultdict(list)
    for one in states:
        gradient = _nearest_gradient(step, one.new)
        is_earlier = gradient is not None and step.flat.made_by[gradient] < one.first
        found[gradient if is_earlier else None].append(one)
    return found


def _nearest_gradient(step: TracedStep, new: Var) -> Var | None:
    gradients, seen, queue = {v for v in step.gradients if v in step.flat.made_by}, {new}, deque([new])
    while queue:
        v = queue.popleft()
        if v in gradients:
            return v
        if v in step.flat.made_by:
            operands = [one for one in operand_vars(step.flat.eqns[step.flat.made_by[v]]) if one not in seen]
            seen.update(operands)
            queue.extend(operands)
    return None
