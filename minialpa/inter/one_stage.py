"""Plans without a pipeline: the whole step as one stage, on the user's submesh or on the best one.

With `remat="auto"`, if the fastest shardings with all values kept do not fit, the fastest of these plans wins:

    free       all values kept, and shardings that save memory by collectives
    uniform    one choice in all layers except the last, which needs its values at once
    mixes      the fastest choices of single layers (`layers/choices.py`), the smallest first: first layers wait longest
    last       if no choice fits, the smallest ones with shardings that save memory
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from minialpa.errors import InfeasibleError, TraceError
from minialpa.inter.build_plan import (
    StageTooLargeError,
    best_of,
    build_plan,
    place_stages,
    plan_stages,
    preference,
    solve_meshes,
)
from minialpa.inter.context import PlanningContext
from minialpa.inter.layers.choices import LayerCost, fastest_mix
from minialpa.inter.layers.layered_step import CutStep, LayeredStep, layered_step
from minialpa.inter.search.stage_in_memory import FreeSolution
from minialpa.inter.search.submeshes import Candidate, candidates
from minialpa.inter.search.user_stages import DecidedStage, placed_stages
from minialpa.intra.graph.constraints import shape_of_constraints
from minialpa.options import MOVING, AutoLayerOption, AutoStageOption, Remat, remats_of
from minialpa.plan import Plan

#: A plan that fits is good up to this multiple of a faster plan that does not. By choice.
_AS_FAST = 1.01
#: Most mixes that are planned. By choice: memory is nearly a sum over layers.
_MOST_MIXES = 3
#: Choices that get slower shardings.
_MOST_OTHER_SHARDINGS = 2
_RECOMPUTING: tuple[Remat, ...] = ("dots", "full")
#: The layers for which rematerialisation is chosen; scans are cut between them.
_LAYERS = AutoLayerOption(remat="auto")


def plan_on_submesh(context: PlanningContext) -> Plan:
    """By default on all devices."""
    cluster, options, user_mesh = context.cluster, context.options, context.logical_mesh
    submesh = options.submesh or (cluster.num_hosts, cluster.devices_per_host)
    shape = options.logical_shape
    if not shape:
        shape = user_mesh.shape if user_mesh else default_shape(context, submesh[0] * submesh[1])
    candidate = Candidate(submesh, shape)
    only_stage = ((), candidate, options.sharding)  # layers, submesh and options
    placed_stages([only_stage], cluster)  # raises for a submesh that the cluster does not have
    stage = DecidedStage(layers=(), candidate=candidate, option=options.sharding, first_device=0)

    choices = remats_of(options.remat)
    if choices == ("none",) or context.traced.n_groups == 0:  # without gradients, no value waits for a backward pass
        return plan_stages(context, context.whole, [stage])
    if len(choices) == 1:
        attempts = _LayerAttempts(context, _cut_into_layers(context), stage)
        layered = attempts.layered(choices * attempts.n_may_recompute)
        return plan_stages(context, layered, [attempts.layered_stage()])
    return _plan_with_least_recomputation(context, stage)


def default_shape(context: PlanningContext, n_devices: int) -> tuple[int, ...]:
    """If the options leave the shape open: the mesh of the step's sharding constraints, or one axis."""
    option = context.options.sharding
    is_open = not option.data_parallel and option.force_batch_dim_to_mesh_dim is None and not option.axis_lengths
    if option.shardings == "ignore" or not is_open:
        return option.open_shape(n_devices)
    return shape_of_constraints(context.traced.flat.eqns, n_devices) or option.open_shape(n_devices)


def plan_on_best_submesh(context: PlanningContext, auto: AutoStageOption) -> Plan:
    """On the fastest submesh. Raises InfeasibleError."""
    cluster = context.cluster

    def attempt(candidate: Candidate) -> Plan:
        host = next(h for h in range(cluster.num_hosts) if candidate.device in (None, cluster.device_of(h)))
        first_device = host * cluster.devices_per_host
        stage = DecidedStage((), candidate, context.options.sharding, first_device)
        return plan_stages(context, context.whole, [stage])

    n_least = cluster.n_devices if context.options.use_all_devices else 1
    choices = candidates(cluster, auto, context.options.sharding, default_shape(context, cluster.n_devices))
    found = [candidate for candidate in choices if candidate.n_devices >= n_least]
    if not found:
        raise InfeasibleError(
            f"`submesh_physical_shape_space` has no submesh of all {cluster.n_devices} devices. Add "
            f"({cluster.num_hosts}, {cluster.devices_per_host}) to it, or use `AutoParallel`, which may leave devices "
            "idle."
        )
    return best_of(partial(attempt, candidate) for candidate in found)


# ---- rematerialisation -----------------------------------------------------------------------------------------------


def _plan_with_least_recomputation(context: PlanningContext, stage: DecidedStage) -> Plan:
    first = _attempt(context, context.whole, stage)
    if first.is_good:
        return first.plan_or_raise()
    if not context.solver.compiler.waits_at_barriers:
        return first.plan_or_raise(
            "Rematerialisation would save no memory: before jax 0.11, XLA for CPUs recomputes values long before the "
            "backward pass needs them."
        )
    try:
        cut = _cut_into_layers(context)
    except TraceError as error:
        return first.plan_or_raise(f"Rematerialisation needs layers, but the step cannot be cut into layers. {error}")

    attempts = _LayerAttempts(context, cut, stage)
    if not attempts.n_may_recompute:
        return first.plan_or_raise("Rematerialisation needs two layers, and the step has one.")

    found = list(attempts.beside(first))
    plans = [one.plan for one in (first, *found) if one.plan is not None]
    if plans:
        return min(plans, key=preference)
    too_slow = next((one for one in found if one.failure is not None and one.failure.is_too_slow), None)
    if too_slow is not None:
        return too_slow.plan_or_raise()
    smallest = min((first, *found), key=lambda one: one.n_bytes)
    return smallest.plan_or_raise(
        f"Of all choices of values to keep, recompute or move to the host, `{smallest.choice}` for "
        f"{attempts.n_may_recompute} of {cut.n_layers} layers needs the least memory."
    )


