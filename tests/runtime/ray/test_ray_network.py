"""Hosts with addresses of their own: Ray nodes in network namespaces, which only see each other over a bridge."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.ray.networked_cluster import needs_namespaces, networked_cluster

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
