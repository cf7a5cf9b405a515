"""Sessions whose workers are threads of this process, for tests of what the runtime of a cluster does."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import jax

import minialpa
from minialpa.cluster import ClusterSpec
from minialpa.inter.lower.mesh_programs import split_by_mesh
from minialpa.runtime.cluster.cluster_runtime import ClusterRuntime
from minialpa.runtime.cluster.in_process import InProcessLauncher
from minialpa.session import Session, _Current


@contextmanager
def in_process_session(n_hosts: int, devices_per_host: int, timeout_s: float = 60.0) -> Iterator[ClusterRuntime]:
    """The session of this process, ended behind the block. Meshes must not cross hosts."""
    spec = ClusterSpec.preset("cpu", num_hosts=n_hosts, devices_per_host=devices_per_host)
    devices = jax.devices()[: n_hosts * devices_per_host]
    split = functools.partial(split_by_mesh, cluster=spec, platform="cpu")
    runtime = ClusterRuntime(InProcessLauncher(devices, devices_per_host, timeout_s), split)
    minialpa.shutdown()
    _Current.session = Session((), spec, None, runtime)
    try:
        yield runtime
    finally:
        minialpa.shutdown()
