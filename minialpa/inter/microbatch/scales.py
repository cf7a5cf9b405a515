"""Levels and scales: an equation in; the loop or the scalar for which its results wait, out.

Both save loops of a step that divides by a reduction. `Levels`: a cheap value that depends on the batch alone, such as
a sum of loss weights, is computed before the first loop. `Scales`: a scalar s that multiplies per-example values waits
until linear equations have summed them:

    sum_k a_k (s x_k) = s sum_k a_k x_k     -> Scales.common

So a denominator without a gradient costs no loop. Loops read an array that s fills or multiplies without s
(`Scales.waiting_form`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.forms import Complete, Form, Partial, PerExample, PerMicroBatch, Same, Scale, ValueForms
from minialpa.ir.equations import Atom, aval_of, is_inexact, is_literal, operand_vars, shape_of
from minialpa.rules.expensive import is_expensive
from minialpa.rules.factors import Factors
from minialpa.rules.known_rules import factors_of
from minialpa.tracing.trace import TracedStep


class Levels:
    """The loop after which each value is complete. independent: cheap values that depend on the batch alone."""

    def __init__(self, step: TracedStep, forms: ValueForms) -> None:
        self.forms = forms
        batch = zip(step.flat.invars, step.batch_dims, strict=True)
        self.independent = {var for var, dim in batch if dim is not None}
        self.independent.update(step.flat.constvars)
        self._prologue_values: set[Var] = set()

    def note(self, eqn: JaxprEqn) -> None:
        """Add cheap results of independent values to `independent`."""
        if not is_expensive(eqn) and all(is_literal(atom) or atom in self.independent for atom in eqn.invars):
            self.independent.update(eqn.outvars)

    def of(self, atom: Atom) -> int:
        """The number of the loop after which a value is complete; 0 before the first loop.

        Records the independent values among the arguments; these are computed before the first loop.
        """
        form = self.forms.form(atom)
        if isinstance(form, Complete):
            return form.after
        if not is_literal(atom) and atom in self.independent:
            self._prologue_values.add(atom)
            return 0
        scale = None if isinstance(form, PerMicroBatch | Same) else form.scale
        return form.loop if scale is None else max(form.loop, self.of(scale.scalar))

    def prologue(self, eqns: Sequence[JaxprEqn], places: Sequence[int | None]) -> frozenset[int]:
        """The equations of loops that also run before the first loop, on the whole batch."""
        required, prologue = set(self._prologue_values), set[int]()
        # Backwards, since an equation of the prologue needs its operands.
        for i in range(len(eqns) - 1, -1, -1):
            if places[i] == 0:
                required.update(operand_vars(eqns[i]))
            elif places[i] is not None and not required.isdisjoint(eqns[i].outvars):
                prologue.add(i)
                required.update(operand_vars(eqns[i]))
        return frozenset(prologue)


class Scales:
    """The scalars that operands and results of equations wait for.

    has_statistics: whether micro-batches have statistics; then loops read the derivatives, and no value waits.
    """

    def __init__(self, forms: ValueForms, levels: Levels, *, has_statistics: bool) -> None:
        self.forms, self.levels, self.has_statistics = forms, levels, has_statistics

    def waiting_form(self, eqn: JaxprEqn, forms: Sequence[Form]) -> Complete | None:
        """The form of an array that a complete scalar fills or multiplies; None for other arrays."""
        scalar = self._filling_scalar(eqn)
        if scalar is not None:
            return Complete(after=self.levels.of(scalar), is_parameter=False, uniform=scalar)
        scale = self._scale_of_known_array(eqn, forms)
        if scale is not None:
            return Complete(after=self.levels.of(scale.scalar), is_parameter=False, scale=scale)
        return None

    def common(self, eqn: JaxprEqn, factors: Factors) -> Scale | None:
        """The scalar of an operand that may multiply the results instead, or None.

        All operands of a jointly linear equation have this scale or are zero; of any other linear equation, one operand
        has it.
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
        """Whether only the operands `scaled` wait, and the dtypes have the range of float32."""
        forms = [self.forms.form(atom) for k, atom in enumerate(eqn.invars) if k not in scaled]
        if any(isinstance(form, PerExample) and form.scale is not None for form in forms):
            return False
        return all(
            is_inexact(atom) and _has_range_of_float32(atom)
            for atom in (*eqn.outvars, *(eqn.invars[k] for k in scaled))
        )

    def of_operand(self, atom: Atom, k: int, factors: Factors) -> Scale | None:
        """The scale of operand `k` of a linear equation, or the scalar that fills it."""
        form = self.forms.form(atom)
        is_linear = k in factors.linear_operands
        if isinstance(form, PerExample | Complete) and form.scale is not None:
            return form.scale if is_linear else None
        scalar = form.uniform if isinstance(form, Complete) else None
        scalar = self._scalar_aggregate(atom) if scalar is None else scalar
        if scalar is None:
            return None
        if is_linear:
            return Scale(scalar)
        return Scale(scalar, divides=True) if factors.linear == "each" and k == 1 else None

    def _scale_of_known_array(self, eqn: JaxprEqn, forms: Sequence[Form]) -> Scale | None:
        """The scalar of an array if all other operands are complete before the first loop, else None."""
        if not all(shape_of(var) for var in eqn.outvars) or eqn.effects:
            return None
        factors = factors_of(eqn)
        scale = self.common(eqn, factors)
        for k, (atom, form) in enumerate(zip(eqn.invars, forms, strict=True)):
            waits = scale is not None and self.of_operand(atom, k, factors) == scale
            if not waits and not (isinstance(form, Complete) and form.after == 0):
                return None
        return scale

    def _filling_scalar(self, eqn: JaxprEqn) -> Var | None:
        """The scalar that a broadcast repeats, or None."""
        if eqn.primitive.name != "broadcast_in_dim" or not is_inexact(eqn.outvars[0]) or len(eqn.invars) > 1:
            return None
        (atom,) = eqn.invars
        form = self.forms.form(atom)
        return form.uniform if isinstance(form, Complete) and form.uniform is not None else self._scalar_aggregate(atom)

    def _scalar_aggregate(self, atom: Atom) -> Var | None:
        """The atom, if it is a scalar that is complete only after a loop."""
        if self.has_statistics or is_literal(atom) or shape_of(atom) or not is_inexact(atom):
            return None
        if atom in self.levels.independent:
            return None
        form = self.forms.form(atom)
        if isinstance(form, Complete):
            return atom if form.after and not form.is_average else None
        return atom if isinstance(form, Partial) and form.reduction == "sum" and form.scale is None else None


def _has_range_of_float32(atom: Atom) -> bool:
    dtype: Any = aval_of(atom).dtype
    return bool(jnp.finfo(dtype).maxexp >= jnp.finfo(np.float32).maxexp)
