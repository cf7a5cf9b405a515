"""`FollowParallel`: an evaluation with the numbers of plain jax, on the meshes and in the shardings of the training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import minialpa
from minialpa import (
    AutoShardingOption,
    FollowParallel,
    ShardingError,
    ShardParallel,
)
from minialpa.methods import Method
from minialpa.runtime.cluster.in_process import ThreadActor
from minialpa.testing import assert_allclose
from tests import scanned_training as scanned
from tests.runtime.cluster.in_process_session import in_process_session
from tests.test_create_state import assert_read_in_place


@pytest.fixture(autouse=True)
def _no_session_stays() -> Iterator[None]:
    yield
    minialpa.shutdown()


def training(name: str) -> tuple[Any, Any, Any]:
    """A parallelized step, the state that it reads, and the same state in plain jax."""
    step = minialpa.parallelize(scanned.train_step, method=scanned.METHODS[name])
    expected = jax.jit(scanned.init)(jax.random.key(0))
    return step, step.preshard_dynamic_args(expected, scanned.BATCH)[0], expected


@pytest.mark.parametrize(
    ("name", "n_micro_batches"),
    [
        ("zero3", 2),
        ("blocks", None),
    ],
)
def test_an_evaluation_equals_plain_jax_and_reads_the_state_in_place(name: str, n_micro_batches: int | None) -> None:
    step, state, expected = training(name)
    evaluate = minialpa.parallelize(scanned.evaluate, method=FollowParallel(step, n_micro_batches))
    for _ in range(2):
        assert_allclose(evaluate(state, scanned.BATCH), jax.jit(scanned.evaluate)(expected, scanned.BATCH), rtol=1e-4)
        assert_read_in_place(evaluate, state, scanned.BATCH)
        state, _ = step(state, scanned.BATCH)
        expected, _ = jax.jit(scanned.train_step)(expected, scanned.BATCH)

    by_training = [stage.first_device for stage in step.get_last_executable().get_parallel_plan().stages]
    assert [s.first_device for s in evaluate.get_last_executable().get_parallel_plan().stages] == by_training


def test_an_argument_may_be_a_part_of_the_state() -> None:
    step, state, expected = training("zero3")
    evaluate = minialpa.parallelize(scanned.evaluate_params, method=FollowParallel(step))
    wanted = jax.jit(scanned.evaluate_params)(expected["params"], scanned.BATCH)
    assert_allclose(evaluate(state["params"], scanned.BATCH), wanted, rtol=1e-4)
    assert_read_in_place(evaluate, state["params"], scanned.BATCH)


def test_of_two_leaves_in_different_places_none_is_followed_by_guess() -> None:
    def train(a: Any, b: Any, x: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, (grad_a, grad_b) = minialpa.value_and_grad(lambda w: jnp.mean((x @ w[0]["w"] @ w[1]["w"]) ** 2))((a, b))
        return jax.tree.map(jnp.subtract, a, grad_a), jax.tree.map(jnp.subtract, b, grad_b), loss

    weights, x = {"w": np.eye(8, dtype=np.float32)}, np.ones((16, 8), np.float32)
    fixed = AutoShardingOption(fixed_specs={"a['w']": P("x"), "b['w']": P()})
    step = minialpa.parallelize(train, method=ShardParallel(auto_sharding_option=fixed))
    step.get_executable(weights, weights, x)
    by_name = minialpa.parallelize(lambda b, x: (x @ b["w"]).sum(), method=FollowParallel(step))
    assert by_name.plan(weights, x).input_specs[0].partition_specs == (P(),)
    by_guess = minialpa.parallelize(lambda v, x: (x @ v["w"]).sum(), method=FollowParallel(step))
    with pytest.raises(ShardingError, match=r"`v\['w'\]` may be `a\['w'\]` or `b\['w'\]`.*Name the argument"):
        by_guess.plan(weights, x)
    mixed = minialpa.parallelize(lambda a, v, x: (x @ a["w"] @ v["w"]).sum(), method=FollowParallel(step))
    with pytest.warns(UserWarning, match=r"`v\['w'\]` may be `a\['w'\]` or `b\['w'\]`.*planned anew"):
        assert mixed.plan(weights, weights, x).input_specs[0].partition_specs == (P("x"),)


def test_a_last_batch_of_another_size_is_planned_without_the_split() -> None:
    step, state, expected = training("zero3")
    evaluate = minialpa.parallelize(scanned.evaluate, method=FollowParallel(step))
    evaluate(state, scanned.BATCH)
    last = {name: rows[:3] for name, rows in scanned.BATCH.items()}
    with pytest.warns(UserWarning, match="planned without this split"):
        found = evaluate(state, last)
    assert_allclose(found, jax.jit(scanned.evaluate)(expected, last), rtol=1e-4)
    assert_read_in_place(evaluate, state, last)


def test_training_and_evaluation_alternate_on_the_same_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_process_session(1, 4) as runtime:
        step, state, expected = training("blocks")
        evaluate = minialpa.parallelize(scanned.evaluate, method=FollowParallel(step))
        state, _ = step(state, scanned.BATCH)
        evaluate(state, scanned.BATCH)
        runtime.sync()

        calls: list[str] = []
        call = ThreadActor.call

        def noted(self: ThreadActor, method: str, *args: Any) -> Any:
            calls.append(method)
            return call(self, method, *args)

        started: list[Any] = []
        monkeypatch.setattr(ThreadActor, "call", noted)
        monkeypatch.setattr(runtime.launcher, "start_meshes", lambda *args: started.append(args))
        for _ in range(3):
            state, _ = step(state, scanned.BATCH)
            evaluate(state, scanned.BATCH)
        runtime.sync()
        assert not started
        assert "step" in calls and not {"put", "fetch", "load"} & set(calls), set(calls)

        monkeypatch.undo()
        for _ in range(4):
            expected, _ = jax.jit(scanned.train_step)(expected, scanned.BATCH)
        found = evaluate(state, scanned.BATCH)
        assert_allclose(found, jax.jit(scanned.evaluate)(expected, scanned.BATCH), rtol=1e-4)


def test_what_cannot_be_followed_is_refused_by_name() -> None:
    step = minialpa.parallelize(scanned.train_step, method=scanned.METHODS["blocks"])
    state = scanned.init(jax.random.key(0))
    with pytest.raises(ShardingError, match=r"`src_func` has not\. Call it first"):
        minialpa.parallelize(scanned.evaluate, method=FollowParallel(step))(state, scanned.BATCH)

    step.get_executable(state, scanned.BATCH)
    with pytest.raises(ShardingError, match="by their paths and types, and there are none"):
        minialpa.parallelize(lambda w, batch: (batch @ w).sum(), method=FollowParallel(step))(
            np.ones((8, 3), np.float32), scanned.BATCH["x"]
        )

    def last_layer(state: Any, batch: Any) -> Any:
        return (batch["x"] @ state["params"]["layers"]["up"][-1]).sum()

    with pytest.raises(ShardingError, match=r"`state\['params'\]\['layers'\]\['up'\]` is kept in the rows"):
        minialpa.parallelize(last_layer, method=FollowParallel(step))(state, scanned.BATCH)


# ---- functions without `FollowParallel` ------------------------------------------------------------------------------


def meshes_of(function: Any) -> list[tuple[int, tuple[int, ...]]]:
    plan = function.get_last_executable().get_parallel_plan()
    return [(stage.first_device, stage.logical_shape) for stage in plan.stages]


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("zero3", ShardParallel()),
        ("blocks", None),
    ],
)
def test_a_function_with_a_state_on_the_meshes_of_a_training_step_runs_there(name: str, method: Method | None) -> None:
    plain = scanned.init(jax.random.key(0))
    evaluate = minialpa.parallelize(scanned.evaluate_params, method=method)
    evaluate(plain["params"], scanned.BATCH)  # before any training: planned by itself

    step = minialpa.parallelize(scanned.train_step, method=scanned.METHODS[name])
    state, _ = step(plain, scanned.BATCH)
    compiled = step.get_last_executable()
    found = evaluate(state["params"], scanned.BATCH)
    assert meshes_of(evaluate) == meshes_of(step)
    assert evaluate.plan(state["params"], scanned.BATCH) == evaluate.get_last_executable().get_parallel_plan()
    assert_read_in_place(evaluate, state["params"], scanned.BATCH)
    expected = jax.device_get(state["params"])
    assert_allclose(found, jax.jit(scanned.evaluate_params)(expected, scanned.BATCH), rtol=1e-4)

    step(state, scanned.BATCH)
    assert step.get_last_executable() is compiled


def test_a_plan_that_the_user_gave_comes_first() -> None:
    _, state, _ = training("zero3")
    evaluate = minialpa.parallelize(scanned.evaluate)
    own = evaluate.plan(jax.device_get(state), scanned.BATCH)
    evaluate.use_plan(own)
    assert evaluate.plan(state, scanned.BATCH) == own
