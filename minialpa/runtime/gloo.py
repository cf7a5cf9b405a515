"""Collectives of CPU hosts: the address of this host in, jax's CPU backend with gloo on that address out.

The only module of the runtime that touches the internals of jax. Left alone, gloo binds the address that this host's
name stands for, which
is the loopback on many machines, and that of another network on others; jax has no public way to say otherwise.
"""

from __future__ import annotations

from functools import partial

import jax


def bind_gloo(ip: str) -> None:
    """Make the CPU backend, which must not have started yet, use gloo on `ip`. After `jax.distributed.initialize`."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        from jax._src import distributed, xla_bridge
        from jax._src.lib import _jax  # type: ignore[attr-defined]

        collectives = _jax.make_gloo_tcp_collectives(distributed_client=distributed.global_state.client, hostname=ip)
        make_client = partial(xla_bridge.make_cpu_client, collectives=collectives)
        xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)
    except (ImportError, AttributeError, TypeError):  # another version of jax: by host name, as it does by itself
        return
