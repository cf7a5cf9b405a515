"""Batch statistics: a step and its moments in, the equations that read reductions as statistics of the micro-batch out.

A step over micro-batches computes the numbers of the full batch, with two exceptions. The model may ask for the value
of a micro-batch with `per_micro_batch`; and a normalisation over examples, as in BatchNorm, uses the mean and variance
of the micro-batch, see `normalisations`.

Backward passes read derivatives of these statistics. The forward equation or, without one, the source line identifies
them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from jax.extend.core import JaxprEqn, Var

from minialpa.errors import TraceError
from minialpa.inter.microbatch.batching import AGGREGATE, Kinds, aggregates_in, is_barrier, per_example_in
from minialpa.inter.microbatch.normalisations import Moments
from minialpa.ir.equations import dtype_name, is_inexact, operand_vars, shape_of, source_line
from minialpa.support.private_jax import innermost_line
from minialpa.tracing.trace import TracedStep

_PER_MICRO_BATCH: Final = "minialpa_per_micro_batch"

#: Identifies an equation and its derivatives: its forward group, if autodiff left one, and its line.
_Key = tuple[int | None, str]


@dataclass(frozen=True, slots=True)
class Statistics:
    """The equations that read statistics of the micro-batch, and descriptions of these."""

    per_micro_batch: frozenset[int] = frozenset()
    found: tuple[str, ...] = ()


class NotPerMicroBatchError(TraceError):
    """A reduction that cannot be a statistic of the micro-batch, and the line that reads it."""

    def __init__(self, eqn: JaxprEqn, problem: str) -> None:
        super().__init__(f"`{eqn.primitive.name}` at {source_line(eqn)} {problem}")
        self.line = innermost_line(eqn)


def normalisations(step: TracedStep, kinds: Kinds, moments: Sequence[Moments]) -> list[Moments]:
    """The moments of a step that may be statistics of the micro-batch.

    Every use of their code must be a normalisation of examples. In a gradient of a gradient, for instance, the inner
    backward pass reads moments in other ways; then all moments are of the whole batch.
    """
    if any(origin.is_second for origin in step.origins):
        return []  # first and second derivatives of statistics have the same lines

    lines = _Lines(step)
    # A backward pass may recompute forward moments. Moments of the batch itself have no derivatives.
    others = [m for m in moments if not (m.is_normalisation or m.in_backward or m.of_batch)]
    other_lines = lines.of(i for m in others for i in m.entries) | lines.of(_on_aggregates_alone(step, kinds, moments))
    return [m for m in moments if m.is_normalisation and not lines.of(m.entries) & other_lines]


def _on_aggregates_alone(step: TracedStep, kinds: Kinds, moments: Sequence[Moments]) -> list[int]:
    """Forward equations on reductions without examples, outside of moments."""
    known = {i for m in moments for i in m.aggregates}
    return [
        i
        for i, (eqn, origin) in enumerate(zip(step.flat.eqns, step.origins, strict=True))
        if i not in known
        and origin.direction != "backward"
        and aggregates_in(eqn, kinds)
        and not per_example_in(eqn, kinds)
    ]


def without(step: TracedStep, normal: Sequence[Moments], line: str) -> list[Moments]:
    """The normalisations that are not computed at `line`; empty if `line` computes no normalisation."""
    lines = _Lines(step)
    rest = [m for m in normal if line not in lines.of((*m.aggregates, *m.entries))]
    return rest if len(rest) < len(normal) else []


def find_statistics(
    step: TracedStep, kinds: Kinds, moments: Sequence[Moments], normal: Sequence[Moments]
) -> Statistics:
    """The statistics of the micro-batch: the moments `normal`, and the calls of `per_micro_batch`.

    Raises NotPerMicroBatchError if a backward equation may be the derivative both of a statistic and of a reduction
    over the whole batch.
    """
    eqns, lines = step.flat.eqns, _Lines(step)
    marked = {i for i, eqn in enumerate(eqns) if eqn.primitive.name == _PER_MICRO_BATCH}
    if not normal and not marked:
        return Statistics()

    per_micro_batch = _statistics_in_forward(step, normal, moments, marked, lines)
    derivatives = _Derivatives(step, kinds, per_micro_batch, lines).find()
    reads = per_micro_batch.entries | derivatives
    read = per_micro_batch.read | {var for i in reads for var in operand_vars(eqns[i])}
    asked_for = [eqns[i] for i in sorted(marked) if not eqns[i].params["cotangent_of"]]
    found = [_description(step, kinds, m) for m in normal]
    found += [f"`per_micro_batch` at {source_line(eqn)}" for eqn in asked_for]
    needed = _needed_aggregates(eqns, sorted(per_micro_batch.aggregates), read)
    return Statistics(frozenset([*reads, *needed]), tuple(dict.fromkeys(found)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ForwardStatistics:
    """The statistics of the micro-batch in the forward pass.

    Attributes:
        entries: numbers of the equations that read them.
        aggregates: numbers of the equations that compute them.
        read: the statistics that examples, running averages and results read.
        keys: the keys of these equations, which identify their derivatives.
    """

    entries: set[int]
    aggregates: set[int]
    read: set[Var]
    keys: set[_Key]


def _statistics_in_forward(
    step: TracedStep, normal: Sequence[Moments], moments: Sequence[Moments], marked: set[int], lines: _Lines
) -> _ForwardStatistics:
    """marked: the calls of `per_micro_batch`."""
    eqns, read = step.flat.eqns, set[Var]().union(*(_statistics_read(step, m) for m in normal))
    keys = {lines.key(i) for m in normal for i in (*m.entries, *_needed_aggregates(eqns, m.aggregates, read))}

    # Recomputed parts of a block have the lines of its forward pass.
    forward = {line for _, line in keys}
    recomputed = [m for m in moments if m.in_backward and lines.of(m.entries) & forward]
    entries = {i for m in (*normal, *recomputed) for i in m.entries} | marked
    aggregates = {i for m in (*normal, *recomputed) for i in m.aggregates}
    return _ForwardStatistics(entries=entries, aggregates=aggregates, read=read, keys=keys)


def _statistics_read(step: TracedStep, moments: Moments) -> set[Var]:
    """The statistics that examples, running averages and results read."""
    eqns = step.flat.eqns
    read = {var for i in moments.entries for var in operand_vars(eqns[i])}
    # A flag has no average: it is computed from averages.
    read.update(var for i in moments.averages for var in operand_vars(eqns[i]) if is_inexact(var))
    return read.union(filter(is_inexact, moments.results))


def _needed_aggregates(eqns: Sequence[JaxprEqn], aggregates: Sequence[int], read: Collection[Var]) -> list[int]:
    """Equations of `aggregates` that compute the variables `read`. Running averages themselves are computed once."""
    needed = set(read)
    out = []
    for i in reversed(aggregates):
        if any(var in needed for var in eqns[i].outvars):
            out.append(i)
            needed.update(operand_vars(eqns[i]))
    return out


def _description(step: TracedStep, kinds: Kinds, moments: Moments) -> str:
    x, eqn = moments.x, step.flat.eqns[moments.aggregates[0]]
    shape = ", ".join("batch" if dim == kinds.get(x) else str(n) for dim, n in enumerate(shape_of(x)))
    return f"mean and variance of {dtype_name(x)} ({shape}) at {source_line(eqn)}"


class _Lines:
    def __init__(self, step: TracedStep) -> None:
        self._step = step
        self._known: dict[int, str] = {}

    def line(self, i: int) -> str:
        if i not in self._known:
            self._known[i] = innermost_line(self._step.flat.eqns[i])
        return self._known[i]

    def of(self, equations: Iterable[int]) -> set[str]:
        return {self.line(i) for i in equations}

    def key(self, i: int) -> _Key:
        return self._step.origins[i].group, self.line(i)


class _Derivatives:
    """A walk over the backward passes that finds the derivatives of statistics of the micro-batch.

    An aggregate is a reduction over examples, or a function of one, such as the mean of BatchNorm or its cotangent.

    Attributes:
        exact_keys: the keys of forward equations that bring aggregates of the whole batch to the examples.
        per_micro_batch_aggregates: the aggregates that each micro-batch computes for itself.
        asked_for: results of `per_micro_batch`, and the reductions computed from them, in any pass.
    """

    def __init__(self, step: TracedStep, kinds: Kinds, per_micro_batch: _ForwardStatistics, lines: _Lines) -> None:
        self.step, self.kinds, self.per_micro_batch, self.lines = step, kinds, per_micro_batch, lines
        self.exact_keys = _exact_keys(step, kinds, per_micro_batch, lines)
        eqns, forward = step.flat.eqns, per_micro_batch.entries | per_micro_batch.aggregates
        self.per_micro_batch_aggregates = {
            var for i in forward for var in eqns[i].outvars if kinds.get(var) == AGGREGATE
        }
        self.asked_for: set[Var] = set()

    def find(self) -> set[int]:
        out = set()
        for i, eqn in enumerate(self.step.flat.eqns):
            if eqn.primitive.name == _PER_MICRO_BATCH:
                self.asked_for.update(eqn.outvars)
            if is_barrier(eqn):
                self._pass_barrier(eqn)
            elif self._may_be_derivative(i, eqn) and self._visit_equation(i, eqn):
                out.add(i)
        return out

    def _pass_barrier(self, eqn: JaxprEqn) -> None:
        for group in (self.per_micro_batch_aggregates, self.asked_for):
            group.update(out for var, out in zip(eqn.invars, eqn.outvars, strict=True) if var in group)

    def _may_be_derivative(self, i: int, eqn: JaxprEqn) -> bool:
        if i in self.per_micro_batch.entries or i in self.per_micro_batch.aggregates:
            return False
        aggregates = aggregates_in(eqn, self.kinds)
        return self.step.origins[i].direction == "backward" or any(var in self.asked_for for var in aggregates)

    def _visit_equation(self, i: int, eqn: JaxprEqn) -> bool:
        """Record per-micro-batch results. Returns whether the equation reads per-micro-batch aggregates alone."""
        aggregates = aggregates_in(eqn, self.kinds)
        reads_per_micro_batch = bool(aggregates) and all(var in self.per_micro_batch_aggregates for var in aggregates)

        if per_example_in(eqn, self.kinds):
            self._refuse_mixed_reads(eqn, aggregates)
            self._record_sums(i, eqn)
        elif reads_per_micro_batch:
            self.per_micro_batch_aggregates.update(eqn.outvars)
            self.asked_for.update(eqn.outvars if any(var in self.asked_for for var in aggregates) else ())
        return reads_per_micro_batch

    def _refuse_mixed_reads(self, eqn: JaxprEqn, aggregates: Sequence[Var]) -> None:
        if len({var in self.per_micro_batch_aggregates for var in aggregates}) == 2:
            raise NotPerMicroBatchError(
                eqn,
                "combines a batch statistic of one micro-batch, such as a mean or variance, with a reduction over the "
                "whole batch. Set `num_micro_batches=1`, or wrap the reduction in `minialpa.per_micro_batch`.",
            )

    def _record_sums(self, i: int, eqn: JaxprEqn) -> None:
        """Record a sum over examples as per micro-batch if it is the derivative of a statistic."""
        sums = [var for var in eqn.outvars if self.kinds.get(var) == AGGREGATE]
        if not sums or not self._derives_from(i, self.per_micro_batch.keys):
            return

        if self._derives_from(i, self.exact_keys):
            raise NotPerMicroBatchError(
                eqn,
                "may be the derivative of a batch statistic, such as a mean or variance, or of a reduction over the "
                "whole batch, because this line computes both. Put the two on different lines, and use "
                "`minialpa.value_and_grad`.",
            )
        self.per_micro_batch_aggregates.update(sums)

    def _derives_from(self, i: int, keys: set[_Key]) -> bool:
        """Without a group, an equation may be a derivative of any equation on its line."""
        group, line = self.lines.key(i)
        return (group, line) in keys or (group is None and any(line == other for _, other in keys))


def _exact_keys(step: TracedStep, kinds: Kinds, per_micro_batch: _ForwardStatistics, lines: _Lines) -> set[_Key]:
    """Keys of the forward equations that bring reductions over the whole batch to the examples."""
    out: set[_Key] = set()
    brought: set[Var] = set()

    # Backwards, from the examples to the broadcasts that bring reductions to them.
    for i in range(len(step.flat.eqns) - 1, -1, -1):
        eqn = step.flat.eqns[i]
        if (
            i in per_micro_batch.entries
            or i in per_micro_batch.aggregates
            or step.origins[i].direction == "backward"
            or is_barrier(eqn)
        ):
            continue

        aggregates = aggregates_in(eqn, kinds)
        passes_on = eqn.primitive.name == "broadcast_in_dim" and any(var in brought for var in eqn.outvars)
        if aggregates and (passes_on or per_example_in(eqn, kinds)):
            out.add(lines.key(i))
            brought.update(aggregates)
    return out