def _cut_into_layers(context: PlanningContext) -> CutStep:
    return context.cut_scans(_LAYERS) or context.whole_scans(_LAYERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """The outcome of one choice of rematerialisation.

    Attributes:
        choice: of most layers.
        plan: None if no shardings fit.
        free: the fastest shardings in unlimited memory; None if options forbid all, or if the caller has a faster plan.
        failure: why there is no plan.
    """

    choice: Remat
    plan: Plan | None
    free: FreeSolution | None
    failure: StageTooLargeError | None

    @property
    def n_bytes(self) -> float:
        """The least memory with any shardings found, if there is no plan."""
        of_free = self.free.n_bytes if self.free is not None else math.inf
        return min(of_free, self.failure.n_bytes if self.failure is not None else math.inf)

    @property
    def is_good(self) -> bool:
        """Whether other choices cannot help: the plan is as fast as in unlimited memory, or impossible."""
        if self.plan is None or self.free is None:
            return self.free is None
        return self.free.fits or self.plan.cost.total_s <= _AS_FAST * self.free.seconds

    def plan_or_raise(self, note: str = "") -> Plan:
        """The plan, or raises the failure with a `note` on other attempts."""
        if self.plan is not None:
            return self.plan
        assert self.failure is not None
        raise InfeasibleError(f"{self.failure}\n{note}") if note else self.failure


def _attempt(
    context: PlanningContext,
    layered: LayeredStep,
    stage: DecidedStage,
    choice: Remat = "none",
    *,
    saves_memory: bool = True,
) -> _Attempt:
    placed = place_stages(context, layered, [stage])
    try:
        solved = solve_meshes(context, placed, saves_memory=saves_memory)
    except StageTooLargeError as failure:
        return _Attempt(choice=choice, plan=None, free=failure.free, failure=failure)
    return _Attempt(choice=choice, plan=build_plan(context, placed, solved), free=solved[0].free, failure=None)


@dataclass(frozen=True, slots=True)
class _LayerAttempts:
    """Attempts to plan a single stage."""

    context: PlanningContext
    cut: CutStep
    stage: DecidedStage

    @property
    def n_may_recompute(self) -> int:
        """All layers except the last."""
        return self.cut.n_layers - 1

    def layered(self, choices: Sequence[Remat]) -> LayeredStep:
        """choices: of all layers except the last, which keeps all values."""
        return layered_step(self.cut, (*choices, "none"))

    def layered_stage(self) -> DecidedStage:
        return dataclasses.replace(self.stage, layers=tuple(range(self.cut.n_layers)))

    def beside(self, first: _Attempt) -> Iterator[_Attempt]:
        """`first` keeps all values."""
        device = self.stage.candidate.device or self.context.cluster.device
        may_move = device.host_bytes is not None
        alone = [first]
        for choice in (*_RECOMPUTING, *MOVING) if may_move else _RECOMPUTING:
            found = self._attempt((choice,) * self.n_may_recompute)
            yield found
            if found.free is not None:
                alone.append(found)
            is_over = found.plan is not None and not may_move
            if is_over or (found.free is None and choice in _RECOMPUTING):
                break

        if any(one.plan is not None for one in alone):
            yield from self._mixes(alone)
            return
        # The fastest shardings never fit.
        for one in sorted(alone[1:], key=lambda one: one.n_bytes)[:_MOST_OTHER_SHARDINGS]:
            yield self._attempt((one.choice,) * self.n_may_recompute, saves_memory=True)

    def _mixes(self, alone: Sequence[_Attempt]) -> Iterator[_Attempt]:
        """alone: attempts with one choice for all layers."""
        free, n, error = [one.free for one in alone if one.free is not None], self.n_may_recompute, 0.0
        tried = {(k,) * n for k in range(len(free))}
        best_s = min(one.plan.cost.total_s for one in alone if one.plan is not None)
        for _ in range(_MOST_MIXES):
            mix = fastest_mix([LayerCost(f.n_bytes, f.seconds) for f in free], n, free[0].limit_bytes - error)
            if mix is None or mix.picks in tried or best_s <= _AS_FAST * mix.seconds:
                return
            tried.add(mix.picks)
            found = self._attempt([alone[k].choice for k in mix.picks])
            if found.free is None:
                return
            yield found
            if found.plan is not None:
                best_s = min(best_s, found.plan.cost.total_s)
            error = found.free.n_bytes - mix.n_bytes

    def _attempt(self, choices: Sequence[Remat], *, saves_memory: bool = False) -> _Attempt:
        # Mixes may be faster than `below_s` even if these shardings are not.
        below_s = self.context.below_s if saves_memory else math.inf
        context = dataclasses.replace(self.context, below_s=below_s)
        return _attempt(context, self.layered(choices), self.layered_stage(), choices[0], saves_memory=saves_memory)
