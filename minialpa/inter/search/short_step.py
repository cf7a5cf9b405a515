"""A shorter step with the same distinct pieces: a staged step in, and the step without most of its repetitions out.

A search stages the step for each number of micro-batches and each rematerialisation. Of a hundred equal layers it
solves the costs of one, so a step with a few of them is enough:

    pieces      0 1 2 3 4 5 6 7 8 9          a unit repeats: some neighbouring pieces, here a single one
    kinds       A B B B B B B B B C          pieces of one kind are equal problems
    stay        0 1 2 3         8 9          the first three units, the last one, and all pieces outside of units
    costed as   0 1 2 2 2 2 2 2 8 9          for each piece, the piece with its costs

Equations that stay may have read values of a unit that is left out. The third unit stands for all of these units. Its
backward pass reads values of the last unit's backward pass, as if the last unit came next. All others read a copy: a
second copy of the third unit's equation that makes the like value. So they read as many different values as before, and
still values of another piece. This makes the third unit unlike all others, so its costs are not used.

`with_models` makes the short step for attempts at a plan (`inter/short_plan.py`). There the third unit counts for all
units that are left out, so no equation is copied: the last unit reads the values of the third.

The short step computes other numbers than the whole one. It gives costs, and shardings of equal layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import NamedTuple

from jax.extend.core import JaxprEqn, Var

from minialpa.inter.staging.tasks import StagedStep
from minialpa.intra.graph.problem import MeshEquations
from minialpa.ir.equations import Atom, aval_of, fresh_var, is_literal, live_equations, operand_vars, reading
from minialpa.ir.op import Op
from minialpa.rules.expensive import has_contraction
from minialpa.tracing.trace import TracedStep, with_leaves

#: Units of a run that stay: the first three and the last one. The second one has equal neighbours: it is costed.
_N_KEPT = 4
#: The third unit, counted from 0.
_THIRD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SublayeredStep:
    """A step in pieces, without rematerialisation: the whole step, or a short one with the group numbers of the whole
    step.

    place: for each piece of the whole step, the piece of this one that is costed for it.
    kept: for each piece that is costed, its number in the whole step.
    """

    step: TracedStep
    sublayer_of_group: tuple[int, ...]
    place: tuple[int, ...]
    kept: Mapping[int, int]

    @property
    def n_sublayers(self) -> int:
        return max(self.sublayer_of_group, default=-1) + 1


def whole_step(step: TracedStep, sublayer_of_group: Sequence[int]) -> SublayeredStep:
    """A step of which each piece is costed for itself."""
    sublayers = range(max(sublayer_of_group, default=-1) + 1)
    return SublayeredStep(
        step=step,
        sublayer_of_group=tuple(sublayer_of_group),
        place=tuple(sublayers),
        kept={sublayer: sublayer for sublayer in sublayers},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSublayers:
    """A whole step that is staged with one piece on each mesh, for any number of micro-batches and any
    rematerialisation.

    problems: the equations of each piece. kind: for each piece, the first piece with an equal problem.
    """

    whole: SublayeredStep
    staged: StagedStep
    problems: Mapping[int, MeshEquations]
    kind: Sequence[int]


@dataclass(frozen=True, slots=True)
class NotShortened:
    """Why the whole step is staged each time."""

    reason: str


@dataclass(frozen=True, slots=True)
class RepeatedUnits:
    """Pieces first, ..., first + n_units * period - 1: units of `period` pieces, each like the unit before it."""

    first: int
    period: int
    n_units: int

    def unit(self, number: int) -> range:
        start = self.first + number * self.period
        return range(start, start + self.period)

    @property
    def third(self) -> range:
        return self.unit(_THIRD)

    @property
    def last(self) -> range:
        return self.unit(self.n_units - 1)

    @property
    def left_out(self) -> range:
        return range(self.third.stop, self.last.start)


def runs_of(kinds: Sequence[int]) -> list[RepeatedUnits]:
    """The runs with units to leave out, in order; of runs that start at one piece, the one with most to leave out."""
    runs: list[RepeatedUnits] = []
    start = 0
    while start < len(kinds):
        # A unit of two equal pieces leaves out no more than one of a single piece, which is looked at first.
        periods = range(1, (len(kinds) - start) // (_N_KEPT + 1) + 1)
        found = max((_run_at(kinds, start, period) for period in periods), key=lambda r: len(r.left_out), default=None)
        if found is None or not found.left_out:
            start += 1
        else:
            runs.append(found)
            start = found.last.stop
    return runs


def _run_at(kinds: Sequence[int], start: int, period: int) -> RepeatedUnits:
    end = start + period
    while end < len(kinds) and kinds[end] == kinds[end - period]:
        end += 1
    return RepeatedUnits(start, period, (end - start) // period)


class StandIn(NamedTuple):
    """A piece of a unit that stands for all units of its run that are left out.

    n: the number of pieces that it stands for, itself included. run: the number of its run.
    before: the same piece of the unit before it.
    """

    n: int
    run: int
    before: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """A step in which the third unit of each run stands for the units that are left out.

    Attributes:
        runs_as: for each piece, the piece that stands for it; itself if it stays.
        models: the pieces of third units.
        sublayer_of: the piece of each equation of the whole step, by its first result. Equations of several pieces are of
            the first one that stays.
    """

    step: TracedStep
    runs_as: tuple[int, ...]
    models: Mapping[int, StandIn]
    sublayer_of: Mapping[Var, int]


class _NotAlikeError(Exception):
    """Pieces of one kind that are not the same equations of the traced step."""


def shortened(sublayers: StagedSublayers) -> SublayeredStep | NotShortened:
    """The step with `_N_KEPT` units of each run."""
    where = Where.of(sublayers)
    runs = runs_of(kinds_of(sublayers, where))
    if not runs:
        return NotShortened(f"No {_N_KEPT + 1} neighbouring sublayers, or groups of sublayers, are alike.")
    try:
        return _Shortening(sublayers, where, runs).pieced_step()
    except _NotAlikeError as error:
        return NotShortened(str(error))


def with_models(sublayers: StagedSublayers, where: Where, kinds: Sequence[int]) -> Shortened | NotShortened:
    """The step with `_N_KEPT` units of each run, of which the third stands for the units that are left out.

    kinds: pieces of one kind may be in one run.
    """
    # The solver shards all units alike. A unit with one product is two, as neighbours may want alternate shardings.
    runs = [_with_products(sublayers, run) for run in runs_of(kinds)]
    runs = [run for run in runs if run.left_out]
    if not runs:
        return NotShortened(f"No {_N_KEPT + 1} neighbouring sublayers, or groups of sublayers, are alike.")
    try:
        return _Shortening(sublayers, where, runs, copies=False).shortened(where)
    except _NotAlikeError as error:
        return NotShortened(str(error))


def _with_products(sublayers: StagedSublayers, run: RepeatedUnits) -> RepeatedUnits:
    origin = {op.eqn: op.origin for op in sublayers.staged.split.ops}
    eqns = (eqn for sublayer in run.third for eqn in sublayers.problems[sublayer].eqns)
    n_products = sum(origin[eqn].direction == "forward" and has_contraction(eqn) for eqn in eqns)
    return run if n_products > 1 else RepeatedUnits(run.first, 2 * run.period, run.n_units // 2)


# ---- which pieces are alike ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Where:
    """Where the equations of the traced step run, by their numbers.

    Attributes:
        of_sublayer: for each piece, the traced equation of each equation of its problem; None without one.
        sublayers: for each equation that runs, its pieces, in the order of the traced step.
    """

    of_sublayer: Mapping[int, Sequence[int | None]]
    sublayers: Mapping[int, AbstractSet[int]]

    @staticmethod
    def of(sublayers: StagedSublayers) -> Where:
        # Rematerialisation keeps the variables of the equations that it does not add.
        number = {eqn.outvars[0]: i for i, eqn in enumerate(sublayers.whole.step.flat.eqns) if eqn.outvars}
        split = sublayers.staged.split
        source: dict[JaxprEqn, int] = {}
        for op in split.ops:
            results = split.traced.flat.eqns[op.source].outvars if op.source >= 0 else []
            if results and results[0] in number:
                source[op.eqn] = number[results[0]]

        found: dict[int, set[int]] = {}
        for task in sublayers.staged.tasks:
            for eqn in task.eqns:
                if eqn in source:
                    found.setdefault(source[eqn], set()).add(task.mesh)
        return Where(
            {sublayer: [source.get(eqn) for eqn in problem.eqns] for sublayer, problem in sublayers.problems.items()},
            {i: found[i] for i in sorted(found)},
        )


def kinds_of(sublayers: StagedSublayers, where: Where) -> list[int]:
    """For each piece, the first one like it: the same problem, which stays the same under rematerialisation.

    Rematerialisation goes by groups. So in pieces that are alike, the same equations run on another piece than their
    group's.
    """
    origins, sublayer_of_group = sublayers.whole.step.origins, sublayers.whole.sublayer_of_group
    astray: dict[int, list[object]] = {sublayer: [] for sublayer in sublayers.whole.kept}
    for i, found in where.sublayers.items():
        origin = origins[i]
        if origin.group is not None:
            sublayer = sublayer_of_group[origin.group]
            if found != {sublayer}:
                astray[sublayer].append((origin.direction, "runs on", *sorted(other - sublayer for other in found)))
                for other in found - {sublayer}:
                    # Several pieces share some equations, such as masks and tables of positions.
                    astray[other].append((origin.direction, "is of", sublayer - other if len(found) == 1 else i))

    keys = [(kind, tuple(astray[sublayer])) for sublayer, kind in enumerate(sublayers.kind)]
    return [keys.index(key) for key in keys]


# ---- the shorter step -----------------------------------------------------------------------------------------------


class _Shortening:
    """One step while pieces are left out; equations are known by their numbers in the traced step."""

    def __init__(
        self, sublayers: StagedSublayers, where: Where, runs: Sequence[RepeatedUnits], *, copies: bool = True
    ) -> None:
        """copies: whether equations that stay read copies of equations of third units."""
        self.whole, self.runs, self.copies = sublayers.whole, runs, copies
        self.eqns, self.origins = sublayers.whole.step.flat.eqns, sublayers.whole.step.origins
        self.maker = {result: i for i, eqn in enumerate(self.eqns) for result in eqn.outvars}

        # An equation is left out if all of its pieces are left out.
        out = {sublayer for run in runs for sublayer in run.left_out}
        third = {sublayer for run in runs for sublayer in run.third}
        self.is_out = frozenset(i for i, found in where.sublayers.items() if found <= out)
        self.in_third = frozenset(i for i, found in where.sublayers.items() if found <= third)

        # The problems of pieces of one kind have their equations in one order.
        self.like_third: dict[int, int] = {}
        self.like_last: dict[int, int] = {}
        for run in runs:
            for sublayer in run.left_out:
                offset = (sublayer - run.first) % run.period
                for like, other in ((self.like_third, run.third[offset]), (self.like_last, run.last[offset])):
                    pairs = zip(where.of_sublayer[sublayer], where.of_sublayer[other], strict=True)
                    like.update((i, j) for i, j in pairs if i in self.is_out and j is not None)

    # ---- stand-ins for values that are left out ---------------------------------------------------------------------

    def _operations(self) -> list[Op]:
        """The equations that stay, which read no value that is left out, and copies of equations of third units."""
        copies: dict[int, list[JaxprEqn]] = {}  # of an equation of a third unit, by its number
        copied: dict[int, JaxprEqn] = {}  # by the number of the equation that is left out

        def stand_in(value: Var, reader: int) -> Var:
            made_by = self.maker.get(value)
            if made_by is None or made_by not in self.is_out:
                return value
            result = self.eqns[made_by].outvars.index(value)

            # A backward pass reads values of the next unit's. A separate copy would be computed too late.
            if reader in self.in_third and self.origins[made_by].direction != "forward":
                return self._counterpart(self.like_last, made_by).outvars[result]
            if not self.copies:
                return self._counterpart(self.like_third, made_by).outvars[result]
            if made_by not in copied:
                eqn = self._counterpart(self.like_third, made_by)
                copied[made_by] = eqn.replace(outvars=[fresh_var(aval_of(v)) for v in eqn.outvars])
                copies.setdefault(self.like_third[made_by], []).append(copied[made_by])
            return copied[made_by].outvars[result]

        kept: list[tuple[int, JaxprEqn]] = []
        for i, eqn in enumerate(self.eqns):
            if i not in self.is_out:
                others = {v: other for v in operand_vars(eqn) if (other := stand_in(v, i)) is not v}
                kept.append((i, reading(eqn, others) if others else eqn))

        # A copy reads what its equation reads now.
        ops: list[Op] = []
        for i, eqn in kept:
            alike = (copy.replace(invars=eqn.invars) for copy in copies.get(i, ()))
            ops += [replace(self.whole.step.flat.ops[i], eqn=one) for one in (eqn, *alike)]
        return ops

    def _counterpart(self, like: Mapping[int, int], number: int) -> JaxprEqn:
        """The equation that stays and is like the one of this number, which is left out."""
        eqn, other = self.eqns[number], like.get(number)
        if other is None or other in self.is_out:
            raise _NotAlikeError(f"`{eqn.primitive.name}` of a piece has no counterpart in the pieces that stay.")
        found = self.eqns[other]
        if found.primitive is not eqn.primitive or list(map(aval_of, found.outvars)) != list(map(aval_of, eqn.outvars)):
            raise _NotAlikeError(f"`{eqn.primitive.name}` of a piece is `{found.primitive.name}` in another one.")
        return found

    # ---- the step ---------------------------------------------------------------------------------------------------

    def _short_step(self) -> TracedStep:
        return _with_equations(self.whole.step, self._operations(), self._inputs_left_out())

    def shortened(self, where: Where) -> Shortened:
        runs_as, models = list(range(len(self.whole.place))), dict[int, StandIn]()
        for number, run in enumerate(self.runs):
            for sublayer in range(run.third.start, run.last.start):
                runs_as[sublayer] = run.third[(sublayer - run.first) % run.period]
            n = run.n_units - _N_KEPT + 1
            models.update((sublayer, StandIn(n, number, sublayer - run.period)) for sublayer in run.third)

        sublayer_of: dict[Var, int] = {}
        for i, found in where.sublayers.items():
            stay = [sublayer for sublayer in found if runs_as[sublayer] == sublayer]
            if self.eqns[i].outvars:
                sublayer_of[self.eqns[i].outvars[0]] = min(stay or found)
        return Shortened(step=self._short_step(), runs_as=tuple(runs_as), models=models, sublayer_of=sublayer_of)

    def pieced_step(self) -> SublayeredStep:
        n_sublayers = len(self.whole.place)
        costed_as, runs_in = list(range(n_sublayers)), list(range(n_sublayers))
        for run in self.runs:
            for sublayer in range(run.third.start, run.last.start):
                offset = (sublayer - run.first) % run.period
                costed_as[sublayer], runs_in[sublayer] = run.unit(_THIRD - 1)[offset], run.third[offset]

        # An equation that stays may belong to a forward group that is left out: the group is put into the third unit.
        number = {sublayer: i for i, sublayer in enumerate(sorted(set(runs_in)))}
        return SublayeredStep(
            step=self._short_step(),
            sublayer_of_group=tuple(number[runs_in[sublayer]] for sublayer in self.whole.sublayer_of_group),
            place=tuple(number[sublayer] for sublayer in costed_as),
            kept={number[sublayer]: sublayer for sublayer in sorted(set(costed_as))},
        )

    def _inputs_left_out(self) -> set[Var]:
        """The inputs that only equations read which are left out."""
        flat = self.whole.step.flat
        read_out = {v for i in self.is_out for v in operand_vars(self.eqns[i])}
        read = {v for i, eqn in enumerate(self.eqns) if i not in self.is_out for v in operand_vars(eqn)}
        return {v for v in (*flat.constvars, *flat.invars) if v in read_out and v not in read}


def _with_equations(step: TracedStep, ops: Sequence[Op], gone_inputs: AbstractSet[Var]) -> TracedStep:
    """`step` with other equations, with the results that they make, and without some of its inputs."""
    flat = step.flat
    inputs = {*flat.constvars, *flat.invars} - gone_inputs
    made = inputs.union(*(op.eqn.outvars for op in ops))
    results = [o for o, atom in enumerate(flat.outvars) if is_literal(atom) or atom in made]
    outvars = [flat.outvars[o] for o in results]

    # Some values of third units have no reader any more.
    live = live_equations([op.eqn for op in ops], outvars)
    ops = list(itertools.compress(ops, live))
    _check_order([op.eqn for op in ops], outvars, inputs)

    replaced = {numbers[o] for numbers in (step.aliases, step.layouts) for o in results}
    if any(flat.invars[i] in gone_inputs for i in replaced if i is not None):
        raise _NotAlikeError("A result that stays replaces an argument that is left out.")
    other = replace(
        step,
        flat=replace(flat, ops=tuple(ops)),
        gradients=tuple(v for v in step.gradients if v in made),
    )
    return with_leaves(other, gone_inputs, results)


def _check_order(eqns: Sequence[JaxprEqn], outvars: Sequence[Atom], inputs: AbstractSet[Var]) -> None:
    """Raise `_NotAlikeError` if an equation reads a value before it is made."""
    known = set(inputs)
    for eqn in eqns:
        if not known.issuperset(operand_vars(eqn)):
            raise _NotAlikeError(f"`{eqn.primitive.name}` would read a value that is computed later.")
        known.update(eqn.outvars)
    assert known.issuperset(v for v in outvars if not is_literal(v)), "a result without its equation"
