"""The formula of each value of a program: equations in, `Form`s out.

A `Form` says which index each dimension of an array stands for, and what the element at these indices is. Formulas are
made for the values between the scores of a softmax and the gradients that follow from it: forward from each `exp` whose
operand is computed from a product of matrices. Every other array is a `Leaf`. Conversions between float dtypes and
barriers do not change a formula.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.recognition.algebra import (
    Axes,
    Expr,
    Label,
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
    renamed,
    scaled,
    sum_over,
)
from minialpa.tracing.jaxprs import Atom, aval_of, is_literal, operand_vars, shape_of

#: Steps from an equation to those that it is compared by, or that lead from an `exp` to the product of its scores.
_DEPTH = 12
_FLOATS = ("bfloat16", "float16", "float32", "float64")

Rule = Callable[["Forms", JaxprEqn], "Form"]


@dataclass(frozen=True, slots=True)
class Form:
    """What an array is.

    Attributes:
        axes: the index of each dimension; None where the array does not depend on it.
        expr: the element at these indices.
        sources: ("product", the result of a product of two leaves that it comes from), and ("scores", such a result)
            for scores whose exponential it comes from.
    """

    axes: Axes
    expr: Expr
    sources: frozenset[tuple[str, Var]] = frozenset()

    @property
    def scores(self) -> frozenset[Var]:
        """The products whose exponentials this comes from."""
        return frozenset(var for kind, var in self.sources if kind == "scores")


class Numbers:
    """Numbers of arrays. Arrays that are computed alike have the same number, also on both sides of a barrier."""

    def __init__(self, producers: Mapping[Var, JaxprEqn]) -> None:
        self._producers = producers
        self._of_var: dict[Var, int] = {}
        self._of_key: dict[Any, int] = {}

    def __call__(self, atom: Atom, depth: int = _DEPTH) -> int:
        if is_literal(atom):
            return self._intern(("literal", str(aval_of(atom)), repr(atom.val)))
        if atom not in self._of_var:
            key = self._key(atom, depth)
            self._of_var[atom] = key if isinstance(key, int) else self._intern(key)
        return self._of_var[atom]

    def _intern(self, key: Any) -> int:
        return self._of_key.setdefault(key, len(self._of_key))

    def _key(self, var: Var, depth: int) -> Any:
        """What a variable is known by: the number of what is before a barrier, its equation, or itself."""
        eqn = self._producers.get(var)
        if eqn is None or eqn.effects:
            return ("variable", id(var))
        i = eqn.outvars.index(var)
        if eqn.primitive.name == "optimization_barrier" or _keeps_elements(eqn):
            return self(eqn.invars[i], depth)
        if depth == 0:
            return ("variable", id(var))
        key = (eqn.primitive, i, tuple(eqn.params.items()), tuple(self(atom, depth - 1) for atom in eqn.invars))
        try:
            hash(key)
        except TypeError:  # a parameter that cannot be hashed
            return ("variable", id(var))
        return key


def _keeps_elements(eqn: JaxprEqn) -> bool:
    """Whether an equation only changes the dtype of floats, or nothing at all."""
    name = eqn.primitive.name
    if name == "convert_element_type":
        return all(aval_of(atom).dtype.name in _FLOATS for atom in (eqn.invars[0], eqn.outvars[0]))
    if name == "reduce_precision":
        info = jnp.finfo(aval_of(eqn.outvars[0]).dtype)
        return bool(eqn.params["exponent_bits"] >= info.nexp and eqn.params["mantissa_bits"] >= info.nmant)
    return name in ("copy", "name", "stop_gradient")


class Forms:
    """The forms of the values of a program.

    producers: the equation of each variable, also of those around a scan.
    is_result: whether a value with this form, given the indices whose names are fixed, is what an attention computes.
    """

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        producers: Mapping[Var, JaxprEqn],
        is_result: Callable[[Form, frozenset[Label]], bool],
    ) -> None:
        self._is_result = is_result
        self._producers = producers
        self._numbers = Numbers(producers)
        # Forms of arrays, and those of arrays as operands of products.
        self._forms: dict[Var, Form] = {}
        self._factors: dict[Var, Form] = {}
        self._may_be_product = True
        self._names = itertools.count()
        #: Indices of scores, whose names mean the same in all forms.
        self.fixed: set[Label] = set()
        self._fixed_names: dict[Label, Label] = {}
        #: The variables that depend on an exponential of scores.
        self.followed: dict[Var, Form] = {}
        self._follow(eqns)

    def __getitem__(self, atom: Atom) -> Form:
        """The form of an atom; that of a leaf, if nothing more is known."""
        if is_literal(atom):
            value = np.asarray(atom.val)
            if value.ndim or (value.dtype.kind not in "biuf" and value.dtype.name != "bfloat16"):
                raise NoFormula
            return Form((), Expr({}) if value == 0 else number(float(value)))
        known = self._forms if self._may_be_product else self._factors
        if atom in self.followed:
            return self.followed[atom]
        if atom not in known:
            known[atom] = self._outside(atom)
        return known[atom]

    def factor(self, atom: Atom) -> Form:
        """The form of an operand of a product of matrices, which is a leaf even if it is such a product itself."""
        before, self._may_be_product = self._may_be_product, False
        try:
            return self[atom]
        finally:
            self._may_be_product = before

    # ---- which equations are followed ------------------------------------------------------------------------------

    def _follow(self, eqns: Sequence[JaxprEqn]) -> None:
        before_exp = self._before_exponentials(eqns)
        for eqn in eqns if before_exp else ():
            rule = _RULES.get(eqn.primitive.name)
            is_after = any(var in self.followed for var in operand_vars(eqn))
            if rule is None or not (is_after or id(eqn) in before_exp):
                continue
            if eqn.primitive.name == "optimization_barrier":
                self._follow_barrier(eqn)
                continue
            # The model goes on with a result as with any other array.
            if eqn.primitive.name not in _TRUE_LAYOUTS and any(map(self._has_finished, operand_vars(eqn))):
                continue
            try:
                form = rule(self, eqn)
            except NoFormula:
                continue
            out = eqn.outvars[0]
            if len(form.axes) != len(shape_of(out)):
                continue
            self._forms[out] = form
            if is_after or eqn.primitive.name == "exp":
                self.followed[out] = form

    def _follow_barrier(self, eqn: JaxprEqn) -> None:
        """Scores and what comes of them are the same behind a barrier."""
        for atom, out in zip(eqn.invars, eqn.outvars, strict=True):
            if is_literal(atom) or self._has_finished(atom):
                continue
            if atom in self.followed:
                self._forms[out] = self.followed[out] = self.followed[atom]
            elif atom in self._forms and self._forms[atom].sources:
                self._forms[out] = self._forms[atom]

    def _has_finished(self, var: Var) -> bool:
        form = self.followed.get(var)
        return form is not None and _has_ended(self, form) and self._is_result(form, frozenset(self.fixed))

    def _before_exponentials(self, eqns: Sequence[JaxprEqn]) -> set[int]:
        """The equations from a product of matrices to an `exp`, by identity."""
        wanted: dict[Var, int] = {}
        found: set[int] = set()
        has_product: set[Var] = set()
        for eqn in reversed(eqns):
            out = eqn.outvars[0] if eqn.outvars else None
            if eqn.primitive.name == "exp" and len(shape_of(eqn.invars[0])) >= 2:
                wanted.update((var, _DEPTH) for var in operand_vars(eqn))
                found.add(id(eqn))
            depth = max((wanted.get(var, 0) for var in eqn.outvars), default=0)
            if depth and eqn.primitive.name in _TO_SCORES:
                found.add(id(eqn))
                has_product.update([out] if eqn.primitive.name == "dot_general" and out is not None else [])
                if eqn.primitive.name != "dot_general":
                    for var in operand_vars(eqn):
                        wanted[var] = max(wanted.get(var, 0), depth - 1)
        return found if has_product else set()

    # ---- leaves ----------------------------------------------------------------------------------------------------

    def leaf(self, var: Var) -> Form:
        axes = tuple(None if size == 1 else next(self._names) for size in shape_of(var))
        return Form(axes, of_atom(Leaf(self._numbers(var), axes, var)))

    def _outside(self, var: Var) -> Form:
        """The form of an array that no rule has followed: a leaf in some layout, or a product of two."""
        eqn = self._producers.get(var)
        rule = None if eqn is None else _LAYOUTS.get(eqn.primitive.name)
        if eqn is not None and self._may_be_product and eqn.primitive.name == "dot_general":
            rule = _dot_general
        if rule is None or eqn is None or any(operand in self.followed for operand in operand_vars(eqn)):
            return self.leaf(var)
        if _narrows(eqn):
            # Products of rotated keys that were rounded to bfloat16, say, are written for units of that dtype.
            return self.leaf(var)
        try:
            return rule(self, eqn)
        except NoFormula:
            return self.leaf(var)

    # ---- forms that meet -------------------------------------------------------------------------------------------

    def apart(self, form: Form, taken: Iterable[Label]) -> Form:
        """The form with other names for its indices, but for those that are fixed and those not in `taken`."""
        taken = set(taken)
        names = {label: next(self._names) for label in form.expr.labels | set(form.axes) - {None}
                 if label in taken and label not in self.fixed}  # fmt: skip
        return self.renamed(form, names)

    def with_fixed_names(self, form: Form) -> Form:
        """The form of scores with names for its indices that mean the same in all forms, and that no leaf has."""
        free = [label for label in form.axes if label is not None and label not in self.fixed]
        names = {label: self._fixed_names.setdefault(label, next(self._names)) for label in free}
        self.fixed.update(names.values())
        return self.renamed(form, names)

    @staticmethod
    def renamed(form: Form, names: Mapping[Label, Label]) -> Form:
        axes = tuple(label if label is None else names.get(label, label) for label in form.axes)
        return Form(axes, renamed(form.expr, names), form.sources)

    def aligned(self, forms: Sequence[Form]) -> tuple[Axes, list[Form]]:
        """Forms of arrays of one shape, with one name for each dimension. Numbers have no dimensions."""
        n_dims = max(len(form.axes) for form in forms)
        axes: list[Label | None] = [None] * n_dims
        for form in forms:
            for i, label in enumerate(form.axes):
                if label in self.fixed:
                    if axes[i] not in (None, label):
                        raise NoFormula
                    axes[i] = label

        # Scores keep the names of their indices: then a saved product has the same ones in the backward pass.
        for form in forms:
            for i, label in enumerate(form.axes if form.sources else ()):
                if axes[i] is None and label not in axes:
                    axes[i] = label

        out = []
        for form in forms:
            if not form.axes:
                out.append(form)
                continue
            form = self.apart(form, {label for label in form.axes if label not in self.fixed} & set(axes))
            names = {}
            for i, label in enumerate(form.axes):
                if label is None:
                    continue
                if axes[i] is None:
                    axes[i] = label
                names[label] = axes[i]
            out.append(self.renamed(form, {old: new for old, new in names.items() if old != new}))
        named = [label for label in axes if label is not None]
        if len(set(named)) != len(named) or any(form.expr.labels - set(named) for form in out):
            raise NoFormula
        return tuple(axes), out


def _is_float(atom: Atom) -> bool:
    return aval_of(atom).dtype.name in _FLOATS


def _sources(*forms: Form) -> frozenset[tuple[str, Var]]:
    return frozenset().union(*(form.sources for form in forms))


# ---- layouts -------------------------------------------------------------------------------------------------------


def _same(forms: Forms, eqn: JaxprEqn) -> Form:
    return forms[eqn.invars[0]]


def _convert(forms: Forms, eqn: JaxprEqn) -> Form:
    old, new = (aval_of(atom).dtype.name for atom in (eqn.invars[0], eqn.outvars[0]))
    form = forms[eqn.invars[0]]
    c = form.expr.constant
    # Every dtype of whole numbers has these.
    is_small = c is not None and c in range(128) and "int" in new
    is_number = c is not None and (new in _FLOATS or is_small)
    if not is_number and (old not in _FLOATS or new not in _FLOATS) and old != new:
        raise NoFormula
    return form


def _narrows(eqn: JaxprEqn) -> bool:
    """Whether an equation rounds floats to a shorter dtype."""
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = (aval_of(atom).dtype for atom in (eqn.invars[0], eqn.outvars[0]))
    return bool(old.itemsize > new.itemsize)


def _transpose(forms: Forms, eqn: JaxprEqn) -> Form:
    form = forms[eqn.invars[0]]
    return Form(tuple(form.axes[i] for i in eqn.params["permutation"]), form.expr, form.sources)


def _broadcast_in_dim(forms: Forms, eqn: JaxprEqn) -> Form:
    form = forms[eqn.invars[0]]
    axes: list[Label | None] = [None] * len(shape_of(eqn.outvars[0]))
    for label, i in zip(form.axes, eqn.params["broadcast_dimensions"], strict=True):
        axes[i] = label
    return Form(tuple(axes), form.expr, form.sources)


def _reshape(forms: Forms, eqn: JaxprEqn) -> Form:
    """Dimensions of length 1 come and go; other ones stay as they are."""
    form = forms[eqn.invars[0]]
    if eqn.primitive.name == "reshape" and eqn.params.get("dimensions") is not None:
        raise NoFormula
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    kept = [label for label, size in zip(form.axes, old, strict=True) if size != 1]
    if [size for size in old if size != 1] != [size for size in new if size != 1]:
        raise NoFormula
    left = iter(kept)
    return Form(tuple(None if size == 1 else next(left) for size in new), form.expr, form.sources)


# ---- elementwise ---------------------------------------------------------------------------------------------------


def _elementwise(fun: Callable[..., Expr]) -> Rule:
    def rule(forms: Forms, eqn: JaxprEqn) -> Form:
        operands = [forms[atom] for atom in eqn.invars]
        axes, aligned = forms.aligned(operands)
        return Form(axes, fun(*(form.expr for form in aligned)), _sources(*operands))

    return rule


def _sum_of(sign: float) -> Rule:
    plain = _elementwise(lambda x, y: add(x, y, sign))

    def rule(forms: Forms, eqn: JaxprEqn) -> Form:
        form = plain(forms, eqn)
        # Behind the attention, other values are added to its result: this is where it ends.
        are_followed = [not is_literal(atom) and atom in forms.followed for atom in eqn.invars]
        is_number = [forms[atom].expr.constant is not None for atom in eqn.invars]
        is_mixed = any(are_followed) and not all(a or b for a, b in zip(are_followed, is_number, strict=True))
        if is_mixed and _has_ended(forms, forms[eqn.invars[are_followed.index(True)]]):
            raise NoFormula
        return form

    return rule


def _has_ended(forms: Forms, form: Form) -> bool:
    """Whether this is the result of an attention, or a gradient of its operands: a sum with an index of features."""
    if not set(form.axes) - forms.fixed - {None}:
        return False
    return any(getattr(atom, "over", frozenset()) & forms.fixed for term in form.expr.terms for atom in term.atoms)


def _integer_pow(forms: Forms, eqn: JaxprEqn) -> Form:
    form = forms[eqn.invars[0]]
    n = eqn.params["y"] if eqn.primitive.name == "integer_pow" else 2
    return Form(form.axes, power(form.expr, n), form.sources)


def _quotient(x: Expr, y: Expr) -> Expr:
    if y.constant == 0:
        raise NoFormula
    return multiply(x, power(y, -1))


def _of_number(fun: Callable[[float], float]) -> Rule:
    def rule(forms: Forms, eqn: JaxprEqn) -> Form:
        form = forms[eqn.invars[0]]
        if form.expr.constant is None:
            raise NoFormula
        try:
            return Form(form.axes, number(fun(form.expr.constant)), form.sources)
        except (ValueError, ZeroDivisionError, OverflowError) as error:
            raise NoFormula from error

    return rule


def _pow(forms: Forms, eqn: JaxprEqn) -> Form:
    base, exponent = (forms[atom].expr.constant for atom in eqn.invars)
    if base is None or exponent is None or base <= 0:
        raise NoFormula
    return Form((None,) * len(shape_of(eqn.outvars[0])), number(base**exponent))


def _absolute(forms: Forms, eqn: JaxprEqn) -> Form:
    form = forms[eqn.invars[0]]
    if not is_positive(form.expr):
        raise NoFormula
    return form


def _exp(forms: Forms, eqn: JaxprEqn) -> Form:
    form = forms[eqn.invars[0]]
    if not form.sources:
        raise NoFormula
    form = forms.with_fixed_names(form)
    scores = frozenset(("scores", var) for _, var in form.sources)
    return Form(form.axes, exponential(form.expr), scores)


def _log(forms: Forms, eqn: JaxprEqn) -> Form:
    form = forms[eqn.invars[0]]
    return Form(form.axes, logarithm(form.expr), form.sources)


def _is_at_least_0(forms: Forms, eqn: JaxprEqn) -> Form:
    """Whether a sum of exponentials is positive: it is."""
    form, bound = (forms[atom] for atom in eqn.invars)
    if not is_positive(form.expr) or bound.expr.constant is None or bound.expr.constant > 0:
        raise NoFormula
    return Form(form.axes, number(1.0), form.sources)


def _select_n(forms: Forms, eqn: JaxprEqn) -> Form:
    if len(eqn.invars) != 3 or aval_of(eqn.invars[0]).dtype != np.bool_ or not _is_float(eqn.outvars[0]):
        raise NoFormula
    if not shape_of(eqn.invars[0]) and shape_of(eqn.outvars[0]):
        raise NoFormula
    operands = [forms[atom] for atom in eqn.invars]
    axes, aligned = forms.aligned(operands)
    which, if_false, if_true = (form.expr for form in aligned)
    if which.constant is not None:
        chosen = if_true if which.constant else if_false
        return Form(axes, chosen, _sources(*operands))

    leaf = _only_leaf(which)
    sources = [form.sources for form in aligned[1:]]
    for value, other, positive, has_source in (
        (if_false, if_true, True, sources[1]), (if_true, if_false, False, sources[0]),
    ):  # fmt: skip
        c = value.constant
        if not has_source:
            continue
        if c == 0:
            return Form(axes, multiply(of_atom(Mask(leaf, positive)), other), _sources(*operands))
        is_score = c is not None and (math.isfinite(c) or c == -math.inf)
        if c is not None and is_score and all(monomial.exponent is None for monomial in other.terms):
            return Form(axes, of_atom(Masked(other, Mask(leaf, positive), c)), _sources(*operands))
    raise NoFormula


def _only_leaf(x: Expr) -> Leaf:
    if len(x.terms) == 1:
        ((monomial, c),) = x.terms.items()
        if c == 1 and monomial.exponent is None and len(monomial.atoms) == 1:
            ((atom, p),) = monomial.atoms.items()
            if isinstance(atom, Leaf) and p == 1:
                return atom
    raise NoFormula


# ---- sums ----------------------------------------------------------------------------------------------------------


def _reduce_sum(forms: Forms, eqn: JaxprEqn) -> Form:
    form, shape = forms[eqn.invars[0]], shape_of(eqn.invars[0])
    expr = form.expr
    for i in eqn.params["axes"]:
        label = form.axes[i]
        expr = scaled(expr, shape[i]) if label is None else sum_over(expr, label, shape[i], forms.fixed)
    axes = tuple(label for i, label in enumerate(form.axes) if i not in eqn.params["axes"])
    return Form(axes, expr, form.sources)


def _dot_general(forms: Forms, eqn: JaxprEqn) -> Form:
    (left_dims, right_dims), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left, right = (forms.factor(atom) for atom in eqn.invars)
    # A product with an array of one number, such as a mask of ones, may have a product as its other operand.
    if left.expr.constant is not None:
        right = forms[eqn.invars[1]]
    elif right.expr.constant is not None:
        left = forms[eqn.invars[0]]
    for atom, form in zip(eqn.invars, (left, right), strict=True):
        # The result of an attention goes on into the model; only products with its probabilities are followed.
        if not is_literal(atom) and atom in forms.followed and _has_ended(forms, form):
            raise NoFormula
    right = forms.apart(right, left.expr.labels | set(left.axes) - {None})

    pairs = [*zip(left_batch, right_batch, strict=True), *zip(left_dims, right_dims, strict=True)]
    left, right = _joined(forms, left, right, pairs)
    free = [[label for i, label in enumerate(form.axes) if i not in {*batch, *dims}] for form, batch, dims in (
        (left, left_batch, left_dims), (right, right_batch, right_dims),
    )]  # fmt: skip
    batch = [left.axes[i] if left.axes[i] is not None else right.axes[j]
             for i, j in zip(left_batch, right_batch, strict=True)]  # fmt: skip
    axes = (*batch, *free[0], *free[1])
    named = [label for label in axes if label is not None]
    if len(set(named)) != len(named):
        raise NoFormula

    expr = multiply(left.expr, right.expr)
    for i, j in zip(left_dims, right_dims, strict=True):
        label, size = left.axes[i] if left.axes[i] is not None else right.axes[j], shape_of(eqn.invars[0])[i]
        if label in named:
            raise NoFormula
        expr = scaled(expr, size) if label is None else sum_over(expr, label, size, forms.fixed)
    if expr.labels - set(named):
        raise NoFormula

    # A product of two leaves may be the scores of an attention.
    sources = _sources(left, right)
    if not sources and all(not form.expr.constant for form in (left, right)):
        sources = frozenset({("product", eqn.outvars[0])})
    return Form(axes, expr, sources)


def _joined(forms: Forms, left: Form, right: Form, pairs: Iterable[tuple[int, int]]) -> tuple[Form, Form]:
    """The operands of a product, with one name for the dimensions of each pair."""
    for i, j in pairs:
        a, b = left.axes[i], right.axes[j]
        if a is None or b is None or a == b:
            continue
        if b not in forms.fixed:
            right = forms.renamed(right, {b: a})
        elif a not in forms.fixed:
            left = forms.renamed(left, {a: b})
        else:
            raise NoFormula
    return left, right


def _part_of_number(forms: Forms, eqn: JaxprEqn) -> Form:
    """A part of an array whose elements are all one number, such as the head mask of ones that no user gave."""
    form = forms[eqn.invars[0]]
    if form.expr.constant is None:
        raise NoFormula
    return Form((None,) * len(shape_of(eqn.outvars[0])), form.expr, form.sources)


def _reduce_precision(forms: Forms, eqn: JaxprEqn) -> Form:
    """What saved values go through under `jax.checkpoint`: a rounding to the dtype that they have."""
    if not _keeps_elements(eqn):
        raise NoFormula
    return forms[eqn.invars[0]]


_LAYOUTS: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "convert_element_type": _convert,
    "dynamic_slice": _part_of_number,
    "copy": _same,
    "copy_p": _same,
    "name": _same,
    "reshape": _reshape,
    "stop_gradient": _same,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "transpose": _transpose,
    "neg": _elementwise(lambda x: scaled(x, -1.0)),
    "sqrt": _of_number(math.sqrt),
    "reduce_precision": _reduce_precision,
    "slice": _part_of_number,
    "rsqrt": _of_number(lambda x: 1 / math.sqrt(x)),
    "pow": _pow,
}


def _by_number(fun: Callable[[Expr, Expr], Expr]) -> Rule:
    """A product with a number, in the place of an array that is followed."""
    plain = _elementwise(fun)

    def rule(forms: Forms, eqn: JaxprEqn) -> Form:
        if not any(forms[atom].expr.constant is not None for atom in eqn.invars):
            raise NoFormula
        return plain(forms, eqn)

    return rule


_TRUE_LAYOUTS = frozenset(_LAYOUTS) - {"neg", "sqrt", "rsqrt", "pow"}
_LAYOUTS |= {"mul": _by_number(multiply), "div": _by_number(_quotient)}

_RULES: dict[str, Rule] = {
    **_LAYOUTS,
    "abs": _absolute,
    "add": _sum_of(1.0),
    "add_any": _sum_of(1.0),
    "div": _elementwise(_quotient),
    "dot_general": _dot_general,
    "exp": _exp,
    "ge": _is_at_least_0,
    "gt": _is_at_least_0,
    "integer_pow": _integer_pow,
    "log": _log,
    "mul": _elementwise(multiply),
    "optimization_barrier": _same,
    "reduce_sum": _reduce_sum,
    "select_n": _select_n,
    "square": _integer_pow,
    "sub": _sum_of(-1.0),
}
#: What may stand between the product of queries and keys and the `exp`.
_TO_SCORES = frozenset(_RULES) - {"exp", "log", "reduce_sum", "ge", "gt", "integer_pow", "square", "abs"}
