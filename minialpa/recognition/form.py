"""What an array is, as a formula.

A `Form` says which index each dimension of an array stands for, and what the element at these indices is:

    array[i, j, ...] = expr        where axes = (i, j, ...)
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from jax.extend.core import Var

from minialpa.recognition.algebra import Axes, Expr, Label


@dataclass(frozen=True, slots=True)
class Form:
    """What an array is.

    Attributes:
        axes: the index of each dimension; None where the array does not depend on it.
        expr: the element at these indices.
        sources: ("product", v) where it comes from v, the result of a product of two leaves, and ("scores", v) where it
            comes from the exponential of scores that come from such a v.
    """

    axes: Axes
    expr: Expr
    sources: frozenset[tuple[str, Var]] = frozenset()

    @property
    def scores(self) -> frozenset[Var]:
        """The products whose exponentials this comes from."""
        return frozenset(var for kind, var in self.sources if kind == "scores")


def sources_of(*forms: Form) -> frozenset[tuple[str, Var]]:
    """The sources of a result with these operands."""
    return frozenset().union(*(form.sources for form in forms))


def has_ended(form: Form, fixed: Set[Label]) -> bool:
    """Whether this is the result of an attention, or a gradient of its operands: a sum with an index of features.

    fixed: the indices of scores.
    """
    if not set(form.axes) - fixed - {None}:
        return False
    return any(getattr(atom, "over", frozenset()) & fixed for term in form.expr.terms for atom in term.atoms)
