"""Models that scan over their layers, trained with pipeline stages that end inside the scan."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import minialpa
from minialpa import (
    AutoLayerOption,
    AutoStageOption,
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

WIDTH, BATCH = 16, 16


def pipeline(stages: StageOption, layer_num: int, **options: Any) -> PipeshardParallel:
    return PipeshardParallel(
        num_micro_batches=4, layer_option=AutoLayerOption(layer_num=layer_num, **options), stage_option=stages
    )


def by_hand(layers: list[list[int]], n_devices: int = 1) -> ManualStageOption:
    n = len(layers)
    return ManualStageOption(layers, [(1, n_devices)] * n, [(n_devices,)] * n)


def check_state(state: Any, plan: Plan) -> None:
    """State is where the plan has it: each block of rows on the devices of its stage, and on no other."""
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


def train(case: models.ModelCase, method: Method, key: jax.Array, n_steps: int = 3) -> Plan:
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


@pytest.mark.slow  # the scanned perceptron is the short relative
@pytest.mark.parametrize(
    ("n_layers", "stages", "layer_num"),
    [
        (5, UniformStageOption(2, submesh_physical_shape=(1, 2)), 2),
        pytest.param(4, UniformStageOption(4, submesh_physical_shape=(1, 1)), 4, marks=pytest.mark.slow),
    ],
)
def test_scanned_llama_trains_as_on_one_device(
    n_layers: int, stages: StageOption, layer_num: int, key: jax.Array
) -> None:
    case = models.build("llama", n_layers=n_layers, scan_layers=True, batch_size=BATCH, learning_rate=1e-4)
    plan = train(case, pipeline(stages, layer_num), key)
    assert sum(plan.row_blocks[0]) == n_layers


class Perceptron:
    """x -> tanh(x w + b) for each layer in a scan, then a head; Adam with clipping by the global norm."""

    def __init__(self, n_layers: int, again: bool) -> None:
        self.n_layers, self.again = n_layers, again
        self.transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, eps=1e-4))

    def init(self, key: jax.Array) -> Any:
        keys = jax.random.split(key, 3)
        params = {
            "b": jnp.zeros((self.n_layers, WIDTH)),
            "head": jax.random.normal(keys[0], (WIDTH, 1)) * 0.3,
            "w": jax.random.normal(keys[1], (self.n_layers, WIDTH, WIDTH)) * 0.3,
        }
        return params, self.transform.init(params)

    def make_batch(self, seed: int, n: int) -> Any:
        x = np.random.default_rng(seed).standard_normal((n, WIDTH), np.float32)
        return {"x": x, "y": np.sin(x.sum(1, keepdims=True))}

    def train_step(self, value_and_grad: Any) -> Any:
        def body(x: jax.Array, row: Any) -> tuple[jax.Array, jax.Array]:
            x = x + jnp.tanh(jnp.dot(x, row["w"]) + row["b"][None])
            return x, jnp.mean(x * x)

        def loss(params: Any, batch: Any) -> jax.Array:
            step = jax.checkpoint(body, prevent_cse=False) if self.again else body
            rows = {name: params[name] for name in ("w", "b")}
            x, norms = jax.lax.scan(step, batch["x"], rows)
            return jnp.mean((jnp.dot(x, params["head"]) - batch["y"]) ** 2) + 1e-3 * jnp.sum(norms)

        def step(state: Any, batch: Any) -> Any:
            params, moments = state
            value, grads = value_and_grad(loss)(params, batch)
            with jax.numpy_dtype_promotion("standard"):
                updates, moments = self.transform.update(grads, moments, params)
                return (optax.apply_updates(params, updates), moments), {"loss": value}

        return step

    def case(self) -> models.ModelCase:
        return models.ModelCase(
            name="perceptron",
            batch_size=BATCH,
            init=self.init,
            make_batch=self.make_batch,
            train_step=self.train_step,
        )


@pytest.mark.parametrize("again", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    ("stages", "layer_num", "options", "blocks"),
    [
        (UniformStageOption(2), 2, {}, 2),
        (by_hand([[0], [1, 2, 3, 4]]), 5, {}, 5),
        (by_hand([[0, 1], [2], [3], [4]], n_devices=2), 5, {"remat": "full"}, 5),
    ],
)
def test_scanned_perceptron_trains_as_on_one_device(
    again: bool, stages: StageOption, layer_num: int, options: dict[str, Any], blocks: int, key: jax.Array
) -> None:
    plan = train(Perceptron(5, again).case(), pipeline(stages, layer_num, **options), key)
    assert len(plan.row_blocks[0]) == blocks


def test_chunks_of_a_scan_go_round_the_stages(key: jax.Array) -> None:
    stages = UniformStageOption(2, submesh_physical_shape=(1, 1), num_chunks=2)
    method = dataclasses.replace(pipeline(stages, 4), pipeline_schedule="1f1b-interleaved")
    plan = train(Perceptron(6, again=True).case(), method, key)
    assert [stage.layers for stage in plan.stages] == [(0, 2), (1, 3)]


@pytest.mark.slow  # the test before is the short relative
def test_a_search_may_end_stages_in_a_scan(key: jax.Array) -> None:
    """Two hosts with a slow link, and more weights than activations: stages are cheaper than sharding."""
    case = models.build(
        "llama", n_layers=4, scan_layers=True, batch_size=64, seq_len=128, hidden=1024, ffn=4096, n_heads=8
    )
    state, batch = jax.eval_shape(case.init, key), case.make_batch(0, 64)
    method = PipeshardParallel(
        num_micro_batches=8,
        layer_option=AutoLayerOption(layer_num=4),
        stage_option=AutoStageOption(planned_steps=math.inf),
    )
    cluster = minialpa.ClusterSpec.preset("h100", num_hosts=2, devices_per_host=1)
    plan = minialpa.plan(case.train_step(minialpa.value_and_grad), (state, batch), cluster=cluster, method=method)
    assert len(plan.stages) == 2 and sum(plan.row_blocks[0]) == 4 and len(plan.row_blocks[0]) > 1
    weights = [value for value in plan.inputs if "params['blocks']" in value.path]
    assert weights and all(set(value.mesh_ids) == {0, 1} for value in weights)
    assert Plan.from_json(plan.to_json()) == plan


def test_plans_with_blocks_are_saved_and_run(key: jax.Array) -> None:
    case = Perceptron(5, again=False).case()
    state, batch = case.init(key), case.make_batch(0, BATCH)
    step = case.train_step(minialpa.value_and_grad)
    first = minialpa.parallelize(step, method=pipeline(UniformStageOption(2), 2))
    plan = first.plan(state, batch)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    expected, _ = first(state, batch)
    actual, _ = minialpa.parallelize(step, method=again)(case.init(key), batch)
    assert_allclose(jax.device_get(actual), jax.device_get(expected), rtol=0, atol=0)
    assert minialpa.replan(plan, step, (state, batch)).row_blocks == plan.row_blocks


def test_one_mesh_keeps_the_scan(key: jax.Array) -> None:
    case = Perceptron(5, again=False).case()
    state, batch = case.init(key), case.make_batch(0, BATCH)
    step = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=ShardParallel())
    plan = step.plan(state, batch)
    assert plan.row_blocks == () and not any(value.rows for value in plan.inputs)
    one_stage = minialpa.parallelize(
        case.train_step(minialpa.value_and_grad), method=pipeline(UniformStageOption(1), 5)
    )
    assert one_stage.plan(state, batch).row_blocks == ()


@pytest.mark.slow  # the test before the last one is the short relative
def test_blocks_go_from_one_plan_to_another(key: jax.Array) -> None:
    """State in blocks is an argument for any other step, and its blocks stay the caller's."""
    case = Perceptron(5, again=False).case()
    batch = case.make_batch(0, BATCH)
    step = case.train_step(minialpa.value_and_grad)
    two = minialpa.parallelize(step, method=pipeline(UniformStageOption(2), 2))
    state, _ = two(case.init(key), batch)
    host = jax.device_get(state)
    expected, _ = jax.jit(case.train_step(jax.value_and_grad))(host, batch)
    for other in (ShardParallel(), pipeline(by_hand([[0], [1, 2, 3, 4]]), 5)):
        actual, _ = minialpa.parallelize(step, method=other)(state, batch)
        assert_allclose(jax.device_get(actual), expected, rtol=2e-4, atol=1e-5)
        assert_allclose(jax.device_get(state), host, rtol=0, atol=0)
    # Another one: jax need not donate what NumPy has seen.
    state, _ = two(case.init(key), batch)
    actual, _ = minialpa.parallelize(step, method=pipeline(UniformStageOption(2), 2))(state, batch)
    assert_allclose(jax.device_get(actual), expected, rtol=2e-4, atol=1e-5)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state) if isinstance(leaf, BlockedArray))


