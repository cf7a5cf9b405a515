"""Faults of a cluster, for tests: training that they stop, the error of the caller, and remaining processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray

import minialpa
from minialpa import ManualStageOption, PipeshardParallel, WorkerError
from minialpa.session import current_session
from minialpa.testing import assert_allclose
from tests.runtime.ray.ray_cluster import start_session

#: Seconds within which an error must come after its first signs.
SOON_S = 10.0
#: A time-out for workers that hang; their first steps take less, also on a busy machine.
PATIENCE_S = 5.0
FOREVER = 2**31 - 1
AT_ONCE = np.zeros(3, np.int32)


def spin(w: jax.Array, n: jax.Array) -> jax.Array:
    """`w`, after `n` iterations of a loop."""
    spun = jax.lax.fori_loop(0, n, lambda _, x: jnp.sin(x), jax.lax.stop_gradient(jnp.sum(w)))
    return w + 0.0 * spun


def train_step(value_and_grad: Any) -> Callable[[Any, Any, Any], Any]:
    """A step of two stages. spins: iterations in the first stage, in the second one, and in the update of the first."""

    def step(params: Any, batch: Any, spins: Any) -> Any:
        def loss_fn(params: Any, batch: Any) -> jax.Array:
            h = jax.nn.relu(batch["x"] @ spin(params["first"], spins[0]))
            minialpa.mark_pipeline_boundary()
            return jnp.mean((h @ spin(params["last"], spins[1]) - batch["y"]) ** 2)

        loss, grads = value_and_grad(loss_fn)(params, batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return {**params, "first": spin(params["first"], spins[2])}, loss

    return step


def make_params() -> Any:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(8, 8)).astype(np.float32) for name in ("first", "last")}


def make_batch(step: int) -> Any:
    rng = np.random.default_rng(100 + step)
    return {name: rng.normal(size=(8, 8)).astype(np.float32) for name in ("x", "y")}


def two_stages(*submeshes: tuple[int, int]) -> PipeshardParallel:
    """A stage on each submesh, which is hosts and devices of each."""
    n_devices = [(hosts * devices,) for hosts, devices in submeshes]
    stages = ManualStageOption(((0,), (1,)), submeshes, n_devices, ({}, {}))
    return PipeshardParallel(num_micro_batches=2, layer_option="manual", stage_option=stages)


#: By the number of hosts: two devices of one host; or a device of each host, and the second mesh is on two of them.
METHODS = {1: two_stages((1, 1), (1, 1)), 3: two_stages((1, 1), (2, 1))}


@dataclass(eq=False)
class Training:
    """Training on sessions of one cluster, beside the serial run of the same steps."""

    address: str
    state: Any = field(default_factory=make_params)
    n_steps: int = 0
    hosts: int = 0
    steps: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.serial = jax.jit(train_step(jax.value_and_grad))

    def start(self, hosts: int, timeout_s: float = 300.0) -> None:
        """A session of a pipeline of two meshes on so many hosts; an equal session continues."""
        if hosts != self.hosts:
            minialpa.shutdown()
        self.hosts = hosts
        n_devices = 2 if hosts == 1 else 1
        start_session(self.address, hosts, n_devices, worker_timeout_s=timeout_s)
        self.steps.setdefault(hosts, minialpa.parallelize(train_step(minialpa.value_and_grad), method=METHODS[hosts]))

    def run(self, spins: Any = AT_ONCE) -> tuple[Any, Any]:
        """Start a step on the NumPy state."""
        return self.steps[self.hosts](self.state, make_batch(self.n_steps), spins)

    def advance(self) -> tuple[Any, Any]:
        """A step that agrees with the serial run; its results, of which the state is a NumPy copy."""
        params, loss = self.run()
        self.state, expected = jax.tree.map(np.asarray, self.serial(self.state, make_batch(self.n_steps), AT_ONCE))
        self.n_steps += 1
        assert_allclose((params, loss), (self.state, expected), rtol=1e-5, atol=1e-6)
        return params, loss


@dataclass
class Traces:
    """The processes of a session on this machine, and its placement group."""

    pids: list[int]
    group: Any

    @staticmethod
    def of_session() -> Traces:
        runtime = current_session().runtime
        pids = [status.pid for status in runtime.ask(runtime.workers, "status")]
        return Traces(pids, runtime.launcher._group)

    def assert_gone(self) -> None:
        """Within seconds: Ray gives a process that is stopped five of them."""
        wait_until(lambda: not any(lives(pid) for pid in self.pids))
        assert ray.util.placement_group_table(self.group)["state"] == "REMOVED"
        assert not [thread for thread in threading.enumerate() if "minialpa" in thread.name]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(is_true: Callable[[], bool], seconds: float = SOON_S) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, f"not so within {seconds} s"
        time.sleep(0.05)


@dataclass
class Told:
    """The error that the caller got after a fault, and the seconds until then."""

    error: WorkerError
    seconds: float


def told_of(fault: Callable[[], None], call: Callable[[], Any], is_time: Callable[[], bool] | None = None) -> Told:
    """The error of `call`. `fault` happens during the call, once `is_time`; without `is_time`, before the call."""
    at = [0.0]

    def make_fault() -> None:
        if is_time is not None:
            wait_until(is_time, 60)
        at[0] = time.monotonic()
        fault()

    thread = threading.Thread(target=make_fault)
    thread.start()
    if is_time is None:
        thread.join()
    with pytest.raises(WorkerError) as caught:
        call()
    thread.join()
    return Told(caught.value, time.monotonic() - at[0])


def in_next_step() -> Callable[[], bool]:
    """A function: whether all workers have reported, while the caller waits, that they run the next step."""
    runtime = current_session().runtime
    last = max(status.step for status in runtime.ask(runtime.workers, "status"))
    return lambda: all(runtime._status(worker).step > last for worker in runtime.workers)


def worker_pid(place: int) -> int:
    """The process of the worker at a place: the first stage or host, or the second one."""
    runtime = current_session().runtime
    workers = sorted(runtime.workers, key=lambda worker: worker.first_device)
    return int(runtime.ask([workers[place]], "status")[0].pid)


def kill(pid: int) -> Callable[[], None]:
    return lambda: os.kill(pid, signal.SIGKILL)


def long_step(training: Training, where: int) -> Callable[[], Any]:
    """A step that never ends: in the first stage, in the second one, or in the update of the first."""
    spins = AT_ONCE.copy()
    spins[where] = FOREVER
    return lambda: np.asarray(training.run(spins)[0]["first"])
