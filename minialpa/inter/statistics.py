"""Batch statistics: which totals over the examples a micro-batch may take from its own examples.

A step over micro-batches computes what the full batch computes, with two exceptions. The model may ask for a
micro-batch's own value with `per_micro_batch`; and a *normalisation* over examples, as in BatchNorm, uses the mean and
variance of the micro-batch. A normalisation of activations x is recognised by all of

    1. totals m of the first and second moments of x, with a dimension for features;
    2. every forward equation on examples that reads such a total maps x to a x + b, with a and b of these totals;
    3. one of these a has an inverse root (rsqrt, sqrt or pow) in it;
    4. the result is scaled or shifted by parameters, or the totals enter running averages that the step returns.

A standardised loss, advantages that are divided by their spread, or a whitening loss lacks 1 or 4, and is computed
from the totals of the full batch. Backward passes read totals too: the derivatives of what a micro-batch took as its
own are its own. They are told by the forward equation, or else the line of the program, that they come from.

In: a traced step and how its values depend on examples. Out: `Statistics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from jax.extend.core import JaxprEqn, Var

from minialpa.errors import TraceError
from minialpa.inter.batching import AGGREGATE, Kinds, is_barrier
from minialpa.jaxprs import Atom, dtype_name, innermost_line, is_inexact, is_literal, shape_of, source_line
from minialpa.trace import Origin, TracedStep

_PER_MICRO_BATCH: Final = "minialpa_per_micro_batch"
_ROOTS = ("rsqrt", "sqrt", "pow")
_AFFINE = ("add", "add_any", "sub", "mul", "div")
_MOVES = ("convert_element_type", "copy", "neg", "reduce_precision")

#: What tells the derivative of an equation: its forward group, where autodiff left one, and its line.
_Key = tuple[int | None, str]


@dataclass(frozen=True, slots=True)
class Statistics:
    """own: numbers of the equations that read totals as the micro-batch's own. found: the statistics, for people."""

    own: frozenset[int] = frozenset()
    found: tuple[str, ...] = ()


@dataclass(slots=True)
class _Cluster:
    """Equations around the moments of one array `x`, as far as they were seen.

    entries: equations on examples that read the moments. is_affine: whether all of the forward ones are as in 2.
    """

    x: Var
    entries: list[int] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)
    first: int = -1
    is_affine: bool = True
    divides: bool = False
    is_adjusted: bool = False
    in_backward: bool = False

    @property
    def is_normalisation(self) -> bool:
        return self.is_affine and self.divides and self.is_adjusted


def find_statistics(step: TracedStep, eqns: Sequence[JaxprEqn], kinds: Kinds) -> Statistics:
    """The batch statistics of a step. Raises TraceError where a derivative may be of a statistic or of a total."""
    marked = {i for i, eqn in enumerate(eqns) if eqn.primitive.name == _PER_MICRO_BATCH}
    clusters = _Clusters(step, eqns, kinds).find()
    # A forward pass that only its derivative needs is computed again in the backward pass, and nowhere else.
    lines = _Lines(eqns, step.origins)
    normal = _consistent([c for c in clusters if c.is_normalisation], clusters, lines)
    if any(origin.is_second for origin in step.origins):
        normal = []  # lines do not tell the derivatives of statistics from derivatives of these
    if not normal and not marked:
        return Statistics()

    own_keys = {lines.key(i) for c in normal for i in _needed_by(eqns, c.totals, c.entries)}
    # Parts of a block that are computed again have the lines of its forward pass.
    own_lines = {line for _, line in own_keys}
    again = [c for c in clusters if c.in_backward and any(lines.key(i)[1] in own_lines for i in c.entries)]
    entries = {i for c in (*normal, *again) for i in c.entries} | marked
    totals = {i for c in (*normal, *again) for i in c.totals}
    entries |= _derivatives(step, eqns, kinds, _Own(entries, totals, own_keys), lines)
    found = [_described(eqns, kinds, c) for c in normal]
    asked_for = [eqns[i] for i in sorted(marked) if not eqns[i].params["cotangent_of"]]
    found += [f"`per_micro_batch` at {source_line(eqn)}" for eqn in asked_for]
    return Statistics(frozenset(_needed_by(eqns, sorted(totals), sorted(entries))), tuple(dict.fromkeys(found)))


