"""Compiled programs have the collectives of their parallel method."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import minialpa
from minialpa import AutoShardingOption, LogicalMesh, ShardParallel, Zero2Parallel, Zero3Parallel
from minialpa.testing import assert_allclose
from tests.compiled_text import collectives
from tests.helpers import descent_step

#: A mesh without a device, where only communication counts: 1 s for each collective and each byte.
UNIT = LogicalMesh((4,), alpha=(1.0,), beta=(1.0,))


# The six-layer perceptron with biases that Alpa's tests plan on four devices, and the objectives that they expect.
# Bytes are for float32; 1 s for each collective and each byte.


def six_layers(
    batch_size: int, hidden: int, mesh: LogicalMesh, method: Any = None, **fields: Any
) -> tuple[minialpa.Plan, Counter[str]]:
    """Plan and collectives of one Adam step."""
    params = [{"b": jnp.zeros(hidden), "w": jnp.eye(hidden)} for _ in range(6)]
    optimizer = optax.adam(1e-2)
    batch = {name: np.ones((batch_size, hidden), np.float32) for name in ("x", "y")}

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            h = batch["x"]
            for layer in params:
                h = jax.nn.relu(h @ layer["w"] + layer["b"][None])
            return jnp.mean((h - batch["y"]) ** 2)

        grads = jax.grad(loss_fn)(state["params"])
        with jax.numpy_dtype_promotion("standard"):  # optax raises float32 to an int32 power
            updates, opt_state = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt_state}

    method = method or ShardParallel(devices=mesh, auto_sharding_option=AutoShardingOption(**fields))
    executable = minialpa.parallelize(step, method=method).get_executable(
        {"params": params, "opt": optimizer.init(params)}, batch
    )
    return executable.get_parallel_plan(), collectives(executable.get_hlo_text())


def all_reduce(n_bytes: float, n: int, beta: float = 1.0) -> float:
    return 1 + beta * 2 * (n - 1) / n * n_bytes


def weight_specs(plan: minialpa.Plan, path: str) -> list[str]:
    return [str(v.specs[0]) for v in plan.inputs if path in v.path and v.path.endswith("['w']")]


def test_six_layers_with_a_large_batch_are_data_parallel() -> None:
    plan, found = six_layers(256, 32, LogicalMesh((4, 1), (1, 1), (1, 1)))
    assert found == {"all-reduce": 1}  # the compiler combines them
    assert weight_specs(plan, "params") == ["R,R"] * 6
    assert plan.cost.total_s == pytest.approx(all_reduce(6 * (4 * 32 * 32 + 4 * 32), 4))


def test_six_wide_layers_are_operator_parallel_unless_data_parallelism_is_forced() -> None:
    """Forward: one all-reduce for each pair of layers. Backward: one for each pair but the first, which reads data."""
    mesh = LogicalMesh((1, 4), (1, 1), (1, 1))
    plan, found = six_layers(32, 256, mesh)
    assert found == {"all-reduce": 3 + 2}
    assert weight_specs(plan, "params") == ["R,S1", "S1,R"] * 3
    assert plan.cost.total_s == pytest.approx(5 * all_reduce(4 * 32 * 256, 4))

    forced, found = six_layers(32, 256, mesh, force_data_parallel=True)
    assert found == {"all-reduce": 1}
    assert weight_specs(forced, "params") == ["R,R"] * 6


def test_six_layers_on_two_axes() -> None:
    """Examples on the slow axis, operators on the fast one: no more expensive than column and row parallel layers.

    Freely planned, both axes split the examples, as gradients are summed on the fast axis first.
    """
    mesh = LogicalMesh((2, 2), (1, 1), (1, 0.1))
    gradients = 6 * (all_reduce(4 * 32 * 16, 2) + all_reduce(4 * 32, 2))
    plan, _ = six_layers(256, 32, mesh, force_batch_dim_to_mesh_dim=0)
    assert plan.cost.total_s <= gradients + 5 * all_reduce(4 * 128 * 32, 2, 0.1)
    assert all(str(v.specs[0]).startswith("S0,") for v in plan.inputs if "batch" in v.path)
    assert {axis for spec in weight_specs(plan, "params") for axis in spec if axis in "01"} == {"1"}
    free, found = six_layers(256, 32, mesh)
    assert found == {"all-reduce": 1}
    assert free.cost.total_s < plan.cost.total_s


def test_six_layers_that_prefer_to_reduce_scatter() -> None:
    plan, found = six_layers(256, 32, LogicalMesh((4, 1), (1, 1), (1, 1)), prefer_reduce_scatter=True)
    assert found["reduce-scatter"] == found["all-gather"] == 12
    assert found["all-reduce"] == 0
    assert not {"R,R"} & set(weight_specs(plan, "opt"))


def test_zero_shards_what_its_stage_says() -> None:
    for method, sharded in ((Zero2Parallel, ["opt"]), (Zero3Parallel, ["opt", "params"])):
        plan, found = six_layers(32, 64, UNIT, method(devices=UNIT))
        assert "all-gather" in found
        for path in ("opt", "params"):
            assert ("R,R" in weight_specs(plan, path)) == (path not in sharded)


def test_replicated_when_sharding_is_disabled() -> None:
    _, found = six_layers(8, 16, UNIT, enable_auto_sharding=False)
    assert not found


def test_layers_computed_again_communicate_no_more() -> None:
    """`jax.checkpoint` puts all operands of a layer after one barrier, which does not decide their shardings."""

    def loss_of(layer: Any) -> Any:
        def loss_fn(params: Any, h: jax.Array) -> jax.Array:
            for w in params:
                h = layer(h, w)
            return jnp.mean(h**2)

        return loss_fn

    def layer(h: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(h @ w) * jnp.sin(h)

    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=(32, 32)) / 6, jnp.float32) for _ in range(4)]
    x = rng.normal(size=(64, 32)).astype(np.float32)
    expected = jax.jit(descent_step(loss_of(layer), jax.value_and_grad))(params, x)
    counts = []
    for one in (layer, jax.checkpoint(layer)):
        step = minialpa.parallelize(
            descent_step(loss_of(one), minialpa.value_and_grad), method=ShardParallel(devices=UNIT), donate_argnums=()
        )
        assert_allclose(step(params, x), expected, rtol=2e-4, atol=1e-6)
        counts.append(collectives(step.get_last_executable().get_hlo_text()))
    assert counts[0] == counts[1]
