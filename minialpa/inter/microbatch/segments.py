"""Segments: a traced step in, the segment and form of each of its equations and values out (`find_segments`).

Loop l is segment 2 l - 1 and runs once per micro-batch. Even segments run once: 0 before the first loop, 2 l after
loop l; the last is the update. An equation goes to the first segment in which its operands are readable:

  * on examples: the loop of its operands, or the loop after the last complete value that it reads;
  * linear in partial sums: their loop, and the result is another partial sum;
  * otherwise on reductions: the segment after the loop that completes them;
  * mixing examples (a sort, a similarity of all pairs): the segment after the loop of its operands, on all examples.
    Later loops cut their rows out of its results.

So a loss on means needs one loop, and a loss that divides by a sum of the model's values two; `scales` has two
exceptions.
`places` has the equations on examples and on reductions; this module places all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.batching import batch_kinds, is_barrier
from minialpa.inter.microbatch.forms import (
    KNOWN,
    Complete,
    Form,
    Partial,
    PerExample,
    PerMicroBatch,
    Same,
    Scale,
    ValueForms,
)
from minialpa.inter.microbatch.normalisations import find_moments
from minialpa.inter.microbatch.places import Places
from minialpa.inter.microbatch.scales import Levels, Scales
from minialpa.inter.microbatch.statistics import (
    NotPerMicroBatchError,
    Statistics,
    find_statistics,
    normalisations,
    without,
)
from minialpa.ir.equations import Atom, source_line
from minialpa.rules.expensive import is_expensive
from minialpa.tracing.trace import TracedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The segment of each equation of a step, and the form of each value. Equations are numbered by position in `eqns`.

    Attributes:
        eqns: the traced equations, with divided optimization barriers.
        sources: for each of `eqns` the number of its traced equation.
        places: the segment of each equation; None if each reader computes the results for itself.
        per_micro_batch: numbers of the equations that read reductions as statistics of the micro-batch.
        prologue: numbers of the equations of loops that also run before the first loop, on the whole batch.
        shares: a factor for each part of an unbiased variance, so that n parts add up to the mean of the micro-batches'
            variances.
        asked_for: for each call of `per_micro_batch` on a reduction, by its number, the factor from a part to the
            micro-batch's mean; 1 for a sum.
        found: descriptions of the batch statistics.
        prologue_values: the results of the equations in `prologue`.
    """

    step: TracedStep
    n_micro_batches: int
    eqns: tuple[JaxprEqn, ...]
    sources: tuple[int, ...]
    places: tuple[int | None, ...]
    forms: ValueForms
    per_micro_batch: frozenset[int]
    prologue: frozenset[int]
    shares: dict[Var, float]
    asked_for: dict[int, float]
    found: tuple[str, ...]
    producer: dict[Var, int]
    prologue_values: frozenset[Var]

    @property
    def n_loops(self) -> int:
        return max([1, *((place + 1) // 2 for place in self.places if place is not None)])

    def line(self, var: Var) -> str:
        return source_line(self.eqns[self.producer[var]])

    def reads_of_micro_batch(self, i: int, var: Var) -> bool:
        """Whether equation `i` reads the micro-batch's version of operand `var`."""
        form = self.forms.form(var)
        if isinstance(form, Partial):
            return var not in self.prologue_values and (i in self.per_micro_batch or self.reads_part_of_loop(i, var))
        return isinstance(form, PerExample | PerMicroBatch)

    def reads_part_of_loop(self, i: int, atom: Atom) -> bool:
        """Whether equation `i` reads a partial sum in its loop."""
        form = self.forms.form(atom)
        return isinstance(form, Partial) and self.places[i] == 2 * form.loop - 1


def find_segments(
    step: TracedStep, n: int, chunk_of: Sequence[int | None] | None = None, *, waits_for_sums: bool = True
) -> Segments:
    """The segments of a step; the arguments are as in `split_micro_batches`.

    If a normalisation with the moments of micro-batches raises NotPerMicroBatchError, it reads the moments of the whole
    batch.
    """
    kinds = batch_kinds(step, n)
    moments = find_moments(step, kinds)
    normal = normalisations(step, kinds, moments)

    # Each failure removes at least one normalisation, so this ends.
    while True:
        try:
            statistics = find_statistics(step, kinds, moments, normal)
            return _Finder(step, n, chunk_of, statistics, waits_for_sums).run()
        except NotPerMicroBatchError as error:
            if not normal:
                raise
            normal = without(step, normal, error.line)


class _Finder:
    """Places equations in program order."""

    def __init__(
        self,
        step: TracedStep,
        n: int,
        chunk_of: Sequence[int | None] | None,
        statistics: Statistics,
        waits_for_sums: bool,
    ) -> None:
        assert step.batch_size is not None
        self.waits_for_sums = waits_for_sums
        per_micro_batch = statistics.per_micro_batch
        self.step, self.statistics = step, statistics
        self.forms = ValueForms(step.flat.eqns, n, step.batch_size)
        self.levels = Levels(step, self.forms)
        self.scales = Scales(self.forms, self.levels, has_statistics=bool(per_micro_batch))
        self.places = Places(
            step, self.forms, levels=self.levels, scales=self.scales, per_micro_batch=per_micro_batch, chunk_of=chunk_of
        )
        self.asked_for: dict[int, float] = {}
        self._eqns: list[JaxprEqn] = []
        self._sources: list[int] = []
        self._places: list[int | None] = []

    def run(self) -> Segments:
        for var, dim in zip(self.step.flat.invars, self.step.batch_dims, strict=True):
            if dim is not None:
                self.forms.of[var] = PerExample(0, dim)

        for i, eqn in enumerate(self.step.flat.eqns):
            if is_barrier(eqn):
                self._divide_barrier(i, eqn)
            else:
                self._record_equation(i, eqn, self._place_equation(i, eqn))
        return self._segments()

    def _segments(self) -> Segments:
        # All requests for values before the first loop have been made.
        eqns = tuple(self._eqns)
        prologue = self.levels.prologue(eqns, self._places)

        return Segments(
            step=self.step,
            n_micro_batches=self.forms.n,
            eqns=eqns,
            sources=tuple(self._sources),
            places=tuple(self._places),
            forms=self.forms,
            per_micro_batch=frozenset(
                i for i, source in enumerate(self._sources) if source in self.statistics.per_micro_batch
            ),
            prologue=prologue,
            shares=self.places.shares,
            asked_for=self.asked_for,
            found=self.statistics.found,
            producer={var: i for i, eqn in enumerate(eqns) for var in eqn.outvars},
            prologue_values=frozenset(var for i in prologue for var in eqns[i].outvars),
        )

    def _record_equation(self, source: int, eqn: JaxprEqn, place: int | None) -> None:
        self._eqns.append(eqn)
        self._sources.append(source)
        self._places.append(place)
        self.levels.note(eqn)

    # ---- barriers -------------------------------------------------------------------------------------------------

    def _divide_barrier(self, source: int, eqn: JaxprEqn) -> None:
        """Divide a barrier into a barrier for each segment, and for each scalar that values wait for.

        Examples and parts of sums share a barrier if `waits_for_sums`.

        A reader may compute a waiting value without its scalar, so that value must not share a barrier with other
        values.
        """
        groups: dict[tuple[type | None, int | None, Scale | None], list[int]] = {}
        for k, atom in enumerate(eqn.invars):
            form = self.forms.form(atom)
            scale = form.scale if isinstance(form, Complete) else None
            kind = None if self.waits_for_sums and isinstance(form, PerExample | Partial) else type(form)
            groups.setdefault((kind, _place_of(form), scale), []).append(k)

        for (_, place, _), positions in groups.items():
            part = eqn.replace(invars=[eqn.invars[k] for k in positions], outvars=[eqn.outvars[k] for k in positions])
            for atom, result in zip(part.invars, part.outvars, strict=True):
                form = self.forms.form(atom)
                # Batch arguments pass the barrier in the first loop.
                self.forms.of[result] = replace(form, loop=max(1, form.loop)) if isinstance(form, PerExample) else form
            self._record_equation(source, part, place)

    # ---- one equation ---------------------------------------------------------------------------------------------

    def _place_equation(self, i: int, eqn: JaxprEqn) -> int | None:
        """The segment of equation `i`; None if readers compute the results."""
        forms = [self.forms.form(atom) for atom in eqn.invars]
        on_examples = any(isinstance(form, PerExample) for form in forms)
        if eqn.primitive.name == "minialpa_per_micro_batch":
            self._note_asked_for(eqn, forms[0])
            if eqn.params["number"] in self.asked_for and not on_examples:
                return self.places.place_per_micro_batch(eqn, forms)

        if on_examples:
            return self.places.on_examples(i, eqn, forms)
        if any(isinstance(form, Partial | PerMicroBatch) for form in forms):
            return self.places.on_aggregates(i, eqn, forms)
        return self._place_known(i, eqn, forms)

    def _note_asked_for(self, eqn: JaxprEqn, form: Form) -> None:
        """Record a call of `per_micro_batch` on a reduction: cotangents of its result are also per micro-batch."""
        if not eqn.params["cotangent_of"] and isinstance(form, Partial | PerMicroBatch):
            rescale = form.rescale if isinstance(form, Partial) else None
            self.asked_for.setdefault(eqn.params["number"], 1.0 if rescale is None else rescale)

    def _place_known(self, i: int, eqn: JaxprEqn, forms: Sequence[Form]) -> int | None:
        """The segment of an equation on values of the forms `Complete` and `Same`."""
        # Functions of `Same` values stay in their loop, unless they also need a later value.
        known = [form for form in forms if isinstance(form, Complete)]
        after = max((form.after for form in known), default=0)
        same = max((form.loop for form in forms if isinstance(form, Same)), default=0)
        if same > after:
            self.forms.set_results(eqn, Same(same))
            return 2 * same - 1

        by_readers = self._computed_by_readers(i, eqn, forms, after)
        if by_readers is not None:
            self.forms.set_results(eqn, by_readers)
            return None

        in_update = self.step.origins[i].direction == "other"
        is_average = any(form.is_average for form in known)
        self.forms.set_results(eqn, Complete(after=after, is_parameter=in_update, is_average=is_average))
        return 2 * after

    def _computed_by_readers(self, i: int, eqn: JaxprEqn, forms: Sequence[Form], after: int) -> Complete | None:
        """The form of results that each reader computes for itself; None for other results."""
        in_update = self.step.origins[i].direction == "other"
        if all(isinstance(form, Complete) and form.is_parameter for form in forms):
            if after == 0:
                return KNOWN
            # A loop may cast and transpose a new parameter for itself, like an argument.
            if not in_update and not is_expensive(eqn) and not eqn.effects:
                is_average = any(isinstance(form, Complete) and form.is_average for form in forms)
                return Complete(after=after, is_average=is_average)

        return None if in_update else self.scales.waiting_form(eqn, forms)


def _place_of(form: Form) -> int | None:
    """The segment of an equation that passes on a value of this form."""
    if isinstance(form, Complete):
        return None if form.is_parameter else 2 * form.after
    return 2 * max(1, form.loop) - 1
