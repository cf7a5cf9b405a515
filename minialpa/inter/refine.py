"""Refinements: a plan in, a plan out with one decision changed if that is better."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Literal

from minialpa.errors import InfeasibleError
from minialpa.inter.build_plan import plan_stages
from minialpa.inter.context import PlanningContext
from minialpa.inter.layers.forward import balanced_runs, layer_flops
from minialpa.inter.layers.layered_step import CutStep, layered_step, with_longer_scans
from minialpa.inter.schedule.chunks import plan_chunks
from minialpa.inter.schedule.schedules import live_counts, order_text
from minialpa.inter.schedule.simulate import link_between, simulate
from minialpa.inter.schedule.synthesis import StageWork, synthesise
from minialpa.inter.search.user_stages import as_planned
from minialpa.plan import PassName, Plan, StagePlan

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


def or_synthesised(best: Plan) -> Plan:
    """A pipeline with split backward passes, with an order made for its seconds and free memory, if that is faster."""
    size = plan_chunks(best).size(best.n_micro_batches)
    if len(best.stages) == 1 or not any(one.kind == "weights" for stage in best.stages for one in stage.passes):
        return best

    made = synthesise([_work_of(best, k) for k in range(size.n_stages)], size.n_micro_batches)
    timeline = simulate(best, made)
    gain_s = simulate(best).total_s - timeline.total_s
    if gain_s <= 0:
        return best

    # The shardings stay: only the micro-batches in flight, and the wait of the stages, are others.
    stages = tuple(
        dataclasses.replace(stage, peak_bytes=stage.fixed_bytes + _most_kept(stage, live_counts(made, k)))
        for k, stage in enumerate(best.stages)
    )
    cost = dataclasses.replace(
        best.cost,
        total_s=best.cost.total_s - gain_s,
        bubble_s=max(0.0, best.cost.bubble_s - gain_s),
        peak_bytes=tuple(stage.peak_bytes for stage in stages),
    )
    return dataclasses.replace(
        best, schedule="zb", orders=tuple(map(order_text, made.passes)), stages=stages, cost=cost
    )


def _work_of(plan: Plan, k: int) -> StageWork:
    stage = plan.stages[k]
    seconds = {one.kind: one.seconds for one in stage.passes}
    limit = stage.option.limit_bytes(plan.cluster.device_of(stage.first_device // plan.cluster.devices_per_host))

    def sends_s(kind: Literal["forward", "backward"], neighbour: int) -> float:
        n_bytes = sum(
            t.n_bytes for t in plan.transfers if t.source == PassName(kind, k) and t.target.number == neighbour
        )
        return link_between(plan, k, neighbour).transfer_s(n_bytes) if n_bytes else 0.0

    until_backward, until_weights, after_backward = stage.kept_bytes
    return StageWork(
        seconds=(seconds.get("forward", 0.0), seconds.get("backward", 0.0), seconds.get("weights", 0.0)),
        kept=(until_backward, until_weights, after_backward),
        budget=math.inf if limit is None else max(limit, stage.peak_bytes) - stage.fixed_bytes,
        sends_s=(sends_s("forward", k + 1), sends_s("backward", k - 1)),
    )


def _most_kept(stage: StagePlan, moments: Sequence[Sequence[int]]) -> float:
    return max(sum(n * size for n, size in zip(live, stage.kept_bytes, strict=True)) for live in moments)


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
