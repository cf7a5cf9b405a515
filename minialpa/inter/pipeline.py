"""The planner: the order in which a step is planned. Pure; no devices.

checks           what the step and its options leave no room for                         checks.py
layers           layer of each forward equation; scans over layers cut, or whole         layers/
stages           none, those that the user gives, or the best of a search, if one pays   one_stage.py one_stage_remat.py
                                                                                         given_plan.py
                                                                                         worth.py searched_plan.py
                                                                                         search/
plan_stages      tasks of every mesh -> shardings -> plan, for each choice that is tried build_plan.py
refinements      one change at a time, kept where the plan gets faster                   refine.py
variants         the same stages with rows kept, or with weights cast once per step      here
by name          after a search: what methods by name make of the step, if that is better by_name.py
"""

from __future__ import annotations

import dataclasses
from functools import partial

from minialpa.cluster import ClusterSpec, LogicalMesh
from minialpa.inter.best import best_of
from minialpa.inter.by_name import best_with_methods_by_name
from minialpa.inter.checks import (
    check_fixed_specs,
    check_logical_mesh,
    check_submeshes,
    warn_of_missing_boundaries,
    warn_of_missing_rules,
)
from minialpa.inter.compilers import compiler_of
from minialpa.inter.context import PlanningContext, Progress
from minialpa.inter.given_plan import plan_on_given_stages
from minialpa.inter.layers.layered_step import LayeredStep
from minialpa.inter.one_stage import plan_on_best_submesh, plan_on_submesh
from minialpa.inter.search.stage_solve import StageSolver
from minialpa.inter.staging.cast_weights import with_weights_cast_once
from minialpa.inter.staging.replan import options_of
from minialpa.inter.staging.staged_step import realise
from minialpa.inter.worth import plan_if_not_searched
from minialpa.intra.memory.compiler import Compiler
from minialpa.options import AutoStageOption, PlanOptions
from minialpa.plan import Plan
from minialpa.tracing.trace import TracedStep


def plan_step(
    traced: TracedStep,
    cluster: ClusterSpec,
    options: PlanOptions,
    *,
    compiler: Compiler | None = None,
    logical_mesh: LogicalMesh | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Plan `traced` on `cluster`. `logical_mesh` overrides the view of the cluster when there is no pipeline.

    `compiler` is None for the one that `compiler_of` assumes for such a cluster, whichever jax is installed here.
    `progress(what, done, total)` is told about long work. Raises InfeasibleError when nothing fits in memory,
    ShardingError when a method asks for devices that the cluster does not have.
    """
    context = PlanningContext(
        traced=traced,
        cluster=cluster,
        solver=StageSolver(compiler or compiler_of(cluster)),
        options=options,
        logical_mesh=logical_mesh,
        report=progress or (lambda what, done, total: None),
    )
    # Before anything long begins.
    warn_of_missing_rules(context)
    warn_of_missing_boundaries(context)
    check_fixed_specs(context)
    check_submeshes(context)
    check_logical_mesh(context)

    best_variant = partial(_best_variant, context)
    if not isinstance(options.stages, AutoStageOption):
        return best_variant(_planned(context))

    # Some spaces of logical shapes stand for options of the shardings.
    auto = options.stages
    searched = context.asking(sharding=auto.sharding(options.sharding))
    plan = plan_if_not_searched(searched, auto)
    if plan is not None:
        return best_variant(plan)
    return best_with_methods_by_name(searched, auto, _planned, best_variant)


def _best_variant(context: PlanningContext, plan: Plan) -> Plan:
    """`plan`, or the same stages with rows kept, or weights cast once, where that is open, is faster and fits."""
    options = context.options
    if options.keep_rows is None and plan.n_loops > 1:
        plan = _or_kept_rows(context, plan)
    if options.cast_once is None and plan.n_micro_batches > 1:
        plan = _or_cast_once(context, plan)
    return plan


def _planned(context: PlanningContext) -> Plan:
    """The best plan of what the options leave open, but for variants of the same stages."""
    options = context.options
    whole = LayeredStep(step=context.traced, fingerprint=context.traced.fingerprint)
    if options.layers is None:
        return plan_on_submesh(context, whole)
    if not isinstance(options.stages, AutoStageOption):
        return plan_on_given_stages(context, whole, options.layers)
    if context.traced.n_groups == 0:  # without layers, such as a step that computes no gradients
        return plan_on_best_submesh(context, whole, options.stages)
    # Imported when something is searched: most small steps do without it.
    from minialpa.inter.searched_plan import plan_on_searched_stages

    return plan_on_searched_stages(context, whole, options.layers, options.stages)


def _or_kept_rows(context: PlanningContext, best: Plan) -> Plan:
    """`best`, or the same stages with what later loops read kept by the earlier ones, where that is faster and fits."""
    if not realise(context.traced, best).staged.split.computes_rows_again:
        return best
    return _or_planned_as(context, best, dataclasses.replace(options_of(best), keep_rows=True))


def _or_cast_once(context: PlanningContext, best: Plan) -> Plan:
    """`best`, or the same stages with weights cast once per step, where that is faster and fits."""
    split = realise(context.traced, best).staged.split
    if with_weights_cast_once(split) is split:
        return best
    return _or_planned_as(context, best, dataclasses.replace(options_of(best), cast_once=True))


def _or_planned_as(context: PlanningContext, best: Plan, options: PlanOptions) -> Plan:
    """`best`, or what these options make of its stages."""
    other = dataclasses.replace(context, options=options)
    return best_of([lambda: best, lambda: dataclasses.replace(_planned(other), certificate=best.certificate)])
