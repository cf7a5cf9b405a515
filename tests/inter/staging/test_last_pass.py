"""Passes sum gradients over devices if their work hides it: the last pass over micro-batches, and scans over layers.

The sums equal the sums of the update, each made once.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import minialpa
from minialpa import AutoLayerOption, AutoShardingOption, ClusterSpec, DataParallel, PipeshardParallel, Zero2Parallel
from minialpa.inter.lower.planned_step import planned_step
from minialpa.inter.staging.staged_step import mesh_problems, realise
from minialpa.intra.spmd import Communication
from minialpa.methods import Method
from minialpa.plan import Plan
from minialpa.testing import assert_allclose
from tests.helpers import trace

GPUS = ClusterSpec.preset("h100", devices_per_host=4)
DATA = DataParallel(GPUS, num_micro_batches=4)
ZERO = Zero2Parallel(GPUS, num_micro_batches=4)
PIPELINE = PipeshardParallel(
    GPUS,
    num_micro_batches=4,
    layer_option=AutoLayerOption(2),
    stage_option="uniform",
    default_auto_sharding_option=AutoShardingOption(force_data_parallel=True),
)
ONE = Zero2Parallel(GPUS)
N_LAYERS, WIDTH = 4, 16

Step = Callable[[Any, Any], Any]


def unrolled(params: Any, x: jax.Array) -> jax.Array:
    for k in range(N_LAYERS):
        x = x + jnp.tanh(x @ params["layers"][k])
    return x @ params["head"] * params["scale"]


def scanned(params: Any, x: jax.Array) -> jax.Array:
    """Reads the weights of a layer twice, and has a constant and an unused row in the body."""
    shift = x[:, :1] * 0.5

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x + jnp.tanh((x @ w + shift) @ w), jnp.sum(x)

    return jax.lax.scan(layer, x, params["layers"])[0] @ params["head"] * params["scale"]


def step_of(model: Callable[[Any, jax.Array], jax.Array], grad: Any = minialpa.value_and_grad) -> Step:
    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        loss, grads = grad(lambda p: jnp.mean((model(p, batch["x"]) - batch["y"]) ** 2))(params)
        # The norm of all gradients needs every sum, also from other stages.
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
        moments = jax.tree.map(lambda m, g: 0.9 * m + g / jnp.maximum(norm, 0.1), moments, grads)
        # A gradient that is a result is also required whole.
        return (jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments), (loss, grads["head"])

    return step


def arguments(model: Callable[[Any, jax.Array], jax.Array]) -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "layers": jax.random.normal(keys[0], (N_LAYERS, WIDTH, WIDTH)) * 0.3,
        "head": jax.random.normal(keys[1], (WIDTH, 8)) * 0.3,
        "scale": jnp.float32(1.5),
    }
    batch = {"x": jax.random.normal(keys[2], (32, WIDTH)), "y": jax.random.normal(keys[3], (32, 8))}
    if model is unrolled:
        params["layers"] = list(params["layers"])  # type: ignore[assignment]
    return (params, jax.tree.map(jnp.zeros_like, params)), batch


@pytest.mark.parametrize(
    ("model", "method"),
    [(scanned, PIPELINE), (unrolled, DATA), (scanned, ONE)],
    ids=["pipeline", "data", "one micro-batch"],
)
def test_the_step_is_that_of_one_device(model: Callable[[Any, jax.Array], jax.Array], method: Method) -> None:
    state, batch = arguments(model)
    expected = jax.jit(step_of(model, jax.value_and_grad))(state, batch)
    step = minialpa.parallelize(step_of(model), method=method)
    found = step(state, batch)
    assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def _found(model: Callable[[Any, jax.Array], jax.Array], method: Method) -> tuple[Any, Plan]:
    state, batch = arguments(model)
    step = step_of(model)
    plan = minialpa.plan(step, (state, batch), cluster=GPUS, method=method)
    staged = realise(trace(step, state, batch), plan).staged
    return planned_step(staged, mesh_problems(staged), plan), plan


def _sums(found: tuple[Communication, ...] | list[Communication]) -> Counter[tuple[Any, ...]]:
    """Bytes by kind and axes: a scan has a sum for each row of a stacked accumulator."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for one in found:
        counts[one.collective.kind, one.collective.axes] += round(one.times * one.collective.n_bytes)
    return counts


@pytest.mark.parametrize(
    ("model", "method"),
    [(scanned, PIPELINE), (scanned, ZERO), (unrolled, DATA), (scanned, ONE)],
    ids=["pipeline", "zero-2", "data", "one micro-batch"],
)
def test_each_sum_is_made_once(model: Callable[[Any, jax.Array], jax.Array], method: Method) -> None:
    """With the sums in last passes, and without, a step communicates the same bytes."""
    planned, plan = _found(model, method)
    cpu = dataclasses.replace(plan.cluster.device, name="cpu")
    without = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, device=cpu), compiler_options=())
    apart = planned_step(planned.staged, mesh_problems(planned.staged), without)
    assert all(one.last is None for one in apart.programs)
    assert any(one.last is not None for one in planned.programs) == (method is not ONE)

    def step_bytes(programs: Any) -> Counter[tuple[Any, ...]]:
        total: Counter[tuple[Any, ...]] = Counter()
        for one in programs:
            n_runs = plan.n_micro_batches if one.task.per_micro_batch else 1
            for _ in range(n_runs - (one.last is not None)):
                total += _sums(one.collectives())
            if one.last is not None:
                total += _sums(one.last.collectives())
        return total

    assert step_bytes(planned.programs) == step_bytes(apart.programs)


@pytest.mark.parametrize("method", [ZERO, ONE], ids=["last pass", "one micro-batch"])
def test_rows_of_stacked_gradients_are_summed_in_the_scan(method: Method) -> None:
    planned, _ = _found(scanned, method)
    found = [one for each in planned.programs for one in (each.last or each).collectives()]
    inside = [one for one in found if one.loop is not None and one.collective.kind == "reduce-scatter"]
    assert [one.times for one in inside] == [N_LAYERS]
    assert all(one.can_hide for one in inside)
    # Each device puts in the gradient of one layer.
    assert inside[0].collective.n_bytes == 4 * WIDTH * WIDTH
