"""Gradients are summed over devices once per step, for any number of micro-batches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import minialpa
from minialpa import (
    AutoShardingOption,
    LogicalMesh,
    PipeshardParallel,
    ShardParallel,
    UniformStageOption,
    Zero2Parallel,
    models,
)
from minialpa.testing import assert_allclose
from tests.compiled_text import collectives

MESH = LogicalMesh((4,))


def program_collectives(executable: Any) -> dict[str, Any]:
    """Collectives of arrays in each program of an executable, by the program's name."""
    texts = zip(executable.function_names, executable.get_hlo_text(), strict=True)
    return {name: collectives([text]) for name, text in texts}


def test_the_loop_sums_no_gradient(key: jax.Array) -> None:
    case = models.build("mlp")
    state, batch = case.init(key), case.make_batch(0, case.batch_size)
    parallel = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=Zero2Parallel(MESH, 4))
    expected = jax.jit(case.train_step(jax.value_and_grad))(case.init(key), batch)
    assert_allclose(parallel(state, batch), expected, rtol=2e-4, atol=1e-5)
    found = program_collectives(parallel.get_last_executable())
    assert not found["step0"]
    assert set(found["update0"]) == {"reduce-scatter", "all-gather"}


def test_backward_stages_sum_no_gradient(key: jax.Array) -> None:
    case = models.build("mlp")
    method = PipeshardParallel(
        num_micro_batches=4,
        layer_option=minialpa.AutoLayerOption(layer_num=2),
        stage_option=UniformStageOption(num_stages=2),
        default_auto_sharding_option=AutoShardingOption(force_data_parallel=True),
    )
    parallel = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=method)
    found = program_collectives(parallel.get_executable(case.init(key), case.make_batch(0, case.batch_size)))
    assert not any(found[name] for name in found if name.startswith(("forward", "backward", "accumulate")))
    assert all(found[name] for name in ("update0", "update1"))


def test_input_gradients_are_added_before_they_are_reduced() -> None:
    """Query, key and value are column-parallel: their three input gradients are one sum."""

    def loss_fn(weights: Any, x: jax.Array) -> jax.Array:
        h = x @ weights["first"]
        q, k, v = (h @ weights[name] for name in "qkv")
        return jnp.mean((jnp.tanh(q) * jnp.tanh(k) * v) ** 2)

    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(64, 256)).astype(np.float32) * 0.1 for name in "qkv"}
    weights["first"] = rng.normal(size=(64, 64)).astype(np.float32) * 0.1
    x = rng.normal(size=(4, 64)).astype(np.float32)
    mesh = LogicalMesh((4,), alpha=(1.0,), beta=(1.0,))
    parallel = minialpa.parallelize(lambda w, x: minialpa.grad(loss_fn)(w, x), method=ShardParallel(devices=mesh))
    assert_allclose(parallel(weights, x), jax.grad(loss_fn)(weights, x), rtol=1e-4, atol=1e-6)
    executable = parallel.get_last_executable()
    assert sum(collectives(executable.get_hlo_text()).values()) == 2  # for the first product, and for the gradients
    h_bytes = 4 * 4 * 64
    assert executable.get_parallel_plan().cost.total_s <= 2 * mesh.all_reduce_s(h_bytes, (0,))
