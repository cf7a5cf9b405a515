"""Meshes of the user change no result. Programs for them, and host memory, are refused by name.

Results never move to devices silently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.compute_on import compute_on
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import minialpa
from minialpa import DataParallel, PipeshardParallel, ShardParallel, TraceError
from minialpa.testing import assert_allclose

W, X = jnp.eye(8), jnp.arange(128.0).reshape(16, 8) / 100

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device

pytestmark = pytest.mark.usefixtures("fresh_session")


def mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(kind,))


def descend(w: jax.Array, loss: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
    value, grad = minialpa.value_and_grad(loss)(w)
    return w - 0.1 * grad, value


def plain(w: jax.Array, x: jax.Array) -> Any:
    return descend(w, lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))


def under_abstract_mesh(w: jax.Array, x: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        with jax.sharding.use_abstract_mesh(mesh().abstract_mesh):
            return jnp.mean(jnp.tanh(x @ w) ** 2)

    return descend(w, loss)


def with_loops(w: jax.Array, x: jax.Array) -> Any:
    """A scan, branches and a loop, in each of which an array is made like one that a constraint has put on a mesh."""
    x = jax.lax.with_sharding_constraint(x, P("data"))

    def layer(h: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(h @ w) + jnp.full_like(h, 0.5), None

    def loss(w: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(jax.checkpoint(layer), x, None, length=2)
        return jnp.mean(jax.nn.relu(h @ w) ** 2)

    new, value = descend(w, loss)
    grad = jax.lax.with_sharding_constraint(w - new, NamedSharding(mesh(), P()))
    grad = jax.lax.cond(value > 0, lambda: grad, lambda: jnp.zeros_like(grad))
    return jax.lax.fori_loop(0, 2, lambda _, w: w - grad + jnp.zeros_like(w), w), value


Around = Callable[[], AbstractContextManager[Any]]


@pytest.mark.parametrize(
    ("step", "around"),
    [
        (under_abstract_mesh, nullcontext),
        (with_loops, lambda: jax.set_mesh(mesh())),
    ],
)
def test_meshes_of_the_user_change_no_result(step: Callable[..., Any], around: Around) -> None:
    parallel = minialpa.parallelize(step, method=ShardParallel(), donate_argnums=(), batch_argnums=(1,))
    with jax.numpy_dtype_promotion("standard"), around():
        for _ in range(2):
            assert_allclose(parallel(W, X), jax.jit(step)(W, X), rtol=1e-5, atol=1e-6)


def test_a_pipeline_is_made_under_a_mesh_with_arrays_that_were_made_there() -> None:
    method = PipeshardParallel(num_micro_batches=2, stage_option="uniform")
    with jax.set_mesh(mesh()):
        scale, w = jnp.full((8, 8), 2.0), jnp.eye(8)
        x = jax.device_put(X, P("data"))

        def step(w: jax.Array, x: jax.Array) -> Any:
            return descend(w, lambda w: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ scale) ** 2))

        found = minialpa.parallelize(step, method=method, donate_argnums=())(w, x)
        assert_allclose(found, jax.jit(step)(w, x), rtol=1e-5, atol=1e-6)
    assert_allclose(minialpa.parallelize(step, method=method, donate_argnums=())(w, x), found)


# ---- what is refused ------------------------------------------------------------------------------------------------


def summed(x: jax.Array) -> jax.Array:
    return jax.lax.psum(jnp.sum(x), "data")


def explicit(w: jax.Array, x: jax.Array) -> Any:
    with jax.sharding.use_abstract_mesh(mesh(AxisType.Explicit).abstract_mesh):
        return plain(w, x)


def with_ref(w: jax.Array, x: jax.Array) -> Any:
    total = jax.new_ref(jnp.zeros(()))
    total[...] = jnp.mean(x @ w)
    return total[...]


COUNT = jax.new_ref(jnp.zeros(()))


def there_and_back(w: jax.Array) -> jax.Array:
    return jax.device_put(jax.device_put(w, HOST), DEVICE)


def computed_on_host(w: jax.Array, x: jax.Array) -> Any:
    with compute_on("device_host"):
        return w * 2


def constrained(w: jax.Array, x: jax.Array) -> Any:
    one = Mesh(jax.devices()[:1], ("x",))
    return jax.lax.with_sharding_constraint(w, NamedSharding(one, P(), memory_kind="pinned_host"))


def offloading(w: jax.Array, x: jax.Array) -> Any:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["kept"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.sin(checkpoint_name(jnp.sin(x @ w), "kept")), None

    return descend(w, lambda w: jnp.mean(jax.lax.scan(layer, x @ w, None, length=2)[0]))


HOST_MEMORY = r"`\w+` at .*test_placements\.py:\d+.*(host|`compute_on`).*Remove it"


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            lambda w, x: jax.shard_map(summed, mesh=mesh(), in_specs=P("data"), out_specs=P())(x @ w),
            "`jax.shard_map`.* Write the step for one device",
        ),
        (lambda w, x: jax.pmap(jnp.tanh)(x.reshape(8, 2, 8)) @ w, "`jax.pmap`.* decides what each device computes"),
        (explicit, "is on a mesh with Explicit axes.*AxisType.Auto"),
        (with_ref, r"uses a mutable array .* at .*with_ref.*return the new value"),
        (lambda w, x: COUNT[...] + jnp.sum(x @ w), "uses a mutable array"),
        (lambda w, x: there_and_back(w), HOST_MEMORY),
        (lambda w, x: jax.lax.cond(w[0, 0] > 0, there_and_back, lambda w: w, w), HOST_MEMORY),
        (computed_on_host, HOST_MEMORY),
        (constrained, HOST_MEMORY),
        (offloading, "in host memory.*`save_only_these_names`"),
    ],
)
def test_programs_for_devices_or_memories_of_the_user_are_refused(step: Callable[..., Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        minialpa.parallelize(step, method=ShardParallel(), batch_argnums=(1,)).plan(W, X)


def test_a_mesh_with_explicit_axes_around_a_call_is_refused() -> None:
    with jax.set_mesh(mesh(AxisType.Explicit)), pytest.raises(TraceError, match="on a mesh with Explicit axes"):
        minialpa.parallelize(plain, method=ShardParallel())(W, X)


def test_arrays_in_host_memory_are_refused_also_after_others() -> None:
    step = minialpa.parallelize(plain, method=ShardParallel(jax.devices()[:1]), batch_argnums=(1,), donate_argnums=())
    w, x = np.asarray(W), np.asarray(X)
    for _ in range(3):
        step(w, x)
    pinned, unpinned = (
        SingleDeviceSharding(jax.devices()[0], memory_kind=name) for name in ("pinned_host", "unpinned_host")
    )
    for leaf in (jax.device_put(W, HOST), jax.device_put(W, unpinned)):
        with pytest.raises(TraceError, match=r"`w` is in host memory \(`(un)?pinned_host`\).*Space.Device"):
            step(leaf, x)
    with pytest.raises(TraceError, match="`x` is in host memory"):
        step.plan(W, jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=pinned))
    step(w, x)

    captured = jax.device_put(W, HOST)
    with pytest.raises(TraceError, match="reads an array in host memory"):
        minialpa.parallelize(lambda w, x: x @ w @ jax.device_put(captured, DEVICE)).plan(W, X)


def test_devices_that_a_step_names_are_left_to_the_plan() -> None:
    place = SingleDeviceSharding(jax.devices()[1])

    def step(w: jax.Array, x: jax.Array) -> Any:
        layer = lambda x, _: (jnp.tanh(jax.device_put(x, place)), None)  # noqa: E731
        new, loss = descend(w, lambda w: jnp.mean(jax.lax.scan(layer, jax.device_put(x @ w, place), None, 2)[0] ** 2))
        return jax.device_put(new, place), loss

    def same(w: jax.Array, x: jax.Array) -> Any:
        return descend(w, lambda w: jnp.mean(jnp.tanh(jnp.tanh(x @ w)) ** 2))

    found = minialpa.parallelize(step, method=DataParallel(jax.devices()[:2]), batch_argnums=(1,))(W, X)
    assert_allclose(found, jax.jit(same)(W, X), rtol=1e-5, atol=1e-6)
