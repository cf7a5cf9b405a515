"""Refinements: a plan in, a plan out with one decision changed if that is better."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Literal

from minialpa.errors import InfeasibleError
from minialpa.inter.build_plan import plan_stages
from minialpa.inter.context import PlanningContext
from minialpa.inter.layers.forward import balanced_runs, layer_flops
from minialpa.inter.layers.layered_step import CutStep, layered_step, with_longer_scans
from minialpa.inter.schedule.chunks import plan_chunks
from minialpa.inter.schedule.schedules import KINDS, live_counts, order_texts
from minialpa.inter.schedule.simulate import link_between, simulate
from minialpa.inter.schedule.synthesis import ChunkWork, PipelineWork, synthesise
from minialpa.inter.search.stage_memory import most_kept
from minialpa.inter.search.user_stages import as_planned, layers_in
from minialpa.plan import PassName, Plan
from minialpa.plan.record import limit_bytes

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
    if len(best.stages) == 1:
        return best
    # Gradients of weights in passes of their own; several runs of layers in each stage; or both.
    fastest = best
    for schedule, n_chunks in (("zb", 1), ("zb", 2), ("1f1b-interleaved", 2), ("1f1b-interleaved", 4)):
        if fastest.cost.bubble_s < _LARGE_BUBBLE * fastest.cost.total_s:
            break
        with contextlib.suppress(InfeasibleError):
            plans = map(or_synthesised, _with_schedule(context, best, cut, schedule, n_chunks))
            fastest = min([fastest, *plans], key=lambda plan: simulate(plan).total_s)
    return fastest


def _with_schedule(context: PlanningContext, best: Plan, cut: CutStep, schedule: str, n_chunks: int) -> list[Plan]:
    """The submeshes of `best` with another schedule; empty if its layers or submeshes do not allow `n_chunks`."""
    n_stages, layers = len(best.stages), [stage.layers for stage in best.stages]
    if n_chunks > 1:
        shapes = {(stage.submesh, stage.logical_shape) for stage in best.stages}
        if n_stages * n_chunks > len(best.remat) or len(shapes) > 1 or context.cluster.host_devices:
            return []
        # Runs of layers of about equal work.
        runs = balanced_runs(layer_flops(cut.step, best.layer_of_group), n_stages * n_chunks)
        layers = layers_in(runs, n_stages, in_v=schedule == "zb")

    asking = context.reporting("refinements").asking(n_micro_batches=best.n_micro_batches, schedule=schedule)
    stages = [as_planned(stage, context.cluster, own) for stage, own in zip(best.stages, layers, strict=True)]
    return [plan_stages(asking, layered_step(cut, best.remat), stages)]


def or_synthesised(best: Plan) -> Plan:
    """A pipeline with split backward passes, with an order made for its seconds and free memory, if that is faster."""
    if len(best.stages) == 1 or not any(one.kind == "weights" for stage in best.stages for one in stage.passes):
        return best

    made = synthesise(_work_of(best))
    gain_s = simulate(best).total_s - simulate(best, made).total_s
    if gain_s <= 0:
        return best

    # The shardings stay: only the micro-batches in flight, and the wait of the stages, are others.
    stages = tuple(
        dataclasses.replace(stage, peak_bytes=stage.fixed_bytes + most_kept(stage.kept_bytes, live_counts(made, k)))
        for k, stage in enumerate(best.stages)
    )
    cost = dataclasses.replace(
        best.cost,
        total_s=best.cost.total_s - gain_s,
        bubble_s=max(0.0, best.cost.bubble_s - gain_s),
        peak_bytes=tuple(stage.peak_bytes for stage in stages),
    )
    return dataclasses.replace(best, schedule="zb", orders=order_texts(made), stages=stages, cost=cost)


def _work_of(plan: Plan) -> PipelineWork:
    """Passes of the first loop with gradients: other loops with gradients have the same order."""
    size = plan_chunks(plan).size(plan.n_micro_batches)
    passes = [one for stage in plan.stages for one in stage.passes]
    loop = min(one.loop for one in passes if one.kind == "weights")
    seconds = {(one.kind, one.chunk): one.seconds for one in passes if one.loop == loop}

    def sends_s(kind: Literal["forward", "backward"], chunk: int, neighbour: int) -> float:
        n_bytes = sum(
            t.n_bytes
            for t in plan.transfers
            if t.source == PassName(kind, chunk, loop) and t.target.kind == kind and t.target.number == neighbour
        )
        link = link_between(plan, size.stage_of[chunk], size.stage_of[neighbour]) if n_bytes else None
        return link.transfer_s(n_bytes) if link else 0.0

    def work_of(chunk: int, stage: int) -> ChunkWork:
        kept, own = plan.stages[stage].kept_bytes, size.chunks_of(stage)
        until_backward, until_weights, after_backward = kept[own.index(chunk) :: len(own)]
        forward_s, backward_s, weights_s = (seconds.get((kind, chunk), 0.0) for kind in KINDS)
        return ChunkWork(
            seconds=(forward_s, backward_s, weights_s),
            kept=(until_backward, until_weights, after_backward),
            sends_s=(sends_s("forward", chunk, chunk + 1), sends_s("backward", chunk, chunk - 1)),
        )

    chunks = tuple(itertools.starmap(work_of, enumerate(size.stage_of)))
    # For micro-batches in flight.
    free = (max(limit_bytes(plan, k), stage.peak_bytes) - stage.fixed_bytes for k, stage in enumerate(plan.stages))
    return PipelineWork(size, chunks, tuple(free))
