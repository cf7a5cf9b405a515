"""The collectives of compiled programs are those that the parallel method stands for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import collectives
from jax.sharding import PartitionSpec as P

import minialpa
from minialpa import AutoShardingOption, DataParallel, LogicalMesh, ShardParallel, Zero2Parallel, Zero3Parallel, models
from minialpa.testing import assert_allclose

#: A mesh without a device, where only communication counts: 1 s for each collective and each byte.
UNIT = LogicalMesh((4,), alpha=(1.0,), beta=(1.0,))


def inputs(executable: Any) -> list[minialpa.PlacementSpec]:
    return jax.tree.leaves(executable.get_input_placement_specs())


def mlp_step(value_and_grad: Any) -> Any:
    """Dense layers without bias, relu between them, mean squared error, momentum."""

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            h = batch["x"]
            for w in params:
                h = jax.nn.relu(h @ w)
            return jnp.mean((h - batch["y"]) ** 2)

        loss, grads = value_and_grad(loss_fn)(state["params"])
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum}, loss

    return step


def mlp_arguments(n_layers: int, batch_size: int, hidden: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=(hidden, hidden)) / hidden**0.5, jnp.float32) for _ in range(n_layers)]
    state = {"params": params, "momentum": [jnp.zeros_like(p) for p in params]}
    batch = {name: rng.normal(size=(batch_size, hidden)).astype(np.float32) for name in ("x", "y")}
    return state, batch


def run(method: Any, n_layers: int, batch_size: int, hidden: int) -> Any:
    """Run one step, compare it with the serial one, and return the executable."""
    state, batch = mlp_arguments(n_layers, batch_size, hidden)
    step = minialpa.parallelize(mlp_step(minialpa.value_and_grad), method=method)
    expected = jax.jit(mlp_step(jax.value_and_grad))(state, batch)
    assert_allclose(step(state, batch), expected, rtol=2e-4, atol=1e-6)
    return step.get_last_executable()


def test_data_parallel_compiles_to_gradient_all_reduces_only() -> None:
    executable = run(DataParallel(devices=UNIT), 6, 32, 64)
    assert set(collectives(executable.get_hlo_text())) == {"all-reduce"}
    assert {spec.partition_specs[0] for spec in inputs(executable)[:12]} == {P()}


@pytest.mark.parametrize("name", ["gpt", "bert", "resnet"])
def test_data_parallel_models_compile_to_all_reduces_only(name: str, key: jax.Array) -> None:
    case = models.build(name, **({"n_layers": 1} if name != "resnet" else {}))
    step = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=DataParallel(devices=UNIT))
    executable = step.get_executable(case.init(key), case.make_batch(0, 16))
    assert set(collectives(executable.get_hlo_text())) == {"all-reduce"}


def test_wide_mlp_with_a_small_batch_is_column_and_row_parallel() -> None:
    """Forward: one all-reduce for each pair of layers. Backward: one for each pair but the first, which reads data."""
    executable = run(ShardParallel(devices=UNIT), 6, 8, 64)
    assert collectives(executable.get_hlo_text()) == {"all-reduce": 3 + 2}
    specs = [spec.partition_specs[0] for spec in inputs(executable) if "params" in spec.path]
    assert specs == [P(None, "x"), P("x")] * 3


def test_zero_shards_what_its_stage_says() -> None:
    for method, sharded in ((Zero2Parallel, ["momentum"]), (Zero3Parallel, ["momentum", "params"])):
        executable = run(method(devices=UNIT), 4, 32, 64)
        for spec in inputs(executable)[:8]:
            assert (spec.partition_specs[0] != P()) == any(s in spec.path for s in sharded)
        assert "all-gather" in collectives(executable.get_hlo_text())


def test_two_axes_combine_data_and_operator_parallelism() -> None:
    """Cheap inner axis, dear outer axis: activations are reduced inside, gradients across."""
    mesh = LogicalMesh((2, 2), alpha=(1.0, 1.0), beta=(1.0, 0.1))
    option = AutoShardingOption(force_batch_dim_to_mesh_dim=0)
    executable = run(ShardParallel(devices=mesh, auto_sharding_option=option), 4, 64, 32)
    batch_specs = [s.partition_specs[0] for s in inputs(executable) if s.path.startswith("batch")]
    assert all(spec[0] == "x" for spec in batch_specs)
    assert set(collectives(executable.get_hlo_text())) == {"all-reduce"}


def test_replicated_when_sharding_is_disabled() -> None:
    option = AutoShardingOption(enable_auto_sharding=False)
    executable = run(ShardParallel(devices=UNIT, auto_sharding_option=option), 2, 8, 16)
    assert not collectives(executable.get_hlo_text(), ignore_scalars=False)
