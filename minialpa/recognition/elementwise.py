"""Rules of equations that compute each element from the elements at the same indices.

`ELEMENTWISE` lists them, and `BY_NUMBERS` those that an array goes through on its way to an attention: a product with
a number, and numbers that are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from jax.extend.core import JaxprEqn

from minialpa.recognition.algebra import (
    Expr,
    Leaf,
    Mask,
    Masked,
    NoFormula,
    add,
    exponential,
    is_positive,
    logarithm,
    multiply,
    number,
    of_atom,
    power,
    scaled,
)
from minialpa.recognition.form import Form, has_ended, sources_of
from minialpa.recognition.numbering import FLOATS
from minialpa.recognition.rule import Known, Rule
from minialpa.tracing.jaxprs import aval_of, shape_of

# ---- arithmetic ----------------------------------------------------------------------------------------------------


def _elementwise(fun: Callable[..., Expr]) -> Rule:
    def rule(known: Known, eqn: JaxprEqn) -> Form:
        operands = [known[atom] for atom in eqn.invars]
        axes, aligned = known.indices.aligned(operands)
        return Form(axes, fun(*(form.expr for form in aligned)), sources_of(*operands))

    return rule


def _by_number(fun: Callable[[Expr, Expr], Expr]) -> Rule:
    """The rule of `fun` where one of the operands is a number. Other arrays are followed no further."""
    plain = _elementwise(fun)

    def rule(known: Known, eqn: JaxprEqn) -> Form:
        if not any(known[atom].expr.constant is not None for atom in eqn.invars):
            raise NoFormula
        return plain(known, eqn)

    return rule


def _sum_of(sign: float) -> Rule:
    """x + sign * y."""
    plain = _elementwise(lambda x, y: add(x, y, sign))

    def rule(known: Known, eqn: JaxprEqn) -> Form:
        form = plain(known, eqn)

        # Behind the attention, other values are added to its result: this is where it ends.
        followed = [atom for atom in eqn.invars if known.is_followed(atom)]
        others = [atom for atom in eqn.invars if not known.is_followed(atom)]
        has_other_value = any(known[atom].expr.constant is None for atom in others)
        if followed and has_other_value and has_ended(known[followed[0]], known.indices.fixed):
            raise NoFormula
        return form

    return rule


def _quotient(x: Expr, y: Expr) -> Expr:
    if y.constant == 0:
        raise NoFormula
    return multiply(x, power(y, -1))


def _integer_pow(known: Known, eqn: JaxprEqn) -> Form:
    form = known[eqn.invars[0]]
    n = eqn.params["y"] if eqn.primitive.name == "integer_pow" else 2
    return Form(form.axes, power(form.expr, n), form.sources)


# ---- numbers -------------------------------------------------------------------------------------------------------


def _of_number(fun: Callable[[float], float]) -> Rule:
    def rule(known: Known, eqn: JaxprEqn) -> Form:
        form = known[eqn.invars[0]]
        if form.expr.constant is None:
            raise NoFormula
        try:
            return Form(form.axes, number(fun(form.expr.constant)), form.sources)
        except (ValueError, ZeroDivisionError, OverflowError) as error:
            raise NoFormula from error

    return rule


def _pow(known: Known, eqn: JaxprEqn) -> Form:
    base, exponent = (known[atom].expr.constant for atom in eqn.invars)
    if base is None or exponent is None or base <= 0:
        raise NoFormula
    return Form((None,) * len(shape_of(eqn.outvars[0])), number(base**exponent))


# ---- exponentials --------------------------------------------------------------------------------------------------


def _exp(known: Known, eqn: JaxprEqn) -> Form:
    form = known[eqn.invars[0]]
    if not form.sources:
        raise NoFormula
    form = known.indices.with_fixed_names(form)
    scores = frozenset(("scores", var) for _, var in form.sources)
    return Form(form.axes, exponential(form.expr), scores)


def _log(known: Known, eqn: JaxprEqn) -> Form:
    form = known[eqn.invars[0]]
    return Form(form.axes, logarithm(form.expr), form.sources)


def _absolute(known: Known, eqn: JaxprEqn) -> Form:
    form = known[eqn.invars[0]]
    if not is_positive(form.expr):
        raise NoFormula
    return form


def _is_at_least_0(known: Known, eqn: JaxprEqn) -> Form:
    """1, since a sum of exponentials is at least 0. Raises NoFormula for all other comparisons."""
    form, bound = (known[atom] for atom in eqn.invars)
    if not is_positive(form.expr) or bound.expr.constant is None or bound.expr.constant > 0:
        raise NoFormula
    return Form(form.axes, number(1.0), form.sources)


# ---- masks ---------------------------------------------------------------------------------------------------------


def _select_n(known: Known, eqn: JaxprEqn) -> Form:
    """One of two arrays everywhere, or one that is masked: the other one is a number."""
    if not _is_choice_of_floats(eqn):
        raise NoFormula
    operands = [known[atom] for atom in eqn.invars]
    axes, (which, if_false, if_true) = known.indices.aligned(operands)
    sources = sources_of(*operands)
    if which.expr.constant is not None:
        return Form(axes, (if_true if which.expr.constant else if_false).expr, sources)

    leaf = _only_leaf(which.expr)
    for seen, hidden, positive in ((if_true, if_false, True), (if_false, if_true, False)):
        # Only what comes of a product of two leaves can be scores.
        if seen.sources and (masked := _masked(seen.expr, Mask(leaf, positive), hidden.expr.constant)) is not None:
            return Form(axes, masked, sources)
    raise NoFormula


def _is_choice_of_floats(eqn: JaxprEqn) -> bool:
    """Whether an equation chooses between two arrays of floats, by a boolean for each element."""
    which, result = eqn.invars[0], eqn.outvars[0]
    is_boolean = len(eqn.invars) == 3 and aval_of(which).dtype == np.bool_
    is_by_element = bool(shape_of(which)) or not shape_of(result)
    return is_boolean and is_by_element and aval_of(result).dtype.name in FLOATS


def _masked(x: Expr, mask: Mask, value: float | None) -> Expr | None:
    """x where a mask is 1 and a number elsewhere; None if that is no formula. value: None if it is no number."""
    if value == 0:
        return multiply(x, of_atom(mask))
    is_score = value is not None and (math.isfinite(value) or value == -math.inf)
    if value is None or not is_score or any(monomial.exponent is not None for monomial in x.terms):
        return None
    return of_atom(Masked(x, mask, value))


def _only_leaf(x: Expr) -> Leaf:
    if len(x.terms) == 1:
        ((monomial, c),) = x.terms.items()
        if c == 1 and monomial.exponent is None and len(monomial.atoms) == 1:
            ((atom, p),) = monomial.atoms.items()
            if isinstance(atom, Leaf) and p == 1:
                return atom
    raise NoFormula


BY_NUMBERS: Mapping[str, Rule] = {
    "div": _by_number(_quotient),
    "mul": _by_number(multiply),
    "neg": _elementwise(lambda x: scaled(x, -1.0)),
    "pow": _pow,
    "rsqrt": _of_number(lambda x: 1 / math.sqrt(x)),
    "sqrt": _of_number(math.sqrt),
}

ELEMENTWISE: Mapping[str, Rule] = {
    **BY_NUMBERS,
    "abs": _absolute,
    "add": _sum_of(1.0),
    "add_any": _sum_of(1.0),
    "div": _elementwise(_quotient),
    "exp": _exp,
    "ge": _is_at_least_0,
    "gt": _is_at_least_0,
    "integer_pow": _integer_pow,
    "log": _log,
    "mul": _elementwise(multiply),
    "select_n": _select_n,
    "square": _integer_pow,
    "sub": _sum_of(-1.0),
}
