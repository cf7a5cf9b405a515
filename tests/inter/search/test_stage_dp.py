"""choose_stages agrees with exhaustive search under memory limits and transfers, is fast, and says why it cannot."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minialpa.errors import InfeasibleError, ShardingError
from minialpa.inter.search.stage_dp import StageChoice, StageCostTable, Start, choose_stages, step_seconds_of
from tests.oracles import fastest_pipeline


@st.composite
def problems(draw: st.DrawFn) -> tuple[StageCostTable, dict[str, Any]]:
    """Up to 6 layers, 8 devices and 5 candidates; integer costs, so that there are ties."""
    n_layers = draw(st.integers(1, 6))
    n_devices = draw(st.integers(1, 8))
    counts = draw(st.lists(st.sampled_from([1, 1, 2, 3, 4, 8]), min_size=1, max_size=5 if n_layers < 6 else 3))
    idle = draw(st.booleans()) and n_layers * n_devices * len(counts) < 80
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    cube = (n_layers, n_layers, len(counts))
    high = draw(st.sampled_from([4, 100]))

    def cost(p_forbidden: float) -> np.ndarray:
        return np.where(rng.random(cube) < p_forbidden, np.inf, rng.integers(0, high, cube) * 1.0)

    p_forbidden = draw(st.sampled_from([0.0, 0.2]))
    length = np.subtract.outer(np.arange(n_layers), np.arange(n_layers)).T[:, :, None] + 1.0  # j - i + 1
    longer_takes_longer = np.maximum(length, 1) if draw(st.booleans()) else 1.0
    table = StageCostTable(
        n_devices=np.array(counts),
        may_start=rng.random((len(counts), n_devices)) >= draw(st.sampled_from([0.0, 0.2])),
        skip_to=np.minimum(np.arange(n_devices) + rng.integers(1, 3, n_devices), n_devices),
        seconds=cost(p_forbidden) * longer_takes_longer,
        step_seconds=cost(p_forbidden / 2) * longer_takes_longer,
        fixed_bytes=rng.integers(0, 10, cube).astype(np.float64),
        in_flight_bytes=rng.integers(0, 5, cube).astype(np.float64),
        transfer_seconds=rng.integers(0, high // 2, (n_layers - 1, n_devices)).astype(np.float64),
    )
    return table, {
        "n_micro_batches": draw(st.sampled_from([1, 2, 3, 16])),
        "memory_bytes": draw(st.sampled_from([6.0, 12.0, math.inf])),
        "schedule": draw(st.sampled_from(["1f1b", "gpipe", "inference"])),
        "use_all_devices": not idle,
    }


@settings(max_examples=300, deadline=None)
@given(problems())
def test_choice_matches_exhaustive_search(problem: tuple[StageCostTable, dict[str, Any]]) -> None:
    table, limits = problem
    expected = fastest_pipeline(table, **limits)
    if math.isinf(expected):
        with pytest.raises(InfeasibleError):
            choose_stages(table, **limits)
        return
    choice = choose_stages(table, **limits)
    assert choice.seconds == pytest.approx(expected, rel=1e-12)
    assert choice.seconds == step_seconds_of(table, choice.stages, limits["n_micro_batches"])
    assert [stage.first_layer for stage in choice.stages[1:]] == [stage.last_layer + 1 for stage in choice.stages[:-1]]


@settings(max_examples=100, deadline=None)
@given(problems(), st.floats(0.0, 1.0))
def test_a_start_changes_nothing_but_the_time(problem: tuple[StageCostTable, dict[str, Any]], share: float) -> None:
    """Any allowed pipeline is a start, with any bound on the slowest stage."""
    table, limits = problem
    if math.isinf(expected := fastest_pipeline(table, **limits)):
        return
    best = choose_stages(table, **limits)
    alone = dataclasses.replace(table, seconds=np.where(table.seconds > 0, 1.0, table.seconds))
    other = choose_stages(alone, **limits).stages if math.isfinite(fastest_pipeline(alone, **limits)) else best.stages
    assert math.isfinite(step_seconds_of(table, best.stages, limits["n_micro_batches"]))
    for stages in (best.stages, other):
        if math.isfinite(step_seconds_of(table, stages, limits["n_micro_batches"])):
            start = Start(stages, best.least_t * share)
            assert choose_stages(table, **limits, start=start).seconds == pytest.approx(expected, rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(problems(), st.sampled_from([0.01, 0.2, 1.0]))
def test_tolerance_is_kept(problem: tuple[StageCostTable, dict[str, Any]], tolerance: float) -> None:
    table, limits = problem
    expected = fastest_pipeline(table, **limits)
    if math.isfinite(expected):
        found = choose_stages(table, **limits, tolerance=tolerance)
        assert expected - 1e-9 <= found.seconds < math.inf and found.seconds * (1 - tolerance) <= expected + 1e-9


@settings(max_examples=100, deadline=None)
@given(problems())
def test_least_memory_in_the_message_is_enough_and_less_is_not(problem: tuple[StageCostTable, dict[str, Any]]) -> None:
    table, limits = problem
    if math.isinf(fastest_pipeline(table, **{**limits, "memory_bytes": math.inf})):
        return
    low, high = -1.0, 100.0
    with pytest.raises(InfeasibleError, match="smallest one needs") as caught:
        choose_stages(table, **{**limits, "memory_bytes": low})
    need = float(str(caught.value).split("needs ")[1].split(" bytes")[0])
    assert math.isfinite(fastest_pipeline(table, **{**limits, "memory_bytes": need}))
    assert math.isinf(fastest_pipeline(table, **{**limits, "memory_bytes": need - 1}))
    assert low < need < high


def uniform(n_layers: int, counts: list[int], n_devices: int, *, in_flight: float = 0.0) -> StageCostTable:
    """Equal layers of one second on one device, perfectly parallel, that hold `in_flight` bytes each."""
    length = np.subtract.outer(np.arange(n_layers), np.arange(n_layers)).T[:, :, None] + 1.0
    share = length / np.array(counts)
    zero = np.zeros_like(share)
    anywhere, skip_to = np.ones((len(counts), n_devices), bool), np.arange(n_devices) + 1
    free = np.zeros((n_layers - 1, n_devices))
    return StageCostTable(
        n_devices=np.array(counts),
        may_start=anywhere,
        skip_to=skip_to,
        seconds=share,
        step_seconds=zero,
        fixed_bytes=zero,
        in_flight_bytes=in_flight * share,
        transfer_seconds=free,
    )


def test_first_stages_of_1f1b_hold_more_and_get_fewer_layers() -> None:
    """Live micro-batches 2 and 1: with 4 bytes, the first stage can hold 2 of 5 layers at most, the last stage 4."""
    table = uniform(5, [1], 2, in_flight=1.0)
    options: dict[str, Any] = {"n_micro_batches": 8, "memory_bytes": 4.0}
    assert choose_stages(table, **options).stages == (StageChoice(0, 1, 0, 0), StageChoice(2, 4, 0, 1))
    with pytest.raises(InfeasibleError, match="`gpipe` with 8 micro-batches the smallest one needs 24 bytes"):
        choose_stages(table, **options, schedule="gpipe")


def test_step_time_can_decide() -> None:
    """Candidate 1 is slower by 1 s for its micro-batch but saves 5 s of gradient sync."""
    seconds = np.array([[[10.0, 11.0]]])
    step_seconds, zero = np.array([[[6.0, 1.0]]]), 0 * seconds
    table = StageCostTable(
        n_devices=np.array([2, 2]),
        may_start=np.ones((2, 2), bool),
        skip_to=np.array([1, 2]),
        seconds=seconds,
        step_seconds=step_seconds,
        fixed_bytes=zero,
        in_flight_bytes=zero,
        transfer_seconds=np.zeros((0, 2)),
    )
    chosen = {n: choose_stages(table, n_micro_batches=n, memory_bytes=1.0).stages[0].candidate for n in (4, 8)}
    assert chosen == {4: 1, 8: 0}


def test_devices_may_stay_idle_only_on_request() -> None:
    table = uniform(2, [1], 3)
    options: dict[str, Any] = {"n_micro_batches": 2, "memory_bytes": 1.0}
    with pytest.raises(InfeasibleError, match="of 2 layers uses 3 to 3 devices: candidates take 1 devices"):
        choose_stages(table, **options)
    assert len(choose_stages(table, **options, use_all_devices=False).stages) == 2


def test_a_border_between_hosts_is_put_where_little_crosses() -> None:
    """Two hosts of two devices; much crosses behind layer 1, so the border of the hosts goes behind layer 0."""
    table = uniform(3, [1], 4)
    slow = np.zeros((2, 4))
    slow[:, 2] = (1.0, 9.0)
    table = dataclasses.replace(table, transfer_seconds=slow, skip_to=np.array([2, 2, 4, 4]))
    choice = choose_stages(table, n_micro_batches=100, memory_bytes=1.0, use_all_devices=False)
    assert [stage.first_device for stage in choice.stages] == [0, 2, 3]
    assert choice.seconds == 3 + 99 + 1


def test_unknown_schedule_is_refused() -> None:
    with pytest.raises(ShardingError, match="No schedule `zb`"):
        choose_stages(uniform(1, [1], 1), n_micro_batches=1, memory_bytes=1.0, schedule="zb")
