"""Scripts for Alpa, sessions, arrays and executables on a Ray cluster of two nodes."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

import minialpa as alpa
from minialpa import AutoLayerOption, ManualStageOption, PipeshardParallel, ShardParallel
from minialpa.testing import assert_allclose
from tests.runtime.ray.ray_cluster import DEVICES_PER_NODE, N_NODES, WORKER_ENV
from tests.test_alpa_scripts import (  # noqa: F401
    make_problem,
    on_one_device,
    train,
    train_step,
    train_with_boundaries_by_hand,
    train_with_layers_and_stages_found,
)

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]


@pytest.fixture(autouse=True)
def _as_in_a_script() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):
        yield


def init(cluster: Cluster, **options: Any) -> None:
    """A session on the cluster: the one that the last test has left, if it is of the same part."""
    arguments = {"cluster_address": cluster.address, "worker_env": WORKER_ENV, **options}
    try:
        alpa.init(cluster="ray", **arguments)
    except alpa.MinialpaError as error:
        if "other arguments" not in str(error):
            raise
        alpa.shutdown()
        alpa.init(cluster="ray", **arguments)


# ---- the scripts ----------------------------------------------------------------------------------------------------


@pytest.mark.slow  # tests/test_alpa_scripts.py has its short relative, in one process
@pytest.mark.parametrize(
    "part",
    [
        # Slow, for test_ray_numeric.py has stages of two hosts.
        pytest.param({}, marks=pytest.mark.slow, id="whole"),
        pytest.param({"num_nodes": 2, "num_devices_per_node": 2}, id="2x2"),
    ],
)
def test_an_mlp_with_boundaries_by_hand_trains_as_on_one_device(cluster: Cluster, part: Any, tmp_path: Path) -> None:
    alpa.shutdown()
    init(cluster, **part)
    executable = train_with_boundaries_by_hand()
    hosts = part.get("num_nodes", N_NODES) // 2
    _check_debug_info(executable, hosts, tmp_path)
    _check_dp_result(executable.get_parallel_plan(), hosts, part.get("num_devices_per_node", DEVICES_PER_NODE))


def _check_debug_info(executable: Any, hosts_per_stage: int, folder: Path) -> None:
    """Every function has its HLO, and every worker says what it is and does."""
    executable.dump_debug_info(folder)
    names = {path.name for path in folder.iterdir()}
    assert {"plan.json", "summary.txt", "placements.txt", "instructions.txt"} <= names
    assert sum(name.endswith(".hlo.txt") for name in names) == len(executable.function_names)
    workers = sorted(name for name in names if name.endswith("-worker.txt"))
    assert workers == [f"stage{i // hosts_per_stage}-host{i}-worker.txt" for i in range(2 * hosts_per_stage)]
    for host, name in enumerate(workers):
        text = (folder / name).read_text()
        assert f"stage {host // hosts_per_stage}, host {host}" in text
        assert "Send" in text and "Receive" in text and "Run" in text


def _check_dp_result(plan: alpa.Plan, hosts: int, devices_per_host: int) -> None:
    _, layers, submeshes, shapes, options = alpa.get_last_dp_result()
    summary = plan.summary()
    assert layers == ((0,), (1,)) and submeshes == ((hosts, devices_per_host),) * 2 and len(options) == 2
    for k, (submesh, shape) in enumerate(zip(submeshes, shapes, strict=True)):
        assert f"Stage {k}: layer {k}, submesh {submesh[0]}x{submesh[1]}" in summary
        assert f"logical shape {shape}" in summary


@pytest.mark.slow
def test_an_mlp_with_layers_and_stages_found_trains_as_on_one_device(cluster: Cluster) -> None:
    alpa.shutdown()
    init(cluster, num_hosts=2)
    train_with_layers_and_stages_found()


@pytest.mark.slow
@pytest.mark.parametrize("n_layers", [None, 2], ids=["shard", "pipeshard"])
def test_a_wide_resnet_trains_over_a_ragged_batch_and_another_batch_size(
    cluster: Cluster,
    n_layers: int | None,
    on_one_device: Any,  # noqa: F811
) -> None:
    init(cluster, num_hosts=2)
    case, (serial, expected, right) = on_one_device
    method: Any = ShardParallel()
    if n_layers is not None:
        layers = AutoLayerOption(layer_num=n_layers)
        method = PipeshardParallel(num_micro_batches=1, layer_option=layers, stage_option="uniform")
    step = alpa.parallelize(case.train_step(alpa.value_and_grad), method=method)
    state, losses, correct = train(step, case)
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    assert correct == right
    assert_allclose(state.batch_stats, serial.batch_stats, rtol=1e-3, atol=1e-3)
    assert_allclose(state.params, serial.params, rtol=1e-2, atol=1e-3)


# ---- sessions -------------------------------------------------------------------------------------------------------

# Tests on the same meshes follow each other: then a session goes on with its workers, which take long to start.


def two_stages(*submeshes: tuple[int, int]) -> PipeshardParallel:
    shapes = tuple((rows * columns,) for rows, columns in submeshes)
    stages = ManualStageOption(((0,), (1,)), submeshes, shapes, ({}, {}))
    return PipeshardParallel(num_micro_batches=4, layer_option="manual", stage_option=stages)


@pytest.mark.slow  # tests/runtime/cluster has its short relative, in one process
def test_functions_with_the_same_meshes_share_them_and_others_take_their_devices(cluster: Cluster) -> None:
    init(cluster, num_hosts=2)
    runtime = alpa.session.current_session().runtime
    state, batch = make_problem(manual=True)

    def mlp_step(state: Any, batch: Any) -> Any:
        return train_step(state, batch, alpa.grad)

    def mean_output(state: Any, batch: Any) -> Any:
        return jnp.mean(state.apply_fn(state.params, batch["x"]))

    def workers() -> set[int]:
        return {worker.number for mesh in runtime._meshes.values() for worker in mesh.workers}

    first = alpa.parallelize(mlp_step, method=two_stages((1, 4), (1, 4)))
    trained = first(state, batch)
    mine = workers()
    expected = train_step(state, batch, jax.grad)

    # The same two meshes: another function uses them, and takes the state where it lies.
    second = alpa.parallelize(lambda *args: mlp_step(*args), method=two_stages((1, 4), (1, 4)))
    trained = second(trained, batch)
    expected = train_step(expected, batch, jax.grad)
    assert workers() == mine and not any(x.held_here for x in jax.tree.leaves(trained))

    # One mesh over both hosts: the workers end, and what they held comes along.
    evaluate = alpa.parallelize(mean_output, method=ShardParallel())
    np.testing.assert_allclose(
        float(evaluate(trained, batch)), float(mean_output(expected, batch)), rtol=1e-4, atol=1e-6
    )
    assert not workers() & mine
    # And back: the first function starts its meshes again.
    assert_allclose(first(trained, batch).params, train_step(expected, batch, jax.grad).params, rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # the other scripts start workers, too
def test_weights_that_lie_on_one_mesh_and_are_read_on_another_are_sent_by_the_workers(cluster: Cluster) -> None:
    init(cluster, num_hosts=2)
    w = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    x = np.ones((8, 16), np.float32)

    def make(w: Any, x: Any) -> Any:
        h = x @ w
        alpa.mark_pipeline_boundary()
        return w * 2.0, jnp.sum(h @ w)

    def use(w: Any, x: Any) -> Any:
        h = jnp.tanh(x)
        alpa.mark_pipeline_boundary()
        return h @ w

    method = PipeshardParallel(num_micro_batches=1, layer_option="manual", stage_option="uniform")
    doubled, _ = alpa.parallelize(make, method=method, donate_argnums=())(w, x)
    used = alpa.parallelize(use, method=method, donate_argnums=())
    result = used(doubled, x)
    assert not doubled.held_here  # nothing came through this process
    np.testing.assert_allclose(result, np.tanh(x) @ (w * 2.0), rtol=1e-5)
    assert doubled.is_replicated
    np.testing.assert_allclose(used(doubled, x), np.tanh(x) @ (w * 2.0), rtol=1e-5)


@pytest.mark.slow  # tests/runtime/cluster/test_in_process_cluster.py has its short relative
def test_arguments_are_laid_out_beforehand(cluster: Cluster) -> None:
    init(cluster, num_hosts=2)
    state, batch = make_problem(manual=True)
    step = alpa.parallelize(lambda state, batch: train_step(state, batch, alpa.grad), method=two_stages((1, 4), (1, 4)))
    placed_state, placed_batch = step.preshard_dynamic_args(state, batch)
    leaves = jax.tree.leaves(placed_state)
    assert all(isinstance(x, alpa.arrays.RemoteArray) for x in leaves)
    assert_allclose(placed_state, state, rtol=0, atol=0)
    expected = train_step(state, batch, jax.grad)
    assert_allclose(step(placed_state, placed_batch).params, expected.params, rtol=1e-4, atol=1e-5)


def test_a_session_can_be_ended_and_started_again_and_gives_everything_back(cluster: Cluster) -> None:
    alpa.shutdown()
    before = ray.available_resources() if ray.is_initialized() else None
    for _ in range(2):
        init(cluster, num_hosts=1)
        y = alpa.parallelize(lambda x: x * 2.0, method=ShardParallel(), batch_argnums=())(np.ones((8, 8), np.float32))
        np.testing.assert_array_equal(y, np.full((8, 8), 2.0, np.float32))
        alpa.shutdown()
        alpa.shutdown()
    assert not ray.is_initialized() and before is None
    np.testing.assert_array_equal(y, np.full((8, 8), 2.0, np.float32))  # it was fetched


def test_more_than_the_cluster_has_is_refused(cluster: Cluster) -> None:
    alpa.shutdown()
    with pytest.raises(alpa.ShardingError, match="5 hosts were asked for and the Ray cluster has 4"):
        init(cluster, num_hosts=5)
    with pytest.raises(alpa.ShardingError, match="5 devices per host were asked for"):
        init(cluster, devices_per_host=5)
    with pytest.raises(alpa.MinialpaError, match="No Ray cluster answers"):
        alpa.init(cluster="ray", address="127.0.0.1:9")
    with pytest.raises(alpa.MinialpaError, match=r"Ray client server.*on a host of the cluster"):
        alpa.init(cluster="ray", address="ray://127.0.0.1:10001")
    init(cluster, num_hosts=2)
    with pytest.raises(alpa.MinialpaError, match="other arguments"):
        alpa.init(cluster="local")
    with pytest.raises(alpa.ShardingError, match="devices of this process"):
        alpa.parallelize(lambda x: x, method=ShardParallel(devices=jax.devices()))(np.ones(8))


# ---- arrays ---------------------------------------------------------------------------------------------------------


def test_results_are_arrays_to_users(cluster: Cluster) -> None:
    init(cluster, num_hosts=2)

    @alpa.parallelize(method=ShardParallel(), batch_argnums=())
    def make(x: Any, key: Any) -> Any:
        return {"x": x + 1.0, "n": jnp.sum(x), "i": jnp.int32(3), "flag": jnp.any(x > 0), "key": jax.random.split(key)}

    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    out = make(x, jax.random.key(7))
    assert isinstance(out["x"], alpa.arrays.RemoteArray) and out["x"].shape == (8, 4) and out["x"].dtype == np.float32
    alpa.prefetch(out)
    np.testing.assert_array_equal(out["x"], x + 1)
    np.testing.assert_array_equal(jnp.sin(jnp.asarray(out["x"])), jnp.sin(x + 1))
    np.testing.assert_array_equal(out["x"] * 2 + x, (x + 1) * 2 + x)
    np.testing.assert_array_equal(out["x"][2:, 1], (x + 1)[2:, 1])
    assert float(out["n"]) == x.sum() and f"{out['n']:.1f}" == "496.0" and int(out["i"]) == 3 and bool(out["flag"])
    assert len(out["x"]) == 8 and list(range(5))[out["i"]] == 3
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(out["x"])), x + 1)
    np.testing.assert_array_equal(copy.deepcopy(out["x"]), x + 1)
    assert jnp.issubdtype(out["key"].dtype, jax.dtypes.prng_key)
    np.testing.assert_array_equal(
        jax.random.key_data(out["key"][...]), jax.random.key_data(jax.random.split(jax.random.key(7)))
    )
    again = make(out["x"], jax.random.key(7))
    np.testing.assert_array_equal(again["x"], x + 2)


def test_a_donated_array_is_gone_and_an_array_given_twice_is_not(cluster: Cluster) -> None:
    init(cluster, num_hosts=2)
    step = alpa.parallelize(lambda a, b: (a + 1.0, b * 2.0), method=ShardParallel(), donate_argnums=(0, 1),
                            batch_argnums=())  # fmt: skip
    x = np.ones((8, 4), np.float32)
    a, b = step(x, x)
    c, d = step(a, b)
    with pytest.raises(alpa.WorkerError, match="donated to an earlier call"):
        step(a, b)
    with pytest.raises(alpa.WorkerError, match="donated"):
        np.asarray(a)
    e, f = step(c, c)
    np.testing.assert_array_equal(e, x + 3)
    np.testing.assert_array_equal(f, (x + 2) * 2)
    np.testing.assert_array_equal(d, x * 4)


def test_what_a_step_only_hands_on_stays(cluster: Cluster) -> None:
    init(cluster, num_hosts=2)
    step = alpa.parallelize(
        lambda s, x: ({**s, "w": s["w"] + x}, s["n"]), method=ShardParallel(), donate_argnums=(0,), batch_argnums=()
    )
    n, x = np.arange(6, dtype=np.int32), np.ones((8, 4), np.float32)
    state: Any = {"w": x, "n": n, "key": jax.random.key(3)}
    for _ in range(3):
        state, same = step(state, x)
        np.testing.assert_array_equal(same, n)
    np.testing.assert_array_equal(state["w"], x * 4)
    np.testing.assert_array_equal(state["n"], n)
    np.testing.assert_array_equal(jax.random.key_data(state["key"][...]), jax.random.key_data(jax.random.key(3)))


def test_what_nobody_uses_is_freed_on_the_workers(cluster: Cluster) -> None:
    init(cluster, num_hosts=2)
    runtime = alpa.session.current_session().runtime
    step = alpa.parallelize(lambda x: x + 1.0, method=ShardParallel(), donate_argnums=(), batch_argnums=())
    x: Any = step(np.zeros((8, 8), np.float32))
    for _ in range(20):
        x = step(x)
    assert float(np.asarray(x)[0, 0]) == 21
    workers = [worker for mesh in runtime._meshes.values() for worker in mesh.workers]
    # The last result, the one before it, and what a next call would tell them to free.
    assert all(counts["arrays"] <= 4 for counts in runtime.ask(workers, "counts"))


def test_a_step_that_calls_back_into_python_is_refused(cluster: Cluster) -> None:
    init(cluster, num_hosts=2)

    def step(x: Any) -> Any:
        jax.debug.print("{}", x[0])
        return x + 1.0

    with pytest.raises(alpa.TraceError, match="Callbacks into Python"):
        alpa.parallelize(step, method=ShardParallel(), batch_argnums=())(np.ones(8, np.float32))


@pytest.mark.slow  # Ray itself tries for 20 seconds
def test_a_cluster_that_wants_a_token_says_so(cluster: Cluster) -> None:
    script = f'import minialpa; minialpa.init(cluster="ray", address="{cluster.address}")'
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    told = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=200).stderr
    assert "for its token" in told.splitlines()[-1] and "RAY_AUTH_TOKEN" in told.splitlines()[-1]
