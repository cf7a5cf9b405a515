"""The places of equations on partial sums, or on own values of micro-batches, without examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.forms import Form, Once, Own, Partial
from minialpa.inter.microbatch.partial_sums import ValueForms
from minialpa.inter.microbatch.scales import Levels, Scales
from minialpa.inter.microbatch.statistics import NotOwnError
from minialpa.ir.equations import operand_vars
from minialpa.rules.known_rules import factors_of
from minialpa.tracing.trace import TracedStep

_Mean = TypeVar("_Mean", Partial, Own)


class OnTotals:
    """Sets the forms of the results and returns the segments of equations on totals.

    Attributes:
        own: numbers of the equations that take totals as the micro-batch's own.
        chunk_of: the chunk of each equation, if it is known: sums of different chunks stay apart.
        shares: see `Segments`.
    """

    def __init__(
        self,
        step: TracedStep,
        forms: ValueForms,
        *,
        levels: Levels,
        scales: Scales,
        own: frozenset[int],
        chunk_of: Sequence[int | None] | None,
    ) -> None:
        self.step, self.forms, self.levels, self.scales = step, forms, levels, scales
        self.own, self.chunk_of = own, chunk_of
        self.shares: dict[Var, float] = {}
        self._producer = {var: i for i, eqn in enumerate(step.flat.eqns) for var in eqn.outvars}

    def place(self, i: int, eqn: JaxprEqn, forms: Sequence[Form]) -> int | None:
        """The segment of equation `i`; None if each reader computes the results for itself."""
        is_own = i in self.own
        in_update = self.step.origins[i].direction == "other"
        waiting = None if is_own or in_update else self.scales.waiting_form(eqn, forms)
        if waiting is not None:
            self.forms.set_results(eqn, waiting)
            return None

        partial = self._partial(eqn, is_own)
        if partial is not None:
            self.forms.set_results(eqn, partial)
            return 2 * partial.loop - 1

        # It needs complete values: the micro-batch's own, or totals after their loops.
        if is_own:
            refuse_sums(eqn, forms)
            return self.place_own(eqn, forms)
        return self._place_after_loops(eqn, forms)

    def place_own(self, eqn: JaxprEqn, forms: Sequence[Form]) -> int:
        """The segment of an equation whose results each micro-batch computes for itself."""
        loop = max(form.after + 1 if isinstance(form, Once) else form.loop for form in forms)
        counts = {form.count for form in forms if isinstance(form, Partial | Own)}
        form = Own(loop, counts.pop() if len(counts) == 1 else 0)

        factor = self.forms.factor(eqn)
        if factor is not None:
            before = next((f.factors for f in forms if isinstance(f, Partial | Own)), ())
            form = self._unbiased(eqn, replace(form, factors=(*before, factor)))
        self.forms.set_results(eqn, form)
        return 2 * loop - 1

    def _unbiased(self, eqn: JaxprEqn, form: _Mean) -> _Mean:
        """The form without the factors of an unbiased variance; notes the share of the results."""
        share = self.forms.unbiased(form.count, form.factors)
        if share == 1:
            return form
        self.shares.update((var, share) for var in eqn.outvars)
        return replace(form, factors=())

    def _place_after_loops(self, eqn: JaxprEqn, forms: Sequence[Form]) -> int:
        after = max(self.levels.of(atom) for atom in eqn.invars)
        is_average = any(isinstance(form, Own) or (isinstance(form, Once) and form.is_average) for form in forms)
        self.forms.set_results(eqn, Once(after=after, is_parameter=False, is_average=is_average))
        return 2 * after

    def _partial(self, eqn: JaxprEqn, is_own: bool) -> Partial | None:
        """The form of the results, if micro-batches compute parts of them; notes shares of unbiased variances."""
        # A micro-batch's own values meet in the loop, even if they come from several chunks.
        if not is_own and self._joins_chunks(eqn):
            return None

        partial = self.forms.stays_partial(eqn, factors_of(eqn), is_own)
        n = float(self.forms.n)
        if partial is not None and is_own and partial.rescale not in (None, n):
            self.shares.update((var, (partial.rescale or 1.0) / self.forms.n) for var in eqn.outvars)
            return replace(partial, rescale=n)
        return self._unbiased(eqn, partial) if partial is not None and is_own else partial

    def _joins_chunks(self, eqn: JaxprEqn) -> bool:
        """Whether partial operands of `eqn` come from different chunks."""
        if self.chunk_of is None:
            return False
        partial = (var for var in operand_vars(eqn) if isinstance(self.forms.form(var), Partial))
        return len({self.chunk_of[self._producer[var]] for var in partial}) > 1


def refuse_sums(eqn: JaxprEqn, forms: Sequence[Form]) -> None:
    """Raise NotOwnError for a sum that was not divided by its number of terms: it has no own mean."""
    if any(isinstance(form, Partial) and form.rescale is None for form in forms):
        raise NotOwnError(
            eqn,
            "reads a sum over examples, or its derivative, where the micro-batch would take its own mean. Use "
            "`num_micro_batches=1`, or divide the sum by its number of terms first.",
        )
