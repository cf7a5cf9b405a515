"""The compiler of a plan follows from its cluster; for devices of this process, the installed jax counts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import minialpa
from minialpa import ClusterSpec, Plan, ShardParallel
from minialpa.cluster import PresetName
from minialpa.inter.context import compiler_of
from minialpa.intra.memory.compiler import Compiler
from minialpa.intra.memory.xla.model import XLA_CPU, XLA_CPU_WITH_BARRIERS, XLA_GPU
from tests.helpers import descent_step


@pytest.mark.parametrize(
    ("device", "version", "expected"),
    [
        ("cpu", None, XLA_CPU),
        ("cpu", (0, 10, 2), XLA_CPU),
        ("cpu", (0, 11, 0), XLA_CPU_WITH_BARRIERS),
        ("h100", None, XLA_GPU),
        ("h100", (0, 10, 2), XLA_GPU),
    ],
)
def test_only_cpus_depend_on_the_version_of_jax(
    device: PresetName, version: tuple[int, ...] | None, expected: Compiler
) -> None:
    assert compiler_of(ClusterSpec.preset(device), version) is expected


def rematerialised(params: list[jax.Array], x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w) * jnp.sin(x)

    for w in params:
        x = jax.checkpoint(layer)(x, w)
    return jnp.sum(x**2)


def plans(monkeypatch: pytest.MonkeyPatch, devices: Any) -> list[Plan]:
    """The plans of a rematerialised step on `devices` where jax 0.10 is installed, and where 0.11 is."""
    args = ([jnp.ones((16, 16))] * 4, jnp.ones((1024, 16)))
    found = []
    for version in ((0, 10, 2), (0, 11, 0)):
        with monkeypatch.context() as patched:
            patched.setattr(jax, "__version_info__", version)
            step = minialpa.parallelize(
                descent_step(rematerialised, minialpa.value_and_grad), method=ShardParallel(devices=devices)
            )
            found.append(step.plan(*args))
    return found


def test_only_the_plan_for_devices_counts_on_the_jax_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = plans(monkeypatch, ClusterSpec.preset("cpu", devices_per_host=1))
    assert old == new
    old, new = plans(monkeypatch, jax.devices()[:1])
    assert new.cost.peak_bytes[0] < old.cost.peak_bytes[0]
