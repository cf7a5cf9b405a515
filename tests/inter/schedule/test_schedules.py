"""Schedules obey their invariants, take the expected number of ticks, and broken ones are refused with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minialpa.errors import ShardingError, VerifyError
from minialpa.inter.schedule.schedules import (
    Pass,
    PipelineSize,
    Schedule,
    global_order,
    live_counts,
    make_schedule,
    max_live,
    n_live,
    schedule_names,
    ticks,
    verify_schedule,
)

STAGES = (1, 2, 3, 4, 8, 16)
MICRO_BATCHES = (1, 2, 3, 4, 8, 32)
SIZES = st.builds(PipelineSize, st.integers(1, 8), st.integers(1, 40), st.integers(1, 5))


def parse(text: str) -> tuple[Pass, ...]:
    """`"f0.1 b0.1"` as passes of chunk 0 and micro-batch 1."""
    words = [(word[0], *map(int, word[1:].split("."))) for word in text.split()]
    return tuple(Pass("forward" if kind == "f" else "backward", chunk, b) for kind, chunk, b in words)


def by_hand(name: str, n_micro_batches: int, *stages: str) -> Schedule:
    """A schedule with one chunk per stage: `"f0 b0"` are micro-batches of the chunk that is the stage's."""
    passes = [parse(" ".join(f"{w[0]}{k}.{w[1:]}" for w in text.split())) for k, text in enumerate(stages)]
    return Schedule(name, PipelineSize(len(stages), n_micro_batches), tuple(passes))


def makespan(schedule: Schedule) -> int:
    """Ticks until all is done when each pass takes one tick: longest path, found by relaxing until nothing moves."""
    end = {one: 0 for passes in schedule.passes for one in passes}
    while True:
        before = dict(end)
        for passes in schedule.passes:
            clock = 0
            for one in passes:
                source = one.chunk - 1 if one.kind == "forward" else one.chunk + 1
                arrives = end.get(Pass(one.kind, source, one.micro_batch), 0)
                clock = end[one] = max(clock, arrives) + 1
        if end == before:
            return max(end.values())


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize("n_stages", STAGES)
@pytest.mark.parametrize("n_micro_batches", MICRO_BATCHES)
def test_every_schedule_is_valid_and_as_short_as_expected(name: str, n_stages: int, n_micro_batches: int) -> None:
    schedule = make_schedule(name, PipelineSize(n_stages, n_micro_batches))
    verify_schedule(schedule)
    passes = 1 if name == "inference" else 2
    assert makespan(schedule) == len(ticks(schedule)) == passes * (n_micro_batches + n_stages - 1)


@given(SIZES)
@settings(max_examples=60)
def test_interleaving_leaves_a_bubble_of_one_chunk_for_each_other_stage(size: PipelineSize) -> None:
    """In ticks of a chunk: every stage is busy for v n of each kind, and waits for p - 1 chunks, not p - 1 stages."""
    p, n, v = size.n_stages, size.n_micro_batches, size.n_chunks
    for name, kinds in (("1f1b-interleaved", 2), ("inference", 1)):
        schedule = make_schedule(name, size)
        verify_schedule(schedule)
        # With fewer micro-batches than stages the first stage waits until they come round again.
        assert len(ticks(schedule)) == kinds * ((v - 1) * max(n, p) + n + p - 1)


