"""Plans as values: JSON both ways, equal in every process, readable, and runnable by `parallelize`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import minialpa
from minialpa import ClusterSpec, PipeshardParallel, Plan, ShardParallel
from minialpa.plan import PlannedCollective
from minialpa.testing import assert_allclose
from tests.plans import make_args, pipeline_plan, train_step


def test_json_both_ways_gives_an_equal_plan(tmp_path: Path) -> None:
    plan = pipeline_plan()
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(str(tmp_path / "plan.json")) == plan
    assert hash(plan) == hash(Plan.load(tmp_path / "plan.json"))
    assert pipeline_plan() == plan


def test_the_summary_and_explain_name_stages_operators_and_arrays() -> None:
    plan = pipeline_plan()
    text = plan.summary()
    assert "2 x 4 a100-40gb devices: 2 stages, 4 micro-batches, schedule 1f1b" in text
    assert "Stage 1: layer 1, submesh 1x4 (devices 4-7), logical shape (4,)" in text
    assert "layer 0 forward: dot_general [4, 8]" in text and "per step: compute" in text

    text = plan.explain("params['w']")
    assert text.startswith("params['w'] float32[8, 8]: mesh 0: P(") and "\n" not in text
    assert "stage 1: layer 1 forward: dot_general" in plan.explain("dot_general")
    assert (
        plan.explain("nothing of that name") == "The plan has no argument, result or operator `nothing of that name`."
    )


def test_the_summary_tells_of_collectives_that_take_no_time_in_passes() -> None:
    plan = pipeline_plan()
    first, *others = plan.stages
    passes = tuple(dataclasses.replace(one, communication_s=0.0, hidden_s=1e-6) for one in first.passes)
    stages = (dataclasses.replace(first, passes=passes, update_s=2e-6), *others)
    sums = PlannedCollective(stage=0, kind="all-reduce", axes=(0,), n_bytes=1.0, times_per_step=1)
    text = str(dataclasses.replace(plan, stages=stages, collectives=(sums,)))
    assert "+ 0 s communication (2 us more beside the compute) per micro-batch, 2 us update (with collectives)" in text


def test_placements_are_partition_specs_on_meshes_and_the_cost_adds_up() -> None:
    plan = pipeline_plan()
    placed = {spec.path: spec for spec in plan.input_specs}
    assert placed["params['w']"].mesh_ids == (0,) and placed["params['v']"].mesh_ids == (1,)
    assert isinstance(placed["batch['x']"].partition_specs[0], jax.sharding.PartitionSpec)
    assert [spec.path for spec in plan.output_specs] == ["result[0]['v']", "result[0]['w']", "result[1]"]

    cost = plan.cost
    parts = cost.compute_s + cost.communication_s + cost.bubble_s + cost.update_s
    assert parts == pytest.approx(cost.total_s) and len(cost.peak_bytes) == 2 and min(cost.peak_bytes) > 0


def test_a_saved_plan_runs_as_the_original(tmp_path: Path) -> None:
    method = PipeshardParallel(num_micro_batches=4, layer_option="manual", stage_option="uniform")
    original = minialpa.parallelize(train_step, method=method)
    params, batch = make_args()
    expected = original(params, batch)
    original.get_last_executable().get_parallel_plan().save(tmp_path / "plan.json")
    again = minialpa.parallelize(train_step, method=Plan.load(tmp_path / "plan.json"))
    assert_allclose(again(params, batch), expected, rtol=0, atol=0)
    assert again.plan(params, batch) == original.plan(params, batch)
    assert_allclose(expected, train_step(params, batch), rtol=1e-4, atol=1e-5)


def test_fingerprints_tell_steps_apart() -> None:
    def sums(axis: int) -> Any:
        return lambda x, batch: jnp.sum(x, axis) + batch

    def scans(reverse: bool) -> Any:
        return lambda x, batch: jax.lax.scan(lambda c, r: (c * 0.5 + r, None), batch, x, reverse=reverse)[0]

    def fingerprint(step: Any, *shapes: tuple[int, ...]) -> str:
        structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        cluster = ClusterSpec.preset("cpu", devices_per_host=2)
        return minialpa.plan(step, structs, cluster=cluster, method=ShardParallel(), batch_argnums=()).fingerprint

    shapes = ((4, 4), (4,))
    found = [fingerprint(step, *shapes) for step in (sums(0), sums(1), scans(False), scans(True))]
    assert len(set(found)) == 4
    assert fingerprint(sums(0), *shapes) == found[0] and fingerprint(scans(True), *shapes) == found[3]
    assert fingerprint(sums(0), (8, 4), (4,)) != found[0]
