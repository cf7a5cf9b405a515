"""A Ray cluster of several nodes on this machine, for tests."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.cluster_utils import Cluster

import minialpa
from tests.xla_flags import FLAGS

WORKER_ENV = {"XLA_FLAGS": " ".join(FLAGS)}
N_NODES, DEVICES_PER_NODE = 3, 4


@contextmanager
def ray_nodes(n_nodes: int = N_NODES, devices_per_node: int = DEVICES_PER_NODE, **head_args: Any) -> Iterator[Cluster]:
    """A cluster of nodes with `minialpa_cpu_device`s, which ends with all of its processes after the block."""
    with _forks_are_fine():
        # Processes that no test needs: the autoscaler, and the monitor that prints the logs of workers.
        without = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
        # Nor would Ray's own idle workers help. And its workers wait for everything else on this machine by default.
        settings = {"prestart_worker_first_driver": False, "worker_niceness": 0}
        head_args = {**_node(devices_per_node), **without, "_system_config": settings, **head_args}
        cluster = Cluster(initialize_head=True, head_node_args=head_args)
    try:
        resize(cluster, n_nodes, devices_per_node)
        yield cluster
    finally:
        minialpa.shutdown()
        ray.shutdown()
        cluster.shutdown()


def resize(cluster: Cluster, n_nodes: int, devices_per_node: int = DEVICES_PER_NODE) -> None:
    """Have a cluster grow or shrink to so many nodes. No session may run on it when it shrinks."""
    with _forks_are_fine():
        while len(cluster.list_all_nodes()) < n_nodes:
            cluster.add_node(**_node(devices_per_node))
        while len(cluster.list_all_nodes()) > n_nodes:
            cluster.remove_node(max(cluster.worker_nodes, key=lambda node: node.node_id))


def start_session(address: str, num_hosts: int, devices_per_host: int, **options: Any) -> None:
    """Start a session whose workers compile as quickly as this process does."""
    minialpa.init(
        cluster="ray",
        address=address,
        num_hosts=num_hosts,
        devices_per_host=devices_per_host,
        **{"worker_env": WORKER_ENV, **options},
    )


def _node(n_devices: int) -> dict[str, Any]:
    return {"num_cpus": 1, "resources": {"minialpa_cpu_device": n_devices}}


@contextmanager
def _forks_are_fine() -> Iterator[None]:
    """Ray forks to start its processes, and these replace themselves at once."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        yield
