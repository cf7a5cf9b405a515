"""Models that scan over their layers, trained with pipeline stages that end inside the scan."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

import minialpa
from minialpa import (
    AutoLayerOption,
    ManualStageOption,
    PipeshardParallel,
    Plan,
    ShardParallel,
    UniformStageOption,
    models,
)
from minialpa.methods import Method
from minialpa.options import StageOption
from minialpa.runtime.arrays import BlockedArray
from minialpa.testing import assert_allclose
from tests.scanned_training import perceptron

N_LAYERS = 4


def pipeline(stages: StageOption, layer_num: int, **options: Any) -> PipeshardParallel:
    return PipeshardParallel(
        num_micro_batches=2, layer_option=AutoLayerOption(layer_num=layer_num, **options), stage_option=stages
    )


def by_hand(layers: list[list[int]], n_devices: int = 1) -> ManualStageOption:
    n = len(layers)
    return ManualStageOption(layers, [(1, n_devices)] * n, [(n_devices,)] * n)


def check_state(state: Any, plan: Plan) -> None:
    """Each block of rows is on the devices of its stage, and on no other."""
    devices = jax.devices()
    stages = [set(devices[s.first_device : s.first_device + s.n_devices]) for s in plan.stages]
    n_blocked = 0
    for value, leaf in zip(plan.outputs, jax.tree.leaves(state), strict=False):
        if not value.rows:
            assert leaf.sharding.device_set == stages[value.mesh_ids[0]], value.path
            continue
        n_blocked += 1
        assert isinstance(leaf, BlockedArray), value.path
        at = 0
        for (start, stop), mesh, block in zip(value.rows, value.mesh_ids, leaf.blocks, strict=True):
            assert start == at and block.shape == (stop - start, *value.shape[1:])
            assert block.sharding.device_set == stages[mesh], value.path
            at = stop
        assert at == value.shape[0] == leaf.shape[0]
        assert len(set(value.mesh_ids)) == len(plan.stages), value.path
    assert n_blocked


def train(case: models.ModelCase, method: Method, key: jax.Array, n_steps: int = 2) -> Plan:
    expected_step = jax.jit(case.train_step(jax.value_and_grad))
    actual_step = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=method)
    expected = actual = case.init(key)
    for i in range(n_steps):
        batch = case.make_batch(i, case.batch_size)
        expected, expected_metrics = expected_step(expected, batch)
        actual, actual_metrics = actual_step(actual, batch)
        assert_allclose(jax.device_get(actual_metrics), expected_metrics, rtol=2e-4, atol=1e-6)
    assert_allclose(jax.device_get(actual), expected, rtol=2e-4, atol=1e-5)
    plan: Plan = actual_step.get_last_executable().get_parallel_plan()
    check_state(actual, plan)
    return plan


def test_scanned_perceptron_trains_as_on_one_device(key: jax.Array) -> None:
    stages = by_hand([[0, 1], [2], [3]], n_devices=2)
    plan = train(perceptron(N_LAYERS, again=True), pipeline(stages, N_LAYERS, remat="full"), key)
    assert len(plan.row_blocks[0]) == N_LAYERS


def test_chunks_of_a_scan_go_round_the_stages(key: jax.Array) -> None:
    stages = UniformStageOption(2, submesh_physical_shape=(1, 1), num_chunks=2)
    method = dataclasses.replace(pipeline(stages, 4), pipeline_schedule="1f1b-interleaved")
    plan = train(perceptron(N_LAYERS, again=True), method, key)
    assert [stage.layers for stage in plan.stages] == [(0, 2), (1, 3)]


@functools.cache
def two_stages() -> tuple[models.ModelCase, Any]:
    """A model, and its step with blocks on two stages, which is compiled once."""
    case = perceptron(5, again=False)
    method = pipeline(UniformStageOption(2), 2)
    return case, minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=method)


def test_plans_with_blocks_are_saved_and_run(key: jax.Array) -> None:
    case, first = two_stages()
    state, batch = case.init(key), case.make_batch(0, case.batch_size)
    step = case.train_step(minialpa.value_and_grad)
    plan = first.plan(state, batch)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    expected, _ = first(state, batch)
    actual, _ = minialpa.parallelize(step, method=again)(case.init(key), batch)
    assert_allclose(jax.device_get(actual), jax.device_get(expected), rtol=0, atol=0)
    assert minialpa.replan(plan, step, (state, batch)).row_blocks == plan.row_blocks


def test_blocks_go_from_one_plan_to_another(key: jax.Array) -> None:
    """State in blocks is an argument for any other step, and its blocks stay the caller's."""
    case, two = two_stages()
    batch = case.make_batch(0, case.batch_size)
    state, _ = two(case.init(key), batch)
    host = jax.device_get(state)
    expected, _ = jax.jit(case.train_step(jax.value_and_grad))(host, batch)
    other = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=ShardParallel())
    assert_allclose(jax.device_get(other(state, batch)[0]), expected, rtol=2e-4, atol=1e-5)
    assert_allclose(jax.device_get(state), host, rtol=0, atol=0)
    assert other.get_last_executable().get_parallel_plan().row_blocks == (), "one mesh keeps the scan"


def test_blocks_are_used_in_place(key: jax.Array) -> None:
    """A step takes the blocks of the last one without a copy, and donates them."""
    case, step = two_stages()
    batch = case.make_batch(0, case.batch_size)
    state = step.preshard_dynamic_args(case.init(key), batch)[0]
    for _ in range(2):
        where = {b.unsafe_buffer_pointer() for b in blocks_of(state[0])}
        new, _ = step(state, batch)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
        assert {b.unsafe_buffer_pointer() for b in blocks_of(new[0])} == where
        state = new


def blocks_of(state: Any) -> list[jax.Array]:
    leaves = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, BlockedArray)]
    assert leaves
    return [shard.data for leaf in leaves for block in leaf.blocks for shard in block.addressable_shards]


def test_stages_have_one_scan_where_it_is_as_fast(key: jax.Array) -> None:
    case = perceptron(12, again=True)
    method = PipeshardParallel(
        num_micro_batches=4,
        layer_option=AutoLayerOption(),
        stage_option=UniformStageOption(2, submesh_physical_shape=(1, 1)),
    )
    plan = train(case, method, key)
    assert len(plan.row_blocks[0]) == 2 and [stage.layers for stage in plan.stages] == [(0,), (1,)]
    assert minialpa.replan(
        plan, case.train_step(minialpa.value_and_grad), (case.init(key), case.make_batch(0, case.batch_size))
    ).row_blocks == (plan.row_blocks)
