"""The formula of each value of a program: equations in, `Form`s out.

Formulas are made for the values between the scores of a softmax and the gradients that follow from it: forward from
each `exp` whose operand is computed from a product of matrices. Every other array is a `Leaf`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from minialpa.ir.equations import Atom, is_literal, operand_vars, shape_of
from minialpa.recognition.equations import OUTSIDE, RULES, dot_general
from minialpa.recognition.indices import Indices
from minialpa.recognition.layouts import LAYOUTS
from minialpa.recognition.numbering import FLOATS, Numbers
from minialpa.recognition.roles import find_role
from minialpa.recognition.rule import Rule
from minialpa.recognition.terms import RESULTS, Form, Leaf, NoFormula, Number, Part, Scores, kind_of

#: Equations from an `exp` back to the product of its scores, at most.
_DEPTH = 12

#: What may stand between the product of queries and keys and the `exp`.
_TO_SCORES = frozenset(RULES) - {"exp", "integer_pow", "reduce_sum"}


def find_forms(eqns: Sequence[JaxprEqn], producers: Mapping[Var, JaxprEqn]) -> dict[Var, Form]:
    """The forms of the variables that depend on an exponential of scores.

    producers: the equation of each variable, also of those around a scan.
    """
    to_exponentials = _equations_to_exponentials(eqns)
    follower = _Follower(producers)
    for eqn in eqns if to_exponentials else ():
        follower.follow(eqn, eqn in to_exponentials)
    return follower.followed


def _equations_to_exponentials(eqns: Sequence[JaxprEqn]) -> set[JaxprEqn]:
    """The equations from a product of matrices to an `exp`."""
    # For each variable that an `exp` is computed from, how many more equations may be between it and the product.
    left: dict[Var, int] = {}
    found: set[JaxprEqn] = set()
    has_product = False
    for eqn in reversed(eqns):
        if eqn.primitive.name == "exp" and len(shape_of(eqn.invars[0])) >= 2:
            left.update((var, _DEPTH) for var in operand_vars(eqn))
            found.add(eqn)

        depth = max((left.get(var, 0) for var in eqn.outvars), default=0)
        if not depth or eqn.primitive.name not in _TO_SCORES:
            continue
        found.add(eqn)
        if eqn.primitive.name == "dot_general":
            has_product = True
            continue
        for var in operand_vars(eqn):
            left[var] = max(left.get(var, 0), depth - 1)
    return found if has_product else set()


class _Follower:
    """Makes the forms of a program, one equation after the other."""

    def __init__(self, producers: Mapping[Var, JaxprEqn]) -> None:
        self.indices = Indices()
        #: The variables that depend on an exponential of scores.
        self.followed: dict[Var, Form] = {}
        self._known = _Known(producers, self.indices, self.followed)

    def follow(self, eqn: JaxprEqn, is_to_exponential: bool) -> None:
        """Note the forms of the results of an equation, if it belongs to an attention and there is a rule for it.

        is_to_exponential: whether it is on the way from a product of matrices to an `exp`.
        """
        name = eqn.primitive.name
        rule = RULES.get(name)
        is_after = any(var in self.followed for var in operand_vars(eqn))
        if rule is None or not (is_after or is_to_exponential):
            return
        if name == "optimization_barrier":
            self._follow_barrier(eqn)
            return
        # The model goes on with a result as with any other array.
        if name not in LAYOUTS and any(map(self._has_finished, operand_vars(eqn))):
            return

        form = _form_by(rule, self._known, eqn)
        (out, *_) = eqn.outvars
        if form is None or len(form.axes) != len(shape_of(out)):
            return
        self._known.forms[out] = form
        if is_after or name == "exp":
            self.followed[out] = form

    def _follow_barrier(self, eqn: JaxprEqn) -> None:
        """Scores and what comes of them are the same behind a barrier."""
        forms = self._known.forms
        for atom, out in zip(eqn.invars, eqn.outvars, strict=True):
            if is_literal(atom) or self._has_finished(atom):
                continue
            if atom in self.followed:
                forms[out] = self.followed[out] = self.followed[atom]
            elif atom in forms and isinstance(forms[atom].term, Scores | Part):
                forms[out] = forms[atom]

    def _has_finished(self, var: Var) -> bool:
        form = self.followed.get(var)
        return form is not None and kind_of(form.term) in RESULTS and find_role(form) is not None


class _Known:
    """The forms of operands, for the rules.

    Operands of products of matrices are read through a second one, to which products are leaves; it is its own.
    """

    def __init__(
        self,
        producers: Mapping[Var, JaxprEqn],
        indices: Indices,
        followed: Mapping[Var, Form],
        numbers: Numbers | None = None,
    ) -> None:
        self.indices = indices
        #: The forms of variables, except those that are followed.
        self.forms: dict[Var, Form] = {}
        self._producers, self._followed = producers, followed
        self._numbers = Numbers(producers) if numbers is None else numbers
        self._rules: Mapping[str, Rule] = OUTSIDE
        self._factors = self
        if numbers is None:
            self._rules = {**OUTSIDE, "dot_general": dot_general}
            self._factors = _Known(producers, indices, followed, self._numbers)

    def __getitem__(self, atom: Atom) -> Form:
        """The form of an atom; that of a leaf, if nothing more is known."""
        if is_literal(atom):
            return _form_of_literal(atom)
        if atom in self._followed:
            return self._followed[atom]
        if atom not in self.forms:
            self.forms[atom] = self._outside(atom)
        return self.forms[atom]

    def factor(self, atom: Atom) -> Form:
        return self._factors[atom]

    def _outside(self, var: Var) -> Form:
        """The form of an array that is not followed: a leaf in some layout, or a product of two."""
        eqn = self._producers.get(var)
        rule = None if eqn is None else self._rules.get(eqn.primitive.name)
        if eqn is None or rule is None or any(var in self._followed for var in operand_vars(eqn)):
            return self._leaf(var)
        form = _form_by(rule, self, eqn)
        return self._leaf(var) if form is None else form

    def _leaf(self, var: Var) -> Form:
        axes = self.indices.new_axes(shape_of(var))
        return Form(axes, Leaf(self._numbers(var), axes, var))


def _form_by(rule: Rule, known: _Known, eqn: JaxprEqn) -> Form | None:
    try:
        return rule(known, eqn)
    except NoFormula:
        return None


def _form_of_literal(literal: Literal) -> Form:
    """A number."""
    value = np.asarray(literal.val)
    if value.ndim or (value.dtype.kind not in "biuf" and value.dtype.name not in FLOATS):
        raise NoFormula
    return Form((), Number(float(value)))
