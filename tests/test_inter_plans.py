"""What the comparison of plans is made of: the stored plans, and climbing over choices."""

from __future__ import annotations

import math

import pytest

from benchmarks.alpa_plans import STORED, StoredPlan
from benchmarks.climbing import Outcome, climb, outcome
from minialpa import InfeasibleError, Plan, ShardingError
from minialpa.models import SIZES


@pytest.mark.parametrize("stored", STORED, ids=lambda stored: stored.model)
def test_stored_plans_use_every_device_and_cut_the_batch_into_whole_parts(stored: StoredPlan) -> None:
    assert stored.model in SIZES
    assert sum(math.prod(stage.submesh) for stage in stored.stages) == stored.n_devices
    assert all(math.prod(stage.submesh) == math.prod(stage.logical_shape) for stage in stored.stages)
    assert stored.batch_size % stored.n_micro_batches == 0


def _needs(n_bytes: int) -> Outcome:
    def fail() -> Plan:
        raise InfeasibleError(f"Stage 0: It needs at least {n_bytes:,} bytes per device and the limit is 16.")

    return outcome("choice", fail)


def test_climb_goes_to_what_needs_least_where_nothing_fits() -> None:
    found = climb([9], lambda n: [n - 1, n + 1], lambda n: _needs(abs(n - 4) * 10**9 + 10**9), most=100)
    assert found.best.failure == "does not fit: needs 1.0 GB"


def test_climb_solves_no_choice_twice_and_at_most_so_many() -> None:
    seen: list[int] = []

    def solve(n: int) -> Outcome:
        seen.append(n)
        return _needs(1000 - n)

    assert climb([0, 1], lambda n: [n - 1, n + 1], solve, most=5).n_solved == 5
    assert seen == [0, 1, 2, 3, 4]


def test_outcome_tells_other_failures_in_a_line() -> None:
    def fail() -> Plan:
        raise ShardingError("No room.\nMore.")

    assert outcome("choice", fail) == Outcome("choice", None, "fails: No room.")
