"""Faults of what Ray itself consists of: its head, and its watch over the memory of a node."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import ray

import minialpa
from minialpa import MinialpaError
from tests.runtime.ray.faults import (
    METHODS,
    SOON_S,
    Traces,
    Training,
    greedy_step,
    kill,
    lives,
    long_step,
    make_batch,
    told_of,
    train_step,
    wait_until,
    worker_pid,
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


def short_steps(training: Training) -> None:
    """Steps of which no wait is long. Ray would end this process after a minute."""
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        np.asarray(training.run()[1])


@pytest.mark.slow  # test_node_lost is the short relative
@pytest.mark.parametrize("steps", ["long", "short"])
def test_head_killed(steps: str) -> None:
    with ray_nodes(1, 2) as cluster:
        ray.init(address=cluster.address, log_to_driver=False)
        training = Training(cluster.address)
        training.start(hosts=1)
        training.advance()
        pids = Traces.of_session().pids
        servers = [process.pid for name, process in cluster.head_node.live_processes() if name == "gcs_server"]
        call = long_step(training, 0) if steps == "long" else lambda: short_steps(training)
        told = told_of(kill(servers[0]), call, after_s=1.0)
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
    """It comes back at once, and remembers nothing: what runs goes on, and all the rest says what to do."""
    with ray_nodes(1, 2) as cluster:
        ray.init(address=cluster.address, log_to_driver=False)
        training = Training(cluster.address)
        training.start(hosts=1)
        params, _ = training.advance()
        pids = Traces.of_session().pids
        cluster.head_node.kill_gcs_server()
        with head_at(training.address):
            training.advance()
            two_hosts = minialpa.parallelize(train_step(minialpa.value_and_grad), method=METHODS[2])
            with pytest.raises(MinialpaError, match=r"head of the Ray cluster .* was restarted"):
                two_hosts(params, make_batch(0), np.zeros(3, np.int32))
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


@pytest.mark.slow
def test_worker_that_ray_kills_for_memory() -> None:
    """Ray watches the memory of a node, and ends a worker before the kernel has to."""
    spare = 2**30
    values = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (1024 * int(values[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    config = {"memory_usage_threshold": 1 - (available - spare) / total, "memory_monitor_refresh_ms": 100}
    with ray_nodes(1, 2, _system_config=config) as cluster:
        ray.init(address=cluster.address, log_to_driver=False)
        training = Training(cluster.address)
        training.start(hosts=1)
        training.advance()
        traces = Traces.of_session()
        pid = worker_pid(1)
        told = told_of(lambda: None, lambda: np.asarray(greedy_step(2 * spare)(training.state, make_batch(0))))
        assert (told.error.host, told.error.stage) == (0, 1)
        assert f"process {pid}" in str(told.error) and "memory" in str(told.error)
        traces.assert_gone()
        training.start(hosts=1)
        training.advance()
