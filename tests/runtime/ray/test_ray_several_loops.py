"""Steps of several loops over their micro-batches, on the workers of a Ray cluster."""

from __future__ import annotations

import itertools

import pytest
from ray.cluster_utils import Cluster

import minialpa
from minialpa.testing import assert_allclose
from tests.runtime.ray.ray_cluster import WORKER_ENV
from tests.several_loops import NAMES, methods, run, serial

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]

_CASES = list(itertools.product(NAMES, (4, 8), methods(4)))


@pytest.fixture(scope="module", autouse=True)
def _session(cluster: Cluster) -> None:
    minialpa.init(cluster="ray", address=cluster.address, num_hosts=2, devices_per_host=1, worker_env=WORKER_ENV)


@pytest.mark.slow  # tests/test_several_loops.py has its short relative, in one process
@pytest.mark.parametrize(
    ("name", "n", "method"),
    _CASES,
)
def test_two_steps_on_a_cluster_equal_the_serial_run(name: str, n: int, method: str) -> None:
    assert_allclose(run(name, methods(n)[method]), serial(name), rtol=2e-4, atol=1e-5)
