"""Where the equations of a traced step came from: the marks of `gradients.py` and the tags of autodiff are read here.

`without_marks` takes the marks out of a program and keeps what they said. `find_origins` says for each equation whether
it is a part of the forward pass, of the backward pass or of neither, and which forward equation it belongs to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jax.extend.core import JaxprEqn, Var

from minialpa.tracing.gradients import boundary_p, gradient_p
from minialpa.tracing.jaxprs import FlatJaxpr, is_literal, live_equations, operand_vars
from minialpa.tracing.scopes import is_second_derivative, is_transposed, read_tag

Direction = Literal["forward", "backward", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where an equation came from.

    Attributes:
        direction: the part of the step that the equation belongs to; "other" includes the update.
        group: number of the forward equation that it is, or whose derivative it is; None if that is not known.
        layer: number of pipeline boundaries before that forward equation.
        call: number of the gradient call of the step that it belongs to, from 0.
        is_second: whether it is a derivative of a backward pass, as in a plain `jax.grad` of `jax.grad`.
    """

    direction: Direction
    group: int | None
    layer: int
    call: int = 0
    is_second: bool = False


@dataclass(frozen=True, slots=True)
class Unmarked:
    """A program without its marks, and what the marks said.

    Attributes:
        flat: the program.
        boundaries_before: for each equation, the number of pipeline boundaries that were marked before it.
        gradients: values that were marked as gradients.
        n_boundaries: number of pipeline boundaries that were marked.
    """

    flat: FlatJaxpr
    boundaries_before: tuple[int, ...]
    gradients: tuple[Var, ...]
    n_boundaries: int


def without_marks(flat: FlatJaxpr) -> Unmarked:
    """Take the marks out of a program; readers of a marked gradient read the gradient itself."""
    unmarked: dict[Var, Any] = {}
    eqns: list[JaxprEqn] = []
    scopes: list[str] = []
    gradients: list[Var] = []
    boundaries_before: list[int] = []
    n_boundaries = 0

    def read(atom: Any) -> Any:
        return atom if is_literal(atom) else unmarked.get(atom, atom)

    for eqn, scope in zip(flat.eqns, flat.scopes, strict=True):
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive is boundary_p:
            n_boundaries += 1
        elif eqn.primitive is gradient_p:
            unmarked.update(zip(eqn.outvars, operands, strict=True))
            gradients.extend(atom for atom in operands if not is_literal(atom))
        else:
            eqns.append(eqn.replace(invars=operands))
            scopes.append(scope)
            boundaries_before.append(n_boundaries)

    outvars = tuple(read(atom) for atom in flat.outvars)
    stripped = replace(flat, eqns=tuple(eqns), scopes=tuple(scopes), outvars=outvars)
    return Unmarked(stripped, tuple(boundaries_before), tuple(gradients), n_boundaries)


def without_dead_equations(program: Unmarked) -> Unmarked:
    """Drop the equations that no result depends on."""
    flat = program.flat
    live = [i for i, is_live in enumerate(live_equations(flat.eqns, flat.outvars)) if is_live]
    return replace(
        program,
        flat=replace(flat, eqns=tuple(flat.eqns[i] for i in live), scopes=tuple(flat.scopes[i] for i in live)),
        boundaries_before=tuple(program.boundaries_before[i] for i in live),
    )


def find_origins(
    eqns: Sequence[JaxprEqn], scopes: Sequence[str], boundaries_before: Sequence[int]
) -> tuple[Origin, ...]:
    """Origin of each equation.

    Without tags (plain `jax.grad`, or no gradient at all) each equation outside the backward pass is its own forward
    group, unless it belongs to the update.
    """
    groups: dict[tuple[int, int, int] | int, int] = {}
    tags = [read_tag(scope) for scope in scopes]
    has_tags = any(tag is not None for tag in tags)
    is_backward = [is_transposed(scope) for scope in scopes]
    in_update = _in_update(eqns, is_backward)

    def origin(i: int) -> Origin:
        tag, boundaries = tags[i], boundaries_before[i]
        if tag is not None:
            call, layer, _ = tag
            direction: Direction = "backward" if is_backward[i] else "forward"
            return Origin(direction=direction, group=groups.setdefault(tag, len(groups)), layer=layer, call=call)
        if is_backward[i]:
            is_second = is_second_derivative(scopes[i])
            return Origin(direction="backward", group=None, layer=boundaries, is_second=is_second)
        if has_tags or in_update[i]:
            return Origin(direction="other", group=None, layer=boundaries)
        return Origin(direction="forward", group=groups.setdefault(i, len(groups)), layer=boundaries)

    return tuple(origin(i) for i in range(len(eqns)))


def _in_update(eqns: Sequence[JaxprEqn], is_backward: Sequence[bool]) -> list[bool]:
    """Which equations depend on the backward pass, or are read by such equations only."""
    in_update = _after_backward(eqns, is_backward)
    readers: dict[Var, list[int]] = defaultdict(list)

    # Backwards: the readers of an equation are decided before it.
    for i in range(len(eqns) - 1, -1, -1):
        reading = [reader for var in eqns[i].outvars for reader in readers[var]]
        if reading and not is_backward[i]:
            in_update[i] = in_update[i] or all(in_update[reader] for reader in reading)
        for var in operand_vars(eqns[i]):
            readers[var].append(i)
    return in_update


def _after_backward(eqns: Sequence[JaxprEqn], is_backward: Sequence[bool]) -> list[bool]:
    """Which equations depend on the backward pass without being part of it."""
    dependent: set[Var] = set()
    is_after = []
    for eqn, backward in zip(eqns, is_backward, strict=True):
        depends = any(var in dependent for var in operand_vars(eqn))
        is_after.append(depends and not backward)
        if backward or depends:
            dependent.update(eqn.outvars)
    return is_after