def _consistent(normal: Sequence[_Cluster], clusters: Sequence[_Cluster], lines: _Lines) -> list[_Cluster]:
    """Those of `normal` whose code is a normalisation wherever it runs. In a gradient of a gradient, say, the inner
    backward pass is a part of what is differentiated, and reads moments in other ways: then all are the whole batch's.
    """
    others = (c for c in clusters if c.divides and not c.is_normalisation and not c.in_backward)
    elsewhere = {lines.line(i) for c in others for i in c.entries}
    return [c for c in normal if not any(lines.line(i) in elsewhere for i in c.entries)]


@dataclass(frozen=True, slots=True)
class _Own:
    """What is a micro-batch's own in the forward pass: equations that read it, that compute it, and their keys."""

    entries: set[int]
    totals: set[int]
    keys: set[_Key]


def _needed_by(eqns: Sequence[JaxprEqn], totals: Sequence[int], entries: Sequence[int]) -> list[int]:
    """`entries` and those equations of `totals` that they need: not those of running averages."""
    needed = {v for i in entries for v in eqns[i].invars if not is_literal(v)}
    out = list(entries)
    for i in reversed(totals):
        if any(v in needed for v in eqns[i].outvars):
            out.append(i)
            needed.update(v for v in eqns[i].invars if not is_literal(v))
    return out


def _described(eqns: Sequence[JaxprEqn], kinds: Kinds, cluster: _Cluster) -> str:
    shape = ", ".join("batch" if d == kinds.get(cluster.x) else str(n) for d, n in enumerate(shape_of(cluster.x)))
    return f"mean and variance of {dtype_name(cluster.x)} ({shape}) at {source_line(eqns[cluster.first])}"


def _derives_from(key: _Key, keys: set[_Key]) -> bool:
    """Whether an equation of the backward pass may be a derivative of one of `keys`; without a group, by its line."""
    return key in keys or (key[0] is None and any(key[1] == line for _, line in keys))


def _is_number(atom: Atom) -> bool:
    return is_literal(atom) and not shape_of(atom)


class _Lines:
    """Keys of equations; a line is looked up once."""

    def __init__(self, eqns: Sequence[JaxprEqn], origins: Sequence[Origin]) -> None:
        self._eqns, self._origins = eqns, origins
        self._known: dict[int, str] = {}

    def line(self, i: int) -> str:
        if i not in self._known:
            self._known[i] = innermost_line(self._eqns[i])
        return self._known[i]

    def key(self, i: int) -> _Key:
        return self._origins[i].group, self.line(i)


