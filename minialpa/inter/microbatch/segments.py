"""Segments: a traced step in, the loop over micro-batches or the time between loops of each of its equations out.

A step over micro-batches is a chain of segments, numbered from 0. Odd ones are loops, run once per micro-batch; even
ones run once: 0 before the first loop, 2 l behind loop l, the last of them being the update. An equation goes to the
first segment in which its operands are known:

  * on examples, a loop: the one of its operands, or the one behind the last total that it reads;
  * linear in partial sums, their loop: the result is a partial sum again;
  * on totals, the segment behind the loop that completes them;
  * mixing examples (a sort, a similarity of all pairs), the segment behind the loop that computes its operands, on all
    examples at once; later loops cut their rows out of its results.

So a loss on means is one loop, and a loss that divides by a total of the model's is two. A loop that reads rows of an
earlier one computes them again. Two exceptions keep loops few:

  * what is cheap and depends on the batch alone (a sum of loss weights) is known before the first loop;
  * a scalar total that rows are multiplied by waits until linear equations have made a sum of them: sum_i (s x_i) is
    s sum_i x_i. So a denominator without a gradient of its own costs no loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.errors import TraceError
from minialpa.inter.microbatch.batching import batch_factors, batch_kinds, dim_of, is_barrier
from minialpa.inter.microbatch.forms import KNOWN, Form, Once, Own, Partial, Rows, Same, Scale
from minialpa.inter.microbatch.normalisations import find_moments
from minialpa.inter.microbatch.partial_sums import Forms
from minialpa.inter.microbatch.statistics import NotOwnError, Statistics, find_statistics, normalisations, without
from minialpa.rules.factors import Factors, factors_of
from minialpa.tracing.jaxprs import (
    Atom,
    aval_of,
    is_inexact,
    is_literal,
    operand_vars,
    shape_of,
    source_line,
    sub_jaxprs,
)
from minialpa.tracing.trace import TracedStep

_HEAVY = ("dot_general", "conv_general_dilated", "sort", "cholesky", "qr", "svd", "eigh", "lu")


@dataclass(frozen=True, slots=True)
class Segments:
    """Where each equation of a step runs, and what its values are.

    eqns: the traced equations, with optimization barriers parted by what passes them; sources: the number of the
        traced equation that each comes from.
    places: segment of each equation; None where whoever reads its results computes them.
    own: numbers of the equations that take totals as the micro-batch's own; found: batch statistics, for people.
    early: numbers of the equations that also run before the first loop, on the whole batch.
    shares: what an unbiased variance is multiplied by, so that n parts of it add up to the mean of the micro-batches'.
    asked_for: for each call of `per_micro_batch` what makes a mean of fewer examples of its argument, 1 if it is a sum;
        absent if it has nothing of the batch, or is of examples.
    producer: the number of the equation that computes each variable; early_values: those that `early` computes.
    """

    step: TracedStep
    n_micro_batches: int
    eqns: tuple[JaxprEqn, ...]
    sources: tuple[int, ...]
    places: tuple[int | None, ...]
    forms: Forms
    own: frozenset[int]
    early: frozenset[int]
    shares: dict[Var, float]
    asked_for: dict[int, float]
    found: tuple[str, ...]
    producer: dict[Var, int]
    early_values: frozenset[Var]

    @property
    def n_loops(self) -> int:
        return max([1, *((place + 1) // 2 for place in self.places if place is not None)])

    def line(self, var: Var) -> str:
        """The source line that computes `var`."""
        return source_line(self.eqns[self.producer[var]])

    def reads_of_micro_batch(self, i: int, var: Var) -> bool:
        """Whether equation `i` reads operand `var` as the micro-batch has it."""
        form = self.forms.form(var)
        if isinstance(form, Partial):
            return var not in self.early_values and (i in self.own or self.reads_part_of_loop(i, var))
        return isinstance(form, Rows | Own)

    def reads_part_of_loop(self, i: int, atom: Atom) -> bool:
        """Whether operand `atom` of equation `i` is a partial sum of the loop that is the place of the equation."""
        form = self.forms.form(atom)
        return isinstance(form, Partial) and self.places[i] == 2 * form.loop - 1


def find_segments(step: TracedStep, n: int, chunk_of: Sequence[int | None] | None = None) -> Segments:
    """`chunk_of[i]`: the chunk of traced equation `i`, where it is known: sums of different chunks stay apart.

    A normalisation over examples that micro-batches cannot take as their own is computed from the whole batch.
    Raises TraceError where a result has no clear meaning over micro-batches.
    """
    kinds = batch_kinds(step, n)
    moments = find_moments(step, kinds)
    normal = normalisations(step, kinds, moments)
    while True:
        try:
            statistics = find_statistics(step, kinds, moments, normal)
            return _Finder(step, n, chunk_of, statistics).run()
        except NotOwnError as error:
            if not normal:
                raise
            normal = without(step, normal, error.line)


class _Finder:
    def __init__(self, step: TracedStep, n: int, chunk_of: Sequence[int | None] | None, statistics: Statistics) -> None:
        assert step.batch_size is not None
        self.step, self.n, self.chunk_of, self.statistics = step, n, chunk_of, statistics
        self.forms = Forms(step.flat.eqns, n, step.batch_size)
        self.maker_of = {v: i for i, eqn in enumerate(step.flat.eqns) for v in eqn.outvars}
        self.eqns: list[JaxprEqn] = []
        self.sources: list[int] = []
        self.places: list[int | None] = []
        # Values that depend on the batch alone and are cheap, and those of them that are wanted before the loops.
        self.independent = {v for v, d in zip(step.flat.invars, step.batch_dims, strict=True) if d is not None}
        self.independent.update(step.flat.constvars)
        self.wanted_early: set[Var] = set()
        self.put_together: set[Var] = set()  # rows that an equation between loops reads, of all examples
        self.shares: dict[Var, float] = {}
        self.asked_for: dict[int, float] = {}

    def run(self) -> Segments:
        for var, dim in zip(self.step.flat.invars, self.step.batch_dims, strict=True):
            if dim is not None:
                self.forms.of[var] = Rows(0, dim)
        for i, eqn in enumerate(self.step.flat.eqns):
            if is_barrier(eqn):
                self._part_barrier(i, eqn)
            else:
                place = self._place(i, eqn)
                self._note(i, eqn, place)
        own = frozenset(k for k, i in enumerate(self.sources) if i in self.statistics.own)
        early = self._early()
        return Segments(
            self.step, self.n, tuple(self.eqns), tuple(self.sources), tuple(self.places), self.forms, own,
            early, self.shares, self.asked_for, self.statistics.found,
            producer={v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars},
            early_values=frozenset(v for i in early for v in self.eqns[i].outvars),
        )  # fmt: skip

    def _note(self, i: int, eqn: JaxprEqn, place: int | None) -> None:
        self.eqns.append(eqn)
        self.sources.append(i)
        self.places.append(place)
        if not _is_heavy(eqn) and all(is_literal(v) or v in self.independent for v in eqn.invars):
            self.independent.update(eqn.outvars)

    def _early(self) -> frozenset[int]:
        """Equations that compute what is wanted before the first loop, on the whole batch."""
        wanted, out = set(self.wanted_early), set[int]()
        for k in range(len(self.eqns) - 1, -1, -1):
            eqn = self.eqns[k]
            if self.places[k] == 0:
                wanted.update(operand_vars(eqn))
            elif self.places[k] is not None and any(v in wanted for v in eqn.outvars):
                out.add(k)
                wanted.update(operand_vars(eqn))
        return frozenset(out)

    def _part_barrier(self, i: int, eqn: JaxprEqn) -> None:
        """A barrier only passes arrays on, side by side, so that those of different segments can pass apart, and those
        that wait for a scalar, which whoever reads them may compute without it."""
        groups: dict[tuple[type, int | None, Scale | None], list[int]] = {}
        for k, atom in enumerate(eqn.invars):
            form = self.forms.form(atom)
            in_loop = 0 if isinstance(form, Once) else max(1, form.loop)
            place = 2 * in_loop - 1 if in_loop else _place_of(form)
            scale = form.scale if isinstance(form, Once) else None
            groups.setdefault((type(form), place, scale), []).append(k)
        for (_, place, _), positions in groups.items():
            part = eqn.replace(invars=[eqn.invars[k] for k in positions], outvars=[eqn.outvars[k] for k in positions])
            for v, out in zip(part.invars, part.outvars, strict=True):
                form = self.forms.form(v)
                if isinstance(form, Rows):
                    form = replace(form, loop=max(1, form.loop))
                self.forms.of[out] = form
            self._note(i, part, place)

    # ---- one equation ---------------------------------------------------------------------------------------------

    def _place(self, i: int, eqn: JaxprEqn) -> int | None:
        forms = [self.forms.form(v) for v in eqn.invars]
        if not eqn.outvars and any(isinstance(form, Rows) for form in forms):
            return 2 * max(1, *map(self._level, eqn.invars)) - 1  # a callback sees each micro-batch
        if eqn.primitive.name == "minialpa_per_micro_batch":
            self._note_asked_for(eqn, forms[0])
            if eqn.params["number"] in self.asked_for and not isinstance(forms[0], Rows):
                return self._own(eqn, forms)
        if any(isinstance(form, Rows) for form in forms):
            return self._on_rows(i, eqn, forms)
        if any(isinstance(form, Partial | Own) for form in forms):
            return self._on_totals(i, eqn, forms)
        return self._once(i, eqn, forms)

    def _note_asked_for(self, eqn: JaxprEqn, form: Form) -> None:
        """Note a call of `per_micro_batch` on a total. What comes back to it in the backward pass follows from that."""
        if not eqn.params["cotangent_of"] and isinstance(form, Partial | Own):
            rescale = form.rescale if isinstance(form, Partial) else None
            self.asked_for.setdefault(eqn.params["number"], 1.0 if rescale is None else rescale)

    def _set(self, eqn: JaxprEqn, form: Form) -> None:
        self.forms.of.update((v, form) for v in eqn.outvars)

    def _level(self, atom: Atom) -> int:
        """The number of the loop behind which the whole of a value is known."""
        form = self.forms.form(atom)
        if isinstance(form, Once):
            return form.after
        if not is_literal(atom) and atom in self.independent:
            self.wanted_early.add(atom)
            return 0
        scale = None if isinstance(form, Own | Same) else form.scale
        return form.loop if scale is None else max(form.loop, self._level(scale.scalar))

    def _once(self, i: int, eqn: JaxprEqn, forms: Sequence[Form]) -> int | None:
        """What depends on no examples: arguments, or totals that are known once."""
        same = max((form.loop for form in forms if isinstance(form, Same)), default=0)
        after = max((form.after for form in forms if isinstance(form, Once)), default=0)
        if same > after:
            self._set(eqn, Same(same))
            return 2 * same - 1
        after = max(after, same)
        average = any(isinstance(form, Once) and form.is_average for form in forms)
        in_update = self.step.origins[i].direction == "other"
        parameters = all(isinstance(form, Once) and form.is_parameter for form in forms)
        if after == 0 and parameters:
            self._set(eqn, KNOWN)
            return None
        if parameters and not in_update and not _is_heavy(eqn) and not eqn.effects:
            # A loop may cast and transpose a new parameter for itself, as it does with an argument.
            self._set(eqn, Once(after, True, average))
            return None
        if self._waits_for_a_scalar(i, eqn, forms):
            return None
        self._set(eqn, Once(after, in_update, average))
        return 2 * after

    def _waits_for_a_scalar(self, i: int, eqn: JaxprEqn, forms: Sequence[Form]) -> bool:
        """Note what a scalar total fills, or multiplies: loops may read it without the scalar, see `_common_scale`."""
        if self.step.origins[i].direction == "other":
            return False
        scalar = self._filled_with(eqn)
        scale = None if scalar is not None else self._known_but_for_a_scale(eqn, forms)
        if scalar is not None:
            self._set(eqn, Once(self._level(scalar), False, False, scalar))
        elif scale is not None:
            self._set(eqn, Once(self._level(scale.scalar), False, False, None, scale))
        return scalar is not None or scale is not None

    def _known_but_for_a_scale(self, eqn: JaxprEqn, forms: Sequence[Form]) -> Scale | None:
        """The scalar total that an array could wait for, if it is computed from nothing else that the loops add up."""
        if not all(shape_of(v) for v in eqn.outvars) or eqn.effects:
            return None
        factors = factors_of(eqn)
        scale = self._common_scale(eqn, factors)
        for k, (v, form) in enumerate(zip(eqn.invars, forms, strict=True)):
            waits = scale is not None and self._scale_of(v, k, factors) == scale
            if not waits and not (isinstance(form, Once) and form.after == 0):
                return None
        return scale

    def _filled_with(self, eqn: JaxprEqn) -> Var | None:
        """The scalar that an equation fills an array with."""
        if eqn.primitive.name != "broadcast_in_dim" or not is_inexact(eqn.outvars[0]):
            return None
        v = eqn.invars[0]
        if len(eqn.invars) > 1:
            return None
        form = self.forms.form(v)
        return form.uniform if isinstance(form, Once) and form.uniform is not None else self._scalar_total(v)

    def _scalar_total(self, atom: Atom) -> Var | None:
        """A scalar that is known behind a loop, and not before the first."""
        if is_literal(atom) or shape_of(atom) or not is_inexact(atom) or atom in self.independent:
            return None
        if self.statistics.own:
            return None  # the derivatives of statistics are read in the loop
        form = self.forms.form(atom)
        if isinstance(form, Once):
            return atom if form.after and not form.is_average else None
        return atom if isinstance(form, Partial) and form.reduction == "sum" and form.scale is None else None

    def _on_totals(self, i: int, eqn: JaxprEqn, forms: Sequence[Form]) -> int | None:
        """What reads partial sums, or values that micro-batches have of their own, and no examples."""
        own = i in self.statistics.own
        if not own and self._waits_for_a_scalar(i, eqn, forms):
            return None
        partial = self._partial(eqn, own)
        if partial is not None:
            self._set(eqn, partial)
            return 2 * partial.loop - 1
        if own:
            self._refuse_sums(eqn, forms)
            return self._own(eqn, forms)
        return self._behind_loops(eqn, forms)

    def _partial(self, eqn: JaxprEqn, own: bool) -> Partial | None:
        """The form of the results, if micro-batches compute parts of them; notes shares of an unbiased variance."""
        # What a micro-batch takes as its own meets in the loop, wherever its parts come from.
        is_apart = not own and self._crosses(eqn)
        partial = None if is_apart else self.forms.stays_partial(eqn, factors_of(eqn), own)
        if partial is not None and own and partial.rescale not in (None, float(self.n)):
            self.shares.update((v, (partial.rescale or 1.0) / self.n) for v in eqn.outvars)
            return replace(partial, rescale=float(self.n))
        return partial

    def _own(self, eqn: JaxprEqn, forms: Sequence[Form]) -> int:
        """Each micro-batch computes its own."""
        loop = max(form.after + 1 if isinstance(form, Once) else form.loop for form in forms)
        self._set(eqn, Own(loop))
        return 2 * loop - 1

    def _behind_loops(self, eqn: JaxprEqn, forms: Sequence[Form]) -> int:
        """Computed once, from totals."""
        after = max(self._level(v) for v in eqn.invars)
        average = any(isinstance(form, Own) or (isinstance(form, Once) and form.is_average) for form in forms)
        self._set(eqn, Once(after, False, average))
        return 2 * after

    def _refuse_sums(self, eqn: JaxprEqn, forms: Sequence[Form]) -> None:
        """A micro-batch takes its own mean; a sum that was not divided by its number of terms has to be the total."""
        if any(isinstance(form, Partial) and form.rescale is None for form in forms):
            raise NotOwnError(
                eqn,
                "reads a sum over examples, or its derivative, where the micro-batch would take its own mean. Use "
                "`num_micro_batches=1`, or divide the sum by its number of terms first.",
            )

    def _crosses(self, eqn: JaxprEqn) -> bool:
        """Whether partial operands of `eqn` come from different chunks."""
        if self.chunk_of is None:
            return False
        partial = (v for v in operand_vars(eqn) if isinstance(self.forms.form(v), Partial))
        return len({self.chunk_of[self.maker_of[v]] for v in partial}) > 1

    # ---- equations on examples ------------------------------------------------------------------------------------

    def _on_rows(self, i: int, eqn: JaxprEqn, forms: Sequence[Form]) -> int:
        self._refuse_averages(eqn, forms)
        self._refuse_own(i, eqn, forms)
        factors = factors_of(eqn)
        try:
            split = batch_factors(eqn, factors, self.forms.row_dims(eqn), self.n)
        except TraceError:
            return self._on_all_rows(i, eqn, forms)
        own = i in self.statistics.own
        if own:
            self._refuse_sums(eqn, [f for k, f in enumerate(forms) if not self._adds_up(f, factors, k, split)])
        scale = None if own else self._common_scale(eqn, factors)
        loop = max(1, *(self._readable(v, factors, k, split, own, scale) for k, v in enumerate(eqn.invars)))
        results = [self._result(v, r, factors, split, forms, loop, scale) for r, v in enumerate(eqn.outvars)]
        if any(form is None for form in results) or self._is_put_together(eqn, forms, loop):
            return self._on_all_rows(i, eqn, forms)
        self.forms.of.update((v, form) for v, form in zip(eqn.outvars, results, strict=True) if form is not None)
        return 2 * loop - 1

    def _is_put_together(self, eqn: JaxprEqn, forms: Sequence[Form], loop: int) -> bool:
        """Whether all rows that an equation reads are put together anyway, and it would need another loop for them.

        The derivative of a similarity of all pairs is one: with the similarities it is known once.
        """
        rows = [v for v, form in zip(eqn.invars, forms, strict=True) if isinstance(form, Rows)]
        return not eqn.effects and all(v in self.put_together and self._level(v) + 1 == loop for v in rows)

    def _refuse_averages(self, eqn: JaxprEqn, forms: Sequence[Form]) -> None:
        if any(isinstance(form, Once) and form.is_average for form in forms):
            raise NotOwnError(
                eqn,
                "brings a statistic that each micro-batch has of its own back to the examples, by way of a result of "
                "the step. Use `num_micro_batches=1`, or compute it from values that are not batch statistics.",
            )

    def _refuse_own(self, i: int, eqn: JaxprEqn, forms: Sequence[Form]) -> None:
        """What a micro-batch has of its own is read where `statistics` says, and by what comes of that alone."""
        if i not in self.statistics.own and any(isinstance(form, Own) for form in forms):
            raise NotOwnError(
                eqn,
                "reads a statistic of the micro-batch in a way that is no normalisation. Use `num_micro_batches=1`, "
                "or `minialpa.per_micro_batch` for what it reads.",
            )

    def _on_all_rows(self, i: int, eqn: JaxprEqn, forms: Sequence[Form]) -> int:
        """An equation that mixes examples runs once, on all of them."""
        if eqn.effects:
            raise TraceError(
                f"`{eqn.primitive.name}` at {source_line(eqn)} mixes the examples of a batch and has side effects, so "
                "it cannot run over micro-batches. Use `num_micro_batches=1`, or move it out of the step."
            )
        if any(isinstance(form, Own) for form in forms) or i in self.statistics.own:
            raise NotOwnError(
                eqn,
                "mixes the examples of a batch and reads statistics of the micro-batch, so it cannot run over "
                "micro-batches. Use `num_micro_batches=1`, or move it out of the step.",
            )
        self.put_together.update(v for v in operand_vars(eqn) if v not in self.independent)
        after = max(self._level(v) for v in eqn.invars)
        self._set(eqn, Once(after, False))
        return 2 * after

    def _readable(
        self, atom: Atom, factors: Factors, k: int, split: Sequence[int], own: bool, scale: Scale | None
    ) -> int:
        """The first loop that can read operand `k` of an equation on examples, whose results wait for `scale`."""
        form = self.forms.form(atom)
        if scale is not None and self._scale_of(atom, k, factors) == scale:
            return form.loop if isinstance(form, Rows) else 0
        if isinstance(form, Once):
            return form.after + 1
        if isinstance(form, Rows):
            return form.loop if form.scale is None else self._level(atom) + 1
        if isinstance(form, Own | Same) or own or self._adds_up(form, factors, k, split):
            return form.loop
        return self._level(atom) + 1

    @staticmethod
    def _adds_up(form: Form, factors: Factors, k: int, split: Sequence[int]) -> bool:
        """Whether a part of a sum stands where a sum over examples begins."""
        is_sum = isinstance(form, Partial) and form.reduction == "sum" and form.scale is None
        return is_sum and any(factors.takes_part_once(f, k) for f in split)

    def _result(
        self, var: Var, r: int, factors: Factors, split: Sequence[int], forms: Sequence[Form], loop: int,
        scale: Scale | None,
    ) -> Form | None:  # fmt: skip
        """The form of a result of an equation on examples; None where it depends on them in no way that is known."""
        d = dim_of(factors.results[r], split)
        if d is not None:
            return Rows(loop, d, scale)
        partial = next((f for f in split if factors.is_partial(f, r)), None)
        if partial is not None:
            # Inside a loop the number of terms is not that of the factors alone.
            is_control = bool(sub_jaxprs(self.forms.producer[var]))
            count = 0 if is_control else int(np.prod([factors.sizes[f] for f in factors.reductions]))
            reduction = factors.reductions[partial]
            assert scale is None or reduction == "sum", reduction
            return Partial(loop, reduction, count, scale=scale)
        if any(isinstance(form, Own) for form in forms):
            return Own(loop)
        return Same(loop)

    def _common_scale(self, eqn: JaxprEqn, factors: Factors) -> Scale | None:
        """A scalar total that the results can be multiplied by afterwards, if an operand waits for it, or is it.

        sum_k a_k (s x_k) = s sum_k a_k x_k: all operands in which the equation is linear have the same scale, or are
        zero; of an equation that is linear in each, one has it. Only in dtypes that have the range of float32.
        """
        atoms = list(enumerate(eqn.invars))
        scales = {k: self._scale_of(v, k, factors) for k, v in atoms}
        found = {k: scale for k, scale in scales.items() if scale is not None}
        if len(set(found.values())) != 1 or any(k not in found for k, v in atoms if self._waits(v)):
            return None
        if not all(is_inexact(v) and _has_range(v) for v in (*eqn.outvars, *(eqn.invars[k] for k in found))):
            return None

        scale = next(iter(found.values()))
        rest = [k for k in factors.linear_operands if k not in found]
        if factors.linear == "joint" and all(self.forms.is_zero(eqn.invars[k]) for k in rest):
            return scale
        return scale if factors.linear == "each" and len(found) == 1 else None

    def _waits(self, atom: Atom) -> bool:
        form = self.forms.form(atom)
        return isinstance(form, Rows) and form.scale is not None

    def _scale_of(self, atom: Atom, k: int, factors: Factors) -> Scale | None:
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


def _place_of(form: Form) -> int | None:
    """Segment of an equation that passes on a value which is known once."""
    assert isinstance(form, Once)
    return None if form.is_parameter else 2 * form.after


def _has_range(atom: Atom) -> bool:
    dtype: Any = aval_of(atom).dtype
    return bool(jnp.finfo(dtype).maxexp >= jnp.finfo(np.float32).maxexp)


def _is_heavy(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _HEAVY or bool(sub_jaxprs(eqn))
