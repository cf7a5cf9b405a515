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
from minialpa.inter.microbatch.batching import AGGREGATE, Kinds, is_barrier, rows_in, totals_in
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
        own: numbers of the equations that read totals as the micro-batch's own.
        found: descriptions of the statistics.
    """

    own: frozenset[int] = frozenset()
    found: tuple[str, ...] = ()


class NotOwnError(TraceError):
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
    elsewhere = lines.of(i for m in others for i in m.entries) | lines.of(_on_totals_alone(step, kinds, moments))
    return [m for m in moments if m.is_normalisation and not lines.of(m.entries) & elsewhere]


def _on_totals_alone(step: TracedStep, kinds: Kinds, moments: Sequence[Moments]) -> list[int]:
    """Forward equations that read totals other than moments, and no examples."""
    known = {i for m in moments for i in m.totals}
    return [
        i
        for i, (eqn, origin) in enumerate(zip(step.flat.eqns, step.origins, strict=True))
        if i not in known and origin.direction != "backward" and totals_in(eqn, kinds) and not rows_in(eqn, kinds)
    ]


def without(step: TracedStep, normal: Sequence[Moments], line: str) -> list[Moments]:
    """The normalisations that are not computed at `line`; none, if none is computed there."""
    lines = _Lines(step)
    rest = [m for m in normal if line not in lines.of((*m.totals, *m.entries))]
    return rest if len(rest) < len(normal) else []


def find_statistics(
    step: TracedStep, kinds: Kinds, moments: Sequence[Moments], normal: Sequence[Moments]
) -> Statistics:
    """What a micro-batch takes as its own: the normalisations `normal`, and what the model asks for.

    Raises NotOwnError if an equation that reads a total may be the derivative of a statistic as well as of a total of
    the whole batch.
    """
    eqns, lines = step.flat.eqns, _Lines(step)
    marked = {i for i, eqn in enumerate(eqns) if eqn.primitive.name == _PER_MICRO_BATCH}
    if not normal and not marked:
        return Statistics()

    own = _own_in_forward(step, normal, moments, marked, lines)
    derivatives = _Derivatives(step, kinds, own, lines).find()
    reads = own.entries | derivatives
    read = own.read | {var for i in reads for var in operand_vars(eqns[i])}
    asked_for = [eqns[i] for i in sorted(marked) if not eqns[i].params["cotangent_of"]]
    found = [_described(step, kinds, m) for m in normal]
    found += [f"`per_micro_batch` at {source_line(eqn)}" for eqn in asked_for]
    needed = _needed_by(eqns, sorted(own.totals), read)
    return Statistics(frozenset([*reads, *needed]), tuple(dict.fromkeys(found)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Own:
    """The totals that are a micro-batch's own in the forward pass.

    Attributes:
        entries: numbers of the equations that read them.
        totals: numbers of the equations that compute them.
        read: what examples, running averages and results read of them.
        keys: the keys of these equations, by which their derivatives are recognised.
    """

    entries: set[int]
    totals: set[int]
    read: set[Var]
    keys: set[_Key]


def _own_in_forward(
    step: TracedStep, normal: Sequence[Moments], moments: Sequence[Moments], marked: set[int], lines: _Lines
) -> _Own:
    eqns = step.flat.eqns
    read = {var for m in normal for i in m.entries for var in operand_vars(eqns[i])}
    # A flag has no average: it is computed from the averages of what it depends on.
    read.update(var for m in normal for i in m.averages for var in operand_vars(eqns[i]) if is_inexact(var))
    read.update(var for m in normal for var in m.results if is_inexact(var))
    keys = {lines.key(i) for m in normal for i in (*m.entries, *_needed_by(eqns, m.totals, read))}

    # Parts of a block that are computed again have the lines of its forward pass.
    forward = {line for _, line in keys}
    again = [m for m in moments if m.in_backward and lines.of(m.entries) & forward]
    entries = {i for m in (*normal, *again) for i in m.entries} | marked
    totals = {i for m in (*normal, *again) for i in m.totals}
    return _Own(entries=entries, totals=totals, read=read, keys=keys)


def _needed_by(eqns: Sequence[JaxprEqn], totals: Sequence[int], read: Collection[Var]) -> list[int]:
    """The equations of `totals` that compute the variables `read`. Running averages themselves are made once."""
    needed = set(read)
    out = []
    for i in reversed(totals):
        if any(var in needed for var in eqns[i].outvars):
            out.append(i)
            needed.update(operand_vars(eqns[i]))
    return out


def _described(step: TracedStep, kinds: Kinds, moments: Moments) -> str:
    x, eqn = moments.x, step.flat.eqns[moments.totals[0]]
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
        is_own: totals that are each micro-batch's own.
        asked_for: results of `per_micro_batch`, and the totals that follow from them, in any pass.
    """

    def __init__(self, step: TracedStep, kinds: Kinds, own: _Own, lines: _Lines) -> None:
        self.step, self.kinds, self.own, self.lines = step, kinds, own, lines
        self.exact_keys = _exact_keys(step, kinds, own, lines)
        eqns, forward = step.flat.eqns, own.entries | own.totals
        self.is_own = {var for i in forward for var in eqns[i].outvars if kinds.get(var) == AGGREGATE}
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
        for group in (self.is_own, self.asked_for):
            group.update(out for var, out in zip(eqn.invars, eqn.outvars, strict=True) if var in group)

    def _may_be_derivative(self, i: int, eqn: JaxprEqn) -> bool:
        if i in self.own.entries or i in self.own.totals:
            return False
        totals = totals_in(eqn, self.kinds)
        return self.step.origins[i].direction == "backward" or any(var in self.asked_for for var in totals)

    def _visit(self, i: int, eqn: JaxprEqn) -> bool:
        """Note which results are the micro-batch's own. Returns whether the equation reads own totals alone."""
        totals = totals_in(eqn, self.kinds)
        reads_own = bool(totals) and all(var in self.is_own for var in totals)

        if rows_in(eqn, self.kinds):
            self._refuse_both(eqn, totals)
            self._reduce(i, eqn)
        elif reads_own:
            self.is_own.update(eqn.outvars)
            self.asked_for.update(eqn.outvars if any(var in self.asked_for for var in totals) else ())
        return reads_own

    def _refuse_both(self, eqn: JaxprEqn, totals: Sequence[Var]) -> None:
        if len({var in self.is_own for var in totals}) == 2:
            raise NotOwnError(
                eqn,
                "joins a statistic of the micro-batch with a total of the whole batch. Use `num_micro_batches=1`, or "
                "`minialpa.per_micro_batch` for the total.",
            )

    def _reduce(self, i: int, eqn: JaxprEqn) -> None:
        """Note that a sum over examples is the micro-batch's own if it is the derivative of an own value."""
        sums = [var for var in eqn.outvars if self.kinds.get(var) == AGGREGATE]
        if not sums or not self._derives_from(i, self.own.keys):
            return

        if self._derives_from(i, self.exact_keys):
            raise NotOwnError(
                eqn,
                "is the derivative of a batch statistic or of a total of the whole batch: both are computed there. "
                "Put them on lines of their own, and use `minialpa.value_and_grad`.",
            )
        self.is_own.update(sums)

    def _derives_from(self, i: int, keys: set[_Key]) -> bool:
        """Whether an equation may be a derivative of one of `keys`; without a group, by its line."""
        group, line = self.lines.key(i)
        return (group, line) in keys or (group is None and any(line == other for _, other in keys))


def _exact_keys(step: TracedStep, kinds: Kinds, own: _Own, lines: _Lines) -> set[_Key]:
    """Keys of the forward equations that bring totals of the whole batch to the examples."""
    out: set[_Key] = set()
    brought: set[Var] = set()

    # Backwards, from the examples to the broadcasts that bring totals to them.
    for i in range(len(step.flat.eqns) - 1, -1, -1):
        eqn = step.flat.eqns[i]
        if i in own.entries or i in own.totals or step.origins[i].direction == "backward" or is_barrier(eqn):
            continue

        totals = totals_in(eqn, kinds)
        passes_on = eqn.primitive.name == "broadcast_in_dim" and any(var in brought for var in eqn.outvars)
        if totals and (passes_on or rows_in(eqn, kinds)):
            out.add(lines.key(i))
            brought.update(totals)
    return out
