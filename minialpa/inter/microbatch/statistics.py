"""Batch statistics: totals over the examples that a micro-batch takes from its own examples.

A step over micro-batches computes the numbers of the full batch, with two exceptions. The model may ask for a
micro-batch's own value with `per_micro_batch`; and a normalisation over examples, as in BatchNorm, uses the mean and
variance of the micro-batch, see `normalisations`.

Backward passes also read totals: the derivatives of a micro-batch's own value are its own. Their forward equation
identifies them, or else its line in the program.
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
    """The own values of a micro-batch.

    Attributes:
        per_micro_batch: numbers of the equations that read totals as the micro-batch's own.
        found: descriptions of the statistics.
    """

    per_micro_batch: frozenset[int] = frozenset()
    found: tuple[str, ...] = ()


class NotPerMicroBatchError(TraceError):
    """A statistic that a micro-batch cannot take as its own, and the line that reads it."""

    def __init__(self, eqn: JaxprEqn, problem: str) -> None:
        super().__init__(f"`{eqn.primitive.name}` at {source_line(eqn)} {problem}")
        self.line = innermost_line(eqn)


def normalisations(step: TracedStep, kinds: Kinds, moments: Sequence[Moments]) -> list[Moments]:
    """The moments of a step that a micro-batch may take as its own.

    Every use of their code must be a normalisation of examples. In a gradient of a gradient, for instance, the inner
    backward pass reads moments in other ways; then all moments are the whole batch's.
    """
    if any(origin.is_second for origin in step.origins):
        return []  # first and second derivatives of statistics have the same lines

    lines = _Lines(step)
    # A backward pass may recompute moments of the forward pass. Moments of the batch itself have no derivatives.
    others = [m for m in moments if not (m.is_normalisation or m.in_backward or m.of_batch)]
    elsewhere = lines.of(i for m in others for i in m.entries) | lines.of(_on_aggregates_alone(step, kinds, moments))
    return [m for m in moments if m.is_normalisation and not lines.of(m.entries) & elsewhere]


def _on_aggregates_alone(step: TracedStep, kinds: Kinds, moments: Sequence[Moments]) -> list[int]:
    """Forward equations that read totals other than moments, and no examples."""
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
    """The normalisations that are not computed at `line`; none, if none is computed there."""
    lines = _Lines(step)
    rest = [m for m in normal if line not in lines.of((*m.aggregates, *m.entries))]
    return rest if len(rest) < len(normal) else []


def find_statistics(
    step: TracedStep, kinds: Kinds, moments: Sequence[Moments], normal: Sequence[Moments]
) -> Statistics:
    """What a micro-batch takes as its own: the normalisations `normal`, and what the model asks for.

    Raises NotPerMicroBatchError if an equation that reads a total may be the derivative of a statistic as well as of a total of
    the whole batch.
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
    found = [_described(step, kinds, m) for m in normal]
    found += [f"`per_micro_batch` at {source_line(eqn)}" for eqn in asked_for]
    needed = _needed_by(eqns, sorted(per_micro_batch.aggregates), read)
    return Statistics(frozenset([*reads, *needed]), tuple(dict.fromkeys(found)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ForwardStatistics:
    """The totals that are a micro-batch's own in the forward pass.

    Attributes:
        entries: numbers of the equations that read them.
        aggregates: numbers of the equations that compute them.
        read: what examples, running averages and results read of them.
        keys: the keys of these equations, by which their derivatives are recognised.
    """

    entries: set[int]
    aggregates: set[int]
    read: set[Var]
    keys: set[_Key]


def _statistics_in_forward(
    step: TracedStep, normal: Sequence[Moments], moments: Sequence[Moments], marked: set[int], lines: _Lines
) -> _ForwardStatistics:
    eqns = step.flat.eqns
    read = {var for m in normal for i in m.entries for var in operand_vars(eqns[i])}
    # A flag has no average: it is computed from the averages of what it depends on.
    read.update(var for m in normal for i in m.averages for var in operand_vars(eqns[i]) if is_inexact(var))
    read.update(var for m in normal for var in m.results if is_inexact(var))
    keys = {lines.key(i) for m in normal for i in (*m.entries, *_needed_by(eqns, m.aggregates, read))}

    # Parts of a block that are computed again have the lines of its forward pass.
    forward = {line for _, line in keys}
    again = [m for m in moments if m.in_backward and lines.of(m.entries) & forward]
    entries = {i for m in (*normal, *again) for i in m.entries} | marked
    aggregates = {i for m in (*normal, *again) for i in m.aggregates}
    return _ForwardStatistics(entries=entries, aggregates=aggregates, read=read, keys=keys)


def _needed_by(eqns: Sequence[JaxprEqn], aggregates: Sequence[int], read: Collection[Var]) -> list[int]:
    """The equations of `aggregates` that compute the variables `read`. Running averages themselves are made once."""
    needed = set(read)
    out = []
    for i in reversed(aggregates):
        if any(var in needed for var in eqns[i].outvars):
            out.append(i)
            needed.update(operand_vars(eqns[i]))
    return out


def _described(step: TracedStep, kinds: Kinds, moments: Moments) -> str:
    x, eqn = moments.x, step.flat.eqns[moments.aggregates[0]]
    shape = ", ".join("batch" if dim == kinds.get(x) else str(n) for dim, n in enumerate(shape_of(x)))
    return f"mean and variance of {dtype_name(x)} ({shape}) at {source_line(eqn)}"


class _Lines:
    """Lines and keys of equations; a line is looked up once."""

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
    """A walk over the backward passes, which finds the derivatives of values that a micro-batch took as its own.

    Attributes:
        exact_keys: the keys of forward equations that bring totals of the whole batch to the examples.
        is_per_micro_batch: totals that are each micro-batch's own.
        asked_for: results of `per_micro_batch`, and the totals that follow from them, in any pass.
    """

    def __init__(self, step: TracedStep, kinds: Kinds, per_micro_batch: _ForwardStatistics, lines: _Lines) -> None:
        self.step, self.kinds, self.per_micro_batch, self.lines = step, kinds, per_micro_batch, lines
        self.exact_keys = _exact_keys(step, kinds, per_micro_batch, lines)
        eqns, forward = step.flat.eqns, per_micro_batch.entries | per_micro_batch.aggregates
        self.is_per_micro_batch = {var for i in forward for var in eqns[i].outvars if kinds.get(var) == AGGREGATE}
        self.asked_for: set[Var] = set()

    def find(self) -> set[int]:
        """Numbers of the equations that read such derivatives."""
        out = set()
        for i, eqn in enumerate(self.step.flat.eqns):
            if eqn.primitive.name == _PER_MICRO_BATCH:
                self.asked_for.update(eqn.outvars)
            if is_barrier(eqn):
                self._pass_on(eqn)
            elif self._may_be_derivative(i, eqn) and self._visit(i, eqn):
                out.add(i)
        return out

    def _pass_on(self, eqn: JaxprEqn) -> None:
        for group in (self.is_per_micro_batch, self.asked_for):
            group.update(out for var, out in zip(eqn.invars, eqn.outvars, strict=True) if var in group)

    def _may_be_derivative(self, i: int, eqn: JaxprEqn) -> bool:
        if i in self.per_micro_batch.entries or i in self.per_micro_batch.aggregates:
            return False
        aggregates = aggregates_in(eqn, self.kinds)
        return self.step.origins[i].direction == "backward" or any(var in self.asked_for for var in aggregates)

    def _visit(self, i: int, eqn: JaxprEqn) -> bool:
        """Note which results are the micro-batch's own. Returns whether the equation reads own totals alone."""
        aggregates = aggregates_in(eqn, self.kinds)
        reads_per_micro_batch = bool(aggregates) and all(var in self.is_per_micro_batch for var in aggregates)

        if per_example_in(eqn, self.kinds):
            self._refuse_both(eqn, aggregates)
            self._reduce(i, eqn)
        elif reads_per_micro_batch:
            self.is_per_micro_batch.update(eqn.outvars)
            self.asked_for.update(eqn.outvars if any(var in self.asked_for for var in aggregates) else ())
        return reads_per_micro_batch

    def _refuse_both(self, eqn: JaxprEqn, aggregates: Sequence[Var]) -> None:
        if len({var in self.is_per_micro_batch for var in aggregates}) == 2:
            raise NotPerMicroBatchError(
                eqn,
                "joins a statistic of the micro-batch with a total of the whole batch. Use `num_micro_batches=1`, or "
                "`minialpa.per_micro_batch` for the total.",
            )

    def _reduce(self, i: int, eqn: JaxprEqn) -> None:
        """Note that a sum over examples is the micro-batch's own if it is the derivative of an own value."""
        sums = [var for var in eqn.outvars if self.kinds.get(var) == AGGREGATE]
        if not sums or not self._derives_from(i, self.per_micro_batch.keys):
            return

        if self._derives_from(i, self.exact_keys):
            raise NotPerMicroBatchError(
                eqn,
                "is the derivative of a batch statistic or of a total of the whole batch: both are computed there. "
                "Put them on lines of their own, and use `minialpa.value_and_grad`.",
            )
        self.is_per_micro_batch.update(sums)

    def _derives_from(self, i: int, keys: set[_Key]) -> bool:
        """Whether an equation may be a derivative of one of `keys`; without a group, by its line."""
        group, line = self.lines.key(i)
        return (group, line) in keys or (group is None and any(line == other for _, other in keys))


def _exact_keys(step: TracedStep, kinds: Kinds, per_micro_batch: _ForwardStatistics, lines: _Lines) -> set[_Key]:
    """Keys of the forward equations that bring totals of the whole batch to the examples."""
    out: set[_Key] = set()
    brought: set[Var] = set()

    # Backwards, from the examples to the broadcasts that bring totals to them.
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
