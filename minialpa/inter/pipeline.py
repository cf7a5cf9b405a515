"""The planner: a traced step, a cluster and options in, a `Plan` out. Pure functions; no devices.

The planner tries plans in this order and keeps the fastest that fits:

    check the request                                                             context.py
    stages: one stage, the user's stages, or the stages that a search finds       one_stage.py, here, searched_plan.py
    for each choice: rematerialise -> micro-batches -> tasks -> specs -> plan     build_plan.py
    refinements: change one decision, keep the change if the plan gets faster     refine.py
    variants: activations kept or recomputed, weights cast once or in each pass   here
    after a search: fixed methods such as DataParallel, for comparison            by_name.py

Most attempts plan a *short step*, in which four layers stand for each run of equal layers. Such a plan is a `Sketch`.
The best sketches become plans of the whole step in the end (whole_plan.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from minialpa.cluster import ClusterSpec, LogicalMesh
from minialpa.errors import InfeasibleError, ShardingError
from minialpa.inter.build_plan import Sketch, StageTooLargeError, best_of, plan_stages, preference, staged_step_of
from minialpa.inter.by_name import best_with_methods_by_name
from minialpa.inter.context import PlanningContext, check_request, compiler_of
from minialpa.inter.layer_choices import or_mixed_choices, plan_of_mix
from minialpa.inter.layers.layered_step import CutStep, layered_step
from minialpa.inter.one_stage import plan_on_best_submesh, plan_on_submesh
from minialpa.inter.plan_details import alternatives_to
from minialpa.inter.refine import or_longer_scans, or_synthesised
from minialpa.inter.search.stage_solve import StageSolver
from minialpa.inter.search.user_stages import DecidedStage, given_stages
from minialpa.inter.search_payoff import or_equal_stages, plan_if_not_searched, without_search
from minialpa.inter.short_plan import NotExpandedError
from minialpa.inter.staging.cast_weights import casts_weights
from minialpa.inter.staging.replan import options_of
from minialpa.inter.staging.stack_matrices import stacks_matrices
from minialpa.inter.whole_plan import whole_plan
from minialpa.intra.memory.compiler import Compiler
from minialpa.options import (
    MOVING,
    AutoLayerOption,
    AutoStageOption,
    FixedLayerOption,
    LayerOption,
    PlanOptions,
    Remat,
    remats,
)
from minialpa.plan import Plan
from minialpa.support.progress import Report
from minialpa.tracing.trace import TracedStep

#: Sketches that are expanded to the whole step, the best first. If all fail, the planner replans the whole step.
_MOST_SKETCHES = 3
#: Part of a step that updates take before stacks of matrices are planned. By choice: that plans the whole step.
_LITTLE_UPDATE = 0.01


def plan_step(
    traced: TracedStep,
    cluster: ClusterSpec,
    options: PlanOptions,
    *,
    compiler: Compiler | None = None,
    logical_mesh: LogicalMesh | None = None,
    progress: Report | None = None,
) -> Plan:
    """Plan `traced` on `cluster`.

    compiler: the model of the memory that XLA allocates; by default `compiler_of(cluster)`.
    logical_mesh: the user's view of all devices; None if the planner chooses.
    Raises InfeasibleError if no plan fits in memory, ShardingError if the step or the cluster cannot have the options.
    """
    context = PlanningContext(
        traced=traced,
        cluster=cluster,
        solver=StageSolver(compiler or compiler_of(cluster)),
        options=options,
        logical_mesh=logical_mesh,
        report=progress or (lambda what, done, total: None),
    )
    check_request(context)
    try:
        plan = _whole(context, _best_plan(context))
    except (NotExpandedError, InfeasibleError):
        # Memory of a short step is a prediction; the whole step may fit.
        if not len(context.sublayered):
            raise
        plan = _best_plan(dataclasses.replace(context, shortens=False))
    if plan.schedule == "zb" or options.choose_schedule:
        plan = or_synthesised(plan)
    others = [one for one in context.made if one.cluster == plan.cluster]
    return dataclasses.replace(plan, alternatives=alternatives_to(plan, others, Sketch))


def _whole(context: PlanningContext, best: Plan) -> Plan:
    """The plan of the whole step for `best`, or for the next best attempts if it does not fit.

    Only attempts on the same devices compete. The lower bound that the search proved holds for all of them.
    """
    others = [plan for plan in context.made if plan.cluster == best.cluster and preference(plan) > preference(best)]
    context.report("expanding the plan", 0, 0)
    ranked = [best, *sorted(others, key=preference)[: _MOST_SKETCHES - 1]]
    return _first_whole([dataclasses.replace(plan, certificate=best.certificate) for plan in ranked])


def _first_whole(plans: Sequence[Plan]) -> Plan:
    for plan in plans[:-1]:
        with contextlib.suppress(InfeasibleError):
            return whole_plan(plan)
    return whole_plan(plans[-1])


def _best_plan(context: PlanningContext) -> Plan:
    """The best plan, or its `Sketch`, over all decisions that the options leave open."""
    options = context.options
    best_variant = partial(_best_variant, context)
    if not isinstance(options.stages, AutoStageOption):
        return best_variant(_planned(context))

    # If the search may use only data-parallel or only model-parallel shapes, shardings are restricted in the same way.
    auto = options.stages
    searched = context.asking(sharding=auto.sharding(options.sharding))
    plan = plan_if_not_searched(searched, auto)
    if plan is not None:
        return without_search(searched, auto, best_variant(or_equal_stages(searched, auto, plan, _planned)))
    return best_with_methods_by_name(searched, auto, _planned, best_variant)


def _planned(context: PlanningContext) -> Plan:
    """The best plan without variants, and without a comparison with fixed methods."""
    options = context.options
    if options.layers is None:  # a method without a pipeline
        return plan_on_submesh(context)
    if not isinstance(options.stages, AutoStageOption):
        return _plan_on_given_stages(context, options.layers)
    if context.traced.n_groups == 0:  # without layers, such as a step that computes no gradients
        return plan_on_best_submesh(context, options.stages)
    # Imported here: most small steps do not search.
    from minialpa.inter.searched_plan import plan_on_searched_stages

    return plan_on_searched_stages(context, options.layers, options.stages)


# ---- stages that the user gives --------------------------------------------------------------------------------------


def _plan_on_given_stages(context: PlanningContext, layers: LayerOption) -> Plan:
    """The best plan with the user's stages."""

    def attempt(choices: tuple[Remat, ...]) -> Plan:
        cut = _cut_step(context, layers, recomputes=choices != ("none",))
        stages = given_stages(context.cluster, context.options, cut.n_layers)
        _check_stages_on(context.logical_mesh, stages)
        return plan_stages(context, layered_step(cut, choices * (cut.n_layers // len(choices))), stages)

    given = remats(layers, 1)
    if len(given) == 1:
        best = attempt(given[0])
    else:
        best = _plan_with_open_choices(context, given, attempt, _cut_step(context, layers, recomputes=True))
    if context.logical_mesh is None and layers == AutoLayerOption():
        return or_longer_scans(context, best, _cut_step(context, layers, recomputes=False))
    return best


def _plan_with_open_choices(
    context: PlanningContext,
    given: Sequence[tuple[Remat, ...]],
    attempt: Callable[[tuple[Remat, ...]], Plan],
    cut: CutStep,
) -> Plan:
    """Raises the error of the choice with the least memory."""
    try:
        return or_mixed_choices(context, best_of(partial(attempt, choices) for choices in given), cut)
    except StageTooLargeError:
        mixed = plan_of_mix(context, cut, given_stages(context.cluster, context.options, cut.n_layers))
        if mixed is not None:
            return mixed
        if context.cluster.device.host_bytes is None:
            raise
    return best_of(partial(attempt, (choice,)) for choice in MOVING)


def _cut_step(context: PlanningContext, layers: LayerOption, *, recomputes: bool) -> CutStep:
    """The step with its scans over layers cut, or with whole scans if no scan can be cut or a cut has no use.

    A cut lets a stage end inside a scan, and lets layers that recompute values keep fewer values. The layers of a
    `FixedLayerOption` always refer to cut scans.
    """
    cut = context.cut_scans(layers)
    if cut is None or isinstance(layers, FixedLayerOption):
        return cut or context.whole_scans(layers)
    one_stage = len(given_stages(context.cluster, context.options, cut.n_layers)) == 1
    return context.whole_scans(layers) if one_stage and not recomputes else cut


def _check_stages_on(logical_mesh: LogicalMesh | None, stages: Sequence[DecidedStage]) -> None:
    if logical_mesh is not None and any(s.candidate.n_devices != logical_mesh.n_devices for s in stages):
        raise ShardingError(
            f"`devices` is a LogicalMesh of {logical_mesh.shape}, which has no parts for the {len(stages)} stages. "
            "Pass a ClusterSpec or a list of devices as `devices`."
        )


# ---- variants of the same stages -------------------------------------------------------------------------------------


def _best_variant(context: PlanningContext, plan: Plan) -> Plan:
    """`plan`, or its stages with per-example values kept for later loops, or with weights cast once per step.

    A variant, or one with updates on stacks of matrices, is planned if its option (`keep_activations`, `cast_once`,
    `stack_matrices`) is open, and taken if it fits and is faster.
    """
    options = context.options
    if options.keep_activations is None and plan.n_loops > 1 and staged_step_of(context, plan).split.recomputes_values:
        plan = _or_planned_with(context, plan, keep_activations=True)
    is_open = options.cast_once is None and plan.n_micro_batches > 1 and not plan.casts_once
    if is_open and casts_weights(staged_step_of(context, plan).split):
        plan = _or_planned_with(context, plan, cast_once=True)
    n_devices = max(stage.n_devices for stage in plan.stages)
    is_open = options.stack_matrices is None and not plan.stack_matrices and n_devices > 1
    # Stacks can save the seconds of the update at most. One micro-batch has no update of its own.
    may_gain = plan.n_micro_batches == 1 or plan.cost.update_s > _LITTLE_UPDATE * plan.cost.total_s
    if is_open and may_gain and stacks_matrices(staged_step_of(context, plan)):
        plan = _or_planned_with(context, plan, stack_matrices=n_devices)
    return plan


def _or_planned_with(context: PlanningContext, best: Plan, **options: Any) -> Plan:
    below_s = min(context.below_s, best.cost.total_s)
    variant = dataclasses.replace(context, options=options_of(best), below_s=below_s).reporting("variants")
    other = variant.asking(**options)
    return best_of([lambda: best, lambda: dataclasses.replace(_planned(other), certificate=best.certificate)])
