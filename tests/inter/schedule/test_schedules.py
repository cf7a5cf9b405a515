"""Schedules run every pass once, take the expected number of ticks, and keep no more than their bound."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minialpa.errors import ShardingError, VerifyError
from minialpa.inter.schedule.schedules import (
    Layout,
    Pass,
    PipelineSize,
    Schedule,
    global_order,
    layouts,
    live_counts,
    make_schedule,
    max_live,
    schedule_names,
    splits_backward,
    ticks,
)
from minialpa.inter.schedule.synthesis import ChunkWork, PipelineWork, seconds_of


def parse(text: str) -> tuple[Pass, ...]:
    """`"f0.1 b0.1"` as passes of chunk 0 and micro-batch 1."""
    words = [(word[0], *map(int, word[1:].split("."))) for word in text.split()]
    return tuple(Pass("forward" if kind == "f" else "backward", chunk, b) for kind, chunk, b in words)


def makespan(schedule: Schedule) -> int:
    """Ticks of the whole schedule when each pass takes one tick: the longest path, by relaxation."""
    end = {one: 0 for passes in schedule.passes for one in passes}
    while True:
        before = dict(end)
        for passes in schedule.passes:
            clock = 0
            for one in passes:
                source = {"forward": one.chunk - 1, "backward": one.chunk + 1}.get(one.kind)
                arrives = 0 if source is None else end.get(Pass(one.kind, source, one.micro_batch), 0)
                clock = end[one] = max(clock, arrives) + 1
        if end == before:
            return max(end.values())


def live_by_formula(name: str, stage: int, size: PipelineSize) -> int:
    p, n, v = size.n_stages, size.n_micro_batches, size.n_chunks
    group = -(-n // max(1, n // p)) if v > 1 else 0  # p where n divides by p
    if name == "inference":
        return (v - 1) * group + 1
    if name == "gpipe":
        return n
    if name == "zb-h1":
        return min(p, n)
    return min(p - stage, n) if v == 1 else min(2 * (p - stage - 1) + (v - 1) * group + 1, v * n)


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in schedule_names() for layout in layouts(name)])
@given(st.integers(1, 8), st.integers(1, 40), st.integers(2, 5))
@settings(max_examples=60)
def test_a_schedule_obeys_its_laws(name: str, layout: Layout, p: int, n: int, v: int) -> None:
    """In ticks of a chunk, a stage is busy for v n of each kind, and waits for p - 1 chunks of each.

    Delayed weight gradients fill the wait for forwards, if there are as many micro-batches as stages.
    """
    v = {"one": 1, "in turn": v, "v": 2}[layout]
    size = PipelineSize(p, n, v, is_v=layout == "v")
    schedule = make_schedule(name, size)
    kinds = ("forward",) if name == "inference" else ("forward", "backward")
    if splits_backward(name):
        kinds = ("forward", "backward", "weights")

    for stage, passes in enumerate(schedule.passes):
        chunks = size.chunks_of(stage)
        expected = {Pass(kind, chunk, b) for kind in kinds for chunk in chunks for b in range(n)}  # type: ignore[arg-type]
        assert set(passes) == expected and len(passes) == len(expected)
        moments = live_counts(schedule, stage)
        if splits_backward(name):
            # Of the counts until the backward pass, until the weights pass, and between these two.
            both = range(len(chunks)), range(2 * len(chunks), 3 * len(chunks))
            wholes = [counts[len(chunks) : 2 * len(chunks)] for counts in moments]
            for counts, whole in zip(moments, wholes, strict=True):
                assert all(counts[i] + counts[j] >= one for i, j, one in zip(*both, whole, strict=True))
            moments = tuple(wholes)
        most = max(map(sum, moments))
        assert most <= max_live(name, stage, size)
        assert layout == "v" or most == live_by_formula(name, stage, size)
        assert all(len(counts) == len(chunks) and max(counts) <= n for counts in moments)

    n_ticks = len(ticks(schedule))
    assert n_ticks == makespan(schedule)
    if name == "zb-h1":
        assert n_ticks == 3 * n + (p - 1) + max(0, p - n)
    elif not splits_backward(name) and layout != "v":
        # With fewer micro-batches than stages, the first stage of several chunks waits for the last one.
        assert n_ticks == len(kinds) * ((v - 1) * max(n, p) + n + p - 1)

    order = global_order(schedule)
    for stage, passes in enumerate(schedule.passes):
        assert tuple(one for one in order if size.stage_of[one.chunk] == stage) == passes


@pytest.mark.parametrize("n", [4, 8, 16])
def test_a_v_waits_half_as_long_as_one_run_of_layers_in_the_same_memory(n: int) -> None:
    p = 4
    plain, v = make_schedule("zb-h1", PipelineSize(p, n)), make_schedule("zb-v", PipelineSize(p, n, 2, is_v=True))
    halves = [ChunkWork(seconds=(1, 1, 1)) for _ in range(2 * p - 1)]
    halves[p - 1] = ChunkWork(seconds=(2, 2, 2), kept=(0, 2, 0))
    budgets = (2.0 * p,) * p
    whole = PipelineWork(plain.size, (halves[p - 1],) * p, budgets)
    split = PipelineWork(v.size, tuple(halves), budgets)
    busy_s = 6 * n
    assert seconds_of(split, v) - busy_s <= (seconds_of(whole, plain) - busy_s) / 2


def test_two_chunks_on_two_stages() -> None:
    schedule = make_schedule("1f1b-interleaved", PipelineSize(2, 4, 2))
    assert schedule.passes == (
        parse("f0.0 f0.1 f2.0 f2.1 f0.2 b2.0 f0.3 b2.1 f2.2 b0.0 f2.3 b0.1 b2.2 b2.3 b0.2 b0.3"),
        parse("f1.0 f1.1 f3.0 b3.0 f3.1 b3.1 f1.2 b1.0 f1.3 b1.1 f3.2 b3.2 f3.3 b3.3 b1.2 b1.3"),
    )
    # Live micro-batches of each chunk when a stage has most.
    assert live_counts(schedule, 0) == ((3, 2), (4, 1)) and live_counts(schedule, 1) == ((2, 1), (3, 0))


def test_stages_that_wait_for_each_other_are_refused() -> None:
    passes = parse("f0.0 f0.1 b0.0 b0.1"), parse("f1.1 b1.1 f1.0 b1.0"), parse("f2.0 f2.1 b2.0 b2.1")
    with pytest.raises(VerifyError, match=r"stops after 3 of 12 passes, because .*backward\(chunk 1, .* 1\) waits"):
        ticks(Schedule("gpipe", PipelineSize(3, 2), passes))


def test_wrong_names_and_counts_are_refused() -> None:
    with pytest.raises(ShardingError, match=r"no schedule `xy`\. Choose one of `1f1b`, `1f1b-interleaved`, `gpipe`"):
        make_schedule("xy", PipelineSize(2, 2))
    with pytest.raises(ShardingError, match=r"`gpipe` needs consecutive layers.*; got .*n_chunks=2"):
        make_schedule("gpipe", PipelineSize(2, 2, 2))
    for counts in ((0, 1), (1, 0), (1, 1, 0)):
        with pytest.raises(ShardingError, match="Set `n_stages`, `n_micro_batches` and `n_chunks` to at least 1; got"):
            PipelineSize(*counts)
