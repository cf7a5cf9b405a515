"""Schedules obey their invariants, take the expected number of ticks, and broken ones are refused with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minialpa.errors import ShardingError, VerifyError
from minialpa.inter.schedule import (
    Schedule,
    Task,
    global_order,
    make_schedule,
    max_live,
    n_live,
    schedule_names,
    ticks,
    verify_schedule,
)

STAGES = (1, 2, 3, 4, 8, 16)
MICRO_BATCHES = (1, 2, 3, 4, 8, 32)


def parse(stage: int, text: str) -> tuple[Task, ...]:
    """`"f0 f1 b0 b1"` as tasks of `stage`."""
    return tuple(Task("forward" if word[0] == "f" else "backward", stage, int(word[1:])) for word in text.split())


def by_hand(name: str, n_micro_batches: int, *stages: str) -> Schedule:
    return Schedule(name, len(stages), n_micro_batches, tuple(parse(k, text) for k, text in enumerate(stages)))


def makespan(schedule: Schedule) -> int:
    """Ticks until all is done when each task takes one tick: longest path, found by relaxing until nothing moves."""
    end = {task: 0 for tasks in schedule.tasks for task in tasks}
    while True:
        before = dict(end)
        for k, tasks in enumerate(schedule.tasks):
            clock = 0
            for task in tasks:
                source = k - 1 if task.kind == "forward" else k + 1
                arrives = end.get(Task(task.kind, source, task.micro_batch), 0)
                clock = end[task] = max(clock, arrives) + 1
        if end == before:
            return max(end.values())


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize("n_stages", STAGES)
@pytest.mark.parametrize("n_micro_batches", MICRO_BATCHES)
def test_every_schedule_is_valid_and_as_short_as_expected(name: str, n_stages: int, n_micro_batches: int) -> None:
    schedule = make_schedule(name, n_stages, n_micro_batches)
    verify_schedule(schedule)
    passes = 1 if name == "inference" else 2
    assert makespan(schedule) == len(ticks(schedule)) == passes * (n_micro_batches + n_stages - 1)


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize("n_stages", STAGES)
@pytest.mark.parametrize("n_micro_batches", MICRO_BATCHES)
def test_global_order_keeps_stage_orders_and_dependencies(name: str, n_stages: int, n_micro_batches: int) -> None:
    schedule = make_schedule(name, n_stages, n_micro_batches)
    order = global_order(schedule)
    for k, tasks in enumerate(schedule.tasks):
        assert tuple(task for task in order if task.stage == k) == tasks
    position = {task: i for i, task in enumerate(order)}
    for task, i in position.items():
        source = task.stage + (-1 if task.kind == "forward" else 1)
        if 0 <= source < n_stages:
            assert position[Task(task.kind, source, task.micro_batch)] < i


@pytest.mark.parametrize("n_stages", STAGES)
@pytest.mark.parametrize("n_micro_batches", MICRO_BATCHES)
def test_live_micro_batches_are_those_of_the_formula(n_stages: int, n_micro_batches: int) -> None:
    for stage in range(n_stages):
        left = n_stages - stage
        expected = {"gpipe": n_micro_batches, "1f1b": min(left, n_micro_batches), "inference": 1}
        for name, live in expected.items():
            assert n_live(make_schedule(name, n_stages, n_micro_batches), stage) == live
            assert max_live(name, left, n_micro_batches) == live


def test_1f1b_on_three_stages() -> None:
    assert make_schedule("1f1b", 3, 4) == by_hand(
        "1f1b",
        4,
        "f0 f1 f2 b0 f3 b1 b2 b3",
        "f0 f1 b0 f2 b1 f3 b2 b3",
        "f0 b0 f1 b1 f2 b2 f3 b3",
    )


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ShardingError, match=r"No schedule `zb`\. Known: `1f1b`, `gpipe`, `inference`"):
        make_schedule("zb", 2, 2)


@pytest.mark.parametrize(("n_stages", "n_micro_batches"), [(0, 1), (1, 0)])
def test_counts_below_one_are_refused(n_stages: int, n_micro_batches: int) -> None:
    with pytest.raises(ShardingError, match="at least one stage and one micro-batch"):
        make_schedule("gpipe", n_stages, n_micro_batches)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (replace(make_schedule("gpipe", 2, 1), n_stages=3), "2 lists of tasks for 3 stages"),
        (replace(make_schedule("gpipe", 1, 1), tasks=(parse(1, "f0 b0"),)), "under stage 0"),
        (by_hand("gpipe", 2, "f0 f1 b0"), r"backward\(stage 0, micro-batch 1\) 0 times; expected once"),
        (by_hand("gpipe", 1, "f0 f0 b0"), r"forward\(stage 0, micro-batch 0\) 2 times; expected once"),
        (by_hand("inference", 1, "f0 b0"), "not one of its tasks"),
        (by_hand("gpipe", 1, "b0 f0"), r"runs backward\(stage 0, micro-batch 0\) before its forward"),
        (
            by_hand("gpipe", 2, "f0 f1 b0 b1", "f1 b1 f0 b0", "f0 f1 b0 b1"),
            r"deadlocks after 3 of 12 tasks: .*backward\(stage 1, micro-batch 1\) waits for",
        ),
        (by_hand("1f1b", 2, "f0 f1 b0 b1", "f0 f1 b0 b1"), "Stage 1 .* holds 2 live micro-batches; at most 1"),
    ],
    ids=["lists", "stage", "missing", "twice", "extra", "backward first", "deadlock", "live"],
)
def test_broken_schedule_is_refused(schedule: Schedule, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify_schedule(schedule)
