"""Rematerialisation without a pipeline: as little is computed again as makes the fastest shardings fit in memory.

The step is planned as it is first. If its fastest shardings fit, that is the plan, and nothing else is done. Where they
do not, shardings that save memory cost collectives, and rematerialisation costs compute; the faster plan is taken:

    layers    those of `AutoLayerOption`; scans over layers are cut into their rows, see `cut_scans`
    uniform   all layers but the last keep the results of products (`dots`); if that is too much, nothing (`full`)
    mixes     the first k layers do so, and the others what did not fit; least k, by where memory is on a line between
              what was tried
    in need   if the fastest shardings never fit, `dots` and `full` with shardings that save memory, too

The first layers are those whose values wait longest for their backward pass. That of the last layer follows at once, so
it would save nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from minialpa.errors import InfeasibleError, TraceError
from minialpa.inter.best import preference
from minialpa.inter.build_plan import StageTooLargeError, build_plan, place_stages, plan_stages, solve_meshes
from minialpa.inter.context import PlanningContext
from minialpa.inter.layers.cut_scans import cut_scans, whole_scans
from minialpa.inter.layers.layered_step import CutStep, LayeredStep, layered_step
from minialpa.inter.search.stage_in_memory import FreeSolution
from minialpa.inter.search.user_stages import DecidedStage
from minialpa.options import AutoLayerOption, Remat, remats_of
from minialpa.plan import Plan

#: Step time of a plan that fits, as a multiple of that of a faster one that does not, up to which it is taken as it is.
#: By choice: what lies between them takes longer to find than it saves.
_AS_FAST = 1.01
#: Mixes of two rematerialisations that are planned. By choice: memory is nearly a line.
_MOST_MIXES = 3
#: Layers that rematerialisation is chosen for. Scans are cut as for layers that may compute again.
_LAYERS = AutoLayerOption(remat="auto")


def plan_in_one_stage(context: PlanningContext, whole: LayeredStep, stage: DecidedStage) -> Plan:
    """The plan of the step in one stage, with the rematerialisation of the options. Raises InfeasibleError."""
    choices = remats_of(context.options.remat)
    if choices == ("none",) or whole.step.n_groups == 0:  # without gradients, nothing waits for a backward pass
        return plan_stages(context, whole, [stage])
    if len(choices) == 1:
        tries = _Tries(context, _cut(whole), stage)
        return plan_stages(context, tries.layered(choices[0], "none", tries.most), [tries.layered_stage()])
    return _with_least_again(context, whole, stage)


def _with_least_again(context: PlanningContext, whole: LayeredStep, stage: DecidedStage) -> Plan:
    """The plan of the step as it is, or a faster one that computes values again where memory is short."""
    first = _tried(context, whole, stage)
    if first.is_good:
        return first.wanted()
    if not context.solver.compiler.waits_at_barriers:
        return first.wanted(
            "Rematerialisation would save no memory: XLA for CPUs, before jax 0.11, computes values again long before "
            "the backward pass needs them."
        )
    try:
        cut = _cut(whole)
    except TraceError as error:
        return first.wanted(f"Rematerialisation needs layers, and there are none: {error}")

    tries = _Tries(context, cut, stage)
    if not tries.most:
        return first.wanted("Rematerialisation needs two layers, and there is one.")

    found = list(tries.computing_again(first))
    plans = [one.plan for one in (first, *found) if one.plan is not None]
    if plans:
        return min(plans, key=preference)
    too_slow = next((one for one in found if one.failure is not None and one.failure.is_too_slow), None)
    if too_slow is not None:
        return too_slow.wanted()
    least = min((one.free.n_bytes for one in found if one.free is not None), default=math.inf)
    return first.wanted(
        f"Rematerialisation of {tries.most} of {cut.n_layers} layers is not enough: with it, the fastest shardings "
        f"need {least:,.0f} bytes."
    )


def _cut(whole: LayeredStep) -> CutStep:
    """The step with its layers. Raises TraceError where it has too few operations."""
    return cut_scans(whole, _LAYERS) or whole_scans(whole, _LAYERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Try:
    """What became of one rematerialisation: a plan, or the reason why there is none.

    Attributes:
        plan: None if nothing fits.
        free: its fastest shardings with no regard to memory; None where the options forbid all shardings, or where the
            caller has a faster plan.
        failure: None if there is a plan.
    """

    plan: Plan | None
    free: FreeSolution | None
    failure: StageTooLargeError | None

    @property
    def is_good(self) -> bool:
        """Whether nothing that is computed again makes it better: it is as fast as without a memory limit, or never."""
        if self.plan is None or self.free is None:
            return self.free is None
        return self.free.fits or self.plan.cost.total_s <= _AS_FAST * self.free.seconds

    def wanted(self, note: str = "") -> Plan:
        """The plan. Raises the failure, with `note` on what else was tried, where there is none."""
        if self.plan is not None:
            return self.plan
        assert self.failure is not None
        raise InfeasibleError(f"{self.failure}\n{note}") if note else self.failure


def _tried(context: PlanningContext, layered: LayeredStep, stage: DecidedStage, *, saves_memory: bool = True) -> _Try:
    placed = place_stages(context.options, layered, [stage])
    try:
        solved = solve_meshes(context, placed, saves_memory=saves_memory)
    except StageTooLargeError as failure:
        return _Try(plan=None, free=failure.free, failure=failure)
    return _Try(plan=build_plan(context, placed, solved), free=solved[0].free, failure=None)


@dataclass(frozen=True, slots=True)
class _Tries:
    """Rematerialisations of the layers of one step, on one stage."""

    context: PlanningContext
    cut: CutStep
    stage: DecidedStage

    @property
    def most(self) -> int:
        """The layers that may compute again: all but the last."""
        return self.cut.n_layers - 1

    def layered(self, again: Remat, kept: Remat, n: int) -> LayeredStep:
        """The step with `again` in its first n layers, and `kept` in the others that may compute again."""
        return layered_step(self.cut, (again,) * n + (kept,) * (self.most - n) + ("none",))

    def layered_stage(self) -> DecidedStage:
        return dataclasses.replace(self.stage, layers=tuple(range(self.cut.n_layers)))

    def computing_again(self, first: _Try) -> Iterator[_Try]:
        """Tries that may beat `first`, which keeps all values."""
        kept: Remat = "none"
        choices: tuple[Remat, ...] = ("dots", "full")
        last = first
        for again in choices:
            found = self._tried(again, kept, self.most)
            if found.plan is not None:
                yield found
                yield from self._mixes(kept, again, (last, found))
                return
            if found.free is None:
                return
            kept, last = again, found
            yield found

        # With the fastest shardings, nothing fits.
        for again in choices:
            yield self._tried(again, kept, self.most, saves_memory=True)

    def _mixes(self, kept: Remat, again: Remat, ends: tuple[_Try, _Try]) -> Iterator[_Try]:
        """Tries with `again` in the first layers and `kept` in the others, of which all alike are the `ends`."""
        too_few, enough = 0, self.most
        free = [one.free for one in ends]
        for _ in range(_MOST_MIXES):
            assert free[0] is not None and free[1] is not None, ends
            if enough - too_few < 2 or free[1].seconds <= _AS_FAST * free[0].seconds:
                return
            missing = (free[0].n_bytes - free[0].limit_bytes) / (free[0].n_bytes - free[1].n_bytes)
            n = min(enough - 1, max(too_few + 1, too_few + math.ceil(missing * (enough - too_few))))

            found = self._tried(again, kept, n)
            if found.free is None:
                return
            yield found
            if found.plan is not None:
                enough, free[1] = n, found.free
            else:
                too_few, free[0] = n, found.free

    def _tried(self, again: Remat, kept: Remat, n: int, *, saves_memory: bool = False) -> _Try:
        # Fastest shardings lead to mixes, which may be fast enough where they are not.
        below_s = self.context.below_s if saves_memory else math.inf
        context = dataclasses.replace(self.context, below_s=below_s)
        return _tried(context, self.layered(again, kept, n), self.layered_stage(), saves_memory=saves_memory)
