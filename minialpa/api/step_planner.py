"""The plan of a traced step: made by a method, made to follow the plan of another function, or a saved one.

A traced step and its devices go in, and a plan comes out, which is remembered for the next call with the same shapes.
`plan_makers` makes plans, and `ragged` has the numbers of micro-batches to try for a batch.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import jax

from minialpa.api.following import Followed
from minialpa.api.plan_folder import PlanFolder
from minialpa.api.plan_makers import MakePlan, Relax, follow_plan, following, on_known_stages, planning
from minialpa.api.ragged import OnRagged, explain_fewer, is_uneven, numbers_to_try, warn_of_fewer
from minialpa.cluster import ClusterSpec, LogicalMesh
from minialpa.errors import InfeasibleError
from minialpa.inter.staging.replan import check_fits, difference, logical_mesh_of
from minialpa.ir.equations import aval_of, is_constraint, is_weak
from minialpa.methods import (
    CreateStateParallel,
    FollowingMethod,
    FollowParallel,
    Method,
    Target,
    options_for,
    plan_to_method,
    resolve_devices,
)
from minialpa.options import AutoShardingOption, PlanOptions
from minialpa.plan import Plan, verify_plan
from minialpa.tracing.fingerprint import Fingerprint
from minialpa.tracing.trace import TracedStep

OnStale = Literal["refuse", "replan"]
#: What a plan is made for: a step on a cluster, or on a view of its devices.
_PlannedFor = tuple[Fingerprint, ClusterSpec, LogicalMesh | None]


class StepPlanner:
    """Plans one function, for each set of argument shapes and each cluster once.

    A session that starts again on the same hosts, or on hosts that it had before, therefore plans nothing.
    """

    #: The plan that was made or loaded last, for any function. Scripts that were written for Alpa ask for it.
    last_plan: ClassVar[Plan | None] = None
    #: Says the layers of each of its stages, also where the answer is one stage and the plan itself needs no layers: to
    #: cut a step into layers takes longer than to plan a small one.
    last_layers: ClassVar[Callable[[], tuple[tuple[int, ...], ...]]] = staticmethod(tuple)

    def __init__(
        self,
        method: Method | FollowingMethod | Plan,
        on_stale: OnStale,
        on_ragged: OnRagged,
        folder: PlanFolder | None,
    ) -> None:
        """folder: keeps the plans that `method` makes for other runs of the script."""
        self._method, self._on_stale, self._on_ragged, self._folder = method, on_stale, on_ragged, folder
        self._plans: dict[_PlannedFor, Plan] = {}
        self._given: set[_PlannedFor] = set()

    def remember(self, plan: Plan) -> None:
        """Use `plan` where the step and the cluster are those that it was made for, instead of planning again."""
        verify_plan(plan)
        key = (plan.fingerprint, plan.cluster, logical_mesh_of(plan))
        self._plans[key] = plan
        self._given.add(key)

    def forget_given(self) -> None:
        """Plan where a plan was to be remembered."""
        for key in self._given:
            del self._plans[key]
        self._given.clear()

    def is_given(self, traced: TracedStep, target: Target) -> bool:
        """Whether the plan for a traced step is one that the user gave."""
        return bool(self._given) and (traced.fingerprint, target.cluster, target.logical_mesh) in self._given

    def plan_followed(self, traced: TracedStep, followed: Followed, leaves: Sequence[Any]) -> Plan | None:
        """The plan on the meshes of a training step, where the arguments are; None if none of them is a state there.

        Raises ShardingError or InfeasibleError if the step cannot run there as its arguments are.
        """
        placements = followed.placements(traced, leaves)
        if all(traced.batch_dims[i] is not None for i in placements):
            return None

        # How the training step splits its examples is nothing that this function has asked for, so that one number of
        # micro-batches will do.
        n, *_ = numbers_to_try(traced, followed.options.n_micro_batches, self._on_ragged)
        options = dataclasses.replace(followed.options, n_micro_batches=n)
        arguments = (traced, followed.plan, placements, options, followed.target)
        try:
            plan = follow_plan(*arguments)
        except InfeasibleError as error:
            if not is_uneven(error):
                raise
            plan = follow_plan(*arguments, AutoShardingOption.for_any_batch)
        warn_of_fewer(traced, followed.options.n_micro_batches, plan)
        _note_last(plan, partial(_layers_in, plan))
        return plan

    def plan(self, traced: TracedStep, target: Target, *, is_first: bool) -> Plan:
        """The plan for a traced step where `target` says.

        is_first: whether the function was compiled for no other shapes yet. Raises InfeasibleError, TraceError, or
            VerifyError for a saved plan that does not fit.
        """
        match self._method:
            case CreateStateParallel(train_step=train_step, other_args=others):
                return train_step.plan(state_shapes(traced), *others)
            case Plan():
                plan = self._saved_plan(traced, self._method)
            case FollowParallel() as method:
                plan = self._new_plan(traced, method.options(), following(traced, method, target), is_first=is_first)
            case method:
                key = (traced.fingerprint, target.cluster, target.logical_mesh)
                if key not in self._plans:
                    known = self._known_like(traced, target)
                    options = options_for(method, traced)
                    make = on_known_stages(planning(traced, target, self._folder), known, options)
                    self._plans[key] = self._new_plan(traced, options, make, is_first=is_first)
                plan = self._plans[key]

        _note_last(plan, partial(_layers_of_stages, traced, self._method, plan))
        return plan

    def _saved_plan(self, traced: TracedStep, saved: Plan) -> Plan:
        """The saved plan. If it is stale and `on_stale` is "replan", a plan with its decisions and new shardings."""
        verify_plan(saved)
        if self._on_stale == "refuse":
            check_fits(traced, saved)
            return saved
        found = difference(traced, saved)
        if found is None:
            return saved

        method = plan_to_method(saved)
        make = planning(traced, resolve_devices(method.devices))
        plan = self._for_batch(traced, method.options(), make)
        warnings.warn(
            f"The plan was made for another call: {found}. Its stages, micro-batches, schedule and rematerialisation "
            f"are kept, and the shardings were solved again: {plan.cost.total_s:.3g} s per step, where the plan had "
            f"{saved.cost.total_s:.3g} s.",
            UserWarning,
            stacklevel=2,
        )
        return plan

    def _new_plan(self, traced: TracedStep, options: PlanOptions, make: MakePlan, *, is_first: bool) -> Plan:
        """The plan of a method, but for what it or the step asks and the devices cannot have; a warning says so."""
        try:
            return self._for_batch(traced, options, make)
        except InfeasibleError as error:
            relaxed = _relaxed(traced, error, is_first=is_first)
            if relaxed is None:
                raise
            relax, what = relaxed
            try:
                plan = self._for_batch(traced, options, make, relax)
            except InfeasibleError:
                raise error from None
            warnings.warn(f"{error} {what}", UserWarning, stacklevel=2)
            return plan

    def _for_batch(self, traced: TracedStep, options: PlanOptions, make: MakePlan, relax: Relax | None = None) -> Plan:
        """The plan with as many micro-batches as the options say, or with the most below that which the batch and the
        devices allow, with a warning.

        Raises the error of the largest number if the devices divide the micro-batches of none.
        """
        uneven: InfeasibleError | None = None
        for n in numbers_to_try(traced, options.n_micro_batches, self._on_ragged):
            try:
                plan = make(dataclasses.replace(options, n_micro_batches=n), relax)
            except InfeasibleError as error:
                if n != options.n_micro_batches:
                    error.add_note(explain_fewer(traced, options.n_micro_batches, n))
                if not is_uneven(error):
                    raise
                uneven = uneven or error
                continue
            warn_of_fewer(traced, options.n_micro_batches, plan)
            return plan
        assert uneven is not None
        raise uneven

    def _known_like(self, traced: TracedStep, target: Target) -> Plan | None:
        """The latest plan there is for the same cluster and a step with the same arguments, of other shapes."""
        for (_, *where), plan in reversed(self._plans.items()):
            paths = tuple(value.path for value in plan.inputs)
            if where == [target.cluster, target.logical_mesh] and paths == traced.in_paths:
                return plan
        return None


def _relaxed(traced: TracedStep, error: InfeasibleError, *, is_first: bool) -> tuple[Relax, str] | None:
    """What a step can do without if there is no plan with it, and how a warning says so; None if there is nothing."""
    # A `with_sharding_constraint` may be for a mesh that the plan does not have.
    if any(map(is_constraint, traced.flat.eqns)):
        return AutoShardingOption.without_constraints, "The step is planned without its sharding constraints."

    # The devices may not divide the last batch of an epoch. Its examples are split in another way or not at all.
    if not is_first and is_uneven(error):
        what = "This batch has another shape than the one before, so it is planned without this split."
        return AutoShardingOption.for_any_batch, what
    return None


def state_shapes(traced: TracedStep) -> Any:
    """The state that a traced function returns, with a shape in place of every leaf."""
    avals = [aval_of(atom) for atom in traced.flat.outvars]
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=is_weak(aval)) for aval in avals]
    return jax.tree.unflatten(traced.out_tree, shapes)


def _note_last(plan: Plan, layers: Callable[[], tuple[tuple[int, ...], ...]]) -> None:
    StepPlanner.last_plan, StepPlanner.last_layers = plan, staticmethod(layers)


def _layers_in(plan: Plan) -> tuple[tuple[int, ...], ...]:
    return tuple(stage.layers for stage in plan.stages)


def _layers_of_stages(
    traced: TracedStep, method: Method | FollowParallel | Plan, plan: Plan
) -> tuple[tuple[int, ...], ...]:
    """The layers of each stage. If there is one stage, the layers into which the method would have cut the step."""
    from minialpa.inter.layers.cut_scans import whole_scans
    from minialpa.inter.layers.layered_step import LayeredStep

    if plan.remat:
        return _layers_in(plan)
    option = None if isinstance(method, Plan | FollowParallel) else method.options().layers
    if option is None or traced.n_groups == 0:  # a step that returns its arguments
        return ((0,),)
    return (tuple(range(max(1, whole_scans(LayeredStep(step=traced, fingerprint=plan.fingerprint), option).n_layers))),)
