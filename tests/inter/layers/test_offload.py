"""Layers that keep values for the backward pass in host memory, on CPU devices and compiled for GPUs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from minialpa import (
    AutoLayerOption,
    AutoParallel,
    AutoShardingOption,
    AutoStageOption,
    ClusterSpec,
    PipeshardParallel,
    ShardParallel,
    UniformStageOption,
)
from minialpa.errors import InfeasibleError
from minialpa.inter.layers.choices import LayerCost, fastest_choices
from minialpa.methods import Method
from minialpa.options import Remat
from minialpa.testing import assert_allclose

N_LAYERS = 4


def step(weights: Any, x: Any) -> Any:
    def loss_of(weights: Any) -> Any:
        y = x
        for up, down in weights:
            y = y + jax.nn.gelu(y @ up) @ down
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    loss, gradients = minialpa.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradients), loss


def scanned_step(stacks: Any, x: Any) -> Any:
    def loss_of(stacks: Any) -> Any:
        y, _ = jax.lax.scan(lambda y, w: (y + jax.nn.gelu(y @ w[0]) @ w[1], None), x, stacks)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    loss, gradients = minialpa.value_and_grad(loss_of)(stacks)
    return jax.tree.map(lambda w, g: w - 0.01 * g, stacks, gradients), loss


def arguments(width: int, rows: int, dtype: Any = jnp.float32) -> tuple[Any, Any]:
    def array(seed: int, *shape: int) -> Any:
        return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) / np.sqrt(width), dtype)

    weights = [(array(i, width, 4 * width), array(i + 9, 4 * width, width)) for i in range(N_LAYERS)]
    return weights, array(99, rows, width)


def stacked(weights: Any) -> Any:
    return jax.tree.map(lambda *rows: jnp.stack(rows), *weights)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def pipeline(n_stages: int, remat: Any, limit_bytes: float | None = None) -> PipeshardParallel:
    return PipeshardParallel(
        num_micro_batches=2 * n_stages,
        layer_option=AutoLayerOption(N_LAYERS, remat=remat),
        stage_option=UniformStageOption(n_stages),
        default_auto_sharding_option=AutoShardingOption(memory_limit_bytes=limit_bytes),
    )


METHODS: dict[str, Callable[[Remat], Method]] = {
    "one program": lambda remat: ShardParallel(jax.devices()[:4], remat=remat),
    "micro-batches": lambda remat: ShardParallel(jax.devices()[:2], num_micro_batches=2, remat=remat),
    "two stages": lambda remat: replace(pipeline(2, remat), devices=jax.devices()[:2]),
    "four stages": lambda remat: replace(pipeline(4, remat), devices=jax.devices()[:4]),
}


@pytest.mark.usefixtures("fresh_session")
@pytest.mark.parametrize("remat", ["offload", "offload_inputs"])
@pytest.mark.parametrize("method", METHODS)
def test_steps_with_values_in_host_memory_equal_plain_jax(method: str, remat: Remat) -> None:
    weights, x = arguments(8, 16)
    run = minialpa.parallelize(step, method=METHODS[method](remat), donate_argnums=())
    moves = [stage.host_bytes > 0 for stage in run.plan(weights, x).stages]
    # The only layer of the first of four stages reads the batch, which stays.
    assert all(moves[1:]) and (moves[0] or (method, remat) == ("four stages", "offload_inputs"))
    for examples in (x, x.at[3].set(jnp.inf), x.at[5, 2].set(jnp.nan)):
        assert_allclose(run(weights, examples), jax.jit(step)(weights, examples), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("fresh_session")
def test_a_scan_over_layers_in_16_bits_equals_plain_jax() -> None:
    weights, x = arguments(8, 16, jnp.bfloat16)
    run = minialpa.parallelize(scanned_step, method=METHODS["one program"]("offload"), donate_argnums=())
    found, expected = run(stacked(weights), x), jax.jit(scanned_step)(stacked(weights), x)
    assert_allclose(found, expected, rtol=2e-2, atol=2e-2)


# ---- choices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(100))
def test_choices_are_the_fastest_within_the_limit(seed: int) -> None:
    """3 layers with 2 classes of values, each kept, recomputed or moved: brute force over all 9 ** 3 choices."""
    rng = np.random.default_rng(seed)
    costs = []
    for _ in range(3):
        classes = [
            [
                LayerCost(rng.integers(1, 50), 0.0),
                LayerCost(0.0, rng.integers(1, 9)),
                LayerCost(1.0, rng.integers(0, 9)),
            ]
            for _ in range(2)
        ]
        costs.append([LayerCost(a + b, s + t) for (a, s), (b, t) in itertools.product(*classes)])
    limit = float(rng.integers(0, 200))

    best = min(
        (
            sum(c.seconds for c in picks)
            for picks in itertools.product(*costs)
            if sum(c.n_bytes for c in picks) <= limit
        ),
        default=None,
    )
    found = fastest_choices(costs, limit)
    if found is None:
        assert best is None
    else:
        picks = [of_layer[k] for of_layer, k in zip(costs, found, strict=True)]
        assert sum(c.n_bytes for c in picks) <= limit
        assert sum(c.seconds for c in picks) == best


# ---- plans for GPUs --------------------------------------------------------------------------------------------------

H100 = ClusterSpec.preset("h100", devices_per_host=1)


def with_host(n_bytes: float | None) -> ClusterSpec:
    return replace(H100, device=replace(H100.device, host_bytes=n_bytes))


def planned(limit_bytes: float | None, cluster: ClusterSpec = H100, remat: Any = "auto") -> minialpa.Plan:
    width, rows = 4096, 32768
    weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((width, 4 * width), (4 * width, width)))
    large = [tuple(weight)] * 2 * N_LAYERS, jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    option = AutoShardingOption(memory_limit_bytes=limit_bytes)
    method = ShardParallel(remat=remat, auto_sharding_option=option)
    return minialpa.plan(step, large, cluster=cluster, method=method, batch_argnums=(1,))


def test_short_memory_moves_values_to_the_host_where_it_is_known() -> None:
    full, moving = planned(None, remat="full"), planned(None, remat="offload_inputs")
    assert moving.cost.peak_bytes[0] < full.cost.peak_bytes[0]

    limit = 1.1 * moving.cost.peak_bytes[0]
    chosen = planned(limit)
    assert "offload_inputs" in chosen.remat and chosen.stages[0].host_bytes > 0
    assert "offload_inputs" in chosen.summary()
    with pytest.raises(InfeasibleError, match="`full` for"):
        planned(limit, with_host(None))


def test_pipelines_keep_values_of_each_micro_batch_in_flight_in_host_memory() -> None:
    cluster = ClusterSpec.preset("h100", devices_per_host=4)
    method = pipeline(4, "offload")
    stages = minialpa.plan(step, arguments(64, 4096), cluster=cluster, method=method, batch_argnums=(1,)).stages
    # Of each layer, its wide product and, unless that is the batch, its input; the loss also reads the last product.
    wide, narrow = 512 * 256 * 4, 512 * 64 * 4
    numbers = [4 * wide, 3 * (wide + narrow), 2 * (wide + narrow), wide + 2 * narrow]
    assert [stage.host_bytes for stage in stages] == numbers


@pytest.mark.usefixtures("fresh_session")
def test_pipelines_choose_values_in_host_memory_where_nothing_else_fits() -> None:
    weights, x = arguments(64, 4096)
    limit = 1.8e6
    cluster = ClusterSpec.preset("h100", devices_per_host=4)

    def planned_on(cluster: ClusterSpec) -> minialpa.Plan:
        return minialpa.plan(step, (weights, x), cluster=cluster, method=pipeline(4, "auto", limit), batch_argnums=(1,))

    plan = planned_on(cluster)
    assert "offload_inputs" in plan.remat and len(set(plan.remat)) > 1
    assert max(plan.cost.peak_bytes) <= limit
    run = minialpa.parallelize(step, method=plan, batch_argnums=(1,))
    expected = jax.jit(step)(weights, x)
    assert_allclose(run(weights, x), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(InfeasibleError, match="Stage 1"):
        planned_on(replace(cluster, device=replace(cluster.device, host_bytes=None)))


@pytest.mark.slow  # the previous test has given stages
def test_a_search_of_stages_moves_values_where_nothing_else_fits() -> None:
    cluster = ClusterSpec.preset("h100", devices_per_host=4)
    method = AutoParallel(
        num_micro_batches=8,
        auto_sharding_option=AutoShardingOption(memory_limit_bytes=2.3e6),
        stage_option=AutoStageOption(submesh_physical_shape_space=((1, 1),)),
    )
    plan = minialpa.plan(step, arguments(64, 4096), cluster=cluster, method=method, batch_argnums=(1,))
    assert len(plan.stages) == 4 and "offload_inputs" in plan.remat
    check = plan.check(step, arguments(64, 4096), target="h100")
    assert [stage.compiled_host_bytes for stage in check.stages] == [stage.host_bytes for stage in plan.stages]


def test_more_host_bytes_than_a_host_has_are_refused() -> None:
    with pytest.raises(InfeasibleError, match="`host_bytes` of the device is 1 MB"):
        planned(None, with_host(1e6), remat="offload")


def test_cluster_files_without_host_memory_load() -> None:
    text = H100.to_json()
    assert ClusterSpec.from_json(text) == H100
    data = json.loads(text)
    del data["device"]["host_bytes"]
    assert ClusterSpec.from_json(json.dumps(data)).device.host_bytes is None
