"""Sessions on a Ray cluster, scripts for Alpa and what a session holds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

import minialpa as alpa
from benchmarks.ray_leaks import BATCH_BYTES, N_MESHES, steps
from minialpa import ManualStageOption, PipeshardParallel, ShardParallel
from minialpa.session import current_session
from minialpa.testing import assert_allclose
from tests.compat.alpa_scripts import make_state_and_batch, step_with, train_with_layers_and_stages_found
from tests.runtime.ray.ray_cluster import WORKER_ENV

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]


@pytest.fixture(autouse=True)
def _as_in_a_script() -> Iterator[None]:
    alpa.shutdown()
    with jax.numpy_dtype_promotion("standard"):
        yield


def init(cluster: Cluster, **options: Any) -> None:
    alpa.init(cluster="ray", **{"cluster_address": cluster.address, "worker_env": WORKER_ENV, **options})


def test_a_session_is_of_its_first_arguments_and_gives_everything_back(cluster: Cluster) -> None:
    with pytest.raises(alpa.ShardingError, match="5 hosts were requested and the Ray cluster has 4"):
        init(cluster, num_hosts=5)
    with pytest.raises(alpa.ShardingError, match="5 devices per host were requested"):
        init(cluster, devices_per_host=5)
    with pytest.raises(alpa.MinialpaError, match="No Ray cluster answers"):
        alpa.init(cluster="ray", address="127.0.0.1:9")
    with pytest.raises(alpa.MinialpaError, match=r"Ray client server.*on a host of the cluster"):
        alpa.init(cluster="ray", address="ray://127.0.0.1:10001")
    assert not ray.is_initialized()

    init(cluster, num_hosts=1)
    with pytest.raises(alpa.MinialpaError, match="other arguments"):
        alpa.init(cluster="local")
    with pytest.raises(alpa.ShardingError, match="devices of this process"):
        alpa.parallelize(lambda x: x, method=ShardParallel(devices=jax.devices()[:4]))(np.ones(8))
    y = alpa.parallelize(lambda x: x * 2.0, method=ShardParallel(), batch_argnums=())(np.ones((8, 8), np.float32))
    np.testing.assert_array_equal(y, np.full((8, 8), 2.0, np.float32))
    alpa.shutdown()
    alpa.shutdown()
    assert not ray.is_initialized()
    np.testing.assert_array_equal(y, np.full((8, 8), 2.0, np.float32))  # it was fetched


@pytest.mark.slow  # tests/compat has its short relative, in one process
def test_an_mlp_with_layers_and_stages_found_trains_as_on_one_device(cluster: Cluster) -> None:
    init(cluster, num_hosts=2)
    train_with_layers_and_stages_found()


@pytest.mark.slow  # tests/runtime/cluster has its short relative, in one process
def test_functions_with_the_same_meshes_share_them_and_others_take_their_devices(cluster: Cluster) -> None:
    init(cluster, num_hosts=2)
    runtime = current_session().runtime
    state, batch = make_state_and_batch(manual=True)
    stages = ManualStageOption(((0,), (1,)), ((1, 4), (1, 4)), ((4,), (4,)), ({}, {}))
    method = PipeshardParallel(num_micro_batches=4, layer_option="manual", stage_option=stages)

    def mlp_step(state: Any, batch: Any) -> Any:
        return step_with(alpa.value_and_grad)(state, batch)[0]

    def serial_step(state: Any, batch: Any) -> Any:
        return step_with(jax.value_and_grad)(state, batch)[0]

    def mean_output(state: Any, batch: Any) -> Any:
        return jnp.mean(state.apply_fn(state.params, batch["x"]))

    def workers() -> set[int]:
        return {worker.number for worker in runtime.workers}

    first = alpa.parallelize(mlp_step, method=method)
    trained = first(state, batch)
    mine = workers()
    expected = serial_step(state, batch)

    # The same two meshes: another function uses them, and takes the state in place.
    second = alpa.parallelize(lambda *args: mlp_step(*args), method=method)
    trained = second(trained, batch)
    expected = serial_step(expected, batch)
    assert workers() == mine and not any(x.held_here for x in jax.tree.leaves(trained))

    # One mesh over both hosts: the workers end, and their arrays come along.
    evaluate = alpa.parallelize(mean_output, method=ShardParallel())
    np.testing.assert_allclose(
        float(evaluate(trained, batch)), float(mean_output(expected, batch)), rtol=1e-4, atol=1e-6
    )
    assert not workers() & mine
    # And back: the first function starts its meshes once more.
    assert_allclose(first(trained, batch).params, serial_step(expected, batch).params, rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # Ray itself tries for 20 seconds
def test_a_cluster_that_wants_a_token_says_so(cluster: Cluster) -> None:
    script = f'import minialpa; minialpa.init(cluster="ray", address="{cluster.address}")'
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    told = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=200).stderr
    assert "for its token" in told.splitlines()[-1] and "RAY_AUTH_TOKEN" in told.splitlines()[-1]


# ---- step after step -------------------------------------------------------------------------------------------------


@pytest.mark.slow  # programs that nothing uses, on workers in threads, are the short relative
def test_nothing_grows_after_the_first_steps(cluster: Cluster) -> None:
    init(cluster, num_hosts=1, devices_per_host=N_MESHES, worker_env={**WORKER_ENV, "NPROC": "1"})
    warm_up, n_steps = 50, 250
    (_, before), (_, after) = steps(current_session().runtime, warm_up, n_steps, every=n_steps)
    for process, counts in after.items():
        grown = {what: value - before[process][what] for what, value in counts.items()}
        # Allocators still settle a little; a batch or a result that stays in every step would be far more.
        assert grown.pop("private_bytes") < (n_steps - warm_up) * BATCH_BYTES / 16, process
        # Ray's object store comes round. Objects that stay there are counted below as well.
        assert grown.pop("shmem_bytes") < (n_steps - warm_up) * BATCH_BYTES / 4, process
        assert grown.pop("threads", 0) <= 2, process  # pools start their threads one by one
        assert not {what: n for what, n in grown.items() if n > 0}, process


@pytest.mark.slow
def test_a_second_session_finds_what_the_first_one_compiled(cluster: Cluster, tmp_path: Any) -> None:
    files = []
    for _ in range(2):
        env = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        init(cluster, num_hosts=1, devices_per_host=1, worker_env=env)
        float(alpa.parallelize(lambda x: jnp.sum(x * 2.0), method=ShardParallel(), batch_argnums=())(np.ones(8)))
        alpa.shutdown()
        files.append({path.name for path in tmp_path.iterdir() if path.name.endswith("-cache")})
    assert files[0] and files[0] == files[1]
