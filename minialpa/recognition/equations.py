"""`RULES`: for each primitive, the form of its result from the forms of its operands.

The rules align indices; the table in `rewrites` has the formulas of the elements.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from minialpa.ir.equations import Atom, aval_of, is_literal, operand_vars, shape_of
from minialpa.recognition.indices import FLOATS, Indices, Numbers, check_apart, keeps_elements
from minialpa.recognition.rewrites import SCORE_FEATURE, converted, rewritten
from minialpa.recognition.terms import (
    OF_QUERIES,
    Axes,
    Form,
    Label,
    Leaf,
    NoFormula,
    Number,
    Scores,
    SoftmaxArray,
    Term,
    renamed,
)


class Known:
    """The forms of operands.

    forms: of variables that do not depend on an exponential of scores.
    """

    def __init__(
        self,
        producers: Mapping[Var, JaxprEqn],
        indices: Indices,
        numbers: Numbers,
        followed: Mapping[Var, Form],
        rules: Mapping[str, Rule],
        factors: Known | None = None,
    ) -> None:
        """rules: for primitives through which arrays are followed back to leaves.
        factors: has the forms of operands of products of matrices.
        followed: forms of variables that depend on an exponential of scores.
        """
        self.indices, self.forms = indices, dict[Var, Form]()
        self._producers, self._numbers, self._followed = producers, numbers, followed
        self._rules, self._factors = rules, factors

    def __getitem__(self, atom: Atom) -> Form:
        """A leaf if no rule applies."""
        if is_literal(atom):
            return _form_of_literal(atom)
        if atom in self._followed:
            return self._followed[atom]
        if atom not in self.forms:
            self.forms[atom] = self._form_outside(atom)
        return self.forms[atom]

    def factor(self, atom: Atom) -> Form:
        """Of an operand of a product of matrices, in which another such product is a leaf."""
        return self[atom] if self._factors is None else self._factors[atom]

    def _form_outside(self, var: Var) -> Form:
        eqn = self._producers.get(var)
        rule = None if eqn is None else self._rules.get(eqn.primitive.name)
        if eqn is not None and rule is not None and self._followed.keys().isdisjoint(operand_vars(eqn)):
            form = form_by(rule, self, eqn)
            if form is not None:
                return form
        axes = self.indices.new_axes(shape_of(var))
        return Form(axes, Leaf(self._numbers(var), axes, var))


#: The form of an equation's only result. Raises NoFormula without one.
Rule = Callable[[Known, JaxprEqn], Form]


def form_by(rule: Rule, known: Known, eqn: JaxprEqn) -> Form | None:
    try:
        return rule(known, eqn)
    except NoFormula:
        return None


def _form_of_literal(literal: Literal) -> Form:
    value = np.asarray(literal.val)
    if value.ndim or (value.dtype.kind not in "biuf" and value.dtype.name not in FLOATS):
        raise NoFormula
    return Form((), Number(float(value)))


# ---- layouts ---------------------------------------------------------------------------------------------------------


def _operand_form(known: Known, eqn: JaxprEqn) -> Form:
    return known[eqn.invars[0]]


def _convert(known: Known, eqn: JaxprEqn) -> Form:
    old, new = (aval_of(atom).dtype.name for atom in (eqn.invars[0], eqn.outvars[0]))
    form = known[eqn.invars[0]]
    if old == new:
        return form
    if old in FLOATS and new in FLOATS:
        return Form(form.axes, converted(form.term, old, new))

    if isinstance(form.term, Number) and form.term.value in range(128) and (new in FLOATS or "int" in new):
        return form
    raise NoFormula


def _reduce_precision(known: Known, eqn: JaxprEqn) -> Form:
    """`jax.checkpoint` rounds saved values to the dtype that they already have."""
    if not keeps_elements(eqn):
        raise NoFormula
    return known[eqn.invars[0]]


def _transpose(known: Known, eqn: JaxprEqn) -> Form:
    form = known[eqn.invars[0]]
    return Form(tuple(form.axes[i] for i in eqn.params["permutation"]), form.term)


def _broadcast_in_dim(known: Known, eqn: JaxprEqn) -> Form:
    form = known[eqn.invars[0]]
    axes: list[Label | None] = [None] * len(shape_of(eqn.outvars[0]))
    for label, i in zip(form.axes, eqn.params["broadcast_dimensions"], strict=True):
        axes[i] = label
    return Form(tuple(axes), form.term)


def _reshape(known: Known, eqn: JaxprEqn) -> Form:
    """Only dimensions of length 1 come or go."""
    form = known[eqn.invars[0]]
    if eqn.primitive.name == "reshape" and eqn.params.get("dimensions") is not None:
        raise NoFormula
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    kept = [label for label, size in zip(form.axes, old, strict=True) if size != 1]
    if [size for size in old if size != 1] != [size for size in new if size != 1]:
        raise NoFormula
    left = iter(kept)
    return Form(tuple(None if size == 1 else next(left) for size in new), form.term)


def _part_of_number(known: Known, eqn: JaxprEqn) -> Form:
    """The array has one value everywhere, as a default head mask of ones."""
    form = known[eqn.invars[0]]
    if not isinstance(form.term, Number):
        raise NoFormula
    return Form((None,) * len(shape_of(eqn.outvars[0])), form.term)


LAYOUTS: Mapping[str, Rule] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "convert_element_type": _convert,
    "copy": _operand_form,
    "copy_p": _operand_form,
    "dynamic_slice": _part_of_number,
    "expand_dims": _reshape,
    "name": _operand_form,
    "reduce_precision": _reduce_precision,
    "reshape": _reshape,
    "slice": _part_of_number,
    "squeeze": _reshape,
    "stop_gradient": _operand_form,
    "transpose": _transpose,
}


# ---- element by element --------------------------------------------------------------------------------------------


def _elementwise(known: Known, eqn: JaxprEqn) -> Form:
    axes, forms = known.indices.aligned([known[atom] for atom in eqn.invars])
    names = _name_of_key([form.term for form in forms])
    axes = tuple(names.get(label, label) for label in axes)
    return Form(axes, rewritten(eqn, [renamed(form.term, names) for form in forms]))


def _name_of_key(terms: Sequence[Term]) -> dict[Label, Label]:
    """Where a broadcast TOTAL meets a product, the broadcast dimension gets the name of key positions."""
    softmaxes = [term.softmax for term in terms if isinstance(term, SoftmaxArray) and term.kind in OF_QUERIES]
    products = [term for term in terms if isinstance(term, Scores) and term.is_product]
    if len(softmaxes) != 1 or len(products) != 1:
        return {}
    others = products[0].labels - softmaxes[0].labels
    return dict.fromkeys(others, softmaxes[0].key_position) if len(others) == 1 else {}


def _difference(known: Known, eqn: JaxprEqn) -> Form:
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
    which, result = eqn.invars[0], eqn.outvars[0]
    is_boolean = len(eqn.invars) == 3 and aval_of(which).dtype == np.bool_
    is_by_element = bool(shape_of(which)) or not shape_of(result)
    return is_boolean and is_by_element and aval_of(result).dtype.name in FLOATS


def _number_rule(fun: Callable[..., object]) -> Rule:
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


def _reduction(known: Known, eqn: JaxprEqn) -> Form:
    """A sum or a maximum; the identity along dimensions of length 1."""
    form = _with_fixed_names(known, known[eqn.invars[0]])
    dims, shape = eqn.params["axes"], shape_of(eqn.invars[0])
    if any(form.axes[i] is None and shape[i] != 1 for i in dims) or isinstance(form.term, Number):
        raise NoFormula
    over = frozenset(form.axes[i] for i in dims) - {None}
    return Form(_axes_without(form.axes, dims), rewritten(eqn, [form.term], over) if over else form.term)


def dot_general(known: Known, eqn: JaxprEqn) -> Form:
    """out[batch, free of left, free of right] = sum over contracted dimensions of left * right."""
    (left_dims, right_dims), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    contracted, batch = (list(zip(*pair, strict=True)) for pair in eqn.params["dimension_numbers"])
    left, right = known.indices.joined(*_product_operands(known, eqn), [*batch, *contracted])

    axes = (
        *(_pair_label(left, right, pair) for pair in batch),
        *_axes_without(left.axes, {*left_batch, *left_dims}),
        *_axes_without(right.axes, {*right_batch, *right_dims}),
    )
    named = check_apart(axes)
    over = frozenset(_pair_label(left, right, pair) for pair in contracted)
    if any(_pair_label(left, right, (i, j)) is None and shape_of(eqn.invars[0])[i] != 1 for i, j in contracted):
        raise NoFormula
    over -= {None}
    if over & named:
        raise NoFormula
    term = rewritten(eqn, [left.term, right.term], over)
    if term.labels - named:
        raise NoFormula
    return Form(axes, term)


def _product_operands(known: Known, eqn: JaxprEqn) -> tuple[Form, Form]:
    left, right = (known.factor(atom) for atom in eqn.invars)
    # If one operand is a number everywhere, such as a mask of ones, the other one may be a product.
    if isinstance(left.term, Number):
        right = known[eqn.invars[1]]
    elif isinstance(right.term, Number):
        left = known[eqn.invars[0]]
    return left, right


def _pair_label(left: Form, right: Form, pair: tuple[int, int]) -> Label | None:
    i, j = pair
    return left.axes[i] if left.axes[i] is not None else right.axes[j]


def _axes_without(axes: Axes, dims: Collection[int]) -> Axes:
    return tuple(label for i, label in enumerate(axes) if i not in dims)


# ---- rules by primitive --------------------------------------------------------------------------------------------


def _first_that_applies(one: Rule, other: Rule) -> Rule:
    def rule(known: Known, eqn: JaxprEqn) -> Form:
        try:
            return one(known, eqn)
        except NoFormula:
            return other(known, eqn)

    return rule


#: Rules for arrays before the scores.
OUTSIDE: Mapping[str, Rule] = {
    **LAYOUTS,
    "div": _number_rule(np.divide),
    "mul": _number_rule(np.multiply),
    "neg": _number_rule(np.negative),
    "pow": _number_rule(np.power),
    "rsqrt": _number_rule(lambda x: 1 / np.sqrt(x)),
    "sqrt": _number_rule(np.sqrt),
}

RULES: Mapping[str, Rule] = {
    **OUTSIDE,
    "add": _elementwise,
    "add_any": _elementwise,
    "div": _first_that_applies(OUTSIDE["div"], _elementwise),
    "dot_general": dot_general,
    "exp": _elementwise,
    "integer_pow": _elementwise,
    "max": _elementwise,
    "mul": _first_that_applies(OUTSIDE["mul"], _elementwise),
    "neg": _first_that_applies(OUTSIDE["neg"], _elementwise),
    "optimization_barrier": LAYOUTS["copy"],
    "reduce_max": _reduction,
    "reduce_sum": _reduction,
    "select_n": _select_n,
    "sub": _difference,
}
