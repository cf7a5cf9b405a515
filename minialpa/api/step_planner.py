"""Plans for one function: a traced step and its devices go in; a new, saved or followed plan comes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Literal

import jax

from minialpa.api.following import Followed
from minialpa.api.pins import NO_PINS, Pins
from minialpa.api.plan_folder import PlanFolder
from minialpa.api.plan_makers import MakePlan, Relax, follow_plan, following, on_known_stages, planning
from minialpa.api.ragged import OnRagged, explain_fewer, explain_most, is_uneven, numbers_to_try, warn_of_fewer
from minialpa.cluster import ClusterSpec, LogicalMesh
from minialpa.errors import InfeasibleError
from minialpa.inter.staging.replan import check_fits, difference, logical_mesh_of
from minialpa.ir.equations import aval_of, type_of
from minialpa.methods import (
    CreateStateParallel,
    FollowingMethod,
    FollowParallel,
    Method,
    Target,
    offloads_optimizer,
    options_for,
    plan_to_method,
    resolve_devices,
)
from minialpa.options import AutoShardingOption, PlanningEffort, PlanOptions, Shardings
from minialpa.plan import Plan, verify_plan
from minialpa.support.private_jax import warn
from minialpa.tracing.fingerprint import Fingerprint
from minialpa.tracing.trace import TracedStep

OnStale = Literal["refuse", "replan"]
#: The step, its pins, the cluster, and the user's logical mesh, if any.
_PlannedFor = tuple[Fingerprint, Pins, ClusterSpec, LogicalMesh | None]


class StepPlanner:
    """Plans one function, once for each set of argument shapes and each cluster.

    A session that restarts on earlier hosts reuses their plan.
    """

    #: The latest plan of any function, for `get_last_dp_result`.
    last_plan: ClassVar[Plan | None] = None
    #: The layers of each stage of `last_plan`, on demand: cutting a small step takes longer than planning it.
    last_layers: ClassVar[Callable[[], tuple[tuple[int, ...], ...]]] = staticmethod(tuple)

    def __init__(
        self,
        method: Method | FollowingMethod | Plan,
        on_stale: OnStale,
        on_ragged: OnRagged,
        folder: PlanFolder | None,
        effort: PlanningEffort | None = None,
        shardings: Shardings | None = None,
    ) -> None:
        """folder: keeps new plans. effort, shardings: None for the method's."""
        self._method, self._on_stale, self._on_ragged, self._folder = method, on_stale, on_ragged, folder
        chosen = {"planning_effort": effort, "shardings": shardings}
        self._chosen: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
        self._plans: dict[_PlannedFor, Plan] = {}
        self._remembered_keys: set[_PlannedFor] = set()

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the method, or `offload_optimizer`, keeps the state of the optimizer in host memory."""
        return bool(self._chosen.get("offload_optimizer")) or offloads_optimizer(self._method)

    @contextmanager
    def offload_optimizer(self) -> Iterator[None]:
        """Plan with `offload_optimizer` from now on, unless the body raises an error."""
        self._chosen["offload_optimizer"] = True
        try:
            yield
        except BaseException:
            del self._chosen["offload_optimizer"]
            raise

    def remember(self, plan: Plan) -> None:
        """Use `plan` for its step on its cluster."""
        verify_plan(plan)
        key = (plan.fingerprint, NO_PINS, plan.cluster, logical_mesh_of(plan))
        self._plans[key] = plan
        self._remembered_keys.add(key)

    def forget_given(self) -> None:
        for key in self._remembered_keys:
            del self._plans[key]
        self._remembered_keys.clear()

    def is_given(self, traced: TracedStep, target: Target) -> bool:
        return (
            bool(self._remembered_keys)
            and (traced.fingerprint, NO_PINS, target.cluster, target.logical_mesh) in self._remembered_keys
        )

    def plan_followed(self, traced: TracedStep, followed: Followed, leaves: Sequence[Any]) -> Plan | None:
        """A plan on the meshes of a training step; None if these meshes hold only examples of this call.

        Raises ShardingError or InfeasibleError if the step cannot run there.
        """
        placements = followed.placements(traced, leaves)
        if all(traced.batch_dims[i] is not None for i in placements):
            return None

        # The user gave this function no number of micro-batches, so any valid number works.
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
        _note_last_plan(plan, partial(_layers_in, plan))
        return plan

    def plan(self, traced: TracedStep, target: Target, *, is_first: bool, pins: Pins = NO_PINS) -> Plan:
        """is_first: whether these are the first shapes of the function.
        pins: shardings for the options of the method. The caller checks plans that are made elsewhere.

        Raises InfeasibleError, TraceError, or VerifyError for a saved plan that does not fit.
        """
        match self._method:
            case CreateStateParallel(train_step=train_step, other_args=others):
                return train_step.plan(state_shapes(traced), *others)
            case Plan():
                plan = self._saved_plan(traced, self._method)
            case FollowParallel() as method:
                options = pins.pinned(self._with_choices(method.options()))
                plan = self._new_plan(traced, options, following(traced, method, target), is_first=is_first)
            case method:
                is_given = self.is_given(traced, target)
                key = (traced.fingerprint, NO_PINS if is_given else pins, target.cluster, target.logical_mesh)
                if key not in self._plans:
                    known = self._plan_of_like_call(traced, target)
                    options = pins.pinned(self._with_choices(options_for(method, traced)))
                    make = on_known_stages(planning(traced, target, self._folder), known, options)
                    self._plans[key] = self._new_plan(traced, options, make, is_first=is_first)
                plan = self._plans[key]

        _note_last_plan(plan, partial(_layers_of_stages, traced, self._method, plan))
        return plan

    def _saved_plan(self, traced: TracedStep, saved: Plan) -> Plan:
        """The saved plan; if it is stale and `on_stale` is "replan", a plan with its decisions and new shardings."""
        verify_plan(saved)
        if self._on_stale == "refuse":
            check_fits(traced, saved)
            return saved
        found = difference(traced, saved)
        if found is None:
            return saved

        method = plan_to_method(saved)
        make = planning(traced, resolve_devices(method.devices))
        plan = self._plan_for_batch(traced, self._with_choices(method.options()), make)
        warn(
            f"The plan was made for another call: {found}. minialpa keeps its stages, micro-batches, schedule and "
            f"rematerialisation, and has solved new shardings: {plan.cost.total_s:.3g} s per step instead of "
            f"{saved.cost.total_s:.3g} s.",
        )
        return plan

    def _with_choices(self, options: PlanOptions) -> PlanOptions:
        chosen = self._chosen
        return options.relaxed(lambda one: dataclasses.replace(one, **chosen)) if chosen else options

    def _new_plan(self, traced: TracedStep, options: PlanOptions, make: MakePlan, *, is_first: bool) -> Plan:
        """The plan of a method. Warns if it must drop a constraint that the devices cannot satisfy."""
        try:
            return self._plan_for_batch(traced, options, make)
        except InfeasibleError as error:
            # The devices may not divide the last batch of an epoch.
            if is_first or not is_uneven(error):
                raise
            try:
                plan = self._plan_for_batch(traced, options, make, AutoShardingOption.for_any_batch)
            except InfeasibleError:
                raise error from None
            warn(f"{error} This batch differs in shape from the first one, so it is planned without this split.")
            return plan

    def _plan_for_batch(
        self, traced: TracedStep, options: PlanOptions, make: MakePlan, relax: Relax | None = None
    ) -> Plan:
        """The plan with the options' number of micro-batches or, with a warning, the largest smaller number that works.

        Raises the first error if no number works.
        """
        uneven: InfeasibleError | None = None
        for n in numbers_to_try(traced, options.n_micro_batches, self._on_ragged):
            try:
                plan = make(dataclasses.replace(options, n_micro_batches=n), relax)
            except InfeasibleError as error:
                if n != options.n_micro_batches:
                    error.add_note(explain_fewer(traced, options.n_micro_batches, n))
                if not is_uneven(error):
                    if note := explain_most(traced, dataclasses.replace(options, n_micro_batches=n), error):
                        error.add_note(note)
                    raise
                uneven = uneven or error
                continue
            warn_of_fewer(traced, options.n_micro_batches, plan)
            return plan
        assert uneven is not None
        raise uneven

    def _plan_of_like_call(self, traced: TracedStep, target: Target) -> Plan | None:
        """The latest plan for this cluster and equal argument paths."""
        for (_, _, *where), plan in reversed(self._plans.items()):
            paths = tuple(value.path for value in plan.inputs)
            if where == [target.cluster, target.logical_mesh] and paths == traced.in_paths:
                return plan
        return None


def state_shapes(traced: TracedStep) -> Any:
    """A step's result, with a `jax.ShapeDtypeStruct` for each leaf."""
    avals = [aval_of(atom) for atom in traced.flat.outvars[: traced.out_tree.num_leaves]]
    shapes = list(map(type_of, avals))
    return jax.tree.unflatten(traced.out_tree, shapes)


def _note_last_plan(plan: Plan, layers: Callable[[], tuple[tuple[int, ...], ...]]) -> None:
    StepPlanner.last_plan, StepPlanner.last_layers = plan, staticmethod(layers)


def _layers_in(plan: Plan) -> tuple[tuple[int, ...], ...]:
    return tuple(stage.layers for stage in plan.stages)


def _layers_of_stages(
    traced: TracedStep, method: Method | FollowParallel | Plan, plan: Plan
) -> tuple[tuple[int, ...], ...]:
    """The layers of each stage; for a single stage, all layers of the step."""
    from minialpa.inter.layers.layered_step import LayeredStep, whole_scans

    if plan.remat:
        return _layers_in(plan)
    option = None if isinstance(method, Plan | FollowParallel) else method.options().layers
    if option is None or traced.n_groups == 0:  # a step that returns its arguments
        return ((0,),)
    layered = LayeredStep(plain=traced, fingerprint=plan.fingerprint)
    return (tuple(range(max(1, whole_scans(layered, option).n_layers))),)
