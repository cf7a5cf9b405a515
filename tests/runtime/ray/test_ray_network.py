"""Hosts with addresses of their own: Ray nodes in network namespaces, which only see each other over a bridge."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.ray.networked_cluster import NetworkedCluster, needs_namespaces, networked_cluster

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]

_SCRIPT = """
import json, os, sys
import jax, numpy as np
import minialpa
from minialpa import ManualStageOption, PipeshardParallel

address, folder = sys.argv[1:]
minialpa.init(cluster="ray", address=address)
runtime = minialpa.session.current_session().runtime
hosts = [host.ip for host in runtime.launcher.hosts]

def step(w, x):
    def loss(w):
        h = jax.numpy.tanh(x @ w["a"])
        minialpa.mark_pipeline_boundary()
        return jax.numpy.mean((h @ w["b"]) ** 2)
    value, grads = minialpa.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value

def serial(w, x):
    value, grads = jax.value_and_grad(lambda w: jax.numpy.mean((jax.numpy.tanh(x @ w["a"]) @ w["b"]) ** 2))(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value

# The second stage is on the hosts behind the first one.
stages = ManualStageOption(((0,), (1,)), ((1, 1), (2, 1)), ((1,), (2,)), ({}, {}))
method = PipeshardParallel(num_micro_batches=2, layer_option="manual", stage_option=stages)
train_step = minialpa.parallelize(step, method=method)
rng = np.random.default_rng(0)
expected = actual = {k: rng.standard_normal((16, 16)).astype(np.float32) for k in "ab"}
for i in range(3):
    x = rng.standard_normal((8, 16)).astype(np.float32)
    expected, value = serial(expected, x)
    actual, loss = train_step(actual, x)
    np.testing.assert_allclose(float(loss), float(value), rtol=1e-4)
minialpa.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
train_step.get_last_executable().dump_debug_info(folder)
print("RESULT", json.dumps(hosts))
minialpa.shutdown()
"""


@pytest.mark.slow  # test_ray_failures.py starts meshes on two hosts, too
@needs_namespaces
def test_a_mesh_on_hosts_behind_the_first_one_starts_at_their_addresses(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    with networked_cluster(3, tmp_path) as cluster:
        done = subprocess.run(
            cluster.command(0, sys.executable, str(script), cluster.address, str(tmp_path / "info")),
            env=cluster.environment, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        addresses = [address for _, address in cluster.hosts]
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = re.findall(r"^RESULT (.*)$", done.stdout, re.MULTILINE)
    assert json.loads(result) == addresses
    texts = [path.read_text() for path in sorted((tmp_path / "info").glob("stage1-*-worker.txt"))]
    assert [f"({address})" in text for address, text in zip(addresses[1:], texts, strict=True)] == [True, True]
    # The coordinator of the second mesh listens on its first host, not on the head.
    assert all(f"coordinator {addresses[1]}:" in text for text in texts)


class _Driver:
    """The process that trains, in the network of the head."""

    def __init__(self, cluster: NetworkedCluster, log: Path) -> None:
        command = cluster.command(0, sys.executable, "-m", "tests.runtime.ray.elastic_driver", cluster.address)
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                env=cluster.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def begin(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        # Ray prints what it hears of nodes between the answers.
        line = next((line for line in self._process.stdout if line.startswith("{")), None)
        assert line is not None, self._log.read_text()[-3000:]
        return json.loads(line)

    def ask(self, command: str) -> Any:
        self.begin(command)
        return self.answer()

    def end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


@pytest.mark.slow  # test_ray_training.py has its short relative
@needs_namespaces
@pytest.mark.parametrize("fault", ["kill", "cut"])
def test_training_goes_on_when_two_of_four_hosts_are_lost(fault: str, tmp_path: Path) -> None:
    with networked_cluster(5, tmp_path, n_devices_of_head=0) as cluster:
        driver = _Driver(cluster, tmp_path / "driver")
        try:
            addresses = [address for _, address in cluster.hosts]
            assert driver.ask("step")["hosts"] == addresses[1:]

            driver.begin("endless step")
            assert driver.answer() == {"began": True}
            time.sleep(2.0)
            lost_at_s = time.monotonic()
            getattr(cluster, fault)(2, 4)
            told = driver.answer()
            assert told["lost"] == [1, 3] and all(addresses[i] in told["error"] for i in (2, 4)), told
            detected_s = told["at_s"] - lost_at_s

            restarted = driver.ask("restart")
            assert restarted["n"] == 2, restarted
            first = driver.ask("step")
            assert first["hosts"] == [addresses[1], addresses[3]]
            available = driver.ask("available")
            assert available["n"] == 2, available
            times = [detected_s, restarted["seconds"], first["seconds"], available["seconds"]]
            print(f"{fault}: detection, restart, step, available_hosts:", [f"{seconds:.2f} s" for seconds in times])

            if fault == "kill":
                cluster.start(2, 4)
            else:
                cluster.heal(2, 4)
            deadline = time.monotonic() + 90.0
            while driver.ask("available")["n"] < 4:
                assert time.monotonic() < deadline
                time.sleep(0.5)
            back_s = time.monotonic()
            assert driver.ask("restart")["n"] == 4
            assert driver.ask("step")["hosts"] == addresses[1:]
            print(f"back after {time.monotonic() - back_s:.1f} s")
        finally:
            driver.end()
