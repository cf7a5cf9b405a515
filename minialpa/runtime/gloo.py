"""Collectives between CPU hosts: has gloo, which jax uses for them, listen on a given address of this host.

By default, gloo binds the address that this host's name resolves to. On many machines that is the loopback, on others
an address of another network. jax has no public way to change it, so this is the one module of the runtime that uses
jax's internals.
"""

from __future__ import annotations

from functools import partial

import jax


def bind_gloo(ip: str) -> None:
    """Have the CPU backend use gloo on `ip`. Call it after `jax.distributed.initialize`, before the backend starts."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        from jax._src import distributed, xla_bridge
        from jax._src.lib import _jax  # type: ignore[attr-defined]

        collectives = _jax.make_gloo_tcp_collectives(distributed_client=distributed.global_state.client, hostname=ip)
        make_client = partial(xla_bridge.make_cpu_client, collectives=collectives)
        xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)
    except (ImportError, AttributeError, TypeError):  # Another version of jax: gloo binds its default address.
        return
