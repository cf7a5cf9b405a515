"""`train` on a Ray cluster: processes and hosts are killed while it runs, and it ends like an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.ray.networked_cluster import needs_namespaces, networked_cluster
from tests.runtime.ray.ray_cluster import ray_nodes, resize
from tests.training_driver import command, environment, losses_in, reports_in
from tests.training_runs import serial_losses

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]


def workers_of(nodes: Iterable[Any]) -> list[int]:
    """The processes that Ray nodes of this machine have started for actors."""
    raylets = {node.all_processes["raylet"][0].process.pid for node in nodes}
    found = []
    for line in subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True).stdout.splitlines()[1:]:
        pid, parent, args = line.split(maxsplit=2)
        if int(parent) in raylets and "ray::" in args and "IDLE" not in args:
            found.append(int(pid))
    return found


def kill_host(cluster: Any) -> None:
    """kill -9 of a node and of its workers, as a loss of power does."""
    (node,) = cluster.worker_nodes
    workers = workers_of([node])
    cluster.remove_node(node, allow_graceful=False)
    for pid in workers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until(is_there: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    while not is_there():
        assert process.poll() in (None, 0), log.read_text()[-3000:]
        if process.poll() == 0:
            return
        time.sleep(0.01)


@contextmanager
def driver(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("a") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def finish(process: subprocess.Popen[bytes], folder: Path, log: Path) -> list[Any]:
    """Wait for the end of the run; its events, and the number of hosts that it had then."""
    assert process.wait(300) == 0, log.read_text()[-3000:]
    events: list[Any] = json.loads((folder / "events.json").read_text())
    return events


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with ray_nodes(2, 1) as cluster:
        words = command(cluster.address, folder, 60, 10, 2)
        with driver(words, environment(), folder / "log") as process:
            finish(process, folder, folder / "log")
    return losses_in(folder)


# tests/test_killed_training.py kills the caller.
@pytest.mark.slow  # tests/test_training.py has its short relative, in one process
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("what", ["worker", "node"])
def test_kill_9_at_any_moment_changes_nothing(
    undisturbed: dict[int, float], what: str, seed: int, tmp_path: Path
) -> None:
    rng, n_steps = random.Random(f"{what}{seed}"), 60
    moment, delay_s = rng.randrange(1, n_steps), rng.random() * 0.3
    log = tmp_path / "log"

    with ray_nodes(2, 1) as cluster:
        words = command(cluster.address, tmp_path, n_steps, 10, 2)
        with driver(words, environment(), log) as process:
            wait_until(lambda: len(reports_in(tmp_path)) >= moment, process, log)
            time.sleep(delay_s)
            if what == "worker":
                os.kill(rng.choice(workers_of(cluster.list_all_nodes())), signal.SIGKILL)
            else:
                kill_host(cluster)
                resize(cluster, 2, 1)
            events = finish(process, tmp_path, log)

    found = losses_in(tmp_path)
    # While one host was there, the plan was another one.
    texts = [event.get("text", "") for event in events]
    if any("1 x 1 devices" in text for text in texts):
        assert found == pytest.approx(undisturbed, rel=1e-3)
    else:
        assert found == undisturbed


@pytest.mark.slow  # tests/test_training.py has its short relative, in one process
@needs_namespaces
def test_two_of_four_hosts_are_cut_off_and_come_back(tmp_path: Path) -> None:
    n_steps, log = 100, tmp_path / "log"
    with networked_cluster(5, tmp_path, n_devices_of_head=0) as cluster:
        words = command(cluster.address, tmp_path, n_steps, 5, 4)
        with driver(cluster.command(0, *words), cluster.environment, log) as process:
            wait_until(lambda: len(losses_in(tmp_path)) >= 30, process, log)
            cluster.cut(2, 4)
            wait_until(lambda: len(losses_in(tmp_path)) >= 40, process, log)
            cluster.heal(2, 4)
            events = finish(process, tmp_path, log)

    assert losses_in(tmp_path) == pytest.approx(serial_losses(n_steps), rel=1e-3)
    texts = [event["text"] for event in events[:-1] if event["what"] in ("lost", "restarted")]
    assert any("2 x 1 devices" in text for text in texts) and events[-1]["n_hosts"] == 4, texts
