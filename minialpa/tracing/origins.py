"""The origin of each equation of a traced step: its pass (forward, backward or other), forward group and layer.

A forward group is one forward equation and its derivatives. `without_marks` removes the marks of gradients and pipeline
boundaries (`gradients.py`) from a program. `with_origins` reads the tags in name scopes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import JaxprEqn, Var

from minialpa.ir.block import Block
from minialpa.ir.equations import is_literal, operand_vars, renamed
from minialpa.ir.op import Direction, Op, Origin, is_second_derivative, is_transposed, read_tag
from minialpa.tracing.gradients import boundary_p, gradient_p


@dataclass(frozen=True, slots=True)
class Unmarked:
    """A program without marks; the layer of an origin counts the boundaries marked before the operation."""

    flat: Block
    gradients: tuple[Var, ...]
    n_boundaries: int


def without_marks(flat: Block) -> Unmarked:
    """Remove the marks from a program. Readers of a marked gradient read the gradient itself."""
    unmarked: dict[Var, Any] = {}
    ops: list[Op] = []
    gradients: list[Var] = []
    n_boundaries = 0
    for op in flat.ops:
        eqn, operands = op.eqn, renamed(op.eqn.invars, unmarked)
        if eqn.primitive is boundary_p:
            n_boundaries += 1
        elif eqn.primitive is gradient_p:
            unmarked.update(zip(eqn.outvars, operands, strict=True))
            gradients.extend(atom for atom in operands if not is_literal(atom))
        else:
            origin = replace(op.origin, layer=n_boundaries)
            ops.append(replace(op, eqn=eqn.replace(invars=operands), origin=origin))

    outvars = tuple(renamed(flat.outvars, unmarked))
    return Unmarked(replace(flat, ops=tuple(ops), outvars=outvars), tuple(gradients), n_boundaries)


def with_origins(flat: Block) -> Block:
    """The program with the origin of each operation. `flat` comes from `without_marks`.

    Without tags (plain `jax.grad`, or no gradient) each equation outside the backward pass and the update is a forward
    group by itself.
    """
    groups: dict[tuple[int, int, int] | int, int] = {}
    tags = [read_tag(op.scope) for op in flat.ops]  # (call, layer, index of the forward equation), or None
    has_tags = any(tag is not None for tag in tags)
    is_backward = [is_transposed(op.scope) for op in flat.ops]
    in_update = _in_update(flat.eqns, is_backward)

    def origin(i: int) -> Origin:
        tag, layer_by_boundaries = tags[i], flat.ops[i].origin.layer
        if tag is not None:
            call, layer, _ = tag
            direction: Direction = "backward" if is_backward[i] else "forward"
            return Origin(direction=direction, group=groups.setdefault(tag, len(groups)), layer=layer, call=call)
        if is_backward[i]:
            is_second = is_second_derivative(flat.ops[i].scope)
            return Origin(direction="backward", group=None, layer=layer_by_boundaries, is_second=is_second)
        if has_tags or in_update[i]:
            return Origin(direction="other", group=None, layer=layer_by_boundaries)
        return Origin(direction="forward", group=groups.setdefault(i, len(groups)), layer=layer_by_boundaries)

    return replace(flat, ops=tuple(replace(op, origin=origin(i)) for i, op in enumerate(flat.ops)))


def _in_update(eqns: Sequence[JaxprEqn], is_backward: Sequence[bool]) -> list[bool]:
    """Which equations depend on the backward pass, or have only such readers."""
    in_update = _after_backward(eqns, is_backward)
    readers: dict[Var, list[int]] = defaultdict(list)

    for i in range(len(eqns) - 1, -1, -1):
        reading = [reader for var in eqns[i].outvars for reader in readers[var]]
        if reading and not is_backward[i]:
            in_update[i] = in_update[i] or all(in_update[reader] for reader in reading)
        for var in operand_vars(eqns[i]):
            readers[var].append(i)
    return in_update


def _after_backward(eqns: Sequence[JaxprEqn], is_backward: Sequence[bool]) -> list[bool]:
    """Which equations outside the backward pass depend on it."""
    dependent: set[Var] = set()
    is_after = []
    for eqn, backward in zip(eqns, is_backward, strict=True):
        depends = any(var in dependent for var in operand_vars(eqn))
        is_after.append(depends and not backward)
        if backward or depends:
            dependent.update(eqn.outvars)
    return is_after
