"""Faults of the head of a Ray cluster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import ray

import minialpa
from minialpa import MinialpaError, ShardParallel
from tests.runtime.ray.faults import (
    AT_ONCE,
    SOON_S,
    Traces,
    Training,
    in_next_step,
    kill,
    lives,
    long_step,
    make_batch,
    told_of,
    train_step,
    wait_until,
)
from tests.runtime.ray.ray_cluster import ray_nodes

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]


NEW_HEAD = """
import sys
from tests.runtime.ray.ray_cluster import ray_nodes
with ray_nodes(1, 2, gcs_server_port=int(sys.argv[1])):
    print("runs", flush=True)
    sys.stdin.read()
"""


@contextmanager
def head_at(address: str) -> Iterator[None]:
    """The head of a new cluster, at the address of one that is gone, started by another process."""
    command = [sys.executable, "-c", NEW_HEAD, address.rpartition(":")[2]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as head:
        assert head.stdout is not None and head.stdin is not None
        assert any(line == "runs\n" for line in head.stdout)
        try:
            yield
        finally:
            minialpa.shutdown()
            ray.shutdown()
            head.stdin.close()


@pytest.mark.slow  # test_a_lost_node is the short relative
def test_head_killed() -> None:
    with ray_nodes(1, 2) as cluster:
        ray.init(address=cluster.address, log_to_driver=False)
        training = Training(cluster.address)
        training.start(hosts=1)
        training.advance()
        pids = Traces.of_session().pids
        servers = [process.pid for name, process in cluster.head_node.live_processes() if name == "gcs_server"]
        told = told_of(kill(servers[0]), long_step(training, 0), in_next_step())
        assert told.seconds < SOON_S
        assert "The head of the Ray cluster" in str(told.error)
        wait_until(lambda: not any(lives(pid) for pid in pids))
        assert minialpa.available_hosts() == 0
        for again in (minialpa.restart, minialpa.restart, lambda: training.start(hosts=1)):
            with pytest.raises(MinialpaError, match=r"head of the Ray cluster .* does not answer"):
                again()
        ray.shutdown()  # Ray ends a process that has lost its head.
        # A cluster that is started for the session ends with it.
        training.address = "local"
        training.start(hosts=1)
        training.advance()
        minialpa.shutdown()
        assert not ray.is_initialized()


@pytest.mark.slow  # the test before is the short relative
def test_head_restarted() -> None:
    """It comes back at once with an empty memory: running workers go on, and every other call raises an error."""
    with ray_nodes(1, 2) as cluster:
        ray.init(address=cluster.address, log_to_driver=False)
        training = Training(cluster.address)
        training.start(hosts=1)
        params, _ = training.advance()
        pids = Traces.of_session().pids
        cluster.head_node.kill_gcs_server()
        with head_at(training.address):
            training.advance()
            one_mesh = minialpa.parallelize(train_step(minialpa.value_and_grad), method=ShardParallel())
            with pytest.raises(MinialpaError, match=r"head of the Ray cluster .* was restarted"):
                one_mesh(params, make_batch(0), AT_ONCE)
            params, _ = training.advance()
            assert np.isfinite(np.asarray(params["first"])).all()
            assert minialpa.available_hosts() == 0
            minialpa.shutdown()
            wait_until(lambda: not any(lives(pid) for pid in pids))
            with pytest.raises(MinialpaError, match=r"was restarted.*call `ray.shutdown\(\)`"):
                training.start(hosts=1)
            ray.shutdown()
            training.start(hosts=1)
            training.advance()
            minialpa.shutdown()
