"""Scales: scalar totals that arrays wait for.

A scalar total that rows are multiplied by waits until linear equations have made a sum of them:

    sum_k a_k (s x_k) = s sum_k a_k x_k     -> Scales.common

So a denominator without a gradient of its own costs no loop. An array that is known but for s, or filled with s, has a
form that says so (`Scales.waiting_form`), and loops may read it before s is known.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.forms import Form, Once, Partial, Rows, Scale
from minialpa.inter.microbatch.levels import Levels
from minialpa.inter.microbatch.partial_sums import ValueForms
from minialpa.ir.equations import Atom, aval_of, is_inexact, is_literal, shape_of
from minialpa.rules.factors import Factors
from minialpa.rules.known_rules import factors_of


class Scales:
    """What the operands and results of equations wait for.

    has_own: whether micro-batches have statistics of their own; then loops read their derivatives and nothing waits.
    """

    def __init__(self, forms: ValueForms, levels: Levels, *, has_own: bool) -> None:
        self.forms, self.levels, self.has_own = forms, levels, has_own

    def waiting_form(self, eqn: JaxprEqn, forms: Sequence[Form]) -> Once | None:
        """The form of an array that a scalar total fills, or multiplies; None if it is another array."""
        scalar = self._filled_with(eqn)
        if scalar is not None:
            return Once(after=self.levels.of(scalar), is_parameter=False, uniform=scalar)
        scale = self._known_but_for_a_scale(eqn, forms)
        if scale is not None:
            return Once(after=self.levels.of(scale.scalar), is_parameter=False, scale=scale)
        return None

    def common(self, eqn: JaxprEqn, factors: Factors) -> Scale | None:
        """A scalar total that the results can be multiplied by afterwards, if an operand waits for it, or is it.

        All operands in which the equation is jointly linear have the same scale, or are zero; of an equation that is
        linear in each operand, one has it.
        """
        found = {k: self.of_operand(atom, k, factors) for k, atom in enumerate(eqn.invars)}
        scales = {k: scale for k, scale in found.items() if scale is not None}
        if len(set(scales.values())) != 1 or not self._may_multiply_results(eqn, scales):
            return None

        scale = next(iter(scales.values()))
        others = [k for k in factors.linear_operands if k not in scales]
        if factors.linear == "joint" and all(self.forms.is_zero(eqn.invars[k]) for k in others):
            return scale
        return scale if factors.linear == "each" and len(scales) == 1 else None

    def _may_multiply_results(self, eqn: JaxprEqn, scaled: Collection[int]) -> bool:
        """Whether no other operand than those `scaled` waits, and the dtypes have the range of float32."""
        forms = [self.forms.form(atom) for k, atom in enumerate(eqn.invars) if k not in scaled]
        if any(isinstance(form, Rows) and form.scale is not None for form in forms):
            return False
        return all(is_inexact(atom) and _has_range(atom) for atom in (*eqn.outvars, *(eqn.invars[k] for k in scaled)))

    def of_operand(self, atom: Atom, k: int, factors: Factors) -> Scale | None:
        """What operand `k` of a linear equation waits for; the scalar itself, where one fills the operand."""
        form = self.forms.form(atom)
        is_linear = k in factors.linear_operands
        if isinstance(form, Rows | Once) and form.scale is not None:
            return form.scale if is_linear else None
        scalar = form.uniform if isinstance(form, Once) else None
        scalar = self._scalar_total(atom) if scalar is None else scalar
        if scalar is None:
            return None
        if is_linear:
            return Scale(scalar)
        return Scale(scalar, divides=True) if factors.linear == "each" and k == 1 else None

    def _known_but_for_a_scale(self, eqn: JaxprEqn, forms: Sequence[Form]) -> Scale | None:
        """The scalar total that an array could wait for, if it is computed from nothing else that the loops add up."""
        if not all(shape_of(var) for var in eqn.outvars) or eqn.effects:
            return None
        factors = factors_of(eqn)
        scale = self.common(eqn, factors)
        for k, (atom, form) in enumerate(zip(eqn.invars, forms, strict=True)):
            waits = scale is not None and self.of_operand(atom, k, factors) == scale
            if not waits and not (isinstance(form, Once) and form.after == 0):
                return None
        return scale

    def _filled_with(self, eqn: JaxprEqn) -> Var | None:
        """The scalar that an equation fills an array with."""
        if eqn.primitive.name != "broadcast_in_dim" or not is_inexact(eqn.outvars[0]) or len(eqn.invars) > 1:
            return None
        (atom,) = eqn.invars
        form = self.forms.form(atom)
        return form.uniform if isinstance(form, Once) and form.uniform is not None else self._scalar_total(atom)

    def _scalar_total(self, atom: Atom) -> Var | None:
        """The atom, if it is a scalar that is known behind a loop and not before the first."""
        if self.has_own or is_literal(atom) or shape_of(atom) or not is_inexact(atom):
            return None
        if atom in self.levels.independent:
            return None
        form = self.forms.form(atom)
        if isinstance(form, Once):
            return atom if form.after and not form.is_average else None
        return atom if isinstance(form, Partial) and form.reduction == "sum" and form.scale is None else None


def _has_range(atom: Atom) -> bool:
    dtype: Any = aval_of(atom).dtype
    return bool(jnp.finfo(dtype).maxexp >= jnp.finfo(np.float32).maxexp)
