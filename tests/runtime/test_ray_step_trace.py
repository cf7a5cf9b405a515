"""Measured timelines of steps on a Ray cluster of two nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import minialpa
from minialpa.methods import Method
from tests.runtime.ray_cluster import WORKER_ENV, ray_nodes
from tests.runtime.timelines import check_step, pipeline

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module", autouse=True)
def _session() -> Iterator[None]:
    with ray_nodes(2, 2) as cluster:
        minialpa.init(cluster="ray", address=cluster.address, worker_env=WORKER_ENV)
        yield


@pytest.mark.parametrize(
    ("method", "n_hosts"),
    [(pipeline(4), [1, 1]), (minialpa.ShardParallel(num_micro_batches=3), [2])],
    ids=["pipeline", "micro-batches"],
)
def test_every_call_has_its_time_on_every_worker_of_its_mesh(
    method: Method, n_hosts: list[int], tmp_path: Path
) -> None:
    program, tasks = check_step(method, n_hosts, tmp_path)
    waits = [task for task in tasks if task.name.startswith("Receive")]
    assert {task.mesh for task in waits} == (set(range(len(n_hosts))) if len(n_hosts) > 1 else set())
    for mesh, shape in enumerate(program.meshes):
        hosts = {task.host for task in tasks if task.mesh == mesh}
        assert len(hosts) == n_hosts[mesh] and min(hosts) == shape.first_device // 2
