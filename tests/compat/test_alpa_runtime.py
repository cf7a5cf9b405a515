"""Scripts in the style of Alpa's tests and examples run under `minialpa.compat.alpa` as on one device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
import minialpa.compat.alpa as alpa
from minialpa.compat.alpa import names
from tests.compat.alpa_scripts import (
    make_state_and_batch,
    step_with,
    train_and_compare,
    train_with_layers_and_stages_found,
)
from tests.runtime.cluster.in_process_session import in_process_session

# ---- steps ----------------------------------------------------------------------------------------------------------


def test_a_method_that_fixes_the_sharding_trains_as_on_one_device() -> None:
    alpa.init(cluster="local")
    executable = train_and_compare(alpa.Zero3Parallel())
    assert executable.get_parallel_plan().stages[0].n_devices == 8
    assert alpa.util.count_communication_primitives(executable.get_hlo_text())[2] > 0, "all-gathers"

    with pytest.raises(minialpa.MinialpaError, match=r"Call `executable\.profile_with_dummy_inputs\(\)`"):
        executable.get_execution_time_costs()
    assert executable.profile_with_dummy_inputs() == executable.get_execution_time_costs()
    for name in ("auto_sharding_objective", "mesh_group", "get_stage_execution_info"):
        with pytest.raises(AttributeError) as caught:
            getattr(executable, name)
        assert str(caught.value) == names.not_here(name)


def test_a_pipeline_with_manual_boundaries_trains_as_on_one_device(tmp_path: Path) -> None:
    alpa.init(cluster="local", num_nodes=1, num_devices_per_node=4)
    method = alpa.PipeshardParallel(num_micro_batches=4, layer_option="manual", stage_option="uniform")
    executable = train_and_compare(method, manual=True)
    executable.sync()
    assert all("HloModule" in text for text in executable.get_hlo_text(alpa.HloStatus.FULLY_OPTIMIZED))
    with pytest.warns(UserWarning, match=r"no text for HloStatus\.UNOPTIMIZED"):
        executable.get_hlo_text(status=alpa.HloStatus.UNOPTIMIZED)
    assert len(executable.get_stage_allocation_size()) == len(executable.get_parallel_plan().stages) == 2
    assert {spec.mesh_ids for spec in jax.tree.leaves(executable.get_input_placement_specs()[1])} == {(0,), (1,)}
    executable.dump_debug_info(tmp_path)
    names = ("stage_0.hlo", "stage_1.hlo", "stage_0.mem_usage.txt", "resharding_tasks.txt")
    assert all((tmp_path / f"train_step_{name}").exists() for name in names)


def test_layers_and_stages_found_train_as_on_one_device() -> None:
    alpa.util.disable_tqdm_globally()
    alpa.init(cluster="local", num_nodes=2, num_devices_per_node=4)
    train_with_layers_and_stages_found()


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

        # Workers run a plan on the first hosts only.
        cluster = alpa.get_global_cluster()
        with pytest.raises(minialpa.ShardingError, match="minialpa runs on the first of them"):
            cluster.get_virtual_physical_mesh([1])
        alpa.set_global_virtual_physical_mesh(cluster.get_virtual_physical_mesh([0]))
        doubled = alpa.parallelize(lambda x: x * 2, batch_argnums=())(np.ones((8, 2), np.float32))
        alpa.testing.assert_allclose(doubled, np.full((8, 2), 2.0))


# ---- states, followers and checkpoints ------------------------------------------------------------------------------


def test_a_state_is_made_followed_and_restored_where_the_step_has_it(tmp_path: Path) -> None:
    alpa.init("local")
    state, batch = make_state_and_batch()

    def eval_step(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((state.apply_fn(params, batch["x"]) - batch["y"]) ** 2)

    train = alpa.parallelize(step_with(alpa.value_and_grad), method=alpa.Zero3Parallel())
    create = alpa.parallelize(lambda: make_state_and_batch()[0], method=alpa.CreateStateParallel(train, batch))
    evaluate = alpa.parallelize(eval_step, method=alpa.FollowParallel(train))
    trained, _ = train(create(), batch)
    alpa.testing.assert_allclose(evaluate(trained.params, batch), eval_step(jax.device_get(trained.params), batch))

    specs = train.get_last_executable().get_input_placement_specs()[0]
    assert jax.tree.leaves(create.get_last_executable().get_output_placement_specs()) == jax.tree.leaves(specs)
    followed = evaluate.get_last_executable().get_input_placement_specs()[0]
    assert jax.tree.leaves(followed) == jax.tree.leaves(specs.params)
    # The parameters are not all alike.
    assert len({(spec.aval.shape, spec.sharding_specs) for spec in jax.tree.leaves(followed)}) > 1

    alpa.save_checkpoint(tmp_path, trained.params, 1)
    restored = alpa.restore_checkpoint(tmp_path, 1, specs.params)
    alpa.testing.assert_allclose(restored, trained.params)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, trained.params)


# ---- executables and loaders ----------------------------------------------------------------------------------------


def test_an_executable_runs_batches_of_a_loader_that_takes_its_placement_specs() -> None:
    alpa.init("local")
    state, batch = make_state_and_batch()
    method = alpa.ShardParallel(num_micro_batches=2)
    step = alpa.parallelize(step_with(alpa.value_and_grad), method=method, donate_argnums=())
    executable = step.get_executable(state, batch)
    specs = executable.get_input_placement_specs()
    expected = jax.jit(step_with(jax.value_and_grad))(state, batch)
    for given in (specs[1], step):
        (placed,) = alpa.DataLoader([batch], given, prefetch_size=0)
        assert jax.tree.structure(placed) == jax.tree.structure(batch)
        alpa.testing.assert_allclose(executable(state, placed), expected)

    # A shorter batch stays a batch of the source.
    shorter = jax.tree.map(lambda x: np.asarray(x[:8]), batch)
    (left,) = alpa.DataLoader([shorter], specs[1])
    assert isinstance(left["x"], np.ndarray)

    with pytest.raises(minialpa.ShardingError, match="A batch has 2 arrays, and there are 28 placement specs"):
        next(alpa.DataLoader([batch], specs))
    with pytest.raises(minialpa.ShardingError, match=r"Pass a part of `executable.get_input_placement_specs\(\)`"):
        alpa.DataLoader([batch], executable.get_output_placement_specs())


IMAGES = np.random.default_rng(0).standard_normal((160, 4, 4), np.float32)
LABELS = np.arange(160, dtype=np.int32) % 10


def read_images(start: int, end: int, batch_size: int) -> Iterator[tuple[Any, Any]]:
    """As in Alpa's examples, it continues beyond `end`."""
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
