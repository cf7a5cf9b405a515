"""A Ray cluster of several nodes on this machine, for tests."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.cluster_utils import Cluster

import minialpa

#: Programs of tests run for milliseconds, so that most of their time would be that of the compiler.
WORKER_ENV = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0"}


@contextmanager
def ray_nodes(n_nodes: int, devices_per_node: int) -> Iterator[Cluster]:
    """A cluster of nodes with `minialpa_cpu_device`s; ended, with all of its processes, behind the block."""
    node: dict[str, Any] = {"num_cpus": 1, "resources": {"minialpa_cpu_device": devices_per_node}}
    with warnings.catch_warnings():
        # Ray forks to start its processes, and these replace themselves at once.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        for _ in range(n_nodes - 1):
            cluster.add_node(**node)
    try:
        yield cluster
    finally:
        minialpa.shutdown()
        ray.shutdown()
        cluster.shutdown()
