"""Steps on meshes with Explicit axes: types have shardings inside, results come back on the user's mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, auto_axes, reshard
from jax.sharding import PartitionSpec as P

import minialpa
from minialpa import AutoLayerOption, AutoShardingOption, PipeshardParallel, ShardParallel, TraceError, Zero3Parallel
from minialpa.testing import assert_allclose
from tests.runtime.cluster.in_process_session import in_process_session

pytestmark = pytest.mark.usefixtures("fresh_session")

METHODS = {
    "none": None,
    "shard": ShardParallel(),
    "zero3": Zero3Parallel(),
    "micro": ShardParallel(num_micro_batches=2),
    "stages": PipeshardParallel(
        num_micro_batches=2,
        layer_option=AutoLayerOption(layer_num=2),
        stage_option=minialpa.UniformStageOption(num_stages=2),
    ),
}


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    made = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(made):
        yield made


def arguments(mesh: Mesh) -> Any:
    def put(key: jax.Array, shape: tuple[int, ...], spec: P) -> jax.Array:
        return jax.device_put(0.1 * jax.random.normal(key, shape), NamedSharding(mesh, spec))

    keys = jax.random.split(jax.random.key(0), 3)
    params = {"a": put(keys[0], (16, 64), P(None, "model")), "b": put(keys[1], (64, 16), P("model"))}
    return params, put(keys[2], (32, 16), P("data"))


def train_step(params: Any, x: Any) -> Any:
    """In the author's words: shardings of types are read, products and arrays have shardings."""
    assert jax.typeof(x).sharding.spec == P("data", None)

    def layer(h: Any, w: Any) -> Any:
        return reshard(jnp.tanh(h @ w), P("data", None)), None

    def loss(params: Any) -> Any:
        hidden = jnp.tanh(x @ params["a"])
        y = jnp.dot(hidden, params["b"], out_sharding=P("data"))
        y = y + jnp.zeros((32, 16), out_sharding=P("data"))
        y, _ = jax.lax.scan(layer, y, jnp.broadcast_to(jnp.eye(16), (2, 16, 16)))
        return jnp.mean(auto_axes(lambda y: jnp.sort(y, axis=0) ** 2)(y, out_sharding=P("data")))

    value, grads = minialpa.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * reshard(g, jax.typeof(p).sharding.spec), params, grads), value


@pytest.mark.filterwarnings("ignore:Each call moves its results:UserWarning")
@pytest.mark.parametrize("method", METHODS)
def test_a_step_on_explicit_axes_trains_as_under_jit(mesh: Mesh, method: str) -> None:
    params, x = arguments(mesh)
    parallel = minialpa.parallelize(train_step, method=METHODS[method])
    expected, actual = params, jax.tree.map(jnp.copy, params)
    for _ in range(3):
        expected, loss = jax.jit(train_step)(expected, x)
        actual, found = parallel(actual, x)
    assert_allclose((actual, found), (expected, loss), rtol=1e-5, atol=1e-6)
    assert len(parallel._executables) == 1

    # The next lines of the script read shardings, and compute with the results and other arrays on the mesh.
    assert [leaf.sharding for leaf in jax.tree.leaves(actual)] == [leaf.sharding for leaf in jax.tree.leaves(expected)]
    assert jax.typeof(actual["a"]) == jax.typeof(expected["a"]) and jax.typeof(found) == jax.typeof(loss)
    assert_allclose(jnp.sum(x @ actual["a"]) + found, jnp.sum(x @ expected["a"]) + loss, rtol=1e-4)


def test_types_of_arguments_are_the_borders_of_the_plan_so_that_no_array_moves(mesh: Mesh) -> None:
    params, x = arguments(mesh)
    parallel = minialpa.parallelize(train_step, method=ShardParallel())
    new, _ = parallel(params, x)
    after, _ = parallel(new, x)
    # The second call took over the memory of the first one's results.
    assert new["a"].is_deleted() and not after["a"].is_deleted()
    placed = {
        value.path: value.partition_specs for value in parallel.get_last_executable().get_parallel_plan().input_specs
    }
    assert placed == {"params['a']": (P(None, "y"),), "params['b']": (P("y"),), "x": (P("x"),)}


