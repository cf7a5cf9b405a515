"""Rules of equations that sum over indices: sums of arrays, and products of matrices."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from jax.extend.core import JaxprEqn

from minialpa.recognition.algebra import Axes, Expr, Label, NoFormula, multiply, scaled, sum_over
from minialpa.recognition.form import Form, has_ended, sources_of
from minialpa.recognition.indices import check_apart
from minialpa.recognition.rule import Known, Rule
from minialpa.tracing.jaxprs import shape_of


def _reduce_sum(known: Known, eqn: JaxprEqn) -> Form:
    form, shape, summed = known[eqn.invars[0]], shape_of(eqn.invars[0]), eqn.params["axes"]
    expr = form.expr
    for i in summed:
        expr = _sum_along(known, expr, form.axes[i], shape[i])
    return Form(_without(form.axes, summed), expr, form.sources)


def dot_general(known: Known, eqn: JaxprEqn) -> Form:
    """out[batch, free of left, free of right] = sum over contracted dimensions of left * right."""
    (left_dims, right_dims), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    contracted, batch = (list(zip(*pair, strict=True)) for pair in eqn.params["dimension_numbers"])
    left, right = known.indices.joined(*_factors(known, eqn), [*batch, *contracted])

    axes = (
        *(_label(left, right, pair) for pair in batch),
        *_without(left.axes, {*left_batch, *left_dims}),
        *_without(right.axes, {*right_batch, *right_dims}),
    )
    named = check_apart(axes)

    expr = multiply(left.expr, right.expr)
    for i, j in contracted:
        label = _label(left, right, (i, j))
        if label in named:
            raise NoFormula
        expr = _sum_along(known, expr, label, shape_of(eqn.invars[0])[i])
    if expr.labels - named:
        raise NoFormula

    # A product of two leaves may be the scores of an attention.
    sources = sources_of(left, right)
    if not sources and all(not form.expr.constant for form in (left, right)):
        sources = frozenset({("product", eqn.outvars[0])})
    return Form(axes, expr, sources)


def _factors(known: Known, eqn: JaxprEqn) -> tuple[Form, Form]:
    """The operands of a product of matrices."""
    left, right = (known.factor(atom) for atom in eqn.invars)
    # A product with an array of one number, such as a mask of ones, may have a product as its other operand.
    if left.expr.constant is not None:
        right = known[eqn.invars[1]]
    elif right.expr.constant is not None:
        left = known[eqn.invars[0]]

    # The result of an attention goes on into the model; only products with its probabilities are followed.
    for atom, form in zip(eqn.invars, (left, right), strict=True):
        if known.is_followed(atom) and has_ended(form, known.indices.fixed):
            raise NoFormula
    return left, right


def _label(left: Form, right: Form, pair: tuple[int, int]) -> Label | None:
    """The index of a dimension that two operands share; None if neither depends on it."""
    i, j = pair
    return left.axes[i] if left.axes[i] is not None else right.axes[j]


def _sum_along(known: Known, x: Expr, label: Label | None, size: int) -> Expr:
    """x, summed along a dimension."""
    return scaled(x, size) if label is None else sum_over(x, label, size, known.indices.fixed)


def _without(axes: Axes, dims: Collection[int]) -> Axes:
    return tuple(label for i, label in enumerate(axes) if i not in dims)


PRODUCTS: Mapping[str, Rule] = {"dot_general": dot_general, "reduce_sum": _reduce_sum}
