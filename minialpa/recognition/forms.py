"""`find_forms` maps the equations of a program to the formula (`Form`) of each value of an attention.

Values get formulas from the scores of a softmax to the gradients that follow from it: forward from each `exp` whose
operand comes from a product of matrices. Every other array is a `Leaf`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from minialpa.ir.equations import is_literal, operand_vars, shape_of
from minialpa.recognition.equations import LAYOUTS, OUTSIDE, RULES, Known, dot_general, form_by
from minialpa.recognition.indices import Indices, Numbers
from minialpa.recognition.terms import RESULTS, Form, Scores, SoftmaxArray, find_role, kind_of

#: Most equations from a product of scores to its `exp`.
_DEPTH = 12

#: Primitives between the product of queries and keys and the `exp`.
_TO_SCORES = frozenset(RULES) - {"exp", "integer_pow", "reduce_sum"}


def find_forms(eqns: Sequence[JaxprEqn], producers: Mapping[Var, JaxprEqn]) -> dict[Var, Form]:
    """Of the variables that depend on an exponential of scores.

    producers: the equation of each variable, also from outside a scan.
    """
    to_exponentials = _equations_to_exponentials(eqns)
    follower = _Follower(producers)
    for eqn in eqns if to_exponentials else ():
        follower.follow(eqn, is_to_exponential=eqn in to_exponentials)
    return follower.followed


def _equations_to_exponentials(eqns: Sequence[JaxprEqn]) -> set[JaxprEqn]:
    """From each product of matrices to its `exp`."""
    # Equations that may precede each variable.
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
    def __init__(self, producers: Mapping[Var, JaxprEqn]) -> None:
        self.followed: dict[Var, Form] = {}
        indices, numbers = Indices(), Numbers(producers)
        factors = Known(producers, indices, numbers, self.followed, OUTSIDE)
        rules = {**OUTSIDE, "dot_general": dot_general}
        self._known = Known(producers, indices, numbers, self.followed, rules=rules, factors=factors)

    def follow(self, eqn: JaxprEqn, *, is_to_exponential: bool) -> None:
        """Record the form of a result, if the equation belongs to an attention and has a rule."""
        name = eqn.primitive.name
        rule = RULES.get(name)
        is_after = any(var in self.followed for var in operand_vars(eqn))
        if rule is None or not (is_after or is_to_exponential):
            return
        if name == "optimization_barrier":
            self._follow_barrier(eqn)
            return
        # A result of an attention is a leaf for the rest of the model.
        if name not in LAYOUTS and any(map(self._has_finished, operand_vars(eqn))):
            return

        form = form_by(rule, self._known, eqn)
        (out, *_) = eqn.outvars
        if form is None or len(form.axes) != len(shape_of(out)):
            return
        self._known.forms[out] = form
        if is_after or name == "exp":
            self.followed[out] = form

    def _follow_barrier(self, eqn: JaxprEqn) -> None:
        """Scores and terms of a softmax keep their forms."""
        forms = self._known.forms
        for atom, out in zip(eqn.invars, eqn.outvars, strict=True):
            if is_literal(atom) or self._has_finished(atom):
                continue
            if atom in self.followed:
                forms[out] = self.followed[out] = self.followed[atom]
            elif atom in forms and isinstance(forms[atom].term, Scores | SoftmaxArray):
                forms[out] = forms[atom]

    def _has_finished(self, var: Var) -> bool:
        form = self.followed.get(var)
        return form is not None and kind_of(form.term) in RESULTS and find_role(form) is not None
