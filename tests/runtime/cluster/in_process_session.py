"""Sessions whose workers are threads of this process, and a training to run on them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

import minialpa
from minialpa.runtime.cluster.cluster_runtime import ClusterRuntime
from minialpa.runtime.cluster.in_process import InProcessLauncher
from minialpa.session import _Current, _session_on
from minialpa.testing import assert_allclose
from tests.helpers import METHODS
from tests.runtime.threads import make_batch, make_params, parallel_steps, train_step


@contextmanager
def in_process_session(n_hosts: int, devices_per_host: int, timeout_s: float = 60.0) -> Iterator[ClusterRuntime]:
    """The session of this process, ended after the block. Meshes must not cross hosts."""
    devices = jax.devices()[: n_hosts * devices_per_host]
    launcher = InProcessLauncher(devices, devices_per_host, timeout_s)
    minialpa.shutdown()
    _Current.session = _session_on(launcher, None)
    try:
        yield _Current.session.runtime
    finally:
        minialpa.shutdown()


def is_running(runtime: ClusterRuntime) -> bool:
    """Whether this is the session of this process, and it has not ended."""
    session = _Current.session
    return session is not None and session.runtime is runtime and runtime._turns.failure is None


@functools.cache
def _steps() -> tuple[Any, Any]:
    """The step of two stages, planned once for all sessions; and plain jax."""
    (step,) = parallel_steps(1, METHODS["pipeline"])
    return step, jax.jit(train_step(0, jax.value_and_grad))


class Training:
    """A step of two stages, with its state and the run of plain jax beside it."""

    def __init__(self) -> None:
        self.step, self.plain = _steps()
        self.batch = make_batch(0)
        self.state = self.expected = make_params(0)

    def advance(self) -> None:
        """A step that agrees with plain jax."""
        self.state, loss = self.step(self.state, self.batch)
        self.expected, wanted = self.plain(self.expected, self.batch)
        assert_allclose((self.state, loss), (self.expected, wanted), rtol=1e-4, atol=1e-6)
