"""Faults of workers and hosts: what the caller is told, and how fast; that nothing stays behind; that training goes on.

Each test makes one fault in a session and starts the next one in the same process, from a NumPy copy of the state.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

import minialpa
from minialpa import WorkerError
from minialpa.runtime.ray import ray_actors
from minialpa.runtime.workers.worker import Worker
from minialpa.session import current_session
from tests.runtime.ray.faults import (
    AT_ONCE,
    PATIENCE_S,
    SOON_S,
    Traces,
    Training,
    cluster_ip,
    greedy_step,
    kill,
    long_step,
    make_batch,
    memfds,
    memory_limit,
    told_of,
    wait_until,
    worker_pid,
)

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def whole_training(cluster: Cluster) -> Training:
    """Its sessions find Ray connected, and leave it so."""
    ray.init(address=cluster.address, log_to_driver=False)
    return Training(cluster.address)


@pytest.fixture
def training(whole_training: Training, request: pytest.FixtureRequest) -> Iterator[Training]:
    """The training that all tests go on with. A session that a failed test leaves ends, whatever it is doing."""
    n_failed = request.session.testsfailed
    yield whole_training
    if request.session.testsfailed > n_failed:
        minialpa.shutdown()


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Python's own handler for SIGINT: a shell has what it starts in the background ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow  # the next test is the short relative
def test_worker_killed_while_it_compiles(training: Training) -> None:
    training.start(hosts=1)
    runtime = current_session().runtime

    def fault() -> None:
        wait_until(lambda: len(runtime.workers) == 2, 60)
        killed.append(runtime.launcher.answer(runtime.workers[0].actor.call_aside("status")).pid)
        traces.append(Traces(killed, [], runtime.launcher._group, memfds()))
        os.kill(killed[0], signal.SIGKILL)
        at.append(time.monotonic())

    killed: list[int] = []
    traces: list[Traces] = []
    at: list[float] = []
    told = told_of(fault, lambda: np.asarray(training.run()[1]), after_s=0.01)
    assert time.monotonic() - at[0] < SOON_S
    assert (told.error.host, told.error.stage) == (0, 0)
    assert "its process died" in str(told.error)
    traces[0].assert_gone()
    training.start(hosts=1)
    training.advance()


@pytest.mark.slow  # a worker killed inside a step is the short relative
def test_worker_killed_between_steps(training: Training) -> None:
    training.start(hosts=1)
    params, loss = training.advance()
    traces = Traces.of_session()
    value = float(loss)
    told = told_of(kill(worker_pid(1)), lambda: np.asarray(training.run()[1]))
    assert told.seconds < SOON_S
    assert (told.error.host, told.error.stage) == (0, 1)
    assert "its process died" in str(told.error) and "restore the state" in str(told.error)
    traces.assert_gone()

    # What was fetched stays; everything else says why it is gone, until there is a new session.
    assert float(loss) == value
    with pytest.raises(WorkerError, match="The session has ended"):
        training.run()
    minialpa.shutdown()
    minialpa.shutdown()
    training.start(hosts=1)
    lost = jax.tree.map(lambda x: x, params)
    for leaf in jax.tree.leaves(lost):
        leaf._host = None
    with pytest.raises(WorkerError, match="The session has ended"):
        np.asarray(lost["first"])
    with pytest.raises(WorkerError, match="The session has ended"):
        training.steps[1](lost, make_batch(0), AT_ONCE)
    training.advance()


@pytest.mark.parametrize(
    "where, place", [pytest.param(1, 1, marks=pytest.mark.slow, id="last-stage"), pytest.param(2, 0, id="update")]
)
def test_worker_killed_inside_a_step(training: Training, where: int, place: int) -> None:
    training.start(hosts=1)
    training.advance()
    traces = Traces.of_session()
    pid = worker_pid(place)
    told = told_of(kill(pid), long_step(training, where), after_s=3.0)
    assert told.seconds < SOON_S
    assert (told.error.host, told.error.stage) == (0, place)
    assert f"process {pid}" in str(told.error)
    # It had said where it was; and the other one still does.
    assert told.error.instruction is not None and "no instruction" not in told.error.instruction
    assert told.error.recent
    assert f"stage {1 - place} on host 0, was in step" in str(told.error)
    traces.assert_gone()
    training.start(hosts=1)
    training.advance()


@pytest.mark.slow  # tests/runtime/cluster/test_in_process_cluster.py has its short relative
def test_stage_that_raises(training: Training) -> None:
    training.start(hosts=1)
    training.advance()
    traces = Traces.of_session()
    told = told_of(lambda: None, lambda: np.asarray(greedy_step(2**48)(training.state, make_batch(0))))
    assert (told.error.host, told.error.stage) == (0, 1)
    assert told.error.instruction is not None and "Run" in told.error.instruction
    assert told.error.recent
    assert told.error.remote_traceback is not None and "Out of memory" in told.error.remote_traceback
    assert told.error.remote_traceback in str(told.error)
    traces.assert_gone()
    training.start(hosts=1)
    training.advance()


@pytest.mark.slow  # the worker that is killed inside a step is the short relative
def test_worker_that_the_kernel_kills_for_memory(training: Training) -> None:
    training.start(hosts=1)
    training.advance()
    traces = Traces.of_session()
    with memory_limit(worker_pid(1), 2**28):
        told = told_of(lambda: None, lambda: np.asarray(greedy_step(2**30)(training.state, make_batch(0))))
    assert (told.error.host, told.error.stage) == (0, 1)
    assert "its process died" in str(told.error) and "OOM" in str(told.error)
    traces.assert_gone()
    training.start(hosts=1)
    training.advance()


@pytest.mark.slow  # tests/runtime/cluster/test_in_process_cluster.py has its short relative
@pytest.mark.parametrize(
    "is_stopped", [pytest.param(True, id="stopped"), pytest.param(False, marks=pytest.mark.slow, id="busy")]
)
def test_worker_that_hangs(training: Training, is_stopped: bool) -> None:
    """Its process is stopped and answers nobody; or it answers, and never ends the update."""
    minialpa.shutdown()
    training.start(hosts=1, timeout_s=PATIENCE_S)
    training.advance()
    traces = Traces.of_session()
    pid = worker_pid(0)
    if is_stopped:
        told = told_of(lambda: os.kill(pid, signal.SIGSTOP), lambda: np.asarray(training.run()[1]))
    else:
        told = told_of(lambda: None, long_step(training, 2))
    assert told.seconds < PATIENCE_S + SOON_S
    assert (told.error.host, told.error.stage) == (0, 0)
    assert ("it has not answered for" if is_stopped else "no worker has made progress for 5 s") in str(told.error)
    traces.assert_gone()


@pytest.mark.slow  # tests/runtime/cluster/test_in_process_cluster.py has its short relative
@pytest.mark.usefixtures("interrupts")
def test_interrupt_of_the_caller(training: Training) -> None:
    training.start(hosts=1)
    training.advance()
    traces = Traces.of_session()
    heard = threading.Event()

    def interrupt() -> None:
        # As a user does. Python drops one that comes while it collects garbage: it arises in a callback of jax then.
        time.sleep(2.0)
        while not heard.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            heard.wait(SOON_S)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        try:
            long_step(training, 0)()
        finally:
            heard.set()
    thread.join()
    minialpa.shutdown()
    traces.assert_gone()


@pytest.mark.slow  # tests/runtime/cluster/test_in_process_cluster.py has its short relative
@pytest.mark.usefixtures("interrupts")
def test_interrupt_when_only_some_workers_have_their_call(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    training.start(hosts=1)
    training.advance()
    traces = Traces.of_session()
    invoke = ray.actor.ActorHandle._actor_method_call

    def interrupted(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        called.append(method)
        if called.count("step") == 2:
            signal.raise_signal(signal.SIGINT)
        return invoke(self, method, *args, **kwargs)

    called: list[str] = []
    monkeypatch.setattr(ray.actor.ActorHandle, "_actor_method_call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.run()
    monkeypatch.undo()
    traces.assert_gone()
    with pytest.raises(WorkerError, match=r"The session has ended.*only some workers had been told"):
        training.run()
    training.start(hosts=1)
    training.advance()
    minialpa.shutdown()


class UnluckyWorker(Worker):
    """Proposes a port that another process has taken, the first time."""

    def reserve_port(self) -> tuple[str, int]:
        taken = Path(os.environ["TAKEN_PORT"])
        ip, port = super().reserve_port()
        if taken.exists():
            port = int(taken.read_text())
            taken.unlink()
        return ip, port


@pytest.mark.slow  # the next test is the short relative
def test_port_taken_then_coordinator_killed(training: Training, tmp_path: Path, monkeypatch: Any) -> None:
    minialpa.shutdown()
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    unlucky = ray.remote(concurrency_groups={"control": 1, "life": 1})(UnluckyWorker)
    monkeypatch.setattr(ray_actors, "_ACTOR", unlucky)
    taken = tmp_path / "port"
    with socket.create_server((cluster_ip(), 0)) as holder:
        taken.write_text(str(holder.getsockname()[1]))
        training.start(hosts=2, env={"TAKEN_PORT": str(taken)})
        training.advance()
    assert not taken.exists()
    traces = Traces.of_session()
    told = told_of(kill(worker_pid(0)), long_step(training, 0), after_s=2.0)
    assert told.seconds < SOON_S
    assert (told.error.host, told.error.stage) == (0, 0)
    traces.assert_gone()


@pytest.mark.slow  # the next test is the short relative
def test_one_host_of_a_mesh_killed(training: Training) -> None:
    training.start(hosts=2)
    training.advance()
    traces = Traces.of_session()
    told = told_of(kill(worker_pid(1)), lambda: np.asarray(training.run()[1]))
    assert told.seconds < SOON_S
    assert (told.error.host, told.error.stage) == (1, 0)
    assert "its process died" in str(told.error)
    traces.assert_gone()


def test_node_lost(training: Training, cluster: Cluster) -> None:
    training.start(hosts=2)
    training.advance()
    traces = Traces.of_session()
    kept = {cluster.head_node.node_id, ray.get_runtime_context().get_node_id()}
    hosts = [host.node_id for host in current_session().runtime.launcher.hosts]
    host = next(i for i, node_id in enumerate(hosts) if node_id not in kept)
    node = next(node for node in cluster.worker_nodes if node.node_id == hosts[host])
    told = told_of(lambda: cluster.remove_node(node, allow_graceful=False), long_step(training, 0), after_s=1.0)
    assert told.seconds < SOON_S
    assert told.error.host == host and "its host is lost" in str(told.error)
    traces.assert_gone()
