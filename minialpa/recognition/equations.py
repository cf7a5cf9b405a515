"""The form of the result of an equation, from those of its operands. `RULES` lists the rules by primitive.

The rules here align the indices of the operands. What the elements are is in the table of `rewrites`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from jax.extend.core import JaxprEqn

from minialpa.ir.equations import aval_of, shape_of
from minialpa.recognition.indices import check_apart
from minialpa.recognition.layouts import LAYOUTS
from minialpa.recognition.numbering import FLOATS
from minialpa.recognition.rewrites import SCORE_FEATURE, rewritten
from minialpa.recognition.rule import Known, Rule
from minialpa.recognition.terms import OF_QUERIES, Axes, Form, Label, NoFormula, Number, Part, Scores, Term, renamed

# ---- element by element --------------------------------------------------------------------------------------------


def _elementwise(known: Known, eqn: JaxprEqn) -> Form:
    axes, forms = known.indices.aligned([known[atom] for atom in eqn.invars])
    names = _name_of_key([form.term for form in forms])
    axes = tuple(names.get(label, label) for label in axes)
    return Form(axes, rewritten(eqn, [renamed(form.term, names) for form in forms]))


def _name_of_key(terms: Sequence[Term]) -> dict[Label, Label]:
    """The new name of the dimension in which a total is repeated, where it meets a product: that of key positions.

    If it is another dimension, the result has no common names with the weights, which it meets later.
    """
    softmaxes = [term.softmax for term in terms if isinstance(term, Part) and term.kind in OF_QUERIES]
    products = [term for term in terms if isinstance(term, Scores) and term.is_product]
    if len(softmaxes) != 1 or len(products) != 1:
        return {}
    others = products[0].labels - softmaxes[0].labels
    return dict.fromkeys(others, softmaxes[0].key_position) if len(others) == 1 else {}


def _difference(known: Known, eqn: JaxprEqn) -> Form:
    """`_elementwise`; of scores and their maximum, both with the names that mean the same in all forms."""
    axes, forms = known.indices.aligned([_with_fixed_names(known, known[atom]) for atom in eqn.invars])
    return Form(axes, rewritten(eqn, [form.term for form in forms]))


def _with_fixed_names(known: Known, form: Form) -> Form:
    if not isinstance(form.term, Scores):
        return form
    form = known.indices.with_fixed_names(form)
    return Form(form.axes, renamed(form.term, {form.term.feature: SCORE_FEATURE}))  # type: ignore[union-attr]


def _select_n(known: Known, eqn: JaxprEqn) -> Form:
    if not _is_choice_of_floats(eqn):
        raise NoFormula
    axes, forms = known.indices.aligned([known[atom] for atom in eqn.invars])
    which, if_false, if_true = (form.term for form in forms)
    if isinstance(which, Number):
        return Form(axes, if_true if which.value else if_false)
    return Form(axes, rewritten(eqn, [which, if_false, if_true]))


def _is_choice_of_floats(eqn: JaxprEqn) -> bool:
    """Whether an equation chooses between two arrays of floats, by a boolean for each element."""
    which, result = eqn.invars[0], eqn.outvars[0]
    is_boolean = len(eqn.invars) == 3 and aval_of(which).dtype == np.bool_
    is_by_element = bool(shape_of(which)) or not shape_of(result)
    return is_boolean and is_by_element and aval_of(result).dtype.name in FLOATS


def _number(fun: Callable[..., object]) -> Rule:
    """The rule of a function of numbers."""

    def rule(known: Known, eqn: JaxprEqn) -> Form:
        terms = [known[atom].term for atom in eqn.invars]
        dtype = aval_of(eqn.outvars[0]).dtype
        if dtype.name not in FLOATS or not all(isinstance(term, Number) for term in terms):
            raise NoFormula
        with np.errstate(all="ignore"):
            value = float(np.asarray(fun(*(dtype.type(term.value) for term in terms)), dtype))  # type: ignore[union-attr]
        return Form((None,) * len(shape_of(eqn.outvars[0])), Number(value))

    return rule


# ---- sums ----------------------------------------------------------------------------------------------------------


def _reduced(known: Known, eqn: JaxprEqn) -> Form:
    """A sum or a maximum along dimensions. Those of length 1 only vanish."""
    form = _with_fixed_names(known, known[eqn.invars[0]])
    dims, shape = eqn.params["axes"], shape_of(eqn.invars[0])
    if any(form.axes[i] is None and shape[i] != 1 for i in dims) or isinstance(form.term, Number):
        raise NoFormula
    over = frozenset(form.axes[i] for i in dims) - {None}
    return Form(_without(form.axes, dims), rewritten(eqn, [form.term], over) if over else form.term)


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
    over = frozenset(_label(left, right, pair) for pair in contracted)
    if any(_label(left, right, (i, j)) is None and shape_of(eqn.invars[0])[i] != 1 for i, j in contracted):
        raise NoFormula
    over -= {None}
    if over & named:
        raise NoFormula
    term = rewritten(eqn, [left.term, right.term], over)
    if term.labels - named:
        raise NoFormula
    return Form(axes, term)


def _factors(known: Known, eqn: JaxprEqn) -> tuple[Form, Form]:
    """The operands of a product of matrices."""
    left, right = (known.factor(atom) for atom in eqn.invars)
    # A product with an array of one number, such as a mask of ones, may have a product as its other operand.
    if isinstance(left.term, Number):
        right = known[eqn.invars[1]]
    elif isinstance(right.term, Number):
        left = known[eqn.invars[0]]
    return left, right


def _label(left: Form, right: Form, pair: tuple[int, int]) -> Label | None:
    """The index of a dimension that two operands share; None if neither depends on it."""
    i, j = pair
    return left.axes[i] if left.axes[i] is not None else right.axes[j]


def _without(axes: Axes, dims: Collection[int]) -> Axes:
    return tuple(label for i, label in enumerate(axes) if i not in dims)


# ---- rules by primitive --------------------------------------------------------------------------------------------


def _first(one: Rule, other: Rule) -> Rule:
    def rule(known: Known, eqn: JaxprEqn) -> Form:
        try:
            return one(known, eqn)
        except NoFormula:
            return other(known, eqn)

    return rule


#: What an array that is no score goes through on its way to an attention.
OUTSIDE: Mapping[str, Rule] = {
    **LAYOUTS,
    "div": _number(np.divide),
    "mul": _number(np.multiply),
    "neg": _number(np.negative),
    "pow": _number(np.power),
    "rsqrt": _number(lambda x: 1 / np.sqrt(x)),
    "sqrt": _number(np.sqrt),
}

RULES: Mapping[str, Rule] = {
    **OUTSIDE,
    "add": _elementwise,
    "add_any": _elementwise,
    "div": _first(OUTSIDE["div"], _elementwise),
    "dot_general": dot_general,
    "exp": _elementwise,
    "integer_pow": _elementwise,
    "max": _elementwise,
    "mul": _first(OUTSIDE["mul"], _elementwise),
    "neg": _first(OUTSIDE["neg"], _elementwise),
    "optimization_barrier": LAYOUTS["copy"],
    "reduce_max": _reduced,
    "reduce_sum": _reduced,
    "select_n": _select_n,
    "sub": _difference,
}
