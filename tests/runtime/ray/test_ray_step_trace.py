"""Measured timelines of steps on a Ray cluster of two nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

import minialpa
from minialpa.methods import Method
from tests.runtime.ray.ray_cluster import WORKER_ENV
from tests.runtime.steps.timelines import check_step, pipeline

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.slow]


@pytest.mark.parametrize(
    ("devices_per_host", "method", "n_hosts"),
    [
        (1, pipeline(2), [1, 1]),
        (2, pipeline(4), [1, 1]),
        (2, minialpa.ShardParallel(num_micro_batches=3), [2]),
    ],
    ids=["a device each", "pipeline", "micro-batches"],
)
def test_every_call_has_its_time_on_every_worker_of_its_mesh(
    cluster: Cluster, devices_per_host: int, method: Method, n_hosts: list[int], tmp_path: Path
) -> None:
    minialpa.shutdown()
    minialpa.init(
        cluster="ray",
        address=cluster.address,
        num_hosts=2,
        devices_per_host=devices_per_host,
        worker_env=WORKER_ENV,
    )
    program, tasks = check_step(method, n_hosts, tmp_path)
    waits = [task for task in tasks if task.name.startswith("Receive")]
    assert {task.mesh for task in waits} == (set(range(len(n_hosts))) if len(n_hosts) > 1 else set())
    for mesh, shape in enumerate(program.meshes):
        hosts = {task.host for task in tasks if task.mesh == mesh}
        assert len(hosts) == n_hosts[mesh] and min(hosts) == shape.first_device // devices_per_host
