"""One Ray cluster for all tests that need no special one: starting it takes as long as many a test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    from tests.runtime.ray.ray_cluster import ray_nodes  # Ray may be missing

    with ray_nodes() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(running_cluster: Cluster) -> Iterator[Cluster]:
    """Four Ray nodes on this machine, of four devices each. This process is connected only where a module does so."""
    import ray

    import minialpa
    from tests.runtime.ray.ray_cluster import N_NODES, resize

    resize(running_cluster, N_NODES)
    yield running_cluster
    minialpa.shutdown()
    ray.shutdown()