@given(SIZES.filter(lambda size: size.n_chunks > 1))
@settings(max_examples=60)
def test_interleaving_holds_the_warm_up_and_one_more(size: PipelineSize) -> None:
    p, n, v = size.n_stages, size.n_micro_batches, size.n_chunks
    schedule = make_schedule("1f1b-interleaved", size)
    group = -(-n // max(1, n // p))  # p where n divides by p
    for k in range(p):
        live = min(2 * (p - k - 1) + (v - 1) * group + 1, v * n)
        assert n_live(schedule, k) == max_live("1f1b-interleaved", k, size) == live
        moments = live_counts(schedule, k)
        assert max(map(sum, moments)) == live and all(len(m) == v and max(m) <= n for m in moments)


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize("n_stages", STAGES)
@pytest.mark.parametrize("n_micro_batches", MICRO_BATCHES)
def test_global_order_keeps_stage_orders_and_dependencies(name: str, n_stages: int, n_micro_batches: int) -> None:
    schedule = make_schedule(name, PipelineSize(n_stages, n_micro_batches, 2 if "interleaved" in name else 1))
    order = global_order(schedule)
    for k, passes in enumerate(schedule.passes):
        assert tuple(one for one in order if one.chunk % n_stages == k) == passes
    position = {one: i for i, one in enumerate(order)}
    for one, i in position.items():
        source = Pass(one.kind, one.chunk + (-1 if one.kind == "forward" else 1), one.micro_batch)
        assert position.get(source, -1) < i


@pytest.mark.parametrize("n_stages", STAGES)
@pytest.mark.parametrize("n_micro_batches", MICRO_BATCHES)
def test_live_micro_batches_are_those_of_the_formula(n_stages: int, n_micro_batches: int) -> None:
    size = PipelineSize(n_stages, n_micro_batches)
    for stage in range(n_stages):
        left = min(n_stages - stage, n_micro_batches)
        for name, live in {"gpipe": n_micro_batches, "1f1b": left, "1f1b-interleaved": left, "inference": 1}.items():
            assert n_live(make_schedule(name, size), stage) == live
            assert max_live(name, stage, size) == live


def test_1f1b_on_three_stages() -> None:
    assert make_schedule("1f1b", PipelineSize(3, 4)) == by_hand(
        "1f1b",
        4,
        "f0 f1 f2 b0 f3 b1 b2 b3",
        "f0 f1 b0 f2 b1 f3 b2 b3",
        "f0 b0 f1 b1 f2 b2 f3 b3",
    )


def test_two_chunks_on_two_stages() -> None:
    schedule = make_schedule("1f1b-interleaved", PipelineSize(2, 4, 2))
    assert schedule.passes == (
        parse("f0.0 f0.1 f2.0 f2.1 f0.2 b2.0 f0.3 b2.1 f2.2 b0.0 f2.3 b0.1 b2.2 b2.3 b0.2 b0.3"),
        parse("f1.0 f1.1 f3.0 b3.0 f3.1 b3.1 f1.2 b1.0 f1.3 b1.1 f3.2 b3.2 f3.3 b3.3 b1.2 b1.3"),
    )
    # Live micro-batches of either chunk when a stage is at its fullest.
    assert live_counts(schedule, 0) == ((3, 2), (4, 1)) and live_counts(schedule, 1) == ((2, 1), (3, 0))


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ShardingError, match=r"No schedule `zb`\. Known: `1f1b`, `1f1b-interleaved`, `gpipe`"):
        make_schedule("zb", PipelineSize(2, 2))


def test_several_chunks_need_a_schedule_that_interleaves() -> None:
    with pytest.raises(ShardingError, match="`gpipe` has one chunk per stage, not 2"):
        make_schedule("gpipe", PipelineSize(2, 2, 2))


@pytest.mark.parametrize("counts", [(0, 1), (1, 0), (1, 1, 0)])
def test_counts_below_one_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ShardingError, match="at least one stage, one micro-batch and one chunk"):
        PipelineSize(*counts)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            replace(make_schedule("gpipe", PipelineSize(2, 1)), size=PipelineSize(3, 1)),
            "2 lists of passes for 3 stages",
        ),
        (replace(make_schedule("gpipe", PipelineSize(2, 1)), passes=(parse("f1.0 b1.0"),) * 2), "under stage 0"),
        (by_hand("gpipe", 2, "f0 f1 b0"), r"backward\(chunk 0, micro-batch 1\) 0 times; expected once"),
        (by_hand("gpipe", 1, "f0 f0 b0"), r"forward\(chunk 0, micro-batch 0\) 2 times; expected once"),
        (by_hand("inference", 1, "f0 b0"), "not one of its passes"),
        (by_hand("gpipe", 1, "b0 f0"), r"runs backward\(chunk 0, micro-batch 0\) before its forward"),
        (
            by_hand("gpipe", 2, "f0 f1 b0 b1", "f1 b1 f0 b0", "f0 f1 b0 b1"),
            r"deadlocks after 3 of 12 passes: .*backward\(chunk 1, micro-batch 1\) waits for",
        ),
        (by_hand("1f1b", 2, "f0 f1 b0 b1", "f0 f1 b0 b1"), "Stage 1 .* holds 2 live micro-batches; at most 1"),
    ],
    ids=["lists", "stage", "missing", "twice", "extra", "backward first", "deadlock", "live"],
)
def test_broken_schedule_is_refused(schedule: Schedule, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify_schedule(schedule)