class _Clusters:
    """A walk over a program that gathers what is computed from the moments of each array."""

    def __init__(self, step: TracedStep, eqns: Sequence[JaxprEqn], kinds: Kinds) -> None:
        self.step, self.eqns, self.kinds = step, eqns, kinds
        self.inputs = set(step.flat.invars)  # and what is computed from inputs alone
        self.root: dict[Var, tuple[Var, int]] = {}  # array on examples -> the x that it is a polynomial of, degree
        self.summed: set[Var] = set()  # those that were summed over other dimensions of each example
        self.moment: dict[Var, Var | None] = {}  # total -> the x whose moments it is computed from; None: of others
        self.rooted: set[Var] = set()  # totals with an inverse root
        self.adjusted: set[Var] = set()  # totals that arguments of the step are part of
        self.normalised: dict[Var, Var] = {}  # result of a normalisation -> its x
        self.clusters: dict[Var, _Cluster] = {}

    def find(self) -> list[_Cluster]:
        for i, eqn in enumerate(self.eqns):
            if is_barrier(eqn):
                self._pass_on(eqn)
                continue
            on_examples = [v for v in eqn.invars if not is_literal(v) and self._is_rows(v)]
            totals = [v for v in eqn.invars if not is_literal(v) and self.kinds.get(v) == AGGREGATE]
            if on_examples and any(self.kinds.get(v) == AGGREGATE for v in eqn.outvars):
                self._reduce(i, eqn, on_examples)
            elif on_examples:
                self._on_examples(i, eqn, on_examples, totals)
            elif totals:
                self._of_totals(i, eqn, totals)
            elif any(not is_literal(v) and v in self.inputs for v in eqn.invars):
                self.inputs.update(eqn.outvars)
        self._find_running_averages()
        return [c for c in self.clusters.values() if c.entries]

    def _pass_on(self, eqn: JaxprEqn) -> None:
        """What passes a barrier is what it was."""
        for v, out in zip(eqn.invars, eqn.outvars, strict=True):
            if is_literal(v):
                continue
            if v in self.moment:
                self.moment[out] = self.moment[v]
            if v in self.normalised:
                self.normalised[out] = self.normalised[v]
            for group in (self.inputs, self.summed, self.rooted, self.adjusted):
                if v in group:
                    group.add(out)
            self.root[out] = self._root(v)

    def _is_rows(self, v: Var) -> bool:
        return isinstance(self.kinds.get(v), int)

    def _root(self, v: Var) -> tuple[Var, int]:
        return self.root.get(v, (v, 1))

    def _is_parameter(self, atom: Atom) -> bool:
        """Whether an operand is computed from arguments of the step that are not examples, and has features."""
        return not is_literal(atom) and atom in self.inputs and atom not in self.kinds and bool(shape_of(atom))

    def _reduce(self, i: int, eqn: JaxprEqn, on_examples: Sequence[Var]) -> None:
        """A sum over examples is a moment of x if it sums a polynomial of x of degree 1 or 2, feature by feature."""
        (x, degree), *others = {self._root(v) for v in on_examples}
        (out, *more) = eqn.outvars
        is_moment = eqn.primitive.name == "reduce_sum" and not others and not more and degree <= 2
        is_moment = is_moment and is_inexact(out) and bool(shape_of(out))
        self.moment.update((v, x if is_moment else None) for v in eqn.outvars)
        if is_moment:
            cluster = self.clusters.setdefault(x, _Cluster(x, first=i))
            cluster.totals.append(i)
            cluster.in_backward |= self.step.origins[i].direction == "backward"

    def _of_totals(self, i: int, eqn: JaxprEqn, totals: Sequence[Var]) -> None:
        """What follows from the moments of one x alone belongs to it."""
        of = {self.moment.get(v) for v in totals}
        x = of.pop() if len(of) == 1 else None
        rooted = eqn.primitive.name in _ROOTS or any(v in self.rooted for v in totals)
        adjusted = any(v in self.adjusted for v in totals) or any(map(self._is_parameter, eqn.invars))
        for v in eqn.outvars:
            self.moment[v] = x
            if rooted:
                self.rooted.add(v)
            if adjusted:
                self.adjusted.add(v)
        if x is not None:
            self.clusters[x].totals.append(i)

    def _on_examples(self, i: int, eqn: JaxprEqn, on_examples: Sequence[Var], totals: Sequence[Var]) -> None:
        (u, *more), name = on_examples, eqn.primitive.name
        x, degree = self._root(u)
        out = eqn.outvars[0]
        if totals:
            self._enter(i, eqn, on_examples, totals)
        elif name in _MOVES or (name in ("mul", "div") and any(map(_is_number, eqn.invars))):
            self.root[out] = x, degree
            self.summed.update(eqn.outvars if u in self.summed else ())
            if u in self.normalised:
                self.normalised[out] = self.normalised[u]
        elif name == "reduce_sum":
            self.root[out] = x, degree
            self.summed.add(out)
        elif degree == 1 and not self.summed.intersection(on_examples) and self._squares(eqn, more, x):
            self.root[out] = x, 2
        if u in self.normalised and name in _AFFINE and any(map(self._is_parameter, eqn.invars)):
            self.clusters[self.normalised[u]].is_adjusted = True

    def _squares(self, eqn: JaxprEqn, more: Sequence[Var], x: Var) -> bool:
        """Whether an equation multiplies what is linear in x with itself, or with another such array."""
        if eqn.primitive.name == "mul":
            return len(more) == 1 and self._root(more[0]) == (x, 1)
        return eqn.primitive.name == "square" or (eqn.primitive.name == "integer_pow" and eqn.params["y"] == 2)

    def _enter(self, i: int, eqn: JaxprEqn, on_examples: Sequence[Var], totals: Sequence[Var]) -> None:
        """Note that an equation on examples reads totals."""
        (u, *more), (total, *others) = on_examples, totals
        x, degree = self._root(u)
        if u in self.normalised and any(v in self.adjusted and self.moment.get(v) is not x for v in totals):
            self.clusters[self.normalised[u]].is_adjusted = True  # by a parameter that an update has changed
        affine = not more and not others and degree == 1 and u not in self.summed and eqn.primitive.name in _AFFINE
        affine = affine and self.moment.get(total) is x and (eqn.primitive.name != "div" or eqn.invars[0] is u)
        for v in totals:
            of = self.moment.get(v)
            if of is not None and (affine or self.step.origins[i].direction != "backward"):
                cluster = self.clusters[of]
                cluster.entries.append(i)
                cluster.is_affine &= affine
        if not affine:
            return
        self.root[eqn.outvars[0]] = x, 1
        if eqn.primitive.name in ("mul", "div") and total in self.rooted:
            cluster = self.clusters[x]
            cluster.divides = True
            cluster.is_adjusted |= total in self.adjusted
            self.normalised[eqn.outvars[0]] = x
        elif u in self.normalised:
            self.normalised[eqn.outvars[0]] = x

    def _find_running_averages(self) -> None:
        for v in self.step.flat.outvars:
            of = None if is_literal(v) else self.moment.get(v)
            if of is not None and v in self.adjusted:
                self.clusters[of].is_adjusted = True


