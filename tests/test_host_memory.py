"""Host memory in a step or its arguments is refused by name: results never move to devices silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.compute_on import compute_on
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import minialpa
from minialpa import DataParallel, ShardParallel, TraceError
from minialpa.testing import assert_allclose

W, X = np.eye(4, dtype=np.float32), np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def _step(change: Callable[[Any], Any] = lambda w: w, forward: Callable[[Any, Any], Any] | None = None) -> Any:
    """A training step that changes its new weights, or whose loss is of `forward(w, x)`."""

    def step(w: Any, x: Any) -> Any:
        predict = forward or (lambda w, x: jnp.tanh(x @ w))
        loss, gradient = minialpa.value_and_grad(lambda w: jnp.mean(predict(w, x) ** 2))(w)
        return change(w - 0.1 * gradient), loss

    return step


def _kind(name: str) -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0], memory_kind=name)


def _doubled_on_host(w: Any) -> Any:
    with compute_on("device_host"):
        return w * 2


def _constrained(w: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    return jax.lax.with_sharding_constraint(w, NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host"))


CHANGES = {
    "device_put": lambda w: jax.device_put(w, HOST),
    "there and back": lambda w: jax.device_put(jax.device_put(w, HOST), DEVICE),
    "unpinned_host": lambda w: jax.device_put(w, _kind("unpinned_host")),
    "with_sharding_constraint": _constrained,
    "compute_on": _doubled_on_host,
    "in a branch": lambda w: jax.lax.cond(w[0, 0] > 0, lambda w: jax.device_put(jax.device_put(w, HOST), DEVICE),
                                          lambda w: w, w),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_host_memory_in_a_step_is_refused(change: Callable[[Any], Any]) -> None:
    with pytest.raises(TraceError, match=r"`\w+` at .*test_host_memory\.py:\d+.*(host|`compute_on`).*Leave it out"):
        minialpa.parallelize(_step(change), method=ShardParallel(), batch_argnums=(1,)).plan(W, X)


def _offloaded(policy: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jnp.sin(checkpoint_name(jnp.sin(x @ w), "kept"))

    block = jax.checkpoint(layer, policy=policy)
    return lambda w, x: jax.lax.scan(lambda x, _: (block(x, w), None), x, None, length=2)[0]


_POLICIES = jax.checkpoint_policies
OFFLOADING = [
    _POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["kept"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    _POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host"),
]


@pytest.mark.parametrize("policy", OFFLOADING, ids=["names", "products"])
def test_policies_that_offload_are_refused(policy: Any) -> None:
    step = _step(forward=_offloaded(policy))
    with pytest.raises(TraceError, match=r"in host memory.*`save_only_these_names`"):
        minialpa.parallelize(step, method=ShardParallel(), batch_argnums=(1,)).plan(W, X)


def test_arguments_in_host_memory_are_refused_also_after_others() -> None:
    step = minialpa.parallelize(_step(), method=ShardParallel(jax.devices()[:1]), batch_argnums=(1,), donate_argnums=())
    for _ in range(3):
        step(W, X)
    for leaf in (jax.device_put(W, HOST), jax.device_put(W, _kind("unpinned_host"))):
        with pytest.raises(TraceError, match=r"`w` is in host memory \(`(un)?pinned_host`\).*Space.Device"):
            step(leaf, X)
    with pytest.raises(TraceError, match="`x` is in host memory"):
        step.plan(W, jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=_kind("pinned_host")))
    step(W, X)


def test_a_captured_array_in_host_memory_is_refused() -> None:
    table = jax.device_put(W, HOST)
    step = _step(lambda w: w + jax.device_put(table, DEVICE))
    with pytest.raises(TraceError, match="by closure"):
        minialpa.parallelize(step, method=ShardParallel(), batch_argnums=(1,)).plan(W, X)


def test_devices_that_a_step_names_are_left_to_the_plan() -> None:
    place = SingleDeviceSharding(jax.devices()[1])
    moved = lambda x, _: (jnp.tanh(jax.device_put(x, place)), None)  # noqa: E731
    step = _step(
        lambda w: jax.device_put(w, place), lambda w, x: jax.lax.scan(moved, jax.device_put(x @ w, place), None, 2)[0]
    )
    plain = _step(forward=lambda w, x: jnp.tanh(jnp.tanh(x @ w)))
    found = minialpa.parallelize(step, method=DataParallel(jax.devices()[:2]), batch_argnums=(1,))(W, X)
    assert_allclose(found, jax.jit(plain)(W, X), rtol=1e-5, atol=1e-6)
