"""Faults of workers and hosts: the caller gets the error in seconds, no process stays, and training goes on.

Each test makes one fault in a session. The next session starts in the same process, from a NumPy copy of the state.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

import minialpa
from minialpa.session import current_session
from tests.runtime.ray.faults import (
    PATIENCE_S,
    SOON_S,
    Traces,
    Training,
    in_next_step,
    kill,
    long_step,
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
    """The training that all tests go on with. A session that a failed test leaves ends, even if it is busy."""
    n_failed = request.session.testsfailed
    yield whole_training
    if request.session.testsfailed > n_failed:
        minialpa.shutdown()


def started(training: Training, hosts: int, timeout_s: float = 300.0) -> Traces:
    """A session that has made a step equal to the serial run."""
    training.start(hosts, timeout_s)
    training.advance()
    return Traces.of_session()


def test_a_worker_killed_inside_a_step(training: Training) -> None:
    traces = started(training, hosts=1)
    pid = worker_pid(0)
    told = told_of(kill(pid), long_step(training, 2), in_next_step())
    assert told.seconds < SOON_S
    assert (told.error.host, told.error.stage) == (0, 0)
    assert f"process {pid}" in str(told.error) and "its process died" in str(told.error)
    # It had reported its position; and the other one still does.
    assert told.error.instruction is not None and "no instruction" not in told.error.instruction
    assert told.error.recent
    assert "stage 1 on host 0, was in step" in str(told.error)
    traces.assert_gone()


@pytest.mark.slow  # a worker killed inside a step is the short relative
def test_a_worker_killed_while_it_compiles(training: Training) -> None:
    training.start(hosts=1)
    runtime = current_session().runtime
    found: list[Traces] = []

    def fault() -> None:
        wait_until(lambda: len(runtime.workers) == 2, 60)
        pid = runtime.launcher.answer(runtime.workers[0].actor.call_aside("status")).pid
        found.append(Traces([pid], runtime.launcher._group))
        os.kill(pid, signal.SIGKILL)

    told = told_of(fault, lambda: np.asarray(training.run()[1]), lambda: True)
    assert (told.error.host, told.error.stage) == (0, 0) and "its process died" in str(told.error)
    found[0].assert_gone()
    started(training, hosts=1)


@pytest.mark.slow  # a worker killed inside a step is the short relative
@pytest.mark.parametrize("place", [1, 2], ids=["with the coordinator", "without it"])
def test_a_worker_of_a_mesh_over_hosts_killed(training: Training, place: int) -> None:
    traces = started(training, hosts=3)
    told = told_of(kill(worker_pid(place)), long_step(training, 0), in_next_step())
    assert told.seconds < SOON_S
    assert (told.error.host, told.error.stage) == (place, 1) and "its process died" in str(told.error)
    traces.assert_gone()


@pytest.mark.slow  # tests/runtime/cluster/test_in_process_cluster.py has its short relative
def test_a_stopped_worker(training: Training) -> None:
    minialpa.shutdown()
    traces = started(training, hosts=1, timeout_s=PATIENCE_S)
    pid = worker_pid(0)
    told = told_of(lambda: os.kill(pid, signal.SIGSTOP), lambda: np.asarray(training.run()[1]))
    assert told.seconds < PATIENCE_S + SOON_S
    assert (told.error.host, told.error.stage) == (0, 0) and "it has not answered for" in str(told.error)
    traces.assert_gone()


@pytest.mark.slow  # tests/runtime/cluster/test_in_process_cluster.py has a short relative
def test_an_interrupt_of_the_caller(training: Training) -> None:
    traces = started(training, hosts=1)
    is_time, heard = in_next_step(), threading.Event()

    def interrupt() -> None:
        # As a user does. Python drops one that comes while it collects garbage: it arises in a callback of jax then.
        wait_until(is_time, 60)
        while not heard.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            heard.wait(SOON_S)

    # Python's own handler: a shell has background processes ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            try:
                long_step(training, 0)()
            finally:
                heard.set()
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    minialpa.shutdown()
    traces.assert_gone()


def test_a_lost_node(training: Training, cluster: Cluster) -> None:
    traces = started(training, hosts=3)
    kept = {cluster.head_node.node_id, ray.get_runtime_context().get_node_id()}
    hosts = [host.node_id for host in current_session().runtime.launcher.hosts]
    host = next(i for i, node_id in enumerate(hosts) if node_id not in kept)
    node = next(node for node in cluster.worker_nodes if node.node_id == hosts[host])
    told = told_of(lambda: cluster.remove_node(node, allow_graceful=False), long_step(training, 0), in_next_step())
    assert told.seconds < SOON_S
    assert told.error.host == host and "its host is lost" in str(told.error)
    traces.assert_gone()
