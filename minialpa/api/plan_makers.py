"""How the plan of a traced step is made: from its options, on the stages of a known plan, or following another plan.

A step and the devices go in. A function of options comes out, some of which may be relaxed; it returns a plan that is
verified, or raises InfeasibleError or TraceError.

Planning imports much, and only the first call of a step plans. So the planner is imported when it is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping

from minialpa.api.plan_folder import PlanFolder
from minialpa.errors import MinialpaError, TraceError
from minialpa.inter.staging.replan import logical_mesh_of, options_of
from minialpa.methods import FollowParallel, Target
from minialpa.options import AutoShardingOption, PlanOptions
from minialpa.plan import PlacedValue, Plan, verify_plan
from minialpa.support.collection import collection_paused
from minialpa.support.progress import ProgressBar
from minialpa.tracing.trace import TracedStep

Relax = Callable[[AutoShardingOption], AutoShardingOption]
#: Plans a step under some options, of which those for the shardings may be relaxed.
MakePlan = Callable[[PlanOptions, Relax | None], Plan]


def planning(traced: TracedStep, target: Target, folder: PlanFolder | None = None) -> MakePlan:
    """Plans a step where `target` says. folder: keeps what is planned, and has what was planned before."""

    def make(options: PlanOptions, relax: Relax | None) -> Plan:
        asked = options if relax is None else options.relaxed(relax)
        if folder is None:
            return _make_plan(traced, asked, target)
        return folder.planned(traced, asked, target, lambda: _make_plan(traced, asked, target))

    return make


def following(traced: TracedStep, method: FollowParallel, target: Target) -> MakePlan:
    """Plans a step so that it keeps to the plan that a method names."""
    return lambda options, relax: follow_plan(traced, method.source(), None, options, target, relax)


def on_known_stages(make: MakePlan, known: Plan | None, asked: PlanOptions) -> MakePlan:
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
                alike = dataclasses.replace(alike, keep_rows=options.keep_rows, cast_once=options.cast_once)
                return make(alike, relax)
        return make(options, relax)

    return make_alike


def follow_plan(
    traced: TracedStep,
    source: Plan,
    placements: Mapping[int, PlacedValue] | None,
    options: PlanOptions,
    target: Target,
    relax: Relax | None = None,
) -> Plan:
    """The plan that keeps to `source`, the plan of another function. placements, relax: see `plan_following`."""
    from minialpa.inter.context import PlanningContext, compiler_of
    from minialpa.inter.followed_plan import plan_following
    from minialpa.inter.search.stage_solve import StageSolver

    with ProgressBar() as bar, collection_paused():
        context = PlanningContext(
            traced=traced,
            cluster=source.cluster,
            solver=StageSolver(compiler_of(source.cluster, target.jax_version)),
            options=options,
            logical_mesh=logical_mesh_of(source),
            report=bar.report,
        )
        plan = plan_following(context, source, placements, relax)
    verify_plan(plan)
    return plan


def _make_plan(traced: TracedStep, options: PlanOptions, target: Target) -> Plan:
    from minialpa.inter.context import compiler_of
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
