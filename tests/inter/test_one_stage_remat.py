"""Rematerialisation without a pipeline: only if memory is short, as little as needed, with the same numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import minialpa
from minialpa import (
    AutoShardingOption,
    ClusterSpec,
    Plan,
    ShardParallel,
    Zero3Parallel,
)
from minialpa.errors import InfeasibleError, ShardingError
from minialpa.methods import Method
from minialpa.testing import assert_allclose
from tests import scanned_training as scanned
from tests.helpers import descent_step

#: Four GPUs. Plans for them run on the first four virtual CPUs of the tests.
H100S = ClusterSpec.preset("h100", num_hosts=1, devices_per_host=4)
#: Without known host memory, the planner moves no values to it.
GPUS = dataclasses.replace(H100S, device=dataclasses.replace(H100S.device, host_bytes=None))
CPUS = ClusterSpec.preset("cpu", num_hosts=1, devices_per_host=4)
#: A model whose activations are most of its memory.
PARAMS = [jnp.eye(16) for _ in range(8)]
BATCH = jnp.linspace(-1.0, 1.0, 4096 * 16).reshape(4096, 16)


def deep(params: Any, batch: jax.Array) -> jax.Array:
    x = batch
    for w in params:
        for _ in range(2):
            x = jnp.tanh(x @ w) * jnp.sin(x)
    return jnp.mean(x**2)


STEP = descent_step(deep, minialpa.value_and_grad)


def planned(method: Method, cluster: ClusterSpec = GPUS) -> Plan:
    return minialpa.plan(STEP, (PARAMS, BATCH), cluster=cluster, method=method)


def within(n_bytes: float | None, **fields: Any) -> ShardParallel:
    return ShardParallel(auto_sharding_option=AutoShardingOption(memory_limit_bytes=n_bytes, **fields))


DATA = {"force_data_parallel": True}


@pytest.fixture(scope="module")
def free() -> Plan:
    """All devices split the examples, and all values are kept."""
    return planned(within(None, **DATA))


def test_where_the_fastest_shardings_fit_nothing_is_computed_again(free: Plan) -> None:
    assert free.remat == () and free.layer_of_group == ()
    kept = dataclasses.replace(within(None, **DATA), remat="none")
    assert planned(kept) == free
    assert planned(within(1.5 * free.stages[0].peak_bytes, **DATA)).cost == free.cost


def test_as_few_layers_as_fit_compute_values_again(free: Plan) -> None:
    full = planned(dataclasses.replace(within(None, **DATA), remat="full"))
    assert set(full.remat[:-1]) == {"full"} and full.remat[-1] == "none"
    assert full.stages[0].peak_bytes < 0.7 * free.stages[0].peak_bytes

    plans = [free]
    for part in (0.9, 0.3):
        limit = part * free.stages[0].peak_bytes + (1 - part) * full.stages[0].peak_bytes
        method = within(limit, **DATA)
        plan = planned(method)
        assert plan.stages[0].peak_bytes <= limit
        with pytest.raises(InfeasibleError):
            planned(dataclasses.replace(method, remat="none"))
        plans.append(plan)

    # The first layers recompute, more of them the less memory there is, and the last one never recomputes.
    order = {"full": 0, "dots": 1, "none": 2}
    for plan in plans[1:]:
        numbers = [order[remat] for remat in plan.remat]
        assert numbers == sorted(numbers) and numbers[-1] == 2 and numbers[0] < 2
    seconds = [plan.cost.total_s for plan in plans]
    assert seconds == sorted(seconds) and seconds[-1] <= full.cost.total_s
    assert Plan.from_json(plans[1].to_json()) == plans[1]
    assert "rematerialisation" in plans[1].summary()


def dropout_and_statistics(params: Any, batch: Any) -> jax.Array:
    """Tied weights, random masks, and means over the batch."""
    x = batch
    for i, w in enumerate([*params, params[0]]):
        x = jnp.tanh(x @ w)
        x = (x - x.mean(0, keepdims=True)) / (x.std(0, keepdims=True) + 1e-3)
        x = x * jax.random.bernoulli(jax.random.fold_in(jax.random.key(7), i), 0.5, x.shape).astype(x.dtype)
    return jnp.mean(x**2)


def test_masks_statistics_and_tied_weights_are_computed_again(key: jax.Array) -> None:
    params = [jax.random.normal(k, (16, 16)) for k in jax.random.split(key, 2)]
    batch = jax.random.normal(key, (32, 16))
    serial = jax.jit(descent_step(dropout_and_statistics, jax.value_and_grad))
    step = minialpa.parallelize(
        descent_step(dropout_and_statistics, minialpa.value_and_grad),
        method=ShardParallel(jax.devices()[:2], remat="dots"),
        donate_argnums=(),
    )
    assert_allclose(step(params, batch), serial(params, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # tests/inter/layers/test_unstack.py has its short relative
def test_a_scan_over_layers_is_cut_into_layers_that_compute_again(key: jax.Array) -> None:
    step = minialpa.parallelize(scanned.train_step, method=Zero3Parallel(remat="full"), donate_argnums=())
    state = scanned.init(key)
    plan = step.plan(state, scanned.BATCH)
    assert plan.row_blocks and len(plan.stages) == 1 and "full" in plan.remat
    expected = jax.jit(scanned.train_step)(state, scanned.BATCH)
    assert_allclose(step(state, scanned.BATCH), expected, rtol=1e-4)


@pytest.mark.slow  # the other tests run such plans from the planner
def test_a_plan_that_computes_again_runs_from_a_file_and_for_another_batch(free: Plan) -> None:
    plan = planned(within(0.9 * free.stages[0].peak_bytes, **DATA))
    assert plan.remat
    saved = Plan.from_json(plan.to_json())
    step = minialpa.parallelize(STEP, method=saved, on_stale="replan")
    expected = jax.jit(descent_step(deep, jax.value_and_grad))
    assert_allclose(step(jax.tree.map(jnp.copy, PARAMS), BATCH), expected(PARAMS, BATCH), rtol=1e-4)

    half = BATCH[:2048]
    with pytest.warns(UserWarning, match="rematerialisation, and has solved new"):
        assert_allclose(step(jax.tree.map(jnp.copy, PARAMS), half), expected(PARAMS, half), rtol=1e-4)
        assert step.plan(PARAMS, half).remat == plan.remat


def test_obstacles_to_rematerialisation_are_reported(free: Plan) -> None:
    with pytest.raises(InfeasibleError, match=r"before jax 0\.11"):
        planned(within(1e5, **DATA), CPUS)
    with pytest.raises(InfeasibleError, match=r"`\w+` for \d+ of \d+ layers needs the least memory"):
        planned(within(1e5, **DATA))
    with pytest.raises(ShardingError, match=r"`remat` must be .*'some'"):
        ShardParallel(remat="some").options()  # type: ignore[arg-type]

    args = ([jnp.ones((16, 16))], jnp.ones((4096, 16)))
    one = descent_step(lambda params, x: jnp.mean(x @ params[0]), minialpa.value_and_grad)
    with pytest.raises(InfeasibleError, match="needs two layers, and the step has one"):
        minialpa.plan(one, args, cluster=GPUS, method=within(2e4, **DATA))
