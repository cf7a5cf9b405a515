"""Scripts in the style of Alpa's runtime tests and examples: states, followers, methods that change, loaders."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import minialpa
import minialpa.compat.alpa as alpa
from tests.compat.alpa_scripts import make_state_and_batch, step_with, train_and_compare
from tests.runtime.cluster.in_process_session import in_process_session


@pytest.fixture(autouse=True)
def _as_in_a_script() -> Iterator[None]:
    alpa.shutdown()
    with jax.numpy_dtype_promotion("standard"):
        yield
    alpa.shutdown()


# ---- states and followers -------------------------------------------------------------------------------------------


def test_a_state_is_created_where_the_step_reads_it() -> None:
    alpa.init("local")
    state, batch = make_state_and_batch()
    step = alpa.parallelize(step_with(alpa.value_and_grad), method=alpa.ShardParallel(num_micro_batches=2))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    create = alpa.parallelize(lambda: make_state_and_batch()[0], method=alpa.CreateStateParallel(step, shapes))
    created = create()
    alpa.testing.assert_allclose(created.params, state.params)

    actual = jax.tree.leaves(create.get_last_executable().get_output_placement_specs())
    expected = jax.tree.leaves(step.get_last_executable().get_input_placement_specs()[0])
    assert actual == expected and list(map(hash, actual)) == list(map(hash, expected))
    step(created, batch)


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
    assert spec == alpa.PlacementSpec(aval, [0], [PartitionSpec("x", None)])
    others = (
        alpa.PlacementSpec(aval, (1,), (PartitionSpec("x"),)),
        alpa.PlacementSpec(aval, (0,), (PartitionSpec(None, "x"),)),
        alpa.PlacementSpec(jax.ShapeDtypeStruct((4, 4), jnp.float32), (0,), (PartitionSpec("x"),)),
        alpa.PlacementSpec(jax.ShapeDtypeStruct((4, 2), jnp.bfloat16), (0,), (PartitionSpec("x"),)),
    )
    assert spec not in others and spec != "x"


# ---- methods that change --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        alpa.DataParallel,
        lambda: alpa.PipeshardParallel(layer_option=alpa.AutoLayerOption(layer_num=2)),
        lambda: alpa.get_3d_parallel_method(1, 4, 1, 1),
    ],
)
def test_methods_change_until_a_step_is_planned(make: Any) -> None:
    alpa.init("local", None, 2, 4)
    method = make()
    method.devices = alpa.get_global_virtual_physical_mesh().slice_1d(0, [1])
    method.num_micro_batches = 2
    step = alpa.parallelize(step_with(alpa.value_and_grad), method=method)
    plan = step.plan(*make_state_and_batch())
    assert plan.cluster.n_devices == 4 and plan.n_micro_batches == 2
    with pytest.raises(AttributeError, match=r"has no attribute `device`\. It has devices, num_micro_batches"):
        method.device = None


def test_the_sharding_options_of_a_method_may_be_replaced() -> None:
    for method in (alpa.ShardParallel(), alpa.PipeshardParallel()):
        method.as_option = alpa.AutoShardingOption(allow_all_to_all=False)
        assert method.options().sharding == minialpa.AutoShardingOption(allow_all_to_all=False)


# ---- executables ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_micro_batches", [None, 2])
def test_an_executable_is_called_on_arguments_and_on_leaves(n_micro_batches: int | None) -> None:
    alpa.init("local")
    args = make_state_and_batch()
    method = alpa.ShardParallel(num_micro_batches=n_micro_batches)
    step = alpa.parallelize(step_with(alpa.value_and_grad), method=method, donate_argnums=())
    executable = step.get_executable(*args)
    expected = jax.jit(step_with(jax.value_and_grad))(*args)

    leaves = jax.tree.leaves(args)
    placed = executable.preshard_dynamic_args(*leaves)
    assert all(len(leaf.sharding.device_set) == 8 and leaf.addressable_shards for leaf in placed)
    for results in (executable(*args), executable(*leaves), executable(*placed)):
        alpa.testing.assert_allclose(results, expected)
    alpa.testing.assert_allclose(executable.launch_on_driver(*leaves), jax.tree.leaves(expected))

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


def test_a_search_uses_the_submeshes_that_a_script_gives() -> None:
    alpa.init("local", num_nodes=1, num_devices_per_node=4)
    stages = alpa.AutoStageOption(
        submesh_physical_shape_space="manual",
        manually_specified_submeshes=[(1, 2)],
        submesh_logical_shape_space="model_parallel_only",
    )
    layers = alpa.AutoLayerOption(layer_num=2)
    method = alpa.PipeshardParallel(num_micro_batches=2, layer_option=layers, stage_option=stages)
    plan = train_and_compare(method, n_steps=1).get_parallel_plan()
    assert [(stage.submesh, stage.logical_shape) for stage in plan.stages] == [((1, 2), (1, 2))] * 2

    stages.manually_specified_submeshes = None
    with pytest.raises(minialpa.ShardingError, match="Give pairs of"):
        method.options()


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


def _train_on(in_process: bool) -> None:
    step, weights = alpa.parallelize(classify), jnp.zeros((16, 10))
    batch = (jax.core.ShapedArray((32, 4, 4), jnp.float32), jax.core.ShapedArray((32,), jnp.int32))
    specs = step.get_executable(weights, *batch).get_input_placement_specs()[1:3]
    # 150 samples fill four batches.
    loader = alpa.MeshDriverDataLoader(32, 150, read_images, specs, prefetch_size=2)
    expected = weights
    for _ in range(2):
        n = 0
        for n, (images, labels) in enumerate(loader, 1):
            assert not isinstance(images, np.ndarray)
            if in_process:
                assert len(images.sharding.device_set) == 8
            weights, value = step(weights, images, labels)
            rows = slice(32 * (n - 1), 32 * n)
            expected, expected_value = jax.jit(classify)(expected, IMAGES[rows], LABELS[rows])
            alpa.testing.assert_allclose(value, expected_value)
        assert n == 4


def test_epochs_of_a_loader_that_takes_placement_specs() -> None:
    alpa.init("local")
    _train_on(in_process=True)


@pytest.mark.slow  # the epochs above are the short relative
def test_workers_read_for_a_loader_that_takes_placement_specs() -> None:
    with in_process_session(1, 4):
        _train_on(in_process=False)


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
