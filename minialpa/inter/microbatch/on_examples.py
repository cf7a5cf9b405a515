"""The places of equations on examples: in a loop, or after one, if the equation mixes the examples of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.errors import TraceError
from minialpa.inter.microbatch.batching import batch_factors, dim_of
from minialpa.inter.microbatch.forms import Form, Once, Own, Partial, Rows, Same, Scale
from minialpa.inter.microbatch.on_totals import refuse_sums
from minialpa.inter.microbatch.partial_sums import ValueForms
from minialpa.inter.microbatch.scales import Levels, Scales
from minialpa.inter.microbatch.statistics import NotOwnError
from minialpa.ir.equations import Atom, operand_vars, source_line, sub_jaxprs
from minialpa.rules.factors import Factors
from minialpa.rules.known_rules import factors_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """An equation on examples.

    Attributes:
        eqn: the equation.
        forms: the forms of its operands.
        factors: all of its factors.
        split: the factors that hold the examples.
        is_own: whether it takes totals as the micro-batch's own.
        scale: the scale of its results, or None.
    """

    eqn: JaxprEqn
    forms: Sequence[Form]
    factors: Factors
    split: Sequence[int]
    is_own: bool
    scale: Scale | None

    def adds_up(self, k: int) -> bool:
        """Whether operand `k` is a part of a sum that the equation adds a sum over examples to."""
        form = self.forms[k]
        is_sum = isinstance(form, Partial) and form.reduction == "sum" and form.scale is None
        return is_sum and any(self.factors.takes_part_once(factor, k) for factor in self.split)


class OnExamples:
    """Sets the forms of the results and returns the segments of equations on examples.

    own: numbers of the equations that take totals as the micro-batch's own.
    """

    def __init__(self, forms: ValueForms, *, levels: Levels, scales: Scales, own: frozenset[int]) -> None:
        self.forms, self.levels, self.scales, self.own = forms, levels, scales, own
        self._concatenated: set[Var] = set()  # rows of which an equation between loops reads those of all examples

    def place(self, i: int, eqn: JaxprEqn, forms: Sequence[Form]) -> int:
        """The segment of equation `i`."""
        is_own = i in self.own
        _refuse_averages(eqn, forms)
        if not is_own:
            _refuse_own(eqn, forms)

        factors = factors_of(eqn).in_time(eqn)
        try:
            split = batch_factors(eqn, factors, self.forms.row_dims(eqn), self.forms.n)
        except TraceError:
            return self._place_on_all_rows(eqn, forms, is_own)

        scale = None if is_own else self.scales.common(eqn, factors)
        reader = _Reader(eqn=eqn, forms=forms, factors=factors, split=split, is_own=is_own, scale=scale)
        if is_own:
            refuse_sums(eqn, [form for k, form in enumerate(forms) if not reader.adds_up(k)])
        return self._place_in_loop(reader)

    def _place_in_loop(self, reader: _Reader) -> int:
        eqn = reader.eqn
        loop = max(1, *(self._readable_in(reader, k, atom) for k, atom in enumerate(eqn.invars)))
        results = {var: self._result(reader, loop, r, var) for r, var in enumerate(eqn.outvars)}
        if self._reads_only_concatenated(reader, loop):
            return self._place_on_all_rows(eqn, reader.forms, reader.is_own)
        self.forms.of.update(results)
        return 2 * loop - 1

    def _readable_in(self, reader: _Reader, k: int, atom: Atom) -> int:
        """The first loop that can read operand `k` of an equation on examples."""
        form = reader.forms[k]
        if reader.scale is not None and self.scales.of_operand(atom, k, reader.factors) == reader.scale:
            return form.loop if isinstance(form, Rows) else 0
        if isinstance(form, Once):
            return form.after + 1
        if isinstance(form, Rows):
            return form.loop if form.scale is None else self.levels.of(atom) + 1
        if isinstance(form, Own | Same) or reader.is_own or reader.adds_up(k):
            return form.loop
        return self.levels.of(atom) + 1

    def _result(self, reader: _Reader, loop: int, r: int, var: Var) -> Form:
        """The form of result `r` of an equation that runs in `loop`."""
        factors = reader.factors
        dim = dim_of(factors.results[r], reader.split)
        if dim is not None:
            return Rows(loop, dim, reader.scale)

        partial = next((factor for factor in reader.split if factors.is_partial(factor, r)), None)
        if partial is not None:
            # Inside a loop of the program, the number of terms is not that of the factors alone.
            is_control = bool(sub_jaxprs(self.forms.producer[var]))
            count = 0 if is_control else int(np.prod([factors.sizes[factor] for factor in factors.reductions]))
            reduction = factors.reductions[partial]
            assert reader.scale is None or reduction == "sum", reduction
            return Partial(loop=loop, reduction=reduction, count=count, scale=reader.scale)

        return Own(loop) if any(isinstance(form, Own) for form in reader.forms) else Same(loop)

    def _reads_only_concatenated(self, reader: _Reader, loop: int) -> bool:
        """Whether all rows that an equation reads are concatenated anyway, and it would need another loop for them.

        An example is the derivative of a similarity of all pairs.
        """
        pairs = zip(reader.eqn.invars, reader.forms, strict=True)
        rows = [atom for atom, form in pairs if isinstance(form, Rows)]
        if reader.eqn.effects:
            return False
        return all(atom in self._concatenated and self.levels.of(atom) + 1 == loop for atom in rows)

    def _place_on_all_rows(self, eqn: JaxprEqn, forms: Sequence[Form], is_own: bool) -> int:
        """The segment of an equation that mixes examples and runs once, on all of them."""
        if eqn.effects:
            raise TraceError(
                f"`{eqn.primitive.name}` at {source_line(eqn)} mixes the examples of a batch and has side effects, so "
                "it cannot run over micro-batches. Use `num_micro_batches=1`, or move it out of the step."
            )
        if is_own or any(isinstance(form, Own) for form in forms):
            raise NotOwnError(
                eqn,
                "mixes the examples of a batch and reads statistics of the micro-batch, so it cannot run over "
                "micro-batches. Use `num_micro_batches=1`, or move it out of the step.",
            )

        self._concatenated.update(var for var in operand_vars(eqn) if var not in self.levels.independent)
        after = max(self.levels.of(atom) for atom in eqn.invars)
        self.forms.set_results(eqn, Once(after=after, is_parameter=False))
        return 2 * after


def _refuse_averages(eqn: JaxprEqn, forms: Sequence[Form]) -> None:
    if any(isinstance(form, Once) and form.is_average for form in forms):
        raise NotOwnError(
            eqn,
            "brings an own statistic of each micro-batch back to the examples, through a result of the step. Use "
            "`num_micro_batches=1`, or compute it from values that are not batch statistics.",
        )


def _refuse_own(eqn: JaxprEqn, forms: Sequence[Form]) -> None:
    """Raise NotOwnError if an equation reads a micro-batch's own value where `statistics` does not allow it."""
    if any(isinstance(form, Own) for form in forms):
        raise NotOwnError(
            eqn,
            "reads a statistic of the micro-batch and is no normalisation. Use `num_micro_batches=1`, or "
            "`minialpa.per_micro_batch` for its operand.",
        )
