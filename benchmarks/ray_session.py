"""A session on a private Ray cluster on this machine, for benchmarks and tests."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import minialpa
from minialpa.session import current_session

#: Environment of a worker that computes on one core, as if each worker had one core. XLA starts `NPROC` threads, and at
#: least one for each device.
ONE_CORE = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "NPROC": "1"}


@contextmanager
def ray_session(n_devices: int, worker_env: Mapping[str, str] | None = None) -> Iterator[Any]:
    """The runtime of a session on one host of `n_devices` virtual devices. The cluster ends after the block."""
    import ray

    with warnings.catch_warnings():
        # jax warns of forks. These forks execute other programs at once.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        ray.init(
            "local",  # a new cluster, even if this machine runs one already
            num_cpus=n_devices,
            include_dashboard=False,
            log_to_driver=False,
            # Ray's default gives workers a lower priority, and the reference process has the normal one.
            _system_config={"worker_niceness": 0},
        )
    try:
        env = {**ONE_CORE, **(worker_env or {})}
        minialpa.init(cluster="ray", devices_per_host=n_devices, worker_env=env)
        yield current_session().runtime
    finally:
        minialpa.shutdown()
        ray.shutdown()