def _derivatives(
    step: TracedStep, eqns: Sequence[JaxprEqn], kinds: Kinds, own: _Own, lines: _Lines
) -> set[int]:
    """Equations that read derivatives of what is a micro-batch's own, or what follows from `per_micro_batch`."""
    exact_keys = _exact_keys(step, eqns, kinds, own.entries | own.totals, lines)
    is_own = {v for i in (*own.entries, *own.totals) for v in eqns[i].outvars if kinds.get(v) == AGGREGATE}
    asked_for: set[Var] = set()
    out: set[int] = set()
    for i, eqn in enumerate(eqns):
        if eqn.primitive.name == _PER_MICRO_BATCH:
            asked_for.update(eqn.outvars)
        if is_barrier(eqn):
            for group in (is_own, asked_for):
                group.update(o for v, o in zip(eqn.invars, eqn.outvars, strict=True) if v in group)
            continue
        totals = [v for v in eqn.invars if not is_literal(v) and kinds.get(v) == AGGREGATE]
        in_backward = step.origins[i].direction == "backward" or any(v in asked_for for v in totals)
        if i in own.entries or i in own.totals or not in_backward:
            continue
        on_examples = any(not is_literal(v) and isinstance(kinds.get(v), int) for v in eqn.invars)
        mine = {v in is_own for v in totals}
        if mine == {True}:
            out.add(i)
        elif len(mine) == 2 and on_examples:
            raise TraceError(
                f"`{eqn.primitive.name}` at {source_line(eqn)} joins a statistic of the micro-batch with a total of "
                "the whole batch. Use `num_micro_batches=1`, or `minialpa.per_micro_batch` for the total."
            )
        if not on_examples:
            if mine == {True}:
                is_own.update(eqn.outvars)
                asked_for.update(eqn.outvars if any(v in asked_for for v in totals) else ())
        elif _derives_from(lines.key(i), own.keys):
            sums = [v for v in eqn.outvars if kinds.get(v) == AGGREGATE]
            if sums and _derives_from(lines.key(i), exact_keys):
                raise TraceError(
                    f"`{eqn.primitive.name}` at {source_line(eqn)} is the derivative of a batch statistic or of a "
                    "total of the whole batch: both are computed there. Put them on lines of their own, and use "
                    "`minialpa.value_and_grad`."
                )
            is_own.update(sums)
    return out


def _exact_keys(
    step: TracedStep, eqns: Sequence[JaxprEqn], kinds: Kinds, own: set[int], lines: _Lines
) -> set[_Key]:
    """Keys of the forward equations that bring totals of the whole batch to the examples."""
    out: set[_Key] = set()
    brought: set[Var] = set()
    for i in range(len(eqns) - 1, -1, -1):
        eqn = eqns[i]
        if i in own or step.origins[i].direction == "backward" or is_barrier(eqn):
            continue
        totals = [v for v in eqn.invars if not is_literal(v) and kinds.get(v) == AGGREGATE]
        on_examples = any(not is_literal(v) and isinstance(kinds.get(v), int) for v in eqn.invars)
        passes_on = eqn.primitive.name == "broadcast_in_dim" and any(v in brought for v in eqn.outvars)
        if totals and (on_examples or passes_on):
            out.add(lines.key(i))
            brought.update(totals)
    return out
