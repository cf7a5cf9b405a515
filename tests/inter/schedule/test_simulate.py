"""Timelines of plans: a second simulation by relaxation, memory, links, deadlock, traces."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minialpa import ClusterSpec, LinkSpec, ShardingError, Timeline, VerifyError, simulate
from minialpa.inter.schedule.schedules import PipelineSize, live_counts, make_schedule
from minialpa.plan import PassName, Plan, PlannedPass, PlannedTransfer
from tests import plans
from tests.inter.schedule.test_interleaved import planned

pipeline_plan = functools.cache(plans.pipeline_plan)
FREE = LinkSpec(0.0, 0.0)
SCHEDULES = ("1f1b", "gpipe", "1f1b-interleaved")


def toy(
    n_stages: int,
    n_micro_batches: int,
    seconds: Sequence[tuple[float, float]],
    schedule: str = "1f1b",
    *,
    link: LinkSpec = FREE,
    inter_host: LinkSpec = FREE,
    n_bytes: float = 0.0,
    updates: Sequence[float] = (),
    kept: Sequence[float] = (),
    devices_per_host: int = 8,
) -> Plan:
    """A chain of chunks with these (forward, backward) seconds, one device a stage; `n_bytes` cross each border.

    kept: bytes that each chunk keeps for a micro-batch; the stages need 100 further bytes.
    """
    n_chunks = len(seconds)
    like = pipeline_plan()
    stages = []
    for k in range(n_stages):
        mine = range(k, n_chunks, n_stages)
        forward = [PlannedPass(kind="forward", chunk=c, compute_s=seconds[c][0], communication_s=0.0) for c in mine]
        backward = [
            PlannedPass(kind="backward", chunk=c, compute_s=0.0, communication_s=seconds[c][1]) for c in reversed(mine)
        ]
        stage = replace(
            like.stages[0],
            layers=tuple(mine),
            submesh=(1, 1),
            first_device=k,
            logical_shape=(1,),
            passes=(*forward, *backward),
            update_s=updates[k] if updates else 0.0,
            fixed_bytes=100.0,
            kept_bytes=tuple(kept[c] if kept else 0.0 for c in mine),
        )
        stages.append(stage)
    ends = range(n_chunks - 1) if n_stages > 1 else ()
    down = [PlannedTransfer(PassName("forward", c), PassName("forward", c + 1), n_bytes) for c in ends]
    up = [PlannedTransfer(PassName("backward", c + 1), PassName("backward", c), n_bytes) for c in ends]
    cluster = ClusterSpec.preset("cpu", num_hosts=-(-n_stages // devices_per_host), devices_per_host=devices_per_host)
    return replace(
        like,
        cluster=replace(cluster, intra_host=link, inter_host=inter_host),
        n_micro_batches=n_micro_batches,
        schedule=schedule,
        stages=tuple(stages),
        transfers=(*down, *up),
    )


def ends_by_relaxation(plan: Plan) -> dict[tuple[str, int, int], float]:
    """The end of each pass of a chain: the longest path, by relaxation of all constraints.

    Links are queues: transfers from one stage to another leave in the order of their production.
    """
    size = PipelineSize(len(plan.stages), plan.n_micro_batches, len(plan.stages[0].kept_bytes))
    orders = make_schedule(plan.schedule, size).passes
    seconds = {(one.kind, one.chunk): one.seconds for stage in plan.stages for one in stage.passes}
    end = {(one.kind, one.chunk, one.micro_batch): 0.0 for order in orders for one in order}
    sent = dict.fromkeys(end, 0.0)
    last = size.n_stages * size.n_chunks - 1
    while True:
        before = dict(end), dict(sent)
        for order in orders:
            clock, free = 0.0, {+1: 0.0, -1: 0.0}
            for one in order:
                step = 1 if one.kind == "forward" else -1
                arrives = sent.get((one.kind, one.chunk - step, one.micro_batch), 0.0)
                key = (one.kind, one.chunk, one.micro_batch)
                clock = end[key] = max(clock, arrives) + seconds[one.kind, one.chunk]
                # With two stages both directions go over one link.
                link = step if size.n_stages > 2 else 1
                goes = 0 <= one.chunk + step <= last and size.n_stages > 1
                if goes:
                    free[link] = max(free[link], clock) + plan.cluster.intra_host.transfer_s(plan.transfers[0].n_bytes)
                    sent[key] = free[link]
        if before == (end, sent):
            return end


counts = st.tuples(st.integers(1, 6), st.integers(1, 16))


@given(counts, st.integers(1, 4), st.sampled_from(SCHEDULES), st.data())
@settings(max_examples=80)
def test_peaks_are_those_of_the_schedule(size: tuple[int, int], v: int, schedule: str, data: st.DataObject) -> None:
    p, n = size
    v = v if schedule == "1f1b-interleaved" and p > 1 else 1
    times = st.tuples(st.integers(0, 5), st.integers(0, 5))
    seconds = data.draw(st.lists(times, min_size=p * v, max_size=p * v))
    kept = data.draw(st.lists(st.integers(0, 9), min_size=p * v, max_size=p * v))
    timeline = simulate(toy(p, n, seconds, schedule, kept=kept))
    order = make_schedule(schedule, PipelineSize(p, n, v))
    for k, stage in enumerate(timeline.stages):
        assert stage.peak_live == max(map(sum, live_counts(order, k)))
        moments = [sum(a * b for a, b in zip(live, kept[k::p], strict=True)) for live in live_counts(order, k)]
        assert stage.peak_bytes == 100 + max(moments)
        assert stage.memory[-1][1] == 100 and list(stage.memory) == sorted(stage.memory, key=lambda m: m[0])


@given(counts, st.integers(1, 3), st.sampled_from(SCHEDULES), st.integers(0, 4), st.integers(0, 3), st.data())
@settings(max_examples=100)
def test_passes_end_when_relaxation_finds(
    size: tuple[int, int], v: int, schedule: str, alpha: int, n_bytes: int, data: st.DataObject
) -> None:
    p, n = size
    v = v if schedule == "1f1b-interleaved" and p > 1 else 1
    times = st.tuples(st.integers(0, 9), st.integers(0, 9))
    seconds = data.draw(st.lists(times, min_size=p * v, max_size=p * v))
    plan = toy(p, n, seconds, schedule, link=LinkSpec(alpha, 1.0), n_bytes=n_bytes)
    ends = {
        (one.kind, one.number, one.micro_batch): one.end_s
        for stage in simulate(plan).stages
        for one in stage.passes[:-1]
    }
    assert ends == ends_by_relaxation(plan)


def test_a_link_between_hosts_is_taken_where_stages_are_on_two() -> None:
    """Four stages on two hosts: a transfer over the middle takes 10 s, and all others 1 s."""
    plan = toy(4, 1, [(1, 1)] * 4, link=LinkSpec(1, 0), inter_host=LinkSpec(8, 1), n_bytes=2, devices_per_host=2)
    timeline = simulate(plan)
    assert timeline.total_s == 8 + 2 * (1 + 10 + 1)
    crossing = {(t.source_stage, t.target_stage): t.end_s - t.start_s for t in timeline.transfers}
    assert crossing == {(0, 1): 1, (1, 2): 10, (2, 3): 1, (3, 2): 1, (2, 1): 10, (1, 0): 1}


def test_updates_wait_for_what_other_stages_accumulate() -> None:
    plan = toy(2, 1, [(1, 2), (3, 4)], link=LinkSpec(0.0, 1.0), updates=[5.0, 6.0])
    assert [s.passes[-1].start_s for s in simulate(plan).stages] == [10, 8]
    tied = PlannedTransfer(PassName("update", 0), PassName("update", 1), 7.0)
    timeline = simulate(replace(plan, transfers=(*plan.transfers, tied)))
    assert [s.passes[-1].start_s for s in timeline.stages] == [10, 17]
    assert timeline.total_s == 23


def test_waiting_for_each_other_in_a_circle_is_refused() -> None:
    plan = toy(2, 2, [(1, 1)] * 2)
    order = make_schedule("gpipe", PipelineSize(2, 2))
    by_micro_batch = tuple(sorted(order.passes[1], key=lambda one: one.micro_batch))
    simulate(plan, replace(order, passes=(order.passes[0], by_micro_batch)))  # another order, and a right one
    message = (
        r"`gpipe` stops after \d of 8 passes, because .*backward\(chunk 1, micro-batch 1\) waits for forward\(chunk"
    )
    with pytest.raises(VerifyError, match=message):
        simulate(plan, replace(order, passes=(order.passes[0], order.passes[1][::-1])))
    back = PlannedTransfer(PassName("backward", 1), PassName("forward", 0), 1.0)
    with pytest.raises(VerifyError, match="comes after its reader"):
        simulate(replace(plan, transfers=(*plan.transfers, back)))


def test_a_schedule_of_other_counts_is_refused() -> None:
    with pytest.raises(ShardingError, match=r"has PipelineSize.*n_micro_batches=3.*the plan has .*Make the schedule"):
        simulate(toy(2, 2, [(1, 1)] * 2), make_schedule("1f1b", PipelineSize(2, 3)))


# ---- plans of the planner -------------------------------------------------------------------------------------------


def test_a_plan_of_the_planner_peaks_where_it_says() -> None:
    n_stages, n_chunks = 3, 2
    plan = planned(n_stages, n_chunks, 6)
    timeline = simulate(Plan.from_json(plan.to_json()))
    assert timeline.peak_bytes == pytest.approx(plan.cost.peak_bytes)
    passes = sum(one.seconds for one in plan.stages[0].passes)
    assert timeline.stages[0].busy_s == pytest.approx(6 * passes + plan.stages[0].update_s)
    # Every micro-batch crosses every border, forward and backward; the tied weight's gradient goes to its home once.
    kinds = [t.kind for t in timeline.transfers]
    n_borders = n_stages * n_chunks - 1
    assert kinds.count("forward") >= 6 * n_borders and kinds.count("backward") >= 6 * n_borders
    assert kinds.count("update") >= 1
    # The plan's formula leaves out the waits of passes for their transfers.
    assert timeline.total_s >= 0.99 * plan.cost.total_s


def test_the_trace_has_a_process_for_each_stage(tmp_path: Path) -> None:
    timeline: Timeline = simulate(toy(2, 2, [(1e-6, 2e-6)] * 2, link=LinkSpec(1e-6, 0), kept=[8, 8]))
    timeline.to_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {"stage 0, devices 0-0", "stage 1, devices 1-1", "passes", "to stage 0", "to stage 1"}
    slices = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (0, 0)]
    expected = [("forward chunk 0, micro-batch 0", 0.0, 1.0), ("forward chunk 0, micro-batch 1", 1.0, 1.0)]
    assert [(name, round(ts, 6), round(dur, 6)) for name, ts, dur in slices[:2]] == expected
    assert {e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 1} == {100.0, 108.0}
    assert sum(e.get("cat") == "transfer" for e in events) == 4


def test_the_summary_tells_time_waiting_and_memory() -> None:
    timeline = simulate(toy(2, 3, [(1, 2)] * 2, kept=[50, 0]))
    text = str(timeline)
    assert text == (
        "Simulated 12 s per step: 2 stages, 3 micro-batches, schedule 1f1b\n"
        "Stage 0: busy 9 s, waits 25.0%, at most 2 passes in flight, 200 B per device\n"
        "Stage 1: busy 9 s, waits 25.0%, at most 1 passes in flight, 100 B per device"
    )
    assert text == timeline.summary()
