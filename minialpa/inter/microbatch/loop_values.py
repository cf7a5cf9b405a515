"""Values in a loop: a variable of the full batch in, the variable that one micro-batch reads out.

* A per-example value: the examples of the micro-batch, from this loop or an earlier one.
* A partial sum: the micro-batch's part, or its mean.
* A value without examples but with their shape (a dropout mask, position numbers): the rows of the micro-batch. Rows
  are recomputed where possible, or else cut out of the full value, so each example meets the same values.
* Any other value: the complete value, see `CompleteValues`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.batching import dim_of
from minialpa.inter.microbatch.draft import CompleteValues, Draft
from minialpa.inter.microbatch.forms import Complete, Partial, PerExample, PerMicroBatch, Same, Scale
from minialpa.ir.equations import Atom, aval_of, is_literal, operand_vars, shape_of
from minialpa.rules.factors import Factors
from minialpa.rules.known_rules import factors_of
from minialpa.rules.shards import localize, run_shard
from minialpa.support.private_jax import with_source_of
from minialpa.tracing.new_equations import equations_for


class LoopValues:
    """The values of one loop, by full-batch variable. The first reader of a missing value writes its equations.

    segment: 2 l - 1 for loop l. source: the traced equation of the new equations.
    """

    def __init__(self, draft: Draft, complete: CompleteValues, segment: int) -> None:
        self.draft, self.complete, self.segment = draft, complete, segment
        self.segments, self.forms, self.n = draft.segments, draft.segments.forms, draft.segments.n_micro_batches
        self.source = -1
        self.values = draft.values[(segment + 1) // 2]
        self._scaled: dict[Var, Atom] = {}
        self._means: dict[Var, Atom] = {}
        self._slices: dict[tuple[Var, int, bool], Atom] = {}

    # ---- writing -----------------------------------------------------------------------------------------------------

    def add(self, eqn: JaxprEqn) -> list[Var]:
        self.draft.add(eqn, self.segment, self.source)
        return list(eqn.outvars)

    def rebuild(self, eqn: JaxprEqn, operands: Sequence[Atom], factors: Factors, split: Sequence[int]) -> list[Var]:
        """Write `eqn` on the micro-batch's part of the factors `split`."""
        if not factors.positional.isdisjoint(split):
            return self._rebuild_by_position(eqn, operands, factors, split)
        params = localize(eqn, factors, dict.fromkeys(split, self.n))
        return self.add(self.draft.maker.rebuild(eqn, operands, params))

    def _rebuild_by_position(
        self, eqn: JaxprEqn, operands: Sequence[Atom], factors: Factors, split: Sequence[int]
    ) -> list[Var]:
        """Write a loop or a branch whose values depend on their position, such as rows of random bits."""
        n_splits, positional = dict.fromkeys(split, self.n), factors.positional.intersection(split)

        def on_rows(m: Any, *arrays: Any) -> list[Any]:
            return run_shard(eqn, factors, arrays, n_splits, dict.fromkeys(positional, m))

        eqns, results = equations_for(on_rows, self.draft.micro_index(), *operands)
        made = {var for one in eqns for var in self.add(with_source_of(one, eqn))}
        # A loop may return an operand, such as carried weights. The micro-batch needs a new variable.
        is_made = [not is_literal(out) and out in made for out in results]
        return [x if made else self.compute("copied", jnp.copy, x) for x, made in zip(results, is_made, strict=True)]

    def compute(self, key: Hashable, fun: Callable[..., Any], *operands: Atom) -> Atom:
        """Write the equations of `fun`; returns its result. Equal `key`s mean equal functions."""
        eqns, (out,) = self.draft.maker.compute(key, fun, *operands)
        for eqn in eqns:
            self.add(eqn)
        return out

    def times(self, x: Atom, factor: float) -> Atom:
        return self.compute(("times", factor), lambda x: x * jnp.asarray(factor, x.dtype), x)

    def share(self, x: Atom) -> Atom:
        """One n-th of a value, so that all micro-batches together count the value once."""
        return self.compute("share", lambda x: x / jnp.asarray(self.n, x.dtype), x)

    # ---- values of the micro-batch -----------------------------------------------------------------------------------

    def of_micro_batch(self, atom: Atom) -> Atom:
        """The variable of the micro-batch for an incomplete value."""
        if atom in self.draft.micro_inputs:
            return self.draft.micro_inputs[atom]
        form = self.forms.form(atom)
        assert not isinstance(form, Complete)
        return self.values[atom] if atom in self.values else self.draft.values[form.loop][atom]

    def scaled_rows(self, var: Var) -> Atom:
        """The examples of the micro-batch, times the scale of `var`."""
        form, rows = self.forms.form(var), self.of_micro_batch(var)
        assert isinstance(form, PerExample)
        if form.scale is None:
            return rows

        if var not in self._scaled:
            eqns, out = self.complete.scaled(rows, form.scale, self.segment - 1)
            for eqn in eqns:
                self.add(eqn)
            self._scaled[var] = out
            self.draft.batch_dims[out] = form.dim
        return self._scaled[var]

    def value(self, atom: Atom, *, per_micro_batch: bool = False) -> Atom:
        """The value of an atom that is not per-example.

        per_micro_batch: read a partial sum as the micro-batch's mean, in place of the complete value.
        """
        if is_literal(atom):
            return atom

        # The micro-batch has computed its version in this loop.
        form = self.forms.form(atom)
        if isinstance(form, PerMicroBatch) or (isinstance(form, Same) and 2 * form.loop - 1 == self.segment):
            return self.of_micro_batch(atom)
        if isinstance(form, Partial) and per_micro_batch and atom not in self.segments.prologue_values:
            return self._micro_batch_mean(atom, form)

        # All other values are complete: reductions of earlier loops, and values without examples.
        if not isinstance(form, Complete):
            self.complete.require(atom, self.segment - 1)
            return atom
        if not self._has_to_be_copied(atom):
            return atom
        self._copy_known(atom)
        return self.values[atom]

    def _micro_batch_mean(self, var: Var, form: Partial) -> Atom:
        """The micro-batch's part of a sum; of a mean, the mean over the micro-batch."""
        assert form.scale is None, f"{self.segments.line(var)}: a micro-batch reads its part of a scaled sum"
        if form.rescale is None:
            return self.of_micro_batch(var)
        if var not in self._means:
            self._means[var] = self.times(self.of_micro_batch(var), form.rescale)
        return self._means[var]

    # ---- values that do not depend on the examples -------------------------------------------------------------------

    def _has_to_be_copied(self, var: Var) -> bool:
        """Whether each loop computes a value itself that is equal for all micro-batches."""
        i = self.segments.producer.get(var)
        return i is not None and self.segments.places[i] is None and var not in self.segments.prologue_values

    def _copy_known(self, var: Var) -> None:
        """Copy the equations that compute `var` to this loop."""
        eqns = self.segments.eqns
        copied, unvisited = set[int](), [var]
        while unvisited:
            needed = unvisited.pop()
            if not self._has_to_be_copied(needed):
                continue
            i = self.segments.producer[needed]
            if i not in copied and eqns[i].outvars[0] not in self.values:
                copied.add(i)
                unvisited.extend(operand_vars(eqns[i]))

        # In the order of the program: operands before their readers.
        for i in sorted(copied):
            copy = self.draft.maker.rebuild(eqns[i], [self._value_or_copy(atom) for atom in eqns[i].invars])
            self.values.update(zip(eqns[i].outvars, self.add(copy), strict=True))

    def _value_or_copy(self, atom: Atom) -> Atom:
        return self.values[atom] if not is_literal(atom) and atom in self.values else self.value(atom)

    # ---- rows of values without examples -----------------------------------------------------------------------------

    def rows(self, var: Var, dim: int, *, per_micro_batch: bool) -> Atom:
        """The micro-batch's part, along `dim`, of a value without examples."""
        key = var, dim, per_micro_batch
        if key not in self._slices:
            recomputed = self._recomputed_rows(var, dim, per_micro_batch)
            self._slices[key] = (
                self._micro_batch_slice(self.value(var, per_micro_batch=per_micro_batch), var, dim)
                if recomputed is None
                else recomputed
            )
        return self._slices[key]

    def value_or_rows(self, atom: Atom, dim: int | None, *, per_micro_batch: bool) -> Atom:
        return (
            self.value(atom, per_micro_batch=per_micro_batch)
            if dim is None
            else self.rows(atom, dim, per_micro_batch=per_micro_batch)
        )

    def _micro_batch_slice(self, x: Atom, var: Var, dim: int) -> Atom:
        size = shape_of(var)[dim] // self.n

        def cut(x: Any, m: Any) -> Any:
            return jax.lax.dynamic_slice_in_dim(x, m * size, size, dim)

        return self.compute(("cut", dim), cut, x, self.draft.micro_index())

    def _recomputed_rows(self, var: Var, dim: int, per_micro_batch: bool) -> Atom | None:
        """`var`, computed on the micro-batch's part alone; None if its equation does not allow that."""
        i = self.segments.producer.get(var)
        if i is None or not self._may_recompute(i, var, per_micro_batch):
            return None

        eqn = self.segments.eqns[i]
        factors, result = factors_of(eqn), eqn.outvars.index(var)
        factor = factors.leading(factors.results[result][dim])
        if factor is None or not self._may_split(factors, factor):
            return None

        form = self.forms.form(var)
        per_micro_batch = per_micro_batch or isinstance(form, PerMicroBatch)
        dims = [dim_of(array, (factor,)) for array in factors.operands]
        operands = [
            self.value_or_rows(atom, along, per_micro_batch=per_micro_batch)
            for atom, along in zip(eqn.invars, dims, strict=True)
        ]
        out = self.rebuild(eqn, operands, factors, (factor,))[result]

        # A part of a mean becomes the micro-batch's mean here, unless an operand was such a mean already.
        operand_forms = [self.forms.form(atom) for atom in eqn.invars]
        were_rescaled = any(isinstance(f, Partial) and f.rescale is not None for f in operand_forms)
        if isinstance(form, Partial) and form.rescale is not None and not were_rescaled:
            return self.times(out, form.rescale * self.segments.shares.get(var, 1.0))
        return out

    def _may_recompute(self, i: int, var: Var, per_micro_batch: bool) -> bool:
        """Whether a micro-batch may compute `var`, which is cheap or per micro-batch and has no per-example operand."""
        form, operands = self.forms.form(var), self.segments.eqns[i].invars
        if var in self.segments.prologue_values or any(
            isinstance(self.forms.form(atom), PerExample) for atom in operands
        ):
            return False
        is_free = isinstance(form, Complete) and self.segments.places[i] is None
        return is_free or isinstance(form, PerMicroBatch | Same) or (per_micro_batch and isinstance(form, Partial))

    def _may_split(self, factors: Factors, factor: int) -> bool:
        return factor not in factors.reductions and factors.may_split(factor, self.n)

    # ---- values that wait for a scalar -------------------------------------------------------------------------------

    def may_wait(self, atom: Atom, scale: Scale | None) -> bool:
        """Whether a reader whose results have `scale` reads the complete value `atom` without the scalar of `scale`."""
        if scale is None or is_literal(atom):
            return False
        form = self.forms.form(atom)
        is_scaled = isinstance(form, Complete) and (form.scale == scale or form.uniform is scale.scalar)
        return is_scaled or atom is scale.scalar

    def unscaled(self, atom: Atom, dim: int | None) -> Atom:
        """A complete value without the scalar of its form; along `dim`, the micro-batch's part."""
        form = self.forms.form(atom)
        if not isinstance(form, Complete) or form.scale is None:
            return self._ones(atom, dim)  # the scalar itself, or an array filled with it

        eqn = self.segments.eqns[self.segments.producer[atom]]
        factors, result = factors_of(eqn), eqn.outvars.index(atom)
        factor = None if dim is None else factors.leading(factors.results[result][dim])
        if dim is not None and factor is not None and not self._may_split(factors, factor):
            return self._micro_batch_slice(self.unscaled(atom, None), atom, dim)

        split = () if factor is None else (factor,)
        dims = [dim_of(array, split) for array in factors.operands]
        operands = [
            self.unscaled(operand, along)
            if self.may_wait(operand, form.scale)
            else self.value_or_rows(operand, along, per_micro_batch=False)
            for operand, along in zip(eqn.invars, dims, strict=True)
        ]
        return self.rebuild(eqn, operands, factors, split)[result]

    def _ones(self, atom: Atom, dim: int | None) -> Atom:
        shape = list(shape_of(atom))
        if dim is not None:
            shape[dim] //= self.n
        dtype = aval_of(atom).dtype
        return self.compute(("ones", tuple(shape), dtype), lambda: jnp.ones(shape, dtype))
