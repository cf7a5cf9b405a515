"""Tries each transport within this process, for `minialpa doctor`, and closes it."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from minialpa.errors import WorkerError
from minialpa.runtime.transports.host_transport import HostTransport
from minialpa.runtime.transports.transport import ExpectedPart, Part

_TIMEOUT_S = 10.0


def diagnose_transports() -> dict[str, str]:
    """By transport: "works" if an array arrives unchanged, or else the error."""
    return {
        "TCP": _outcome(_through_tcp),
        "NCCL": _outcome(_through_nccl),
    }


def _outcome(attempt: Callable[[], bool]) -> str:
    """attempt: sends an array, and returns whether it arrives unchanged."""
    try:
        return "works" if attempt() else "changes the values that it carries"
    except Exception as error:
        return f"does not work: {str(error) or repr(error)}"


def _through_tcp() -> bool:
    """From one transport of this process to another."""
    secret = secrets.token_bytes(32)
    here, there = (HostTransport(secret, number) for number in range(2))
    try:
        addresses = [here.address, there.address]

        # `connect` returns only when both sides call it.
        connecting = threading.Thread(target=there.connect, args=(addresses, _TIMEOUT_S), daemon=True)
        connecting.start()
        here.connect(addresses, _TIMEOUT_S)
        connecting.join(_TIMEOUT_S)

        sent = np.arange(1 << 16)
        here.send(1, 0, [Part(sent)])
        (got,) = there.receive(0, 0, [ExpectedPart(sent.shape, sent.dtype)], _TIMEOUT_S)
        return np.array_equal(got, sent)
    finally:
        here.close()
        there.close()


def _through_nccl() -> bool:
    """From a GPU to itself, over a communicator of one rank."""
    devices = [device for device in jax.local_devices() if device.platform in ("gpu", "cuda")]
    if not devices:
        raise WorkerError("jax sees no GPU here. For an NVIDIA GPU, install `minialpa[gpu]`")
    from minialpa.runtime.transports.nccl import Endpoint, exchange, new_id

    end = Endpoint(devices[0], new_id(), rank=0, n_ranks=1)
    sent, got = jax.device_put((np.arange(1 << 16), np.zeros(1 << 16, int)), devices[0])
    jax.block_until_ready((sent, got))
    exchange([(end, sent)], [(end, got)])
    end.close(abort=False)
    return bool(jnp.array_equal(got, sent))
