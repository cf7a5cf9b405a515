"""Joins this process to a Ray cluster, or starts one, and tells whether the head of the cluster answers."""

from __future__ import annotations

import os
import re
import socket
import traceback
import warnings

import ray
from ray.exceptions import RayError

from minialpa.errors import MinialpaError
from minialpa.runtime.private_ray import address_of_this_machine, head_knows_this_process, start_cluster


def connect(address: str | None, namespace: str) -> None:
    """Join the cluster at `address`, or at RAY_ADDRESS, or that of this machine, or start one; for "local" start one.

    Raises MinialpaError if none answers.
    """
    address = address or os.environ.get("RAY_ADDRESS") or _started_here()
    if address in (None, "local"):
        with warnings.catch_warnings():
            # Ray forks to start its processes, and these replace themselves at once.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            start_cluster(namespace)
        return
    if address.startswith("ray://"):
        raise MinialpaError(
            f"{address!r} is the address of a Ray client server, but the process that trains has to be on a host of "
            "the cluster: start it there, by `ray job submit` for instance, and leave out `address` and `RAY_ADDRESS`."
        )
    # Ray would try for minutes.
    if re.fullmatch(r"\S+:\d+", address) and "://" not in address and not answers(address):
        raise _no_cluster(address, "nothing listens there")
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False)
    except (ConnectionError, RuntimeError, RayError) as error:
        if "AuthenticationError" in "".join(traceback.format_exception(error)):
            raise MinialpaError(
                f"The Ray cluster at {address!r} wants its token from this process. Set RAY_AUTH_MODE=token, and "
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
    """The address of the cluster that `ray start` has started on this machine, if it still runs."""
    address = address_of_this_machine()
    return address if address and answers(address) else None


def fault_of_head(address: str) -> str | None:
    """Why the head of the cluster that this process has joined does not do what it is asked, if so."""
    if not answers(address):
        return "does not answer"
    return None if head_knows_this_process() else "was restarted and does not know this process"


def answers(address: str) -> bool:
    """Whether something listens at host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=2.0):
            return True
    except (OSError, ValueError):
        return False
