"""Equations in a loop: an equation of the full batch in, the equation for one micro-batch out.

Constants keep their full-batch values: a mean over 64 examples still divides by 64, so parts of micro-batches add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from minialpa.inter.microbatch.batching import batch_factors, dim_of, is_barrier
from minialpa.inter.microbatch.forms import Partial, PerExample, PerMicroBatch, Scale
from minialpa.inter.microbatch.loop_values import LoopValues
from minialpa.ir.equations import Atom
from minialpa.rules.factors import Factors
from minialpa.rules.known_rules import factors_of


class LoopEquations:
    """Writes the equations of one loop."""

    def __init__(self, loop: LoopValues) -> None:
        self.loop = loop
        self.draft, self.segments, self.forms = loop.draft, loop.segments, loop.forms

    def emit(self, i: int) -> None:
        eqn = self.segments.eqns[i]
        self.loop.source = self.segments.sources[i]
        if is_barrier(eqn):
            self._emit_barrier(eqn)
        elif eqn.primitive.name == "minialpa_per_micro_batch" and isinstance(
            self.forms.form(eqn.outvars[0]), PerMicroBatch
        ):
            self._emit_per_micro_batch(eqn)
        elif any(isinstance(self.forms.form(atom), PerExample) for atom in eqn.invars):
            self._emit_on_examples(i, eqn)
        else:
            self._emit_on_aggregates(i, eqn)

    def _emit_barrier(self, eqn: JaxprEqn) -> None:
        operands = [self.loop.of_micro_batch(atom) for atom in eqn.invars]
        results = self.loop.add(self.draft.maker.rebuild(eqn, operands))
        for operand, var, result in zip(operands, eqn.outvars, results, strict=True):
            self.loop.values[var] = result
            if operand in self.draft.batch_dims:
                self.draft.batch_dims[result] = self.draft.batch_dims[operand]

    def _emit_per_micro_batch(self, eqn: JaxprEqn) -> None:
        """Write `per_micro_batch`, which turns a part of a mean into the micro-batch's mean, or the cotangent of such a
        call.

        The result leaves the step as an average over n micro-batches. So a per-micro-batch cotangent counts one n-th,
        and a cotangent that is a sum over examples counts in full.
        """
        (operand,) = eqn.invars
        rescale = self.segments.asked_for[eqn.params["number"]]

        if not eqn.params["cotangent_of"]:
            result = self.loop.value(operand, per_micro_batch=True)
        elif isinstance(self.forms.form(operand), Partial):
            result = self.loop.times(self.loop.of_micro_batch(operand), rescale)
        else:
            result = self.loop.times(self.loop.value(operand), rescale / self.segments.n_micro_batches)
        self.loop.values[eqn.outvars[0]] = result

    # ---- equations on examples ------------------------------------------------------------------------------------

    def _emit_on_examples(self, i: int, eqn: JaxprEqn) -> None:
        factors = factors_of(eqn).in_time(eqn)
        split = batch_factors(eqn, factors, self.forms.row_dims(eqn), self.segments.n_micro_batches)
        form = self.forms.form(eqn.outvars[0])
        reader = _SplitEquation(i, factors, split, form.scale if isinstance(form, PerExample | Partial) else None)

        operands = [self._operand(reader, k, atom) for k, atom in enumerate(eqn.invars)]
        results = self.loop.rebuild(eqn, operands, factors, split)
        for var, result, array in zip(eqn.outvars, results, factors.results, strict=True):
            self.loop.values[var] = result
            dim = dim_of(array, split)
            if dim is not None:
                self.draft.batch_dims[result] = dim

    def _operand(self, reader: _SplitEquation, k: int, atom: Atom) -> Atom:
        """Operand `k`, as a micro-batch reads it."""
        form = self.forms.form(atom)
        if isinstance(form, PerExample):
            waits = reader.scale is not None and form.scale == reader.scale
            return self.loop.of_micro_batch(atom) if waits else self.loop.scaled_rows(atom)

        dim = dim_of(reader.factors.operands[k], reader.split)
        if self.loop.may_wait(atom, reader.scale):
            return self.loop.unscaled(atom, dim)
        if dim is None and any(reader.factors.takes_part_once(factor, k) for factor in reader.split):
            return self._operand_once(reader.number, atom)
        return self.loop.value_or_rows(atom, dim, per_micro_batch=reader.number in self.segments.per_micro_batch)

    def _operand_once(self, i: int, atom: Atom) -> Atom:
        """An operand that has to count once over all micro-batches: itself in micro-batch 0, zero in the others.

        A per-micro-batch value counts one n-th in each micro-batch.
        """
        form = self.forms.form(atom)
        is_sum = isinstance(form, Partial) and form.reduction == "sum" and form.scale is None
        if is_sum and self.segments.reads_part_of_loop(i, atom):
            return self.loop.of_micro_batch(atom)
        if isinstance(form, PerMicroBatch):
            return self.loop.share(self.loop.value(atom))
        if self.forms.is_zero(atom):
            return self.loop.value(atom)

        def first(x: Any, m: Any) -> Any:
            return jnp.where(m == 0, x, jnp.zeros_like(x))

        return self.loop.compute("first", first, self.loop.value(atom), self.draft.micro_index())

    # ---- equations on reductions -----------------------------------------------------------------------------------

    def _emit_on_aggregates(self, i: int, eqn: JaxprEqn) -> None:
        """Write an equation on reductions. `shares` corrects unbiased variances."""
        is_per_micro_batch = i in self.segments.per_micro_batch
        if isinstance(self.forms.form(eqn.outvars[0]), Partial):
            operands = self._partial_operands(eqn, is_per_micro_batch)
        else:
            operands = [self.loop.value(atom, per_micro_batch=is_per_micro_batch) for atom in eqn.invars]

        results = self.loop.add(self.draft.maker.rebuild(eqn, operands))
        for var, result in zip(eqn.outvars, results, strict=True):
            share = self.segments.shares.get(var)
            self.loop.values[var] = result if share is None else self.loop.times(result, share)

    def _partial_operands(self, eqn: JaxprEqn, is_per_micro_batch: bool) -> list[Atom]:
        factors = factors_of(eqn)
        partial = self.forms.kept_partial(eqn, factors, is_per_micro_batch)
        return [
            self.loop.of_micro_batch(atom) if k in partial else self._beside_partial(atom, factors, k)
            for k, atom in enumerate(eqn.invars)
        ]

    def _beside_partial(self, atom: Atom, factors: Factors, k: int) -> Atom:
        """An operand beside partial sums. A per-micro-batch value counts 1 / n as a summand, in full as a factor."""
        value = self.loop.value(atom, per_micro_batch=True)
        if (
            isinstance(self.forms.form(atom), PerMicroBatch)
            and factors.linear == "joint"
            and k in factors.linear_operands
        ):
            return self.loop.share(value)
        return value


@dataclass(frozen=True, slots=True)
class _SplitEquation:
    """An equation on examples. split: the factors that hold the examples. scale: the scale of its results."""

    number: int
    factors: Factors
    split: Sequence[int]
    scale: Scale | None
