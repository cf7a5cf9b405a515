"""A staged step in, a shorter step with the same distinct sublayers out: most repetitions are left out.

Of a hundred equal layers, the search solves the costs of one, so a step with four of them is enough:

    sublayers   0 1 2 3 4 5 6 7 8 9
    kinds       A B B B B B B B B C     sublayers of one kind are equal problems
    stay        0 1 2 3         8 9     of a run, the first three units and the last unit
    costed as   0 1 2 2 2 2 2 2 8 9     the sublayer whose cost counts

A unit is a group of neighbouring sublayers that repeats, here a single sublayer; a run is its repetitions. The third
unit stands for all units that are left out, so its costs are not used:

- An equation that stays reads copies of equations of the third unit instead of values that are left out: one copy for
  each such equation, so the number of operands from other sublayers does not change.
- The backward pass of the third unit reads values of the last unit, as if that came next.

In the short step of `with_models`, for attempts at a plan (`inter/short_plan.py`), no equation is copied: the third
unit counts for all units that are left out, and the last unit reads its values.

The short step does not compute the numbers of the whole step.
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

#: Units of a run that stay: the first three and the last one. The second one, with equal neighbours, is costed.
_N_KEPT = 4
_THIRD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SublayeredStep:
    """A step in sublayers, without rematerialisation: the whole step, or a short one with the same forward groups.

    Attributes:
        place: for each sublayer of the whole step, the number in this step of the sublayer that is costed for it.
        kept: for each costed sublayer of this step, its number in the whole step.
    """

    step: TracedStep
    sublayer_of_group: tuple[int, ...]
    place: tuple[int, ...]
    kept: Mapping[int, int]

    @property
    def n_sublayers(self) -> int:
        return max(self.sublayer_of_group, default=-1) + 1


def whole_step(step: TracedStep, sublayer_of_group: Sequence[int]) -> SublayeredStep:
    sublayers = range(max(sublayer_of_group, default=-1) + 1)
    return SublayeredStep(
        step=step,
        sublayer_of_group=tuple(sublayer_of_group),
        place=tuple(sublayers),
        kept={sublayer: sublayer for sublayer in sublayers},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSublayers:
    """A whole step, staged with one sublayer on each mesh. kind: for each sublayer, the first with an equal problem."""

    whole: SublayeredStep
    staged: StagedStep
    problems: Mapping[int, MeshEquations]
    kind: Sequence[int]


@dataclass(frozen=True, slots=True)
class NotShortened:
    reason: str


@dataclass(frozen=True, slots=True)
class RepeatedUnits:
    """A run: sublayers first, ..., first + n_units * period - 1 are units of `period` sublayers, all alike."""

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
    """The runs that leave out units, in order; of runs with the same start, the one that leaves out most."""
    runs: list[RepeatedUnits] = []
    start = 0
    while start < len(kinds):
        # Of equals, `max` takes the shortest period.
        periods = range(1, (len(kinds) - start) // (_N_KEPT + 1) + 1)
        found = max(
            (_longest_run_at(kinds, start, period) for period in periods), key=lambda r: len(r.left_out), default=None
        )
        if found is None or not found.left_out:
            start += 1
        else:
            runs.append(found)
            start = found.last.stop
    return runs


def _longest_run_at(kinds: Sequence[int], start: int, period: int) -> RepeatedUnits:
    end = start + period
    while end < len(kinds) and kinds[end] == kinds[end - period]:
        end += 1
    return RepeatedUnits(start, period, (end - start) // period)


class StandIn(NamedTuple):
    """A sublayer of a third unit, which stands for the same sublayer of the units that are left out.

    n: how many sublayers, itself included. before: the same sublayer of the unit before it.
    """

    n: int
    run: int
    before: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """A step in which the third unit of each run stands for the units that are left out.

    Attributes:
        runs_as: for each sublayer, the sublayer that stands for it; itself if it stays.
        models: the sublayers of third units.
        sublayer_of: the first sublayer that stays, of each equation of the whole step, by its first result.
    """

    step: TracedStep
    runs_as: tuple[int, ...]
    models: Mapping[int, StandIn]
    sublayer_of: Mapping[Var, int]


class _NotAlikeError(Exception):
    """Sublayers of one kind are not the same equations of the traced step."""


def shortened(sublayers: StagedSublayers) -> SublayeredStep | NotShortened:
    where = Where.of(sublayers)
    runs = runs_of(kinds_of(sublayers, where))
    if not runs:
        return NotShortened(f"No {_N_KEPT + 1} neighbouring sublayers, or groups of sublayers, are alike.")
    try:
        return _Shortening(sublayers, where, runs).sublayered_step()
    except _NotAlikeError as error:
        return NotShortened(str(error))


def with_models(sublayers: StagedSublayers, where: Where, kinds: Sequence[int]) -> Shortened | NotShortened:
    """The short step for attempts at a plan. kinds: for each sublayer; only sublayers of one kind repeat."""
    # The solver shards all units alike. Neighbouring products may alternate shardings, so a unit has at least two.
    runs = [_with_two_products(sublayers, run) for run in runs_of(kinds)]
    runs = [run for run in runs if run.left_out]
    if not runs:
        return NotShortened(f"No {_N_KEPT + 1} neighbouring sublayers, or groups of sublayers, are alike.")
    try:
        return _Shortening(sublayers, where, runs, copies=False).shortened(where)
    except _NotAlikeError as error:
        return NotShortened(str(error))


def _with_two_products(sublayers: StagedSublayers, run: RepeatedUnits) -> RepeatedUnits:
    """Units with fewer than two products are joined in pairs."""
    origin = {op.eqn: op.origin for op in sublayers.staged.split.ops}
    eqns = (eqn for sublayer in run.third for eqn in sublayers.problems[sublayer].eqns)
    n_products = sum(origin[eqn].direction == "forward" and has_contraction(eqn) for eqn in eqns)
    return run if n_products > 1 else RepeatedUnits(run.first, 2 * run.period, run.n_units // 2)


# ---- sublayers that are alike ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Where:
    """Where equations run, by their numbers in the traced step.

    of_sublayer: the traced equation of each equation of the sublayer's problem; `None` without one.
    sublayers: of each traced equation that runs.
    """

    of_sublayer: Mapping[int, Sequence[int | None]]
    sublayers: Mapping[int, AbstractSet[int]]

    @staticmethod
    def of(sublayers: StagedSublayers) -> Where:
        # Rematerialisation keeps the variables of the original equations.
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
    """For each sublayer, the first one like it: an equal problem under any rematerialisation.

    Rematerialisation treats a forward group as a whole. So its equations outside of the sublayer have to correspond.
    """
    origins, sublayer_of_group = sublayers.whole.step.origins, sublayers.whole.sublayer_of_group
    # By sublayer: equations of its groups that run elsewhere, and equations of other groups that run here.
    astray: dict[int, list[object]] = {sublayer: [] for sublayer in sublayers.whole.kept}
    for i, found in where.sublayers.items():
        origin = origins[i]
        if origin.group is not None:
            sublayer = sublayer_of_group[origin.group]
            if found != {sublayer}:
                astray[sublayer].append((origin.direction, "runs on", *sorted(other - sublayer for other in found)))
                for other in found - {sublayer}:
                    # Sublayers share some equations, such as masks and tables of positions.
                    astray[other].append((origin.direction, "is of", sublayer - other if len(found) == 1 else i))

    keys = [(kind, tuple(astray[sublayer])) for sublayer, kind in enumerate(sublayers.kind)]
    return [keys.index(key) for key in keys]


# ---- the shorter step -----------------------------------------------------------------------------------------------


class _Shortening:
    """Equations are numbers in the traced step."""

    def __init__(
        self, sublayers: StagedSublayers, where: Where, runs: Sequence[RepeatedUnits], *, copies: bool = True
    ) -> None:
        """copies: whether readers of values that are left out read copies of equations of third units."""
        self.whole, self.runs, self.copies = sublayers.whole, runs, copies
        self.eqns, self.origins = sublayers.whole.step.flat.eqns, sublayers.whole.step.origins
        self.maker = {result: i for i, eqn in enumerate(self.eqns) for result in eqn.outvars}

        out = {sublayer for run in runs for sublayer in run.left_out}
        third = {sublayer for run in runs for sublayer in run.third}
        self.eqns_left_out = frozenset(i for i, found in where.sublayers.items() if found <= out)
        self.eqns_in_third = frozenset(i for i, found in where.sublayers.items() if found <= third)

        # Problems of one kind have the same order of equations.
        self.like_third: dict[int, int] = {}
        self.like_last: dict[int, int] = {}
        for run in runs:
            for sublayer in run.left_out:
                offset = (sublayer - run.first) % run.period
                for like, other in ((self.like_third, run.third[offset]), (self.like_last, run.last[offset])):
                    pairs = zip(where.of_sublayer[sublayer], where.of_sublayer[other], strict=True)
                    like.update((i, j) for i, j in pairs if i in self.eqns_left_out and j is not None)

    # ---- stand-ins for values that are left out ---------------------------------------------------------------------

    def _short_operations(self) -> list[Op]:
        """The equations that stay, with stand-ins for values that are left out, and copies."""
        copies: dict[int, list[JaxprEqn]] = {}  # of an equation of a third unit, by its number
        copied: dict[int, JaxprEqn] = {}  # by the number of the equation that is left out

        def stand_in(value: Var, reader: int) -> Var:
            made_by = self.maker.get(value)
            if made_by is None or made_by not in self.eqns_left_out:
                return value
            result = self.eqns[made_by].outvars.index(value)

            # The backward pass of the next unit makes the value. A copy in the third unit would come too late.
            if reader in self.eqns_in_third and self.origins[made_by].direction != "forward":
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
            if i not in self.eqns_left_out:
                others = {v: other for v in operand_vars(eqn) if (other := stand_in(v, i)) is not v}
                kept.append((i, reading(eqn, others) if others else eqn))

        ops: list[Op] = []
        for i, eqn in kept:
            alike = (copy.replace(invars=eqn.invars) for copy in copies.get(i, ()))
            ops += [replace(self.whole.step.flat.ops[i], eqn=one) for one in (eqn, *alike)]
        return ops

    def _counterpart(self, like: Mapping[int, int], number: int) -> JaxprEqn:
        """The equation that stays and is like equation `number`."""
        eqn, other = self.eqns[number], like.get(number)
        if other is None or other in self.eqns_left_out:
            raise _NotAlikeError(f"`{eqn.primitive.name}` of a sublayer has no counterpart in sublayers that stay.")
        found = self.eqns[other]
        if found.primitive is not eqn.primitive or list(map(aval_of, found.outvars)) != list(map(aval_of, eqn.outvars)):
            raise _NotAlikeError(f"`{eqn.primitive.name}` of a sublayer is `{found.primitive.name}` in another one.")
        return found

    # ---- the step ---------------------------------------------------------------------------------------------------

    def _short_step(self) -> TracedStep:
        return _with_equations(self.whole.step, self._short_operations(), self._inputs_left_out())

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

    def sublayered_step(self) -> SublayeredStep:
        n_sublayers = len(self.whole.place)
        costed_as, runs_in = list(range(n_sublayers)), list(range(n_sublayers))
        for run in self.runs:
            for sublayer in range(run.third.start, run.last.start):
                offset = (sublayer - run.first) % run.period
                costed_as[sublayer], runs_in[sublayer] = run.unit(_THIRD - 1)[offset], run.third[offset]

        # An equation that stays may belong to a forward group that is left out, which joins the third unit.
        number = {sublayer: i for i, sublayer in enumerate(sorted(set(runs_in)))}
        return SublayeredStep(
            step=self._short_step(),
            sublayer_of_group=tuple(number[runs_in[sublayer]] for sublayer in self.whole.sublayer_of_group),
            place=tuple(number[sublayer] for sublayer in costed_as),
            kept={number[sublayer]: sublayer for sublayer in sorted(set(costed_as))},
        )

    def _inputs_left_out(self) -> set[Var]:
        flat = self.whole.step.flat
        read_out = {v for i in self.eqns_left_out for v in operand_vars(self.eqns[i])}
        read = {v for i, eqn in enumerate(self.eqns) if i not in self.eqns_left_out for v in operand_vars(eqn)}
        return {v for v in (*flat.constvars, *flat.invars) if v in read_out and v not in read}


def _with_equations(step: TracedStep, ops: Sequence[Op], gone_inputs: AbstractSet[Var]) -> TracedStep:
    flat = step.flat
    inputs = {*flat.constvars, *flat.invars} - gone_inputs
    made = inputs.union(*(op.eqn.outvars for op in ops))
    results = [o for o, atom in enumerate(flat.outvars) if is_literal(atom) or atom in made]
    outvars = [flat.outvars[o] for o in results]

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
