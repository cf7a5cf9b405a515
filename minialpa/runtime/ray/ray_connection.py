"""Finds or starts a Ray cluster, connects to it, and probes its head.

Ray has one connection per process. `connect` makes it, and the caller ends it by `ray.shutdown`.
"""

from __future__ import annotations

import os
import re
import socket
import traceback
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import RayError

from minialpa.errors import MinialpaError
from minialpa.runtime.ray.private_ray import address_of_this_machine, head_knows_this_process, start_cluster

#: Seconds that a host has to accept a connection. TCP repeats a lost first packet after one second.
_PROBE_S = 2.0


def connect(address: str | None, namespace: str) -> bool:
    """Connect to the cluster at `address`, at RAY_ADDRESS, or on this machine. Otherwise, or for "local", start one.

    Returns whether it has started one. Raises MinialpaError if no cluster answers at an address.
    """
    address = address or os.environ.get("RAY_ADDRESS") or _address_started_here()

    if address in (None, "local"):
        with warnings.catch_warnings():
            # Ray's forked processes call `exec` at once.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            start_cluster(namespace)
        return True

    if address.startswith("ray://"):
        raise MinialpaError(
            f"{address!r} is the address of a Ray client server, but the training process has to be on a host of "
            "the cluster. Start it there, for example with `ray job submit`, without `address` and `RAY_ADDRESS`."
        )
    # Ray would retry for minutes.
    if re.fullmatch(r"\S+:\d+", address) and "://" not in address and not answers(address):
        raise _no_cluster(address, "no process listens there")

    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False)
    except (ConnectionError, RuntimeError, RayError) as error:
        if "AuthenticationError" in "".join(traceback.format_exception(error)):
            raise MinialpaError(
                f"The Ray cluster at {address!r} asks this process for its token. Before Python starts, set "
                "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the output of `ray get-auth-token` on the cluster; or "
                'start another cluster on this machine with `address="local"`.'
            ) from error
        raise _no_cluster(address, str(error)) from error
    return False


def _no_cluster(address: str, reason: str) -> MinialpaError:
    return MinialpaError(
        f"No Ray cluster answers at {address!r} ({reason}). Start one with `ray start --head`, or have one "
        'started on this machine with `address="local"`.'
    )


def _address_started_here() -> str | None:
    address = address_of_this_machine()
    return address if address and answers(address) else None


def fault_of_head(address: str) -> str | None:
    """As the end of a sentence; None if the head works."""
    if not answers(address):
        return "does not answer"
    if not head_knows_this_process():
        return "was restarted and does not know this process"
    return None


def nodes_that_answer(timeout_s: float) -> list[Mapping[str, Any]]:
    """Nodes that accept a connection within `timeout_s`. Ray lists a lost node as alive for up to a minute."""
    listed = [node for node in ray.nodes() if node["Alive"]]
    found = each_answers([f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}" for node in listed], timeout_s)
    return [node for node, is_there in zip(listed, found, strict=True) if is_there]


def each_answers(addresses: Sequence[str], timeout_s: float = _PROBE_S) -> list[bool]:
    with ThreadPoolExecutor(max_workers=max(1, len(addresses))) as pool:
        return list(pool.map(lambda address: answers(address, timeout_s), addresses))


def answers(address: str, timeout_s: float = _PROBE_S) -> bool:
    """Whether a process listens at `address`, a host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s):
            return True
    except (OSError, ValueError):
        return False
