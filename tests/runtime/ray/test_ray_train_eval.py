"""Training and an evaluation that says nothing of it take turns on the same Ray workers."""

from __future__ import annotations

import jax
import pytest
from ray.cluster_utils import Cluster

import minialpa
from minialpa.session import current_session
from minialpa.testing import assert_allclose
from tests import scanned_training as scanned
from tests.runtime.ray.ray_cluster import WORKER_ENV

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]


@pytest.mark.slow  # tests/test_follow.py has its short relative, in one process
def test_training_and_evaluation_in_turns_start_and_end_no_worker(cluster: Cluster) -> None:
    minialpa.init(cluster="ray", address=cluster.address, num_hosts=1, devices_per_host=2, worker_env=WORKER_ENV)
    runtime, expected = current_session().runtime, scanned.init(jax.random.key(0))
    assert runtime is not None
    step = minialpa.parallelize(scanned.train_step, method=scanned.METHODS["blocks"])
    evaluate = minialpa.parallelize(scanned.evaluate_params)
    state, _ = step(scanned.init(jax.random.key(0)), scanned.BATCH)
    found = evaluate(state["params"], scanned.BATCH)
    workers = [worker.number for worker in runtime.workers]
    assert len(workers) == 2

    for _ in range(3):
        state, _ = step(state, scanned.BATCH)
        found = evaluate(state["params"], scanned.BATCH)
    runtime.sync()
    assert [worker.number for worker in runtime.workers] == workers

    for _ in range(4):
        expected, _ = jax.jit(scanned.train_step)(expected, scanned.BATCH)
    assert_allclose(found, jax.jit(scanned.evaluate_params)(expected["params"], scanned.BATCH), rtol=1e-4)
