"""Sessions on a Ray cluster connect to it, and do not grow from step to step."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

import minialpa
from benchmarks.ray_leaks import BATCH_BYTES, N_MESHES, steps
from minialpa import MinialpaError, ShardingError, ShardParallel
from minialpa.session import current_session
from tests.runtime.ray.ray_cluster import WORKER_ENV, start_session

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("fresh_session")]


def test_a_session_is_of_its_first_arguments_and_gives_ray_back(cluster: Cluster) -> None:
    with pytest.raises(ShardingError, match="9 hosts were requested, and the Ray cluster has 3"):
        start_session(cluster.address, 9, 1)
    with pytest.raises(ShardingError, match="5 devices per host were requested"):
        start_session(cluster.address, 1, 5)
    with pytest.raises(MinialpaError, match="No Ray cluster answers"):
        minialpa.init(cluster="ray", address="127.0.0.1:9")
    with pytest.raises(MinialpaError, match=r"Ray client server.*on a host of the cluster"):
        minialpa.init(cluster="ray", address="ray://127.0.0.1:10001")
    assert not ray.is_initialized()

    start_session(cluster.address, 1, 4)
    with pytest.raises(MinialpaError, match="other arguments"):
        minialpa.init(cluster="local")
    with pytest.raises(ShardingError, match="devices of this process"):
        minialpa.parallelize(lambda x: x, method=ShardParallel(devices=jax.devices()[:4]))(np.ones(8))
    for _ in range(2):
        minialpa.shutdown()
    assert not ray.is_initialized()


@pytest.mark.slow  # Ray itself tries for 20 seconds
def test_a_cluster_that_wants_a_token_says_so(cluster: Cluster) -> None:
    script = f'import minialpa; minialpa.init(cluster="ray", address="{cluster.address}")'
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    told = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=200).stderr
    assert "for its token" in told.splitlines()[-1] and "RAY_AUTH_TOKEN" in told.splitlines()[-1]


@pytest.mark.slow  # tests of programs on workers in threads are the short relatives
def test_nothing_grows_after_the_first_steps(cluster: Cluster) -> None:
    start_session(cluster.address, 1, N_MESHES, worker_env={**WORKER_ENV, "NPROC": "1"})
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
        start_session(cluster.address, 1, 1, worker_env=env)
        float(minialpa.parallelize(lambda x: jnp.sum(x * 2.0), method=ShardParallel(), batch_argnums=())(np.ones(8)))
        minialpa.shutdown()
        files.append({path.name for path in tmp_path.iterdir() if path.name.endswith("-cache")})
    assert files[0] and files[0] == files[1]
