"""Levels: behind which loop each value is known, on all examples.

A value that depends on the batch alone and is cheap (a sum of loss weights) need not wait for a loop: it is computed
before the first one, for all examples at once, if an equation asks for its total.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.forms import Once, Own, Same
from minialpa.inter.microbatch.partial_sums import ValueForms
from minialpa.ir.equations import Atom, is_literal, operand_vars
from minialpa.rules.heavy import is_heavy
from minialpa.tracing.trace import TracedStep


class Levels:
    """The levels of the values of a program, as their forms become known.

    Attributes:
        independent: values that depend on the batch alone and are cheap.
    """

    def __init__(self, step: TracedStep, forms: ValueForms) -> None:
        self.forms = forms
        batch = zip(step.flat.invars, step.batch_dims, strict=True)
        self.independent = {var for var, dim in batch if dim is not None}
        self.independent.update(step.flat.constvars)
        self._wanted_early: set[Var] = set()

    def note(self, eqn: JaxprEqn) -> None:
        """Note whether the results of an equation depend on the batch alone and are cheap."""
        if not is_heavy(eqn) and all(is_literal(atom) or atom in self.independent for atom in eqn.invars):
            self.independent.update(eqn.outvars)

    def of(self, atom: Atom) -> int:
        """The number of the loop behind which a value is known on all examples; 0 if it is known before the first loop.

        Notes the values that have to be computed before the first loop for that.
        """
        form = self.forms.form(atom)
        if isinstance(form, Once):
            return form.after
        if not is_literal(atom) and atom in self.independent:
            self._wanted_early.add(atom)
            return 0
        scale = None if isinstance(form, Own | Same) else form.scale
        return form.loop if scale is None else max(form.loop, self.of(scale.scalar))

    def early(self, eqns: Sequence[JaxprEqn], places: Sequence[int | None]) -> frozenset[int]:
        """Equations of loops that also run before the first loop, on the whole batch, for values needed there."""
        wanted, early = set(self._wanted_early), set[int]()
        # Backwards, since an early equation makes its operands wanted.
        for i in range(len(eqns) - 1, -1, -1):
            if places[i] == 0:
                wanted.update(operand_vars(eqns[i]))
            elif places[i] is not None and not wanted.isdisjoint(eqns[i].outvars):
                early.add(i)
                wanted.update(operand_vars(eqns[i]))
        return frozenset(early)
