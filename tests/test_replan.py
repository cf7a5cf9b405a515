"""Plans for other calls than their own: refused with the differences, or replanned with the same stages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from minialpa import (
    AutoLayerOption,
    ClusterSpec,
    LogicalMesh,
    PipeshardParallel,
    Plan,
    ShardingError,
    ShardParallel,
    VerifyError,
)
from minialpa.methods import Method
from minialpa.testing import assert_allclose
from tests.plans import make_args, pipeline_plan, shard_plan, train_step

pytestmark = pytest.mark.usefixtures("fresh_session")


def refusal(step: Callable[..., Any], plan: Plan, *args: Any, **options: Any) -> str:
    with pytest.raises(VerifyError) as caught:
        minialpa.parallelize(step, method=plan, **options)(*args)
    return str(caught.value)


# ---- what differs ---------------------------------------------------------------------------------------------------


def test_arguments_that_differ_are_named() -> None:
    text = refusal(train_step, shard_plan(), *make_args(32))
    assert (
        "argument `batch['x']` is float32[32, 8] and the plan was made for float32[16, 8]; argument `batch['y']`"
        in text
    )
    assert 'on_stale="replan"' in text and "the step itself" not in text
    text = refusal(train_step, shard_plan(), *make_args(32, width=16))
    assert text.count("argument") == 3 and "; and 1 more." in text

    # Arguments that come and go.
    params, batch = make_args()
    text = refusal(train_step, shard_plan(), params, {**batch, "z": batch["x"]})
    assert "argument `batch['z']` is float32[16, 8] and the plan has no such argument" in text

    def step(params: Any) -> Any:
        return jax.tree.map(jnp.sin, params)

    text = refusal(step, shard_plan(), params)
    assert "argument `batch['x']` is missing and the plan was made for float32[16, 8]" in text


def test_changes_in_a_step_are_reported() -> None:
    ones = jnp.ones((4, 4))

    def told(old: Callable[..., Any], new: Callable[..., Any], **options: Any) -> str:
        plan = minialpa.plan(old, (ones, ones), cluster=ClusterSpec.preset("cpu", devices_per_host=2))
        return refusal(new, plan, ones, ones, **options)

    def with_sin(x: jax.Array, batch: jax.Array) -> jax.Array:
        return jnp.sin(x) + batch

    # Operations that are new or gone are counted and placed.
    text = told(lambda x, batch: jnp.cos(jnp.sin(x)) + batch, lambda x, batch: jnp.tanh(jnp.tanh(jnp.sin(x))) + batch)
    assert (
        "it has 0 `cos` where the plan has 1, 2 `tanh` where the plan has 0; the first difference is `tanh` at" in text
    )
    assert "test_replan.py" in text

    text = told(with_sin, with_sin, batch_argnums=())
    assert "has changed: what it returns, or which of its arguments are batches or are donated" in text
    few, many = jnp.ones((2, 4)), jnp.ones((3, 4))
    text = told(lambda x, batch: x + batch + jnp.sum(few), lambda x, batch: x + batch + jnp.sum(many))
    assert "the arrays that it captures" in text


# ---- replanning -----------------------------------------------------------------------------------------------------

CLUSTER = ClusterSpec.preset("a100-40gb", num_hosts=1, devices_per_host=8)
METHODS: dict[str, Method] = {
    "shard": ShardParallel(num_micro_batches=2, logical_shape=(2, 4)),
    "uniform": PipeshardParallel(num_micro_batches=4, layer_option="manual", pipeline_schedule="gpipe"),
    "auto": PipeshardParallel(
        num_micro_batches=2,
        layer_option=AutoLayerOption(layer_num=2, remat="dots"),
        stage_option=minialpa.AutoStageOption(planned_steps=math.inf),
    ),
}


def test_a_logical_mesh_is_kept() -> None:
    mesh = LogicalMesh((2, 4), (1e-6, 1e-6), (1e-9, 1e-12), device=CLUSTER.device)
    plan = minialpa.parallelize(train_step, method=ShardParallel(devices=mesh)).plan(*make_args())
    assert minialpa.replan(plan, train_step, make_args()) == plan


@pytest.mark.parametrize("name", METHODS)
def test_planning_again_gives_the_same_plan_and_for_other_shapes_the_same_decisions(name: str) -> None:
    plan = minialpa.plan(train_step, make_args(), cluster=CLUSTER, method=METHODS[name])
    # Without a search there is no certificate.
    assert minialpa.replan(plan, train_step, make_args()) == dataclasses.replace(plan, certificate=None)

    again = minialpa.replan(plan, train_step, make_args(32))
    assert again.fingerprint != plan.fingerprint
    assert [value.shape for value in again.inputs][2:] == [(32, 8), (32, 8)]
    for field in ("cluster", "n_micro_batches", "schedule", "layer_of_group", "remat"):
        assert getattr(again, field) == getattr(plan, field)
    for stage, old in zip(again.stages, plan.stages, strict=True):
        for field in ("layers", "submesh", "first_device", "logical_shape", "alpha", "beta", "option"):
            assert getattr(stage, field) == getattr(old, field)


def test_a_stale_plan_runs_after_planning_again_and_says_so() -> None:
    plan, args = pipeline_plan(num_hosts=1, devices_per_host=8), make_args(32)
    parallel = minialpa.parallelize(train_step, method=plan, on_stale="replan")
    with pytest.warns(UserWarning, match=r"`batch\['x'\]` is float32\[32, 8\] .* has solved new shardings"):
        out = parallel(*args)
    assert_allclose(out, train_step(*args), rtol=1e-4, atol=1e-5)
    assert len(parallel.get_last_executable().get_parallel_plan().stages) == 2
    assert parallel.plan(*make_args()) is plan


def test_a_model_with_other_layers_is_refused() -> None:
    def other(params: Any, batch: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            x = jnp.sin(jnp.tanh(batch["x"] @ p["w"]))
            return jnp.mean((x @ p["v"] - batch["y"]) ** 2)

        value, grads = minialpa.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    with pytest.raises(
        VerifyError, match=r"\d+ forward operations, and this step has \d+. Plan this step with `minialpa.plan`"
    ):
        minialpa.replan(pipeline_plan(), other, make_args())
    assert minialpa.replan(shard_plan(), other, make_args()).stages
    with pytest.raises(ShardingError, match=r"`on_stale` must be .*got 'ignore'"):
        minialpa.parallelize(train_step, method=shard_plan(), on_stale="ignore")


def test_a_number_that_lost_its_weak_type_is_named() -> None:
    """Python's numbers are weakly typed, and numbers that another library restores are not."""

    def step(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        loss, grad = minialpa.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * grad, "n": state["n"] + 1}, loss

    w, batch = np.ones((8, 8), np.float32), np.ones((16, 8), np.float32)
    plan = minialpa.parallelize(step, method=ShardParallel()).plan({"w": w, "n": 0}, batch)
    loaded = minialpa.parallelize(step, method=plan)
    loaded({"w": w, "n": jnp.asarray(3)}, batch)
    with pytest.raises(VerifyError, match=r"one of `state\['n'\]` may be weakly typed"):
        loaded({"w": w, "n": np.asarray(3, np.int32)}, batch)
