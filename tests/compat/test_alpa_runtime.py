"""Scripts in the style of Alpa's tests and examples run under `minialpa.compat.alpa` as on one device."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import minialpa
import minialpa.compat.alpa as alpa
from minialpa.compat.alpa import names
from tests.compat.alpa_scripts import make_state_and_batch, step_with, train_and_compare
from tests.runtime.cluster.in_process_session import in_process_session


@pytest.fixture(autouse=True)
def _as_in_a_script() -> Iterator[None]:
    alpa.shutdown()
    with jax.numpy_dtype_promotion("standard"):
        yield
    alpa.shutdown()


# ---- steps ----------------------------------------------------------------------------------------------------------


def test_a_shard_parallel_script_trains_as_on_one_device() -> None:
    alpa.init(cluster="local")
    executable = train_and_compare(None)
    assert isinstance(executable.get_hlo_text(), str) and "HloModule" in executable.get_hlo_text()
    (stage,) = executable.get_parallel_plan().stages
    assert stage.n_devices == 8
    assert executable.get_total_allocation_size() > 0


def test_a_method_that_fixes_the_sharding_trains_as_on_one_device() -> None:
    alpa.init(cluster="local")
    text = train_and_compare(alpa.Zero3Parallel()).get_hlo_text()
    total, *kinds = alpa.util.count_communication_primitives(text, ignore_scalar_all_reduce=True)
    assert total == sum(kinds) and kinds[1] > 0, "all-gathers"


def test_a_pipeline_with_manual_boundaries_trains_as_on_one_device() -> None:
    alpa.init(cluster="local", num_nodes=1, num_devices_per_node=4)
    method = alpa.PipeshardParallel(num_micro_batches=4, layer_option="manual", stage_option="uniform")
    executable = train_and_compare(method, manual=True)
    assert len(executable.get_parallel_plan().stages) == 2

    # As in Alpa: a forward pass, a backward pass and an update for each stage; each pass runs for each micro-batch.
    texts, info = executable.get_hlo_text(), executable.get_stage_execution_info()
    assert isinstance(texts, list) and len(texts) == len(info) == len(executable.function_names) == 6
    runs = [run for stage in info for run in stage]
    assert {tuple(devices) for _, _, _, devices in runs} == {(0, 1), (2, 3)}
    assert all(0 <= start <= stop and nodes == (0,) for start, stop, nodes, _ in runs)
    assert list(map(len, info)) == [4, 4, 4, 4, 1, 1]


def test_the_result_of_a_search_can_be_given_by_hand() -> None:
    alpa.init(cluster="local", num_nodes=1, num_devices_per_node=4)
    layers = alpa.AutoLayerOption(layer_num=2)
    stages = alpa.AutoStageOption("manual", [(1, 2)], "model_parallel_only")
    method = alpa.PipeshardParallel(num_micro_batches=2, layer_option=layers, stage_option=stages)
    step, args = step_with(alpa.value_and_grad), make_state_and_batch()
    plan = alpa.parallelize(step, method=method).plan(*args)
    assert [(stage.submesh, stage.logical_shape) for stage in plan.stages] == [((1, 2), (1, 2))] * 2

    _, *found = alpa.get_last_dp_result()
    by_hand = alpa.PipeshardParallel(
        num_micro_batches=2, layer_option=layers, stage_option=alpa.ManualStageOption(*found)
    )
    same = alpa.parallelize(step, method=by_hand).plan(*args)
    assert [stage.submesh for stage in same.stages] == list(found[1])


@pytest.mark.slow  # the pipeline above is the short relative
def test_a_script_runs_on_workers() -> None:
    with in_process_session(2, 2):
        method = alpa.PipeshardParallel(num_micro_batches=2, layer_option="manual")
        state, batch = make_state_and_batch(manual=True)
        step = alpa.parallelize(step_with(alpa.value_and_grad), method=method)
        expected, expected_loss = step_with(jax.value_and_grad)(state, batch)
        actual, loss = step(state, batch)
        assert isinstance(loss, alpa.DistributedArray)
        alpa.prefetch(loss)
        alpa.testing.assert_allclose((actual.params, loss), (expected.params, expected_loss))
        runs = [run for stage in step.get_last_executable().get_stage_execution_info() for run in stage]
        assert {run.node_ids for run in runs} == {(0,), (1,)}

        # Workers run a plan on the first hosts only, and their devices are not of this process.
        cluster = alpa.get_global_cluster()
        with pytest.raises(minialpa.ShardingError, match="minialpa runs on the first hosts of a session"):
            alpa.ShardParallel(devices=cluster.get_virtual_physical_mesh([1])).devices  # noqa: B018
        with pytest.raises(minialpa.MinialpaError, match=r"wait with `executable\.sync\(\)`"):
            cluster.get_physical_mesh().sync_workers()
        alpa.set_global_virtual_physical_mesh(cluster.get_virtual_physical_mesh([0]))
        doubled = alpa.parallelize(lambda x: x * 2, batch_argnums=())(np.ones((8, 2), np.float32))
        alpa.testing.assert_allclose(doubled, np.full((8, 2), 2.0))


# ---- states and followers -------------------------------------------------------------------------------------------


def test_a_follower_has_the_placement_specs_of_the_step() -> None:
    alpa.init("local")
    state, batch = make_state_and_batch()
    apply_fn = state.apply_fn

    def eval_step(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((apply_fn(params, batch["x"]) - batch["y"]) ** 2)

    train = alpa.parallelize(step_with(alpa.value_and_grad), method=alpa.Zero3Parallel())
    evaluate = alpa.parallelize(eval_step, method=alpa.FollowParallel(train))
    state, _ = train(state, batch)
    twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), batch)
    alpa.testing.assert_allclose(evaluate(state.params, twice), eval_step(jax.device_get(state.params), twice))

    actual = jax.tree.leaves(evaluate.get_last_executable().get_input_placement_specs()[0])
    expected = jax.tree.leaves(train.get_last_executable().get_input_placement_specs()[0].params)
    assert actual == expected
    # It is equality of shape and sharding: the parameters are not all alike.
    assert len(set(actual)) > 1


def test_placement_specs_differ_in_shape_dtype_meshes_and_shardings() -> None:
    aval = jax.ShapeDtypeStruct((4, 2), jnp.float32)
    spec = alpa.PlacementSpec(aval, (0,), (PartitionSpec("x"),))
    assert isinstance(spec, minialpa.PlacementSpec) and (spec.shape, spec.dtype) == ((4, 2), "float32")
    assert spec.sharding_specs == spec.partition_specs == (PartitionSpec("x"),)
    assert spec == alpa.PlacementSpec(aval, [0], [PartitionSpec("x", None)])
    others = (
        alpa.PlacementSpec(aval, (1,), (PartitionSpec("x"),)),
        alpa.PlacementSpec(aval, (0,), (PartitionSpec(None, "x"),)),
        alpa.PlacementSpec(jax.ShapeDtypeStruct((4, 4), jnp.float32), (0,), (PartitionSpec("x"),)),
        alpa.PlacementSpec(jax.ShapeDtypeStruct((4, 2), jnp.bfloat16), (0,), (PartitionSpec("x"),)),
    )
    assert spec not in others and spec != "x"


# ---- executables ----------------------------------------------------------------------------------------------------


def test_an_executable_is_called_on_arguments_and_on_leaves() -> None:
    alpa.init("local")
    args = make_state_and_batch()
    method = alpa.ShardParallel(num_micro_batches=2)
    step = alpa.parallelize(step_with(alpa.value_and_grad), method=method, donate_argnums=())
    executable = step.get_executable(*args)
    expected = jax.jit(step_with(jax.value_and_grad))(*args)

    leaves = jax.tree.leaves(args)
    placed = executable.preshard_dynamic_args(*leaves)
    assert all(len(leaf.sharding.device_set) == 8 and leaf.addressable_shards for leaf in placed)
    for results in (executable(*args), executable(*leaves), executable(*placed)):
        alpa.testing.assert_allclose(results, expected)

    with pytest.raises(minialpa.ShardingError, match="takes 28 arrays, and got 26"):
        executable(args[0])
    with pytest.raises(minialpa.ShardingError, match=r"compiled for `batch\['x'\]` of float32\[32, 16\], and got"):
        executable(args[0], jax.tree.map(lambda x: x[:16], args[1]))


def test_all_arguments_are_placed_but_for_static_ones() -> None:
    alpa.init("local")

    @alpa.parallelize
    def step(params: Any, batch: Any, scale: Any, apply: Any) -> jax.Array:
        return apply(batch["x"]) @ params["w"] * scale

    args = ({"w": np.ones((8, 8), np.float32)}, {"x": np.ones((16, 8), np.float32), "unread": np.ones(16)}, 2.0)
    placed = step.preshard_dynamic_args(*args, jnp.tanh)
    assert len(placed) == 3 and step.get_last_executable() is not None
    assert all(leaf.sharding.device_set == set(jax.devices()) for leaf in jax.tree.leaves(placed))
    alpa.testing.assert_allclose(step(*placed, jnp.tanh), np.full((16, 8), np.tanh(1.0) * 16.0))


def test_times_are_those_of_timed_steps_or_of_a_profile() -> None:
    alpa.init(cluster="local")
    executable = train_and_compare(alpa.ShardParallel(), n_steps=1)
    with pytest.raises(minialpa.MinialpaError, match=r"Set `global_config\.shard_parallel_sync_for_timer`"):
        executable.get_execution_time_costs()
    assert executable.profile_with_dummy_inputs() == executable.get_execution_time_costs()

    alpa.global_config.shard_parallel_sync_for_timer = True
    try:
        executable = train_and_compare(alpa.ShardParallel(), n_steps=3)
    finally:
        alpa.global_config.shard_parallel_sync_for_timer = False
    costs = executable.get_execution_time_costs()
    assert len(costs) == 3 and all(cost > 0 for cost in costs)


@pytest.mark.parametrize("name", ["auto_sharding_objective", "mesh_group", "physical_mesh"])
def test_an_attribute_that_is_not_here_says_what_to_use(name: str) -> None:
    executable = alpa.parallelize(lambda x: x * 2, batch_argnums=()).get_executable(np.ones(8, np.float32))
    with pytest.raises(AttributeError, match=re.escape(names.INSTEAD[f"executable.{name}"])):
        getattr(executable, name)


# ---- loaders --------------------------------------------------------------------------------------------------------


IMAGES = np.random.default_rng(0).standard_normal((160, 4, 4), np.float32)
LABELS = np.arange(160, dtype=np.int32) % 10


def read_images(start: int, end: int, batch_size: int) -> Iterator[tuple[Any, Any]]:
    """As in examples, it goes on beyond `end`."""
    while True:
        for i in range(start, len(IMAGES), batch_size):
            yield IMAGES[i : i + batch_size], LABELS[i : i + batch_size]


def classify(weights: Any, images: Any, labels: Any) -> tuple[Any, jax.Array]:
    def loss(weights: Any) -> jax.Array:
        logits = images.reshape(len(images), -1) @ weights
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, 10), -1))

    value, grad = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * grad, value


def test_epochs_of_a_loader_that_takes_placement_specs() -> None:
    alpa.init("local")
    step, weights = alpa.parallelize(classify), jnp.zeros((16, 10))
    batch = (jax.core.ShapedArray((32, 4, 4), jnp.float32), jax.core.ShapedArray((32,), jnp.int32))
    specs = step.get_executable(weights, *batch).get_input_placement_specs()[1:3]
    # 150 samples fill four batches.
    loader = alpa.MeshDriverDataLoader(32, 150, read_images, specs, prefetch_size=2)
    expected = weights
    for _ in range(2):
        n = 0
        for n, (images, labels) in enumerate(loader, 1):
            assert len(images.sharding.device_set) == 8
            weights, value = step(weights, images, labels)
            rows = slice(32 * (n - 1), 32 * n)
            expected, expected_value = jax.jit(classify)(expected, IMAGES[rows], LABELS[rows])
            alpa.testing.assert_allclose(value, expected_value)
        assert n == 4


def test_a_loader_takes_specs_of_whole_arguments_and_the_step() -> None:
    alpa.init("local")
    state, batch = make_state_and_batch()
    step = alpa.parallelize(step_with(alpa.value_and_grad), method=alpa.ShardParallel(num_micro_batches=2))
    specs = step.get_executable(state, batch).get_input_placement_specs()
    expected = jax.jit(step_with(jax.value_and_grad))(state, batch)[1]
    for given in (specs[1], step):
        (placed,) = alpa.DataLoader([batch], given, prefetch_size=0)
        assert jax.tree.structure(placed) == jax.tree.structure(batch)
        alpa.testing.assert_allclose(step(jax.tree.map(jnp.copy, state), placed)[1], expected)

    # A shorter batch is as the source gave it.
    shorter = jax.tree.map(lambda x: np.asarray(x[:8]), batch)
    (left,) = alpa.DataLoader([shorter], specs[1])
    assert isinstance(left["x"], np.ndarray)

    with pytest.raises(minialpa.ShardingError, match="A batch has 2 arrays, and there are 28 placement specs"):
        next(alpa.DataLoader([batch], specs))
    assert pickle.loads(pickle.dumps(specs[1])) == specs[1]
    with pytest.raises(minialpa.ShardingError, match=r"Pass a part of `executable.get_input_placement_specs\(\)`"):
        alpa.DataLoader([batch], pickle.loads(pickle.dumps(specs[1])))
