"""Shared sessions, because a start takes as long as many tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from minialpa.runtime.cluster.cluster_runtime import ClusterRuntime
from tests.runtime.cluster.in_process_session import in_process_session, is_running

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster


@pytest.fixture(scope="module")
def _running() -> Iterator[Callable[[], ClusterRuntime]]:
    with ExitStack() as stack:
        found: list[ClusterRuntime] = []

        def running() -> ClusterRuntime:
            if not found or not is_running(found[-1]):
                found.append(stack.enter_context(in_process_session(1, 4)))
            return found[-1]

        yield running


@pytest.fixture
def runtime(_running: Callable[[], ClusterRuntime]) -> ClusterRuntime:
    """A host of four devices: a mesh of all of them, or two of two. Workers are threads.

    The session lives from test to test in a module, until one ends it.
    """
    return _running()


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
