"""Every model on every arrangement of meshes over the hosts of a Ray cluster trains as on one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from ray.cluster_utils import Cluster

import minialpa
from minialpa import ShardParallel
from minialpa.testing import assert_allclose
from tests.runtime.ray.ray_cluster import N_NODES, WORKER_ENV, resize
from tests.test_numeric_matrix import N_MICRO_BATCHES, SIZES, pipeline, serial_run

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]


@dataclass(frozen=True)
class Arrangement:
    """Meshes of so many hosts each, of which so many devices are used."""

    meshes: int
    hosts: int
    devices: int

    def __str__(self) -> str:
        return f"{self.meshes}-meshes-of-{self.hosts}x{self.devices}"

    @property
    def method(self) -> Any:
        if self.meshes == 1:
            return ShardParallel()
        return pipeline(self.meshes, "gpipe" if self.hosts == 1 else "1f1b")


ARRANGEMENTS = [Arrangement(m, h, d) for m, h in ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (4, 2)) for d in (1, 2, 3, 4)]
#: What always runs.
SHORT = {(Arrangement(2, 2, 2), "mlp")}


@pytest.fixture(scope="module")
def arrangement(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Arrangement]:
    """An arrangement, with a session on as many hosts and devices as it uses."""
    found: Arrangement = request.param
    n_hosts = found.meshes * found.hosts
    resize(cluster, max(n_hosts, N_NODES))
    minialpa.init(
        cluster="ray", address=cluster.address, num_hosts=n_hosts, devices_per_host=found.devices, worker_env=WORKER_ENV
    )
    yield found
    minialpa.shutdown()


@pytest.mark.parametrize(
    "arrangement, name",
    [
        pytest.param(arrangement, name, marks=() if (arrangement, name) in SHORT else pytest.mark.slow)
        for arrangement in ARRANGEMENTS
        for name in SIZES
    ],
    indirect=["arrangement"],
    ids=str,
)
def test_three_steps_equal_the_serial_run(arrangement: Arrangement, name: str) -> None:
    run = serial_run(name, N_MICRO_BATCHES if name == "resnet" and arrangement.meshes > 1 else 1)
    step = minialpa.parallelize(run.case.train_step(minialpa.value_and_grad), method=arrangement.method)
    state = run.initial
    for i, expected in enumerate(run.metrics):
        state, metrics = step(state, run.case.make_batch(i, run.case.batch_size))
        assert_allclose(metrics, expected, rtol=2e-4, atol=1e-6)
    assert_allclose(state.params, run.final.params, rtol=2e-4, atol=1e-5)
    stages = step.get_last_executable().get_parallel_plan().stages
    assert [stage.n_devices for stage in stages] == [arrangement.hosts * arrangement.devices] * arrangement.meshes
