"""How plans are made: a traced step and the devices go in; a function from options to a verified plan comes out.

It raises InfeasibleError or TraceError if there is no plan. Importing the planner takes long, so functions do it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping

from minialpa.api.plan_folder import PlanFolder
from minialpa.errors import MinialpaError, TraceError
from minialpa.inter.staging.replan import logical_mesh_of, options_of
from minialpa.methods import FollowParallel, Target
from minialpa.options import (
    AutoShardingOption,
    ManualLayerOption,
    ManualStageOption,
    PlanOptions,
    UniformStageOption,
)
from minialpa.plan import PlacedValue, Plan, verify_plan
from minialpa.support.collection import collection_paused
from minialpa.support.progress import phase
from minialpa.tracing.trace import TracedStep

#: Drops options that no plan satisfies, such as data parallelism of a batch that the devices do not divide.
Relax = Callable[[AutoShardingOption], AutoShardingOption]
#: From options, and a function that relaxes their sharding options or None, to a plan.
MakePlan = Callable[[PlanOptions, Relax | None], Plan]


def planning(traced: TracedStep, target: Target, folder: PlanFolder | None = None) -> MakePlan:
    def make(options: PlanOptions, relax: Relax | None) -> Plan:
        final_options = options if relax is None else options.relaxed(relax)
        if folder is None:
            return _make_plan(traced, final_options, target)
        return folder.planned(traced, final_options, target, lambda: _make_plan(traced, final_options, target))

    return make


def following(traced: TracedStep, method: FollowParallel, target: Target) -> MakePlan:
    return lambda options, relax: follow_plan(traced, method.source(), None, options, target, relax)


def on_known_stages(make: MakePlan, known: Plan | None, asked: PlanOptions) -> MakePlan:
    """`make`, but on the stages of `known` for a number of micro-batches that differs from the method's options
    `asked`.

    Such a batch is smaller than the others, and the state should not move for it. If `make` fails there, the options
    decide, and also in the later attempt with `relax`.
    """
    if known is None or asked.layers is None:
        return make

    def make_on_stages(options: PlanOptions, relax: Relax | None) -> Plan:
        if options.n_micro_batches != asked.n_micro_batches and relax is None:
            with contextlib.suppress(MinialpaError):
                known_options = dataclasses.replace(
                    options_of(known),
                    n_micro_batches=options.n_micro_batches,
                    keep_activations=options.keep_activations,
                    cast_once=options.cast_once,
                    stack_matrices=options.stack_matrices,
                )
                return make(known_options, relax)
        return make(options, relax)

    return make_on_stages


def follow_plan(
    traced: TracedStep,
    source: Plan,
    placements: Mapping[int, PlacedValue] | None,
    options: PlanOptions,
    target: Target,
    relax: Relax | None = None,
) -> Plan:
    """The plan of a step on the meshes of `source`, the plan of another function.

    placements: the present placement of argument leaves, by number.
    relax: see `plan_following`.
    """
    with phase("planning") as report, collection_paused():
        from minialpa.inter.context import PlanningContext, compiler_of
        from minialpa.inter.followed_plan import plan_following
        from minialpa.inter.search.stage_solve import StageSolver

        context = PlanningContext(
            traced=traced,
            cluster=source.cluster,
            solver=StageSolver(compiler_of(source.cluster, target.jax_version)),
            options=options,
            logical_mesh=logical_mesh_of(source),
            report=report,
        )
        plan = plan_following(context, source, placements, relax)
    verify_plan(plan)
    return plan


def _make_plan(traced: TracedStep, options: PlanOptions, target: Target) -> Plan:
    """A new plan, verified. Raises TraceError if the options split examples that no argument holds."""
    _check_batch(traced, options)
    _check_boundaries(traced, options)
    with phase("planning") as report, collection_paused():
        from minialpa.inter.context import compiler_of
        from minialpa.inter.pipeline import plan_step

        plan = plan_step(
            traced,
            target.cluster,
            options,
            compiler=compiler_of(target.cluster, target.jax_version),
            logical_mesh=target.logical_mesh,
            progress=report,
        )
    verify_plan(plan)
    return plan


def _check_boundaries(traced: TracedStep, options: PlanOptions) -> None:
    """Raise TraceError if the options ask for several stages of marked layers, and the step has no mark."""
    match options.stages:
        case UniformStageOption(num_stages=int(n), num_chunks=chunks):
            n_layers = n * chunks
        case ManualStageOption(forward_stage_layer_ids=layers):
            n_layers = sum(map(len, layers))
        case _:
            return
    if n_layers > 1 and traced.n_boundaries == 0 and isinstance(options.layers, ManualLayerOption):
        raise TraceError(
            f"The stages need {n_layers} layers, which end at `mark_pipeline_boundary()`, but the step has no such "
            "call, so it is one layer. Call `mark_pipeline_boundary()` in the model, or set "
            f"`layer_option=AutoLayerOption(layer_num={n_layers})`."
        )


def _check_batch(traced: TracedStep, options: PlanOptions) -> None:
    """Raise TraceError if the options split examples, and no argument is known to hold examples.

    A search that chooses the number of micro-batches accepts a step without candidates, but not with several.
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
