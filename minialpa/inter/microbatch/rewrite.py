"""Rewrites a traced full-batch step as loops over micro-batches.

The full-batch program is rewritten, not traced again, so every constant in it keeps its full-batch value. `segments`
says what each value is and where each equation runs; here the equations are written out, segment by segment:

  * in a loop, an equation runs on the micro-batch's part of its operands, and each loop has variables of its own
    (`loop_equations`, `loop_values`);
  * between loops, an equation runs once, on complete values (`once_values`);
  * rows that an earlier loop computed are kept, or computed again, where a later one reads them (`recomputation`).
"""

from __future__ import annotations

from collections.abc import Sequence

from minialpa.errors import TraceError
from minialpa.inter.microbatch.draft import Draft
from minialpa.inter.microbatch.loop_equations import LoopEquations
from minialpa.inter.microbatch.loop_values import LoopValues
from minialpa.inter.microbatch.once_values import OnceValues
from minialpa.inter.microbatch.recomputation import compared_rows, recomputed_equations
from minialpa.inter.microbatch.segments import Segments, find_segments
from minialpa.inter.microbatch.split_step import SplitStep, is_loop
from minialpa.inter.microbatch.whole_batch import whole_batch
from minialpa.support.divisors import divisors
from minialpa.tracing.trace import TracedStep


def split_micro_batches(
    step: TracedStep, n: int, chunk_of: Sequence[int | None] | None = None, *, keep_rows: bool = False
) -> SplitStep:
    """Split `step` into `n` micro-batches.

    chunk_of: the chunk of each traced equation, if it is known. Partial results of different chunks are not added in
    the loop but after it.
    keep_rows: whether rows of an earlier loop that a later one reads are kept, for all micro-batches, or else computed
    again.
    Raises TraceError if the examples cannot be split, or a result has no clear meaning over micro-batches.
    """
    if n == 1:
        return whole_batch(step, several_loops=chunk_of is not None)

    if step.batch_size is None:
        why = "None is listed in `batch_argnums`." if step.no_batch is None else step.no_batch.reason
        raise TraceError(f"`num_micro_batches={n}` needs an argument with examples. {why}")
    if step.batch_size % n:
        raise TraceError(
            f"A batch of {step.batch_size} examples cannot be split into {n} equal micro-batches. "
            f"Choose `num_micro_batches` among its divisors: {', '.join(map(str, divisors(step.batch_size)))}."
        )
    return _written(find_segments(step, n, chunk_of), keep_rows)


def _written(segments: Segments, keep_rows: bool) -> SplitStep:
    """The step that runs each equation in its segment."""
    draft = Draft(segments)
    once = OnceValues(draft)
    last = 2 * segments.n_loops
    compared = compared_rows(segments)

    for segment in range(last + 1):
        again = set[int]()
        if is_loop(segment) and not keep_rows:
            again = recomputed_equations(segments, segment, compared | draft.stacks.keys())
        _write_segment(draft, once, segment, again)

    for atom in segments.step.flat.outvars:
        once.require(atom, last)
    return draft.finish()


def _write_segment(draft: Draft, once: OnceValues, segment: int, again: set[int]) -> None:
    """Write the equations of one segment, and with them those of earlier loops that run `again`."""
    segments = draft.segments
    early = segments.early if segment == 0 else frozenset[int]()
    numbers = [i for i, place in enumerate(segments.places) if place == segment or i in early or i in again]
    if not is_loop(segment):
        for i in numbers:
            once.emit(i, segment)
        return

    loop = LoopEquations(LoopValues(draft, once, segment))
    for i in numbers:
        loop.emit(i)
