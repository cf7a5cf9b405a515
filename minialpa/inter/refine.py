"""Refinements: a plan in, a plan out with one decision changed if that is better."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

from minialpa.errors import InfeasibleError
from minialpa.inter.build_plan import plan_stages
from minialpa.inter.context import PlanningContext
from minialpa.inter.layers.forward import balanced_runs, layer_flops
from minialpa.inter.layers.layered_step import CutStep, layered_step, with_longer_scans
from minialpa.inter.schedule.chunks import plan_chunks
from minialpa.inter.schedule.simulate import simulate
from minialpa.inter.search.user_stages import as_planned
from minialpa.plan import Plan

#: Other schedules are tried if the bubble is at least this part of the step. By choice: each try solves all stages.
_LARGE_BUBBLE = 0.02
#: Long scans may take up to this multiple of the step time: their programs are smaller and compile sooner.
_AS_FAST = 1.01


def or_longer_scans(context: PlanningContext, best: Plan, cut: CutStep) -> Plan:
    """`best`, or one scan for all rows of a chunk if that is as fast: its programs do not grow with the layers."""
    if not best.row_blocks or set(best.remat) != {"none"}:
        return best

    chunks = plan_chunks(best)
    longer = with_longer_scans(cut, chunks.of_group(range(len(best.remat))))
    if longer.row_blocks == best.row_blocks:
        return best

    # Each chunk is one layer of the new step.
    layers_of = [tuple(c for c, k in enumerate(chunks.stage_of) if k == stage) for stage in range(chunks.n_stages)]
    stages = [as_planned(s, context.cluster, layers) for layers, s in zip(layers_of, best.stages, strict=True)]
    with_number = context.reporting("refinements").asking(n_micro_batches=best.n_micro_batches, schedule=best.schedule)
    layered = layered_step(longer, tuple(itertools.repeat("none", longer.n_layers)))
    try:
        plan = plan_stages(with_number, layered, stages)
    except InfeasibleError:
        return best
    if plan.cost.total_s > _AS_FAST * best.cost.total_s:
        return best
    return dataclasses.replace(plan, certificate=best.certificate)


def or_shorter_bubble(context: PlanningContext, best: Plan, cut: CutStep) -> Plan:
    """`best`, or its submeshes with another schedule, if stages wait long and another schedule is faster."""
    if len(best.stages) == 1 or best.cost.bubble_s < _LARGE_BUBBLE * best.cost.total_s:
        return best
    return min(
        [best, *_interleaved(context, best, cut), *_zero_bubble(context, best, cut)],
        key=lambda plan: simulate(plan).total_s,
    )


def _zero_bubble(context: PlanningContext, best: Plan, cut: CutStep) -> list[Plan]:
    """`best` with gradients of weights in passes of their own; empty if that does not fit."""
    layered = layered_step(cut, best.remat)
    split = context.reporting("refinements").asking(n_micro_batches=best.n_micro_batches, schedule="zb-h1")
    stages = [as_planned(stage, context.cluster, stage.layers) for stage in best.stages]
    try:
        return [plan_stages(split, layered, stages)]
    except InfeasibleError:
        return []


def _interleaved(context: PlanningContext, best: Plan, cut: CutStep) -> list[Plan]:
    """Plans with several runs of layers in each submesh of `best`, which is worth the transfers of a long bubble."""
    n_stages, n_layers = len(best.stages), len(best.remat)
    shapes = {(stage.submesh, stage.logical_shape) for stage in best.stages}
    if len(shapes) > 1 or context.cluster.host_devices:
        return []

    # Each stage has several runs of layers of about equal work.
    layered = layered_step(cut, best.remat)
    interleaved = context.reporting("refinements").asking(
        n_micro_batches=best.n_micro_batches, schedule="1f1b-interleaved"
    )
    flops = layer_flops(cut.step, best.layer_of_group)

    def attempt(n_chunks: int) -> Plan:
        runs = balanced_runs(flops, n_stages * n_chunks)
        stages = [as_planned(stage, context.cluster, sum(runs[k::n_stages], ())) for k, stage in enumerate(best.stages)]
        return plan_stages(interleaved, layered, stages)

    plans: list[Plan] = []
    for n_chunks in (2, 4):
        if n_stages * n_chunks <= n_layers:
            with contextlib.suppress(InfeasibleError):
                plans.append(attempt(n_chunks))
    return plans
