"""Which results of an attention a term is: `find_role`."""

from __future__ import annotations

from dataclasses import dataclass

from minialpa.recognition.rewrites import is_derivative
from minialpa.recognition.terms import Axes, Form, Kind, Label, Leaf, Part, Softmax

_NAMES = {Kind.OUT: "out", Kind.QUERY_BAR: "query", Kind.KEY_BAR: "key", Kind.VALUE_BAR: "value"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What a value is to an attention: its result, or the gradient of one of its operands.

    Attributes:
        name: "out", "query", "key", "value", or "bias" for gradients.
        softmax: the attention's softmax.
        value: the array of values; None where only its gradient is known.
        cotangent: the cotangent of the result; None in the forward pass.
        has_float16_bar: whether the formula has p_bar in float16.
        bias: number of the bias.
        axes: for each dimension of the value, the index in terms of the operands.
    """

    name: str
    softmax: Softmax
    axes: Axes
    value: Leaf | None = None
    cotangent: Leaf | None = None
    has_float16_bar: bool = False
    bias: int = 0


def find_role(form: Form) -> Role | None:
    """What a value with this form is to an attention; None if it is none of its results."""
    part = form.term
    if not isinstance(part, Part) or part.labels != frozenset(form.axes) - {None}:
        return None
    softmax = part.softmax
    found = {name: getattr(part, name) for name in ("softmax", "value", "cotangent", "has_float16_bar")}
    found["axes"] = form.axes
    if part.kind is Kind.SCORE_BAR and is_derivative(part) and not part.is_scaled:
        biases = [i for i, (bias, sign) in enumerate(softmax.scores.biases) if sign == 1 and bias.labels == part.labels]
        return Role(name="bias", bias=biases[0], **found) if biases else None
    if part.kind not in _NAMES or not part.labels & softmax.labels <= _own_indices(part):
        return None
    return Role(name=_NAMES[part.kind], **found)


def _own_indices(part: Part) -> frozenset[Label]:
    """The indices of scores that a result or a gradient has; a gradient may still have to be summed over others."""
    softmax = part.softmax
    is_of_queries = part.kind in (Kind.OUT, Kind.QUERY_BAR)
    return softmax.batch | (softmax.query_positions if is_of_queries else {softmax.key_position})
