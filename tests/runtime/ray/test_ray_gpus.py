"""Clusters whose nodes declare GPUs to Ray: the planned devices, and the errors without GPUs."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from minialpa import session
from minialpa.cluster import gpu_preset


@pytest.mark.parametrize(
    "kind, preset",
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("A100-40G", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("V100", "v100-p3.16xlarge"),
    ],
)
def test_kinds_of_gpus_are_known_by_the_names_of_jax_and_ray(kind: str, preset: str) -> None:
    assert gpu_preset(kind) == preset


@pytest.mark.parametrize("kind", ["NVIDIA GH200 480GB", "unknown"])
def test_other_gpus_are_planned_for_with_a_warning(kind: str) -> None:
    with pytest.warns(UserWarning, match=f"no rates for the GPU '{kind}'"):
        assert gpu_preset(kind) == "v100-p3.16xlarge"


SCRIPT = """
import jax, pytest, ray
from ray.cluster_utils import Cluster
import minialpa

node = {"num_cpus": 1, "num_gpus": 2, "object_store_memory": 80_000_000}
kinds = ["A100-40G", "H100"]
cluster = Cluster()
for kind in kinds:
    cluster.add_node(**node, resources={f"accelerator_type:{kind}": 1})
try:
    with pytest.raises(minialpa.MinialpaError, match="a number such as 0.8; got 'most'"):
        minialpa.init(cluster="ray", address=cluster.address, worker_env={"XLA_PYTHON_CLIENT_MEM_FRACTION": "most"})
    minialpa.init(
        cluster="ray", address=cluster.address, worker_env={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.8"}
    )
    spec = minialpa.session.current_session().cluster
    assert (spec.num_hosts, spec.devices_per_host) == (2, 2)
    devices = sorted((spec.device_of(host) for host in range(2)), key=lambda device: device.name)
    assert [device.name for device in devices] == ["a100-40gb", "h100"]
    assert [device.memory_bytes for device in devices] == [0.8 * 40e9, 0.8 * 80e9]  # what jax takes
    # The caller leaves the GPUs to the workers.
    assert jax.devices()[0].platform == "cpu" and jax.config.jax_platforms == "cpu"
    step = minialpa.parallelize(lambda x: x + 1.0, method=minialpa.ShardParallel(), batch_argnums=())
    with pytest.raises(minialpa.WorkerError, match="Ray has GPUs on host .* jax cannot use them") as caught:
        step(jax.numpy.ones((8, 8)))
    assert caught.value.instruction == "the call of `join`" and "in join" in caught.value.remote_traceback
    minialpa.shutdown()
finally:
    ray.shutdown()
    cluster.shutdown()
"""


def test_a_caller_whose_jax_has_a_gpu_already_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(jax_platforms=None)
    config.update = functools.partial(setattr, config)
    monkeypatch.setattr(session, "jax", SimpleNamespace(config=config, default_backend=lambda: "gpu"))
    with pytest.warns(UserWarning, match="before anything else of jax"):
        session._leave_gpus_to_workers()
    assert config.jax_platforms is None


@pytest.mark.slow  # test_cli.py has a relative: a check of transports where jax sees no GPU
@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_hosts_that_have_no_gpu_after_all_are_named() -> None:
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
