"""Meshes of the user with Auto axes change no result. Work on the host is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compute_on import compute_on
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import minialpa
from minialpa import DataParallel, PipeshardParallel, ShardParallel, TraceError
from minialpa.testing import assert_allclose

W, X = jnp.eye(8), jnp.arange(128.0).reshape(16, 8) / 100

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device

pytestmark = pytest.mark.usefixtures("fresh_session")


def mesh() -> Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


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

        with pytest.warns(UserWarning, match="moves its results from the devices of 2 stages"):
            found = minialpa.parallelize(step, method=method, donate_argnums=())(w, x)
        assert_allclose(found, jax.jit(step)(w, x), rtol=1e-5, atol=1e-6)
    # Outside the mesh, on arrays without one, results stay on the devices of the stages.
    w, x = np.asarray(w), np.asarray(x)
    assert_allclose(minialpa.parallelize(step, method=method, donate_argnums=())(w, x), found)


# ---- what is refused ------------------------------------------------------------------------------------------------


def computed_on_host(w: jax.Array, x: jax.Array) -> Any:
    with compute_on("device_host"):
        return w * 2


def constrained(w: jax.Array, x: jax.Array) -> Any:
    one = Mesh(jax.devices()[:1], ("x",))
    return jax.lax.with_sharding_constraint(w, NamedSharding(one, P(), memory_kind="pinned_host"))


def unpinned(w: jax.Array, x: jax.Array) -> Any:
    place = SingleDeviceSharding(jax.devices()[0], memory_kind="unpinned_host")
    return jax.lax.cond(w[0, 0] > 0, lambda: jax.device_put(w, place), lambda: w)


def jitted_inside(w: jax.Array, x: jax.Array) -> Any:
    place = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return jax.jit(lambda w: w * 2, out_shardings=place)(w)


LINE = r"`\w+` at .*test_placements\.py:\d+.*"


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (computed_on_host, LINE + "runs on the host by `compute_on`.*Remove `compute_on`"),
        (unpinned, LINE + "the memory kind `unpinned_host`.*Use `pinned_host`"),
        (constrained, LINE + "the memory kind `pinned_host`.*`jax.device_put`"),
        (jitted_inside, LINE + "the memory kind `pinned_host`.*`jax.device_put`"),
    ],
)
def test_memories_that_plans_lack_are_refused(step: Callable[..., Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        minialpa.parallelize(step, method=ShardParallel(), batch_argnums=(1,)).plan(W, X)


def test_arrays_in_other_memories_are_refused_also_after_others() -> None:
    step = minialpa.parallelize(plain, method=ShardParallel(jax.devices()[:1]), batch_argnums=(1,), donate_argnums=())
    w, x = np.asarray(W), np.asarray(X)
    for _ in range(3):
        step(w, x)
    unpinned = SingleDeviceSharding(jax.devices()[0], memory_kind="unpinned_host")
    with pytest.raises(TraceError, match=r"`w` is in host memory of the kind `unpinned_host`.*Use `pinned_host`"):
        step(jax.device_put(W, unpinned), x)
    with pytest.raises(ValueError, match="memory_space of all inputs"):  # by jax: the step lacks a move
        step(jax.device_put(W, HOST), x)
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
