"""Every model on every arrangement of meshes over the hosts of a Ray cluster trains as on one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest
from ray.cluster_utils import Cluster

import minialpa
from minialpa import ShardParallel, models
from minialpa.testing import assert_allclose
from tests.runtime.ray_cluster import WORKER_ENV, ray_nodes
from tests.test_numeric_matrix import N_MICRO_BATCHES, SIZES, pipeline, serial_step

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]

N_HOSTS, DEVICES_PER_HOST = 4, 2
METHODS = {
    "1 mesh of 4 hosts": ShardParallel(),
    "2 meshes of 2 hosts": pipeline(2, "1f1b"),
    "4 meshes of 1 host": pipeline(4, "gpipe"),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_nodes(N_HOSTS, DEVICES_PER_HOST) as cluster:
        minialpa.init(cluster="ray", address=cluster.address, worker_env=WORKER_ENV)
        yield cluster


#: What always runs.
SHORT: dict[str, tuple[str, ...]] = {
    "1 mesh of 4 hosts": (),
    "2 meshes of 2 hosts": ("gpt",),
    "4 meshes of 1 host": ("mlp",),
}


@pytest.mark.parametrize(
    "arrangement, name",
    [
        pytest.param(arrangement, name, marks=() if name in SHORT[arrangement] else pytest.mark.slow)
        for arrangement in METHODS
        for name in SIZES
    ],
)
def test_three_steps_equal_the_serial_run(cluster: Cluster, name: str, arrangement: str, key: jax.Array) -> None:
    case = models.build(name, **SIZES[name])
    n_meshes = int(arrangement[0])
    expected_step = serial_step(case, 1 if n_meshes == 1 else N_MICRO_BATCHES)
    actual_step = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=METHODS[arrangement])
    expected: Any = case.init(key)
    actual: Any = expected
    for i in range(3):
        batch = case.make_batch(i, case.batch_size)
        expected, expected_metrics = expected_step(expected, batch)
        actual, actual_metrics = actual_step(actual, batch)
        assert_allclose(actual_metrics, expected_metrics, rtol=2e-4, atol=1e-6)
    assert_allclose(actual.params, expected.params, rtol=2e-4, atol=1e-5)
    stages = actual_step.get_last_executable().get_parallel_plan().stages
    assert [stage.n_devices for stage in stages] == [8 // n_meshes] * n_meshes
