"""choose_stages agrees with exhaustive search under memory limits and transfers, is fast, and explains failures."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minialpa.errors import InfeasibleError
from minialpa.inter.search.stage_dp import StageCostTable, Start, choose_stages, step_seconds_of
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
    need = float(str(caught.value).split("needs ")[1].split(" B")[0])
    assert math.isfinite(fastest_pipeline(table, **{**limits, "memory_bytes": need}))
    assert math.isinf(fastest_pipeline(table, **{**limits, "memory_bytes": need - 1}))
    assert low < need < high
