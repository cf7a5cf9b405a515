"""Shardings that the user fixes hold in the plan and in the arrays, and change no number."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import minialpa
from minialpa import AutoShardingOption, LogicalMesh, ShardingError, ShardParallel
from minialpa.testing import assert_allclose

MESH = LogicalMesh((2, 4))
PIN = AutoShardingOption(shardings="pin")
USER_MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def params() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 2)
    return {"v": jax.random.normal(keys[0], (32, 16)) * 0.1, "w": jax.random.normal(keys[1], (16, 32)) * 0.1}


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(16, 16)).astype(np.float32)}


def make_step(value_and_grad: Any, constrain: Any = lambda h: h) -> Any:
    def step(p: Any, b: Any) -> Any:
        def loss_fn(p: Any) -> jax.Array:
            hidden = constrain(jnp.tanh(b["x"] @ p["w"]))
            return jnp.mean((hidden @ p["v"] - b["x"]) ** 2)

        loss, grads = value_and_grad(loss_fn)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), loss

    return step


def run(method: Any, constrain: Any = lambda h: h) -> tuple[Any, Any]:
    """Results and executable of one step, after comparing it with the serial one."""
    parallel = minialpa.parallelize(make_step(minialpa.value_and_grad, constrain), method=method)
    expected = jax.jit(make_step(jax.value_and_grad))(params(), batch())
    actual = parallel(params(), batch())
    assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    return actual, parallel.get_last_executable()


def test_specs_of_arguments_and_results_are_fixed_by_path() -> None:
    fixed = {"p['w']": P(None, "y"), "*['v']": P(("x", "y")), "b*": P("x"), "result[0]['w']": P("x")}
    option = AutoShardingOption(fixed_specs=fixed)
    method = ShardParallel(devices=MESH, num_micro_batches=2, auto_sharding_option=option)
    (new, _), executable = run(method)
    placed = {s.path: s.partition_specs[0] for s in jax.tree.leaves(executable.get_input_placement_specs())}
    assert placed == {"p['v']": P(("x", "y")), "p['w']": P(None, "y"), "b['x']": P("x")}
    assert new["w"].sharding.spec == P("x")
    assert new["v"].sharding.spec == P(("x", "y"))


def test_axes_have_the_names_that_the_options_give_them() -> None:
    """Also for functions that follow, and although other axes of a plan have these names."""
    option = dataclasses.replace(PIN, fixed_specs={"p['w']": P(None, "x"), "b*": P("y")}, axis_names=("y", "x"))
    train = minialpa.parallelize(
        make_step(minialpa.value_and_grad, lambda h: jax.lax.with_sharding_constraint(h, P("y", "x"))),
        method=ShardParallel(devices=MESH, auto_sharding_option=option),
    )
    assert_allclose(
        train(params(), batch()), jax.jit(make_step(jax.value_and_grad))(params(), batch()), rtol=1e-5, atol=1e-6
    )
    plan = train.get_last_executable().get_parallel_plan()
    placed = {s.path: s.partition_specs for s in plan.input_specs}
    assert placed["p['w']"] == (P(None, "y"),) and placed["b['x']"] == (P("x"),)
    kept = [e.results[0] for e in plan.stages[0].equation_specs if e.operands[:1] == e.made == e.results]
    assert "S0,S1" in map(str, kept)

    def evaluate(p: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(p["w"] @ p["v"], P("y"))

    follower = minialpa.parallelize(evaluate, method=minialpa.FollowParallel(train), batch_argnums=())
    assert_allclose(follower(params()), params()["w"] @ params()["v"], rtol=1e-5, atol=1e-6)
    followed = follower.get_last_executable().get_parallel_plan().input_specs
    assert {s.path: s.partition_specs for s in followed} == {k: v for k, v in placed.items() if k[0] == "p"}


@pytest.mark.parametrize(
    ("partition", "wanted"),
    [
        (P(None, ("data", "model")), ["R,S01"]),
        (P(P.UNCONSTRAINED, "model"), ["R,S1", "S0,S1"]),
    ],
)
def test_pinned_constraints_in_the_model_hold(partition: P, wanted: list[str]) -> None:
    sharding = NamedSharding(USER_MESH, partition)
    method = ShardParallel(devices=MESH, auto_sharding_option=PIN)
    _, executable = run(method, lambda h: jax.lax.with_sharding_constraint(h, sharding))
    stage = executable.get_parallel_plan().stages[0]
    kept = [e.results[0] for e in stage.equation_specs if e.operands[:1] == e.made == e.results]
    assert any(str(spec) in wanted for spec in kept)


def test_a_constraint_inside_a_loop_is_ignored_and_harmless() -> None:
    sharding = NamedSharding(USER_MESH, P("data"))

    def constrain(h: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (jax.lax.with_sharding_constraint(c, sharding), None), h, None, length=2)[0]

    run(ShardParallel(devices=MESH), constrain)


def test_a_pinned_constraint_inside_a_loop_of_products_holds_in_every_micro_batch() -> None:
    sharding = NamedSharding(USER_MESH, P("model", None))

    def constrain(h: jax.Array) -> jax.Array:
        def layer(h: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(jax.lax.with_sharding_constraint(h, sharding) @ weight), None

        return jax.lax.scan(layer, h, jnp.stack([jnp.eye(32)] * 2))[0]

    def unconstrained(h: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(h))

    method = ShardParallel(devices=MESH, num_micro_batches=2, auto_sharding_option=PIN)
    parallel = minialpa.parallelize(make_step(minialpa.value_and_grad, constrain), method=method)
    expected = jax.jit(make_step(jax.value_and_grad, unconstrained))(params(), batch())
    assert_allclose(parallel(params(), batch()), expected, rtol=1e-5, atol=1e-6)

    stage = parallel.get_last_executable().get_parallel_plan().stages[0]
    inside = [e.results[0] for loop in stage.equation_specs for e in loop.body if e.operands == e.made == e.results]
    assert "S1,R" in map(str, inside)


@pytest.mark.parametrize("partition", [P("model", None), P(None, ("data", "model")), P(("data", "model")), P()])
def test_a_changed_hint_would_add_at_most_its_price_to_the_plan(partition: P) -> None:
    """Inside a loop, over micro-batches."""
    sharding = NamedSharding(USER_MESH, partition)

    def constrain(h: jax.Array) -> jax.Array:
        def layer(h: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(jax.lax.with_sharding_constraint(h, sharding) @ weight), None

        return jax.lax.scan(layer, h, jnp.zeros((4, 1024, 1024)))[0]

    step = make_step(minialpa.value_and_grad, constrain)
    weights = {"v": jax.ShapeDtypeStruct((1024, 512), jnp.float32), "w": jax.ShapeDtypeStruct((512, 1024), jnp.float32)}
    plans = {}
    for shardings in ("ignore", "hint", "pin"):
        option = AutoShardingOption(shardings=shardings)
        cluster = minialpa.ClusterSpec.preset("h100", num_hosts=2, devices_per_host=4)
        method = ShardParallel(num_micro_batches=2, auto_sharding_option=option, logical_shape=(2, 4))
        rows = {"x": jax.ShapeDtypeStruct((4096, 512), jnp.float32)}
        plans[shardings] = minialpa.plan(step, (weights, rows), cluster=cluster, method=method)

    added_s = sum(one.added_s for one in plans["hint"].user_shardings)
    assert plans["pin"].cost.total_s <= 1.001 * (plans["hint"].cost.total_s + added_s)
    assert plans["hint"].cost.total_s <= 1.001 * plans["ignore"].cost.total_s
    assert [one.added_s for one in plans["pin"].user_shardings] == [0.0]
    if added_s:
        assert "would add at most" in " ".join(plans["hint"].summary().split())


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"p['w']": P("z")}, r"`fixed_specs` for `p\['w'\]` has the mesh axes z, but the mesh has x, y"),
        ({"p['w']": P(None, None, "x")}, r"has 3 entries for an array of shape \(16, 33\)"),
        ({"b['x']": P(None, ("y", "x"))}, r"is not the order of the mesh. Write \('x', 'y'\)"),
        (
            {"p['v']": P("y")},
            r"splits dimension 0 of an array of shape \(33, 16\) over y, \d devices, .* not divide 33",
        ),
    ],
)
def test_specs_that_cannot_be(fixed: Any, message: str) -> None:
    odd = {"v": jnp.ones((33, 16)), "w": jnp.ones((16, 33))}
    method = ShardParallel(devices=MESH, auto_sharding_option=AutoShardingOption(fixed_specs=fixed))
    with pytest.raises(ShardingError, match=message):
        minialpa.parallelize(make_step(jax.value_and_grad), method=method).plan(odd, batch())


# ---- constraints for a mesh of the caller ----------------------------------------------------------------------------


def shapes_of(method: Any) -> list[tuple[int, ...]]:
    """Logical shapes of the stages of a step with a constraint for (4, 2) devices, after comparing its results."""
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P("data", "model"))
    _, executable = run(method, lambda h: jax.lax.with_sharding_constraint(h, sharding))
    plan = executable.get_parallel_plan()
    assert minialpa.Plan.from_json(plan.to_json()) == plan
    return [stage.logical_shape for stage in plan.stages]


def test_the_mesh_of_a_constraint_is_the_view_of_the_devices_where_the_method_has_none() -> None:
    assert shapes_of(ShardParallel()) == [(4, 2)]
    # Lengths tell the axes apart.
    assert shapes_of(ShardParallel(logical_shape=(2, 4))) == [(2, 4)]


def test_a_search_chooses_among_the_meshes_on_which_a_constraint_holds() -> None:
    """Without a warning, which would be an error here."""
    assert shapes_of(None)


def test_a_constraint_that_cannot_hold_is_a_hint_and_no_pin() -> None:
    assert shapes_of(minialpa.DataParallel()) == [(8,)]
    with pytest.raises(minialpa.InfeasibleError, match=r'\'data\': 4, \'model\': 2.* With .*shardings="hint"'):
        shapes_of(ShardParallel(logical_shape=(8,), auto_sharding_option=PIN))


@pytest.mark.parametrize("force", ["hint", "ignore"])
def test_a_hint_chooses_among_equally_fast_shardings(force: str) -> None:
    """Square arrays: rows and columns cost the same."""

    def step(x: Any, spec: P) -> Any:
        return jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, spec)) + 1

    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    option, found = AutoShardingOption(shardings=force), []
    for spec in (P("data"), P(None, "data")):
        method = ShardParallel(auto_sharding_option=option)
        parallel = minialpa.parallelize(functools.partial(step, spec=spec), method=method, batch_argnums=())
        found.append(parallel.plan(jax.ShapeDtypeStruct((64, 64), jnp.float32)).inputs[0].specs[0])
    assert (found[0] == found[1]) == (force == "ignore")


def test_shardings_of_jit_inside_the_step_are_left_out_with_a_warning() -> None:
    sharded = NamedSharding(USER_MESH, P("data"))
    double = jax.jit(lambda h: 2 * h, out_shardings=sharded)
    step = make_step(minialpa.value_and_grad, lambda h: double(h) / 2)
    with pytest.warns(UserWarning, match=r"shardings of `jax.jit` at .*test_constraints.py:\d+ .* have no effect"):
        actual = minialpa.parallelize(step, method=ShardParallel(devices=MESH))(params(), batch())
    assert_allclose(actual, jax.jit(make_step(jax.value_and_grad))(params(), batch()), rtol=1e-5, atol=1e-6)
