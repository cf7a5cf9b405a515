"""The connection of this process to Ray: finds or starts a cluster, connects to it, and probes its head.

Ray keeps one connection per process, so `connect` changes the state of the process; the caller disconnects with
`ray.shutdown`. Errors are MinialpaErrors that say how to get a cluster that works.
"""

from __future__ import annotations

import os
import re
import socket
import traceback
import warnings

import ray
from ray.exceptions import RayError

from minialpa.errors import MinialpaError
from minialpa.runtime.ray.private_ray import address_of_this_machine, head_knows_this_process, start_cluster


def connect(address: str | None, namespace: str) -> None:
    """Connect to the cluster at `address`, or RAY_ADDRESS, or of this machine. If there is none, or for "local",
    start one.

    Raises MinialpaError if no cluster answers there.
    """
    address = address or os.environ.get("RAY_ADDRESS") or _started_here()

    if address in (None, "local"):
        with warnings.catch_warnings():
            # Ray forks to start its processes, and these call `exec` at once, so threads of this one do no harm.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            start_cluster(namespace)
        return

    if address.startswith("ray://"):
        raise MinialpaError(
            f"{address!r} is the address of a Ray client server, but the process that trains has to be on a host of "
            "the cluster: start it there, by `ray job submit` for instance, and leave out `address` and `RAY_ADDRESS`."
        )
    # Ray would retry for minutes.
    if re.fullmatch(r"\S+:\d+", address) and "://" not in address and not answers(address):
        raise _no_cluster(address, "nothing listens there")

    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False)
    except (ConnectionError, RuntimeError, RayError) as error:
        if "AuthenticationError" in "".join(traceback.format_exception(error)):
            raise MinialpaError(
                f"The Ray cluster at {address!r} asks this process for its token. Set RAY_AUTH_MODE=token, and "
                "RAY_AUTH_TOKEN to what `ray get-auth-token` prints there, before Python starts; or start another "
                'cluster on this machine with `address="local"`.'
            ) from error
        raise _no_cluster(address, str(error)) from error


def _no_cluster(address: str, reason: str) -> MinialpaError:
    return MinialpaError(
        f"No Ray cluster answers at {address!r} ({reason}). Start one with `ray start --head`, or have one "
        'started on this machine with `address="local"`.'
    )


def _started_here() -> str | None:
    """The address of the cluster that `ray start` has started on this machine, if that still runs."""
    address = address_of_this_machine()
    return address if address and answers(address) else None


def fault_of_head(address: str) -> str | None:
    """What is wrong with the head that this process is connected to, as the end of a sentence; None if it works."""
    if not answers(address):
        return "does not answer"
    if not head_knows_this_process():
        return "was restarted and does not know this process"
    return None


def answers(address: str) -> bool:
    """Whether something listens at `address`, a host:port. Takes up to two seconds."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=2.0):
            return True
    except (OSError, ValueError):
        return False
