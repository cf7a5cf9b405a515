"""Plans as values: JSON both ways, equal in every process, readable, and runnable by `parallelize`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import minialpa
from minialpa import ClusterSpec, PipeshardParallel, Plan, ShardParallel
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
    assert text == str(plan) and "2 x 4 a100-40gb devices: 2 stages, 4 micro-batches, schedule 1f1b" in text
    assert re.search(r"Stage 1  4-7 as 4  layer 1 ", text) and "float32[" not in text
    assert "float32[4, 8]" in plan.summary(full=True) and len(repr(plan)) < 150

    text = plan.explain("params['w']")
    assert text.startswith("params['w'] (weights) float32[8, 8]: columns over 4 on stage 0; 64 B of 256 B on each")
    assert "matmul (backward)" in plan.explain("matmul") and "plans.py:" in plan.explain("matmul")
    assert plan.explain("nothing of it").startswith("No part of the plan is called `nothing of it`.")


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
