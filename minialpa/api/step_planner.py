"""The plan of a traced step: made by a method, made to follow the plan of another function, or a saved one.

Planning imports much, and only the first call of a step plans. So the planner is imported when it is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax

from minialpa.api.following import Followed
from minialpa.api.ragged import OnRagged, explain_fewer, numbers_to_try, warn_of_fewer
from minialpa.cluster import ClusterSpec, LogicalMesh
from minialpa.errors import InfeasibleError, MinialpaError, TraceError
from minialpa.inter.staging.replan import check_fits, difference, logical_mesh_of, options_of
from minialpa.methods import (
    CreateStateParallel,
    FollowingMethod,
    FollowParallel,
    Method,
    Target,
    plan_to_method,
    resolve_devices,
)
from minialpa.options import AutoShardingOption, PlanOptions
from minialpa.plan import PlacedValue, Plan, verify_plan
from minialpa.support.collection import collection_paused
from minialpa.support.progress import ProgressBar
from minialpa.tracing.fingerprint import Fingerprint
from minialpa.tracing.jaxprs import aval_of, is_constraint, is_weak
from minialpa.tracing.trace import TracedStep

OnStale = Literal["refuse", "replan"]
Relax = Callable[[AutoShardingOption], AutoShardingOption]
#: Plans a step under some options, of which those for the shardings may be relaxed.
_MakePlan = Callable[[PlanOptions, Relax | None], Plan]
#: What a plan is made for: a step on a cluster, or on a view of its devices.
_PlannedFor = tuple[Fingerprint, ClusterSpec, LogicalMesh | None]


class StepPlanner:
    """Plans one function, for each set of argument shapes and each cluster once.

    A session that starts again on the same hosts, or on hosts that it had before, therefore plans nothing.
    """

    #: The plan that was made or loaded last, for any function. Scripts that were written for Alpa ask for it.
    last_plan: ClassVar[Plan | None] = None
    #: The layers of each of its stages, also where the answer is one stage and the plan itself needs no layers.
    last_layers: ClassVar[tuple[tuple[int, ...], ...]] = ()

    def __init__(self, method: Method | FollowingMethod | Plan, on_stale: OnStale, on_ragged: OnRagged) -> None:
        self._method, self._on_stale, self._on_ragged = method, on_stale, on_ragged
        self._plans: dict[_PlannedFor, Plan] = {}
        self._given: set[_PlannedFor] = set()

    def remember(self, plan: Plan) -> None:
        """Use `plan` where the step and the cluster are those that it was made for, instead of planning again."""
        verify_plan(plan)
        key = (plan.fingerprint, plan.cluster, logical_mesh_of(plan))
        self._plans[key] = plan
        self._given.add(key)

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

        from minialpa.intra.graph.option_constraints import UnevenBatchError

        # How the training step splits its examples is nothing that this function has asked for, so that one number of
        # micro-batches will do.
        n, *_ = numbers_to_try(traced, followed.options.n_micro_batches, self._on_ragged)
        options = dataclasses.replace(followed.options, n_micro_batches=n)
        arguments = (traced, followed.plan, placements, options, followed.target)
        try:
            plan = _follow_plan(*arguments)
        except InfeasibleError as error:
            if not _is_caused_by(UnevenBatchError, error):
                raise
            plan = _follow_plan(*arguments, AutoShardingOption.for_any_batch)
        warn_of_fewer(traced, followed.options.n_micro_batches, plan)
        StepPlanner.last_plan, StepPlanner.last_layers = plan, tuple(stage.layers for stage in plan.stages)
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
                plan = self._new_plan(traced, method.options(), _following(traced, method, target), is_first=is_first)
            case method:
                key = (traced.fingerprint, target.cluster, target.logical_mesh)
                if key not in self._plans:
                    make = _on_known_stages(
                        _planning(traced, target), self._known_like(traced, target), method.options()
                    )
                    self._plans[key] = self._new_plan(traced, method.options(), make, is_first=is_first)
                plan = self._plans[key]

        StepPlanner.last_plan, StepPlanner.last_layers = plan, _layers_of_stages(traced, self._method, plan)
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
        make = _planning(traced, resolve_devices(method.devices))
        plan = self._for_batch(traced, method.options(), make)
        warnings.warn(
            f"The plan was made for another call: {found}. Its stages, micro-batches, schedule and rematerialisation "
            f"are kept, and the shardings were solved again: {plan.cost.total_s:.3g} s per step, where the plan had "
            f"{saved.cost.total_s:.3g} s.",
            UserWarning,
            stacklevel=2,
        )
        return plan

    def _new_plan(self, traced: TracedStep, options: PlanOptions, make: _MakePlan, *, is_first: bool) -> Plan:
        """The plan of a method, but for what it or the step asks and the devices cannot have; a warning says so.

        A `with_sharding_constraint` may be for a mesh that the plan does not have. The devices may not divide the last
        batch of an epoch; then its examples are split in another way or not at all.
        """
        from minialpa.intra.graph.option_constraints import UnevenBatchError

        try:
            return self._for_batch(traced, options, make)
        except InfeasibleError as error:
            if any(map(is_constraint, traced.flat.eqns)):
                relax, how = (
                    AutoShardingOption.without_constraints,
                    "The step is planned without its sharding constraints.",
                )
            elif not is_first and _is_caused_by(UnevenBatchError, error):
                how = "This batch has another shape than the one before, so it is planned without the option."
                relax = AutoShardingOption.for_any_batch
            else:
                raise
            try:
                plan = self._for_batch(traced, options, make, relax)
            except InfeasibleError:
                raise error from None
            warnings.warn(f"{error} {how}", UserWarning, stacklevel=2)
            return plan

    def _for_batch(self, traced: TracedStep, options: PlanOptions, make: _MakePlan, relax: Relax | None = None) -> Plan:
        """The plan with as many micro-batches as the options say, or with the most below that which the batch and the
        devices allow, with a warning.

        Raises the error of the largest number if the devices divide the micro-batches of none.
        """
        from minialpa.intra.graph.option_constraints import UnevenBatchError

        uneven: InfeasibleError | None = None
        for n in numbers_to_try(traced, options.n_micro_batches, self._on_ragged):
            try:
                plan = make(dataclasses.replace(options, n_micro_batches=n), relax)
            except InfeasibleError as error:
                if n != options.n_micro_batches:
                    error.add_note(explain_fewer(traced, options.n_micro_batches, n))
                if not _is_caused_by(UnevenBatchError, error):
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


def _planning(traced: TracedStep, target: Target) -> _MakePlan:
    return lambda options, relax: _make_plan(traced, options if relax is None else options.relaxed(relax), target)


def _following(traced: TracedStep, method: FollowParallel, target: Target) -> _MakePlan:
    return lambda options, relax: _follow_plan(traced, method.source(), None, options, target, relax)


def _on_known_stages(make: _MakePlan, known: Plan | None, asked: PlanOptions) -> _MakePlan:
    """`make`, but on the stages of a known plan where the number of micro-batches is not the one that was asked for.

    asked: the options of the method. Then the state is not moved between stages for one batch. Where this cannot be,
    the method decides.
    """
    if known is None or asked.layers is None:
        return make

    def make_alike(options: PlanOptions, relax: Relax | None) -> Plan:
        if options.n_micro_batches != asked.n_micro_batches and relax is None:
            with contextlib.suppress(MinialpaError):
                alike = dataclasses.replace(options_of(known), n_micro_batches=options.n_micro_batches)
                return make(dataclasses.replace(alike, keep_rows=options.keep_rows), relax)
        return make(options, relax)

    return make_alike


def state_shapes(traced: TracedStep) -> Any:
    """The state that a traced function returns, with a shape in place of every leaf."""
    avals = [aval_of(atom) for atom in traced.flat.outvars]
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=is_weak(aval)) for aval in avals]
    return jax.tree.unflatten(traced.out_tree, shapes)


def _is_caused_by(kind: type[Exception], error: BaseException) -> bool:
    """Whether an error is of a kind, or was raised for one that is. An error may be raised for itself."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__
    return any(isinstance(cause, kind) for cause in causes)


