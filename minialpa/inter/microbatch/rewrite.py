"""Writes a split step: a traced full-batch step and a number n in, a `SplitStep` of loops over n micro-batches out.

`segments` finds the form of each value and the segment of each equation. This module writes the equations:

  * in a loop, on the micro-batch's part of the operands; each loop has its own variables (`loop_equations`,
    `loop_values`);
  * between loops, once, on complete values (`draft`);
  * a loop that needs per-example values of an earlier loop reads kept values, or recomputes them.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from jax.extend.core import Var

from minialpa.errors import TraceError
from minialpa.inter.microbatch.draft import CompleteValues, Draft
from minialpa.inter.microbatch.forms import Partial, PerExample
from minialpa.inter.microbatch.loop_equations import LoopEquations
from minialpa.inter.microbatch.loop_values import LoopValues
from minialpa.inter.microbatch.segments import Segments, find_segments
from minialpa.inter.microbatch.split_step import SplitStep, is_loop
from minialpa.inter.microbatch.whole_batch import whole_batch
from minialpa.ir.equations import operand_vars
from minialpa.support.divisors import divisors
from minialpa.tracing.trace import TracedStep


def split_micro_batches(
    step: TracedStep,
    n: int,
    chunk_of: Sequence[int | None] | None = None,
    *,
    keep_activations: bool = False,
    waits_for_sums: bool = True,
) -> SplitStep:
    """Split `step` into `n` micro-batches of equal size.

    chunk_of: the chunk of each traced equation, in a pipeline. Partial sums of different chunks are added after their
    loop.
    keep_activations: whether later loops read kept per-example values of earlier loops; else they recompute them.
    waits_for_sums: whether values to recompute wait for gradients of the micro-batch.
    Raises TraceError if the batch has no `n` equal parts, or if a result has no clear meaning over micro-batches.
    """
    if n == 1:
        return whole_batch(step, several_loops=chunk_of is not None)

    if step.batch_size is None:
        why = (
            "`batch_argnums` is empty; list the number of this argument in it."
            if step.no_batch is None
            else step.no_batch.reason
        )
        raise TraceError(f"`num_micro_batches={n}` needs an argument that holds the examples of a batch. {why}")
    if step.batch_size % n:
        raise TraceError(
            f"A batch of {step.batch_size} examples cannot be split into {n} equal micro-batches. "
            f"Choose `num_micro_batches` among its divisors: {', '.join(map(str, divisors(step.batch_size)))}."
        )
    return _written(find_segments(step, n, chunk_of, waits_for_sums=waits_for_sums), keep_activations)


def _written(segments: Segments, keep_activations: bool) -> SplitStep:
    draft = Draft(segments)
    complete = CompleteValues(draft)
    last = 2 * segments.n_loops
    compared = _compared_values(segments)

    for segment in range(last + 1):
        recomputed = set[int]()
        if is_loop(segment) and not keep_activations:
            recomputed = _recomputed_equations(segments, segment, compared | draft.concatenations.keys())
        _write_segment(draft, complete, segment, recomputed)

    for atom in segments.step.flat.outvars:
        complete.require(atom, last)
    return draft.finish()


def _write_segment(draft: Draft, complete: CompleteValues, segment: int, recomputed: set[int]) -> None:
    segments = draft.segments
    prologue = segments.prologue if segment == 0 else frozenset[int]()
    numbers = [i for i, place in enumerate(segments.places) if place == segment or i in prologue or i in recomputed]
    if not is_loop(segment):
        for i in numbers:
            complete.emit(i, segment)
        return

    loop = LoopEquations(LoopValues(draft, complete, segment))
    for i in numbers:
        loop.emit(i)


# ---- values of earlier loops -----------------------------------------------------------------------------------------


def _recomputed_equations(segments: Segments, segment: int, kept: Set[Var]) -> set[int]:
    """Equations of earlier loops that the loop `segment` repeats, because it reads their results and these are not
    `kept`.
    """
    required, recomputed = set[Var](), set[int]()

    # Backwards, since a recomputed equation needs its operands.
    for i in range(len(segments.eqns) - 1, -1, -1):
        eqn = segments.eqns[i]
        runs = segments.places[i] == segment

        if _may_repeat(segments, i, segment) and kept.isdisjoint(eqn.outvars) and not required.isdisjoint(eqn.outvars):
            recomputed.add(i)
            runs = True
        if runs:
            required.update(var for var in operand_vars(eqn) if segments.reads_of_micro_batch(i, var))
    return recomputed


def _may_repeat(segments: Segments, i: int, segment: int) -> bool:
    """Whether equation `i` runs in a loop before `segment`; equations with side effects never repeat."""
    place = segments.places[i]
    return place is not None and is_loop(place) and place < segment and not segments.eqns[i].effects


def _compared_values(segments: Segments) -> set[Var]:
    """The operands of reductions to the largest or smallest example.

    Loops keep them, because the derivative of such a reduction compares them with its result to the last bit.
    """
    compared: set[Var] = set()
    for eqn, place in zip(segments.eqns, segments.places, strict=True):
        forms = [segments.forms.form(var) for var in eqn.outvars] if place is not None else []
        if any(isinstance(form, Partial) and form.reduction in ("max", "min") for form in forms):
            compared.update(var for var in operand_vars(eqn) if isinstance(segments.forms.form(var), PerExample))
    return compared
