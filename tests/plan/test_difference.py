"""The description of the difference between two plans."""

from __future__ import annotations

import dataclasses
import json

import hypothesis
from hypothesis import strategies as st

from minialpa import AutoShardingOption, Plan, ShardParallel, VerifyError
from minialpa.plan import PlannedCollective
from tests.plan.mutations import places, put
from tests.plan.test_codec import data_of, good
from tests.plans import pipeline_plan, shard_plan

replace = dataclasses.replace


def test_differences_are_reported_with_both_sides() -> None:
    lines = pipeline_plan().diff(shard_plan()).splitlines()
    assert "cluster size: 2 x 4 -> 1 x 8" in lines
    assert "stages: 2 -> 1" in lines
    assert "stage 1: layer 1, submesh 1x4 (devices 4-7), logical shape (4,) -> none" in lines
    assert any(line.startswith("placement params['v']: mesh 1 ") and " -> mesh 0 " in line for line in lines)
    assert any(line.startswith("total per step: ") and line.endswith("%)") for line in lines)

    split = ShardParallel(auto_sharding_option=AutoShardingOption(force_data_parallel=True))
    text = shard_plan().diff(shard_plan(split))
    assert "stage 0, option `force_data_parallel`: False -> True" in text
    assert "operator of stage 0: none -> forward: dot_general [16, 8] S0,R" in text
    assert "communication of stage 0, all-reduce over axis 0: none -> 516 B in 3 collectives per step" in text
    assert "shape of batch['x']: float32[16, 8] -> float32[32, 8]" in shard_plan().diff(shard_plan(n=32))


def test_collectives_are_added_up_by_kind_and_stage() -> None:
    def plan(*collectives: PlannedCollective) -> Plan:
        return replace(good(), collectives=collectives)

    two = plan(
        PlannedCollective(kind="all-gather", n_bytes=100.0, axes=(0,), stage=1, times_per_step=2),
        PlannedCollective(kind="all-gather", n_bytes=50.0, axes=(0,), stage=1, times_per_step=4),
    )
    one = plan(PlannedCollective(kind="all-gather", n_bytes=100.0, axes=(0,), stage=1, times_per_step=1))
    text = two.diff(one)
    assert text.startswith("communication of stage 1, all-gather over axis 0: 400 B in 6 collectives per step -> ")
    assert text.endswith(" -> 100 B in 1 collective per step")


def test_long_lists_are_cut() -> None:
    values = tuple(replace(good().inputs[0], path=f"p[{i}]") for i in range(50))
    text = good().diff(replace(good(), inputs=values))
    assert "... and 34 more like these" in text


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=50)
def test_no_difference_is_left_out(draw: st.DataObject) -> None:
    data = data_of(good())
    numbers = [(p, old) for p, old in places(data) if p[:1] == ("plan",) and type(old) in (int, float, str)]
    place, old = draw.draw(st.sampled_from(numbers))
    data = put(data, place, draw.draw(st.sampled_from(["S0,R", "R", "x", "none"])) if type(old) is str else old + 1)
    try:
        other = Plan.from_json(json.dumps(data))
    except VerifyError:
        hypothesis.reject()
    assert (good().diff(other) == "The plans are equal.") == (other == good())
    assert good().diff(other)
