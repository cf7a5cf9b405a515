"""Sessions whose workers are threads of this process, for tests of what the runtime of a cluster does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

import minialpa
from minialpa.runtime.cluster.cluster_runtime import ClusterRuntime
from minialpa.runtime.cluster.in_process import InProcessLauncher
from minialpa.session import _Current, _session_on


@contextmanager
def in_process_session(n_hosts: int, devices_per_host: int, timeout_s: float = 60.0) -> Iterator[ClusterRuntime]:
    """The session of this process, ended behind the block. Meshes must not cross hosts."""
    devices = jax.devices()[: n_hosts * devices_per_host]
    launcher = InProcessLauncher(devices, devices_per_host, timeout_s)
    minialpa.shutdown()
    _Current.session = _session_on(launcher, None)
    try:
        yield _Current.session.runtime
    finally:
        minialpa.shutdown()
