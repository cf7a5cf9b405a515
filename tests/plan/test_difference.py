"""Two plans and what is told of their difference."""

from __future__ import annotations

import dataclasses
import json

import hypothesis
from hypothesis import strategies as st

import minialpa
from minialpa import AutoShardingOption, ClusterSpec, Plan, ShardParallel, VerifyError
from minialpa.plan import PlannedCollective
from tests.plan.test_codec import at, data_of, good, places, put
from tests.plans import make_args, pipeline_plan, shard_plan, train_step

replace = dataclasses.replace


def test_clusters_stages_and_costs_are_told_with_both_sides() -> None:
    lines = pipeline_plan().diff(shard_plan()).splitlines()
    assert "cluster size: 2 x 4 -> 1 x 8" in lines
    assert "micro-batches: 4 -> 1" in lines
    assert "layers: 2 -> no pipeline" in lines
    assert "stages: 2 -> 1" in lines
    assert (
        "stage 0: layer 0, submesh 1x4 (devices 0-3), logical shape (4,) -> "
        "all layers, submesh 1x8 (devices 0-7), logical shape (8,)"
    ) in lines
    assert "stage 1: layer 1, submesh 1x4 (devices 4-7), logical shape (4,) -> none" in lines
    assert any(line.startswith("placement params['v']: mesh 1 ") and " -> mesh 0 " in line for line in lines)
    assert any(line.startswith("total per step: ") and line.endswith("%)") for line in lines)
    assert any(line.startswith("peak memory: ") for line in lines)


def test_options_placements_and_operators_are_told() -> None:
    split = ShardParallel(auto_sharding_option=AutoShardingOption(force_data_parallel=True))
    text = shard_plan().diff(shard_plan(split))
    assert "stage 0, option `force_data_parallel`: False -> True" in text
    assert "placement batch['x']: mesh 0 P() -> mesh 0 P('x',)" in text.replace("P('x')", "P('x',)")
    assert "operator of stage 0: none -> forward: dot_general [16, 8] S0,R" in text
    assert "communication of stage 0, all-reduce over axis 0: none -> " in text


def test_shapes_and_operations_are_told() -> None:
    assert "shape of batch['x']: float32[16, 8] -> float32[32, 8]" in shard_plan().diff(shard_plan(n=32))
    cluster = ClusterSpec.preset("a100-40gb", devices_per_host=8)
    other = minialpa.plan(lambda p, b: (train_step(p, b), b["x"]), make_args(), cluster=cluster)
    assert "placement result[0][0]['v']: none -> mesh 0" in shard_plan().diff(other)


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
def test_no_difference_goes_untold(draw: st.DataObject) -> None:
    data = data_of(good())
    numbers = [p for p in places(data) if p[:1] == ("plan",) and type(at(data, p)) in (int, float, str)]
    place = draw.draw(st.sampled_from(numbers))
    old = at(data, place)
    data = put(data, place, draw.draw(st.sampled_from(["S0,R", "R", "x", "none"])) if type(old) is str else old + 1)
    try:
        other = Plan.from_json(json.dumps(data))
    except VerifyError:
        hypothesis.reject()
    assert (good().diff(other) == "The plans are equal.") == (other == good())
    assert good().diff(other)