def test_shardings_inside_are_pins_if_asked_for(mesh: Mesh) -> None:
    def step(x: Any) -> Any:
        return reshard(2 * x, P(None, ("data", "model"))) + 1

    option = AutoShardingOption(shardings="pin")
    parallel = minialpa.parallelize(step, method=ShardParallel(auto_sharding_option=option), batch_argnums=())
    x = jax.device_put(jnp.ones((16, 16)), P("data", "model"))
    plan = parallel.plan(x)
    assert any(str(spec) == "R,S01" for equation in plan.stages[0].equation_specs for spec in equation.results)
    assert parallel(x).sharding == jax.jit(step)(x).sharding


def test_results_of_a_pipeline_under_a_mesh_come_back_with_a_warning(mesh: Mesh) -> None:
    params, x = arguments(mesh)
    with pytest.warns(UserWarning, match="moves its results from the devices of 2 stages to the user's mesh of 8"):
        minialpa.parallelize(train_step, method=METHODS["stages"])(params, x)


def test_an_unreduced_result_is_refused(mesh: Mesh) -> None:
    x = jax.device_put(np.ones((8, 8), np.float32), P("data", "model"))
    y = jax.device_put(np.ones((8, 8), np.float32), P("model"))
    with pytest.raises(TraceError, match="`result` is unreduced over axes of the mesh"):
        minialpa.parallelize(lambda x, y: jnp.dot(x, y, out_sharding=P("data", unreduced={"model"}))).plan(x, y)


def test_other_shardings_of_types_are_another_program(mesh: Mesh) -> None:
    seen = []

    def step(x: Any) -> Any:
        seen.append(jax.typeof(x).sharding.spec)
        return 2 * x

    parallel = minialpa.parallelize(step, method=ShardParallel(), batch_argnums=(), donate_argnums=())
    for spec in (P("data"), P("model"), P("data", None)):
        x = jax.device_put(jnp.ones((8, 8)), spec)
        assert parallel(x).sharding == jax.jit(lambda x: 2 * x)(x).sharding
    assert seen == [P("data", None), P("model", None)]


def test_a_ref_has_the_type_of_its_array(mesh: Mesh) -> None:
    def step(x: Any, losses: Any, n: Any) -> Any:
        losses[n] = jnp.sum(x)
        return reshard(2 * x, jax.typeof(x).sharding)

    x = jax.device_put(jnp.ones((8, 8)), P("data"))
    found = []
    for parallel in (jax.jit(step), minialpa.parallelize(step, method=ShardParallel(), donate_argnums=())):
        losses = jax.new_ref(jnp.zeros(4))
        parallel(parallel(x, losses, jnp.int32(0)), losses, jnp.int32(1))
        found.append((losses[...], jax.typeof(losses[...])))
    assert found[0][1] == found[1][1]
    assert_allclose(found[1][0], found[0][0])


def test_on_workers_types_and_refs_stay_on_the_users_mesh(mesh: Mesh) -> None:
    def step(params: Any, count: Any, x: Any) -> Any:
        count[...] += 1
        return train_step(params, x)

    params, x = arguments(mesh)
    expected, loss = jax.jit(train_step)(jax.jit(train_step)(params, x)[0], x)
    count = jax.new_ref(jax.device_put(0, NamedSharding(mesh, P())))
    with in_process_session(1, 4):
        parallel = minialpa.parallelize(step, method=ShardParallel(), donate_argnums=())
        found, _ = parallel(params, count, x)
        found, value = parallel(found, count, x)  # the types of arrays on workers have shardings, too
        assert len(parallel._executables) == 1
        assert count[...] == 2
        assert_allclose((found, value), (expected, loss), rtol=1e-5, atol=1e-6)
