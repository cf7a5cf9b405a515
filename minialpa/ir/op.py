"""One operation of a program: an equation of jax, and the facts that phases have found about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jax.extend.core import JaxprEqn

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


#: What is known of an equation that no user wrote and no derivative is.
OTHER = Origin(direction="other", group=None, layer=0)


@dataclass(frozen=True, slots=True)
class Op:
    """An operation.

    Attributes:
        eqn: what it computes, on which values.
        scope: the name scopes that it was traced in, as text.
        origin: where it came from.
        source: number of the traced operation that it is, or that it was written for; -1 for none.
        segment: when it runs, see `SplitStep`; -1 before micro-batches are split.
    """

    eqn: JaxprEqn
    scope: str = ""
    origin: Origin = OTHER
    source: int = -1
    segment: int = -1