def _make_plan(traced: TracedStep, options: PlanOptions, target: Target) -> Plan:
    from minialpa.inter.compilers import compiler_of
    from minialpa.inter.pipeline import plan_step

    _check_batch(traced, options)
    with ProgressBar() as bar, collection_paused():
        plan = plan_step(
            traced,
            target.cluster,
            options,
            compiler=compiler_of(target.cluster, target.jax_version),
            logical_mesh=target.logical_mesh,
            progress=bar.report,
        )
    verify_plan(plan)
    return plan


def _follow_plan(
    traced: TracedStep,
    source: Plan,
    placements: Mapping[int, PlacedValue] | None,
    options: PlanOptions,
    target: Target,
    relax: Relax | None = None,
) -> Plan:
    """The plan that keeps to `source`, the plan of another function. placements, relax: see `plan_following`."""
    from minialpa.inter.compilers import compiler_of
    from minialpa.inter.context import PlanningContext
    from minialpa.inter.followed_plan import plan_following

    with ProgressBar() as bar, collection_paused():
        context = PlanningContext(
            traced=traced,
            cluster=source.cluster,
            compiler=compiler_of(source.cluster, target.jax_version),
            options=options,
            logical_mesh=logical_mesh_of(source),
            report=bar.report,
        )
        plan = plan_following(context, source, placements, relax)
    verify_plan(plan)
    return plan


def _check_batch(traced: TracedStep, options: PlanOptions) -> None:
    """Raise TraceError if a method splits the examples of a step and no argument is known to hold them.

    A search that may choose micro-batches, or none, goes on if there is no candidate, but does not choose between
    candidates.
    """
    if traced.no_batch is None:
        return
    sharding = options.sharding
    if options.n_micro_batches > 1:
        raise TraceError(f"`num_micro_batches={options.n_micro_batches}` splits examples. {traced.no_batch.reason}")
    if sharding.data_parallel or sharding.force_batch_dim_to_mesh_dim is not None:
        raise TraceError(f"Data parallelism splits examples. {traced.no_batch.reason}")
    if options.choose_micro_batches and traced.no_batch.ambiguous:
        raise TraceError(f"The planner may split examples. {traced.no_batch.reason}")


def _layers_of_stages(
    traced: TracedStep, method: Method | FollowParallel | Plan, plan: Plan
) -> tuple[tuple[int, ...], ...]:
    """The layers of each stage. If there is one stage, the layers into which the method would have cut the step."""
    from minialpa.inter.layers.cut_scans import whole_scans
    from minialpa.inter.layers.layered_step import LayeredStep

    if plan.remat:
        return tuple(stage.layers for stage in plan.stages)
    option = None if isinstance(method, Plan | FollowParallel) else method.options().layers
    if option is None or traced.n_groups == 0:  # a step that returns its arguments
        return ((0,),)
    return (tuple(range(max(1, whole_scans(LayeredStep(step=traced, fingerprint=plan.fingerprint), option).n_layers))),)
