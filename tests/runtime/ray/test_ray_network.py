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
import json, sys
import minialpa
from minialpa.session import current_session
from tests.runtime.ray.faults import Training

address, folder = sys.argv[1:]
training = Training(address)
training.start(hosts=3)  # the second stage is on the hosts behind the first one
for _ in range(3):
    training.advance()
training.steps[3].get_last_executable().dump_debug_info(folder)
print("RESULT", json.dumps([host.ip for host in current_session().runtime.launcher.hosts]))
minialpa.shutdown()
"""


@pytest.mark.slow  # test_ray_failures.py has the same meshes, at one address
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
