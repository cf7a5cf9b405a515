"""Places: an equation on examples, or on reductions of examples, in; its segment and the forms of its results out.

An equation on examples is in a loop; if it mixes examples, such as a sort over the batch, it is after the loop. An
equation on partial sums or per-micro-batch values is in their loop, or after the loop that completes its operands.
Loop l is segment 2 l - 1; segment 2 l runs after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.errors import TraceError
from minialpa.inter.microbatch.batching import batch_factors, dim_of
from minialpa.inter.microbatch.forms import Complete, Form, Partial, PerExample, PerMicroBatch, Same, Scale, ValueForms
from minialpa.inter.microbatch.scales import Levels, Scales
from minialpa.inter.microbatch.statistics import NotPerMicroBatchError
from minialpa.ir.equations import Atom, operand_vars, source_line, sub_jaxprs
from minialpa.rules.factors import Factors
from minialpa.rules.known_rules import factors_of
from minialpa.tracing.trace import TracedStep

_Mean = TypeVar("_Mean", Partial, PerMicroBatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExampleEquation:
    """An equation on examples.

    Attributes:
        split: the factors that hold the examples.
        is_per_micro_batch: whether it reads reductions as statistics of the micro-batch.
        scale: the scale of its results.
    """

    eqn: JaxprEqn
    forms: Sequence[Form]
    factors: Factors
    split: Sequence[int]
    is_per_micro_batch: bool
    scale: Scale | None

    def adds_up(self, k: int) -> bool:
        """Whether operand `k` is a partial sum to which the equation adds a sum over examples."""
        form = self.forms[k]
        is_sum = isinstance(form, Partial) and form.reduction == "sum" and form.scale is None
        return is_sum and any(self.factors.takes_part_once(factor, k) for factor in self.split)


class Places:
    """Sets the forms of the results of equations and returns their segments. The attributes are as in `Segments`.

    levels: the loop after which each value is complete.
    chunk_of: the chunk of each equation, in a pipeline. Partial sums of different chunks are added after the loop.
    """

    def __init__(
        self,
        step: TracedStep,
        forms: ValueForms,
        *,
        levels: Levels,
        scales: Scales,
        per_micro_batch: frozenset[int],
        chunk_of: Sequence[int | None] | None,
    ) -> None:
        self.step, self.forms, self.levels, self.scales = step, forms, levels, scales
        self.per_micro_batch, self.chunk_of = per_micro_batch, chunk_of
        self.shares: dict[Var, float] = {}
        self._producer = {var: i for i, eqn in enumerate(step.flat.eqns) for var in eqn.outvars}
        self._concatenated: set[Var] = set()  # variables that an equation between loops reads whole

    # ---- equations on examples ------------------------------------------------------------------------------------

    def on_examples(self, i: int, eqn: JaxprEqn, forms: Sequence[Form]) -> int:
        """The segment of an equation with per-example operands."""
        is_per_micro_batch = i in self.per_micro_batch
        _refuse_averages(eqn, forms)
        if not is_per_micro_batch:
            _refuse_per_micro_batch(eqn, forms)

        factors = factors_of(eqn).in_time(eqn)
        try:
            split = batch_factors(eqn, factors, self.forms.row_dims(eqn), self.forms.n)
        except TraceError:
            return self._place_on_all_rows(eqn, forms, is_per_micro_batch)

        scale = None if is_per_micro_batch else self.scales.common(eqn, factors)
        reader = _ExampleEquation(
            eqn=eqn, forms=forms, factors=factors, split=split, is_per_micro_batch=is_per_micro_batch, scale=scale
        )
        if is_per_micro_batch:
            _refuse_sums(eqn, [form for k, form in enumerate(forms) if not reader.adds_up(k)])
        return self._place_in_loop(reader)

    def _place_in_loop(self, reader: _ExampleEquation) -> int:
        """Place an equation in the first loop that has all operands."""
        eqn = reader.eqn
        loop = max(1, *(self._first_loop_to_read(reader, k, atom) for k, atom in enumerate(eqn.invars)))
        results = {var: self._result_form(reader, loop, r, var) for r, var in enumerate(eqn.outvars)}
        if self._reads_only_concatenated(reader, loop):
            return self._place_on_all_rows(eqn, reader.forms, reader.is_per_micro_batch)
        self.forms.of.update(results)
        return 2 * loop - 1

    def _first_loop_to_read(self, reader: _ExampleEquation, k: int, atom: Atom) -> int:
        form = reader.forms[k]
        if reader.scale is not None and self.scales.of_operand(atom, k, reader.factors) == reader.scale:
            return form.loop if isinstance(form, PerExample) else 0
        if isinstance(form, Complete):
            return form.after + 1
        if isinstance(form, PerExample):
            return form.loop if form.scale is None else self.levels.of(atom) + 1
        if isinstance(form, PerMicroBatch | Same) or reader.is_per_micro_batch or reader.adds_up(k):
            return form.loop
        return self.levels.of(atom) + 1

    def _result_form(self, reader: _ExampleEquation, loop: int, r: int, var: Var) -> Form:
        factors = reader.factors
        dim = dim_of(factors.results[r], reader.split)
        if dim is not None:
            return PerExample(loop, dim, reader.scale)

        partial = next((factor for factor in reader.split if factors.is_partial(factor, r)), None)
        if partial is not None:
            # A scan or a branch in the program has further terms than its factors.
            is_control = bool(sub_jaxprs(self.forms.producer[var]))
            count = 0 if is_control else int(np.prod([factors.sizes[factor] for factor in factors.reductions]))
            reduction = factors.reductions[partial]
            assert reader.scale is None or reduction == "sum", reduction
            return Partial(loop=loop, reduction=reduction, count=count, scale=reader.scale)

        return PerMicroBatch(loop) if any(isinstance(form, PerMicroBatch) for form in reader.forms) else Same(loop)

    def _reads_only_concatenated(self, reader: _ExampleEquation, loop: int) -> bool:
        """Whether all per-example operands are concatenated anyway, and reading them in parts would need another loop.

        An example is the derivative of a similarity of all pairs.
        """
        pairs = zip(reader.eqn.invars, reader.forms, strict=True)
        rows = [atom for atom, form in pairs if isinstance(form, PerExample)]
        if reader.eqn.effects:
            return False
        return all(atom in self._concatenated and self.levels.of(atom) + 1 == loop for atom in rows)

    def _place_on_all_rows(self, eqn: JaxprEqn, forms: Sequence[Form], is_per_micro_batch: bool) -> int:
        """The segment of an equation that mixes examples: after the loop, on all examples at once."""
        if eqn.effects:
            raise TraceError(
                f"`{eqn.primitive.name}` at {source_line(eqn)} mixes the examples of the batch and has side effects, "
                "so it cannot run on one micro-batch at a time. Set `num_micro_batches=1`, or move it out of the step."
            )
        if is_per_micro_batch or any(isinstance(form, PerMicroBatch) for form in forms):
            raise NotPerMicroBatchError(
                eqn,
                "mixes the examples of the batch and reads batch statistics, such as a mean or variance, so it cannot "
                "run on one micro-batch at a time. Set `num_micro_batches=1`, or move it out of the step.",
            )

        self._concatenated.update(var for var in operand_vars(eqn) if var not in self.levels.independent)
        after = max(self.levels.of(atom) for atom in eqn.invars)
        self.forms.set_results(eqn, Complete(after=after, is_parameter=False))
        return 2 * after

    # ---- equations on reductions -----------------------------------------------------------------------------------

    def on_aggregates(self, i: int, eqn: JaxprEqn, forms: Sequence[Form]) -> int | None:
        """The segment of an equation on reductions; None if readers compute the results."""
        is_per_micro_batch = i in self.per_micro_batch
        in_update = self.step.origins[i].direction == "other"
        waiting = None if is_per_micro_batch or in_update else self.scales.waiting_form(eqn, forms)
        if waiting is not None:
            self.forms.set_results(eqn, waiting)
            return None

        partial = self._partial_form(eqn, is_per_micro_batch)
        if partial is not None:
            self.forms.set_results(eqn, partial)
            return 2 * partial.loop - 1

        # It needs statistics of the micro-batch, or complete values after their loops.
        if is_per_micro_batch:
            _refuse_sums(eqn, forms)
            return self.place_per_micro_batch(eqn, forms)
        return self._place_after_loops(eqn, forms)

    def place_per_micro_batch(self, eqn: JaxprEqn, forms: Sequence[Form]) -> int:
        """Place an equation on per-micro-batch values in their loop."""
        loop = max(form.after + 1 if isinstance(form, Complete) else form.loop for form in forms)
        counts = {form.count for form in forms if isinstance(form, Partial | PerMicroBatch)}
        result = PerMicroBatch(loop, counts.pop() if len(counts) == 1 else 0)

        factor = self.forms.factor(eqn)
        if factor is not None:
            before = next((f.factors for f in forms if isinstance(f, Partial | PerMicroBatch)), ())
            result = self._record_unbiased(eqn, replace(result, factors=(*before, factor)))
        self.forms.set_results(eqn, result)
        return 2 * loop - 1

    def _record_unbiased(self, eqn: JaxprEqn, form: _Mean) -> _Mean:
        """`form` without the factors of an unbiased variance; `shares` records the correction for b examples."""
        share = self.forms.unbiased(form.count, form.factors)
        if share == 1:
            return form
        self.shares.update((var, share) for var in eqn.outvars)
        return replace(form, factors=())

    def _place_after_loops(self, eqn: JaxprEqn, forms: Sequence[Form]) -> int:
        """Place an equation after the last loop of its operands."""
        after = max(self.levels.of(atom) for atom in eqn.invars)
        is_average = any(
            isinstance(form, PerMicroBatch) or (isinstance(form, Complete) and form.is_average) for form in forms
        )
        self.forms.set_results(eqn, Complete(after=after, is_parameter=False, is_average=is_average))
        return 2 * after

    def _partial_form(self, eqn: JaxprEqn, is_per_micro_batch: bool) -> Partial | None:
        """The form of the results if they are partial sums, else None.

        `rescale` is n for a mean; of an unbiased variance, `shares` records `rescale` / n.
        """
        # A loop joins statistics of a micro-batch, even if they come from several chunks.
        if not is_per_micro_batch and self._joins_chunks(eqn):
            return None

        partial = self.forms.stays_partial(eqn, factors_of(eqn), is_per_micro_batch)
        n = float(self.forms.n)
        if partial is not None and is_per_micro_batch and partial.rescale not in (None, n):
            self.shares.update((var, (partial.rescale or 1.0) / self.forms.n) for var in eqn.outvars)
            return replace(partial, rescale=n)
        return self._record_unbiased(eqn, partial) if partial is not None and is_per_micro_batch else partial

    def _joins_chunks(self, eqn: JaxprEqn) -> bool:
        if self.chunk_of is None:
            return False
        partial = (var for var in operand_vars(eqn) if isinstance(self.forms.form(var), Partial))
        return len({self.chunk_of[self._producer[var]] for var in partial}) > 1


def _refuse_averages(eqn: JaxprEqn, forms: Sequence[Form]) -> None:
    if any(isinstance(form, Complete) and form.is_average for form in forms):
        raise NotPerMicroBatchError(
            eqn,
            "combines the examples with an average of batch statistics that is complete only after the last "
            "micro-batch. Set `num_micro_batches=1`, or compute it from values that are not batch statistics.",
        )


def _refuse_per_micro_batch(eqn: JaxprEqn, forms: Sequence[Form]) -> None:
    if any(isinstance(form, PerMicroBatch) for form in forms):
        raise NotPerMicroBatchError(
            eqn,
            "reads a batch statistic, such as a mean or variance, and is not part of a normalisation. Set "
            "`num_micro_batches=1`, or wrap its operand in `minialpa.per_micro_batch`.",
        )


def _refuse_sums(eqn: JaxprEqn, forms: Sequence[Form]) -> None:
    """Raise for a sum that is not divided by its number of terms: such a sum has no mean of the micro-batch."""
    if any(isinstance(form, Partial) and form.rescale is None for form in forms):
        raise NotPerMicroBatchError(
            eqn,
            "reads a sum over the examples, or its derivative, where each micro-batch needs a mean. Divide the sum by "
            "its number of terms first, or set `num_micro_batches=1`.",
        )
