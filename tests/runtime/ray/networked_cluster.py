"""Ray nodes in network namespaces of this machine: hosts with separate addresses, which may be lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


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


needs_namespaces = pytest.mark.skipif(not _can_make_namespaces(), reason="needs root and `ip netns`")


class NetworkedCluster:
    """A Ray cluster with a node in each namespace; the head is in the first one.

    Attributes:
        hosts: (name, address) of the namespaces.
        address: The address of the head.
        environment: The environment variables of its processes.
    """

    def __init__(self, hosts: list[tuple[str, str]], logs: Path, folder: Path) -> None:
        self.hosts, self.address = hosts, f"{hosts[0][1]}:6399"
        self._logs, self._folder = logs, folder
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": os.getcwd()}
        self.environment.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=uuid.uuid4().hex * 2)
        self.environment.pop("RAY_ADDRESS", None)

    def command(self, host: int, *words: str) -> list[str]:
        """A command that runs in the namespace of a host."""
        return ["ip", "netns", "exec", self.hosts[host][0], *words]

    def start(self, *hosts: int, n_devices: int = 1) -> None:
        """Start the nodes of hosts, and wait until they run."""
        for host in hosts:
            where = (
                ["--head", "--port=6399", "--include-dashboard=false"] if host == 0 else [f"--address={self.address}"]
            )
            resources = json.dumps({"minialpa_cpu_device": n_devices} if n_devices else {})
            start = [sys.executable, "-m", "ray.scripts.scripts", "start", *where,
                     f"--node-ip-address={self.hosts[host][1]}", f"--temp-dir={self._folder}", "--num-cpus=1",
                     "--object-store-memory=80000000", f"--resources={resources}", "--block"]  # fmt: skip
            with (self._logs / f"node{host}").open("w") as log:
                self._nodes[host] = subprocess.Popen(
                    self.command(host, *start), env=self.environment, stdout=log, stderr=subprocess.STDOUT
                )
            # One after the other: nodes that start at once in one folder may miss the head.
            _wait_for(self._logs / f"node{host}", self._nodes[host])

    def cut(self, *hosts: int) -> None:
        """Cut the links of hosts, whose processes go on."""
        self._set_links(hosts, "down")

    def heal(self, *hosts: int) -> None:
        """Undo `cut`."""
        self._set_links(hosts, "up")

    def _set_links(self, hosts: tuple[int, ...], state: str) -> None:
        hub = self.hosts[-1][0]
        for host in hosts:
            subprocess.run(["ip", "-n", hub, "link", "set", f"p{host}", state], check=True)

    def end(self) -> None:
        for node in reversed(self._nodes.values()):
            node.terminate()
        for host in list(self._nodes):
            self._nodes.pop(host).wait(30)


@contextmanager
def networked_cluster(n_hosts: int, logs: Path, n_devices_of_head: int = 1) -> Iterator[NetworkedCluster]:
    """A Ray cluster of so many hosts with one virtual device each, ended after the block."""
    # A separate folder, so that no other Ray cluster of this machine is found. Its path must be short.
    folder = Path("/tmp") / f"m{uuid.uuid4().hex[:6]}"
    with namespaces(n_hosts) as hosts:
        cluster = NetworkedCluster(hosts, logs, folder)
        try:
            cluster.start(0, n_devices=n_devices_of_head)
            cluster.start(*range(1, n_hosts))
            yield cluster
        finally:
            cluster.end()
            shutil.rmtree(folder, ignore_errors=True)


def _wait_for(log: Path, node: subprocess.Popen[bytes]) -> None:
    """Wait until a node reports its start."""
    for _ in range(300):
        if "Ray runtime started" in log.read_text():
            return
        assert node.poll() is None, log.read_text()
        try:
            node.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(log.read_text())