def test_evaluation_takes_the_blocks_of_training(key: jax.Array) -> None:
    case = Perceptron(5, again=False)
    state, batch = case.init(key), case.make_batch(0, BATCH)
    method = pipeline(UniformStageOption(2), 2)
    state, _ = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=method)(state, batch)

    def evaluate(params: Any, batch: Any) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(jnp.dot(x, w)), None), batch["x"], params["w"])
        return jnp.dot(x, params["head"])

    option = dataclasses.replace(method, pipeline_schedule="inference")
    step = minialpa.parallelize(evaluate, method=option)
    for _ in range(2):  # nothing is donated
        assert_allclose(step(state[0], batch), evaluate(jax.device_get(state[0]), batch), rtol=1e-4, atol=1e-5)
    plan = step.get_last_executable().get_parallel_plan()
    assert plan.row_blocks == ((2, 3),) or plan.row_blocks == ((3, 2),)
    assert step.get_last_executable().get_input_placement_specs()[0]["w"].rows


def test_blocks_are_used_in_place(key: jax.Array) -> None:
    """What one step leaves, the next one takes as it is: no block is copied or moved."""
    case = Perceptron(5, again=False).case()
    batch = case.make_batch(0, BATCH)
    step = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=pipeline(UniformStageOption(2), 2))
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
    case = Perceptron(12, again=True).case()
    method = PipeshardParallel(
        num_micro_batches=4,
        layer_option=AutoLayerOption(),
        stage_option=UniformStageOption(2, submesh_physical_shape=(1, 1)),
    )
    plan = train(case, method, key)
    assert len(plan.row_blocks[0]) == 2 and [stage.layers for stage in plan.stages] == [(0,), (1,)]
    assert minialpa.replan(
        plan, case.train_step(minialpa.value_and_grad), (case.init(key), case.make_batch(0, BATCH))
    ).row_blocks == (plan.row_blocks)
