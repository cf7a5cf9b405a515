"""Hosts with addresses of their own: Ray nodes in network namespaces, which only see each other over a bridge."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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


def _can_make_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"try{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made


@contextmanager
def namespaces(n: int) -> Iterator[list[tuple[str, str]]]:
    """(name, address) of network namespaces that are joined by a bridge; the last one holds it."""
    tag = uuid.uuid4().hex[:6]
    names = [f"m{tag}{i}" for i in range(n)]
    made: list[tuple[str, str]] = []

    def ip(*words: str, at: str | None = None) -> None:
        where = [] if at is None else ["-n", at]
        subprocess.run(["ip", *where, *words], check=True, capture_output=True)

    try:
        for i, name in enumerate(names):
            ip("netns", "add", name)
            made.append((name, f"10.231.7.{i + 1}"))
            ip("link", "set", "lo", "up", at=name)
        hub = names[-1]
        ip("link", "add", "br0", "type", "bridge", at=hub)
        ip("link", "set", "br0", "up", at=hub)
        for i, (name, address) in enumerate(made):
            ip("link", "add", f"p{i}", "type", "veth", "peer", "name", f"v{i}", at=hub)
            ip("link", "set", f"p{i}", "master", "br0", "up", at=hub)
            if name != hub:
                ip("link", "set", f"v{i}", "netns", name, at=hub)
            ip("addr", "add", f"{address}/24", "dev", f"v{i}", at=name)
            ip("link", "set", f"v{i}", "up", at=name)
        yield made
    finally:
        for name, _ in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.skipif(not _can_make_namespaces(), reason="needs root and `ip netns`")
def test_a_mesh_on_hosts_behind_the_first_one_starts_at_their_addresses(tmp_path: Path) -> None:
    # A folder of its own, so that no other Ray cluster of this machine is found. Its path must be short.
    folder = Path("/tmp") / f"m{uuid.uuid4().hex[:6]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": os.getcwd()}
    environment.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=uuid.uuid4().hex * 2)
    environment.pop("RAY_ADDRESS", None)
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    device = json.dumps({"minialpa_cpu_device": 1})
    nodes = []
    with namespaces(3) as hosts:
        head = f"{hosts[0][1]}:6399"
        try:
            for i, (name, address) in enumerate(hosts):
                where = ["--head", "--port=6399", "--include-dashboard=false"] if i == 0 else [f"--address={head}"]
                start = [*ray, "start", *where, f"--node-ip-address={address}", f"--temp-dir={folder}", "--num-cpus=1",
                           f"--resources={device}", "--block"]  # fmt: skip
                with (tmp_path / f"node{i}").open("w") as log:
                    command = ["ip", "netns", "exec", name, *start]
                    nodes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
                _wait_for(tmp_path / f"node{i}", nodes[-1])
            script = tmp_path / "train.py"
            script.write_text(_SCRIPT)
            done = subprocess.run(
                ["ip", "netns", "exec", hosts[0][0], sys.executable, str(script), head, str(tmp_path / "info")],
                env=environment, capture_output=True, text=True, timeout=240,
            )  # fmt: skip
        finally:
            for node in reversed(nodes):
                node.terminate()
            for node in nodes:
                node.wait(30)
            shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stdout + done.stderr
    addresses = [address for _, address in hosts]
    (result,) = re.findall(r"^RESULT (.*)$", done.stdout, re.MULTILINE)
    assert json.loads(result) == addresses
    texts = [path.read_text() for path in sorted((tmp_path / "info").glob("stage1-*-worker.txt"))]
    assert [f"({address})" in text for address, text in zip(addresses[1:], texts, strict=True)] == [True, True]
    # The coordinator of the second mesh listens on its first host, not on the head.
    assert all(f"coordinator {addresses[1]}:" in text for text in texts)


def _wait_for(log: Path, node: subprocess.Popen[bytes]) -> None:
    """Wait until a node says that it has started."""
    for _ in range(300):
        if "Ray runtime started" in log.read_text():
            return
        assert node.poll() is None, log.read_text()
        try:
            node.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(log.read_text())
