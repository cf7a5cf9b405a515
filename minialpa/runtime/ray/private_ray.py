"""All private names of Ray that minialpa uses, as of Ray 2.60.0. A test keeps them out of other modules.

| private | minialpa needs it for | would be replaced by |
|---|---|---|
| `ray._private.utils.read_ray_address` | the address of a cluster on this machine | `ray.init("auto")` with a timeout |
| `ray._private.state.available_resources_per_node` | the free resources of a node | a public call for one node |
| `_internal_kv_exists` | whether the head knows this process | a public call that asks the head for anything |
| files `plasma*` among the mappings of this process | the folder of shared memory | a public call for its free space |
| `_system_config` of `ray.init` | workers at the priority of their caller | a public option for the priority |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_exists


def start_cluster(namespace: str) -> None:
    ray.init(
        "local",
        namespace=namespace,
        include_dashboard=False,
        log_to_driver=False,
        # By default, Ray lowers the priority of workers below all else on this machine.
        _system_config={"worker_niceness": 0},
    )


def address_of_this_machine() -> str | None:
    """Of the last cluster that `ray start` has started here. It may have ended."""
    try:
        from ray._private.utils import read_ray_address
    except ImportError:  # in another version of Ray, the user gives the address
        return None
    return read_ray_address() or None


def available_resources() -> Mapping[str, Mapping[str, float]]:
    """Unreserved, by `NodeID`. Changes show within a second."""
    from ray._private.state import available_resources_per_node

    available: Mapping[str, Mapping[str, float]] = available_resources_per_node()
    return available


def folder_of_shared_memory() -> Path | None:
    """Usually `/dev/shm`; None before the first large value."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    found = re.search(r" (/.*)/plasma[^/\n]*$", maps, re.MULTILINE)
    return Path(found[1]) if found else None


def head_knows_this_process() -> bool:
    """Whether a reachable head has not restarted. Other calls to a restarted head would end this process."""
    try:
        _internal_kv_exists(b"minialpa")
    except RayError:
        return False
    return True
