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
    CreateStateParallel,
    FollowParallel,
    PipeshardParallel,
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
    create = minialpa.parallelize(scanned.init, method=CreateStateParallel(step, (scanned.BATCH,)))
    return step, create(jax.random.key(0)), jax.jit(scanned.init)(jax.random.key(0))


@pytest.mark.parametrize(
    ("name", "n_micro_batches"),
    [
        ("zero3", 2),
        ("blocks", None),
        pytest.param("zero3", None, marks=pytest.mark.slow),
        pytest.param("blocks", 2, marks=pytest.mark.slow),
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

    # `p` may be the moments, too, which are in the same place.
    renamed = minialpa.parallelize(lambda p, batch: scanned.evaluate_params(p, batch), method=FollowParallel(step))
    assert_allclose(renamed(state["params"], scanned.BATCH), wanted, rtol=1e-4)
    assert_read_in_place(renamed, state["params"], scanned.BATCH)


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


@pytest.mark.parametrize("is_told", [pytest.param(True, marks=pytest.mark.slow), False])
def test_training_and_evaluation_alternate_on_the_same_workers(is_told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with in_process_session(1, 4) as runtime:
        step, state, expected = training("blocks")
        evaluate = minialpa.parallelize(scanned.evaluate, method=FollowParallel(step) if is_told else None)
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


@pytest.mark.slow  # the other tests read all stages
def test_a_function_that_reads_one_stage_only_leaves_the_other_idle() -> None:
    step, state, expected = training("blocks")

    def head_norm(state: Any, batch: Any) -> Any:
        return (batch["x"] @ state["params"]["head"]).sum()

    evaluate = minialpa.parallelize(head_norm, method=FollowParallel(step))
    assert_allclose(evaluate(state, scanned.BATCH), head_norm(expected, scanned.BATCH), rtol=1e-4)
    assert_read_in_place(evaluate, state, scanned.BATCH)


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


# ---- functions whose method says nothing of it -----------------------------------------------------------------------


def meshes_of(function: Any) -> list[tuple[int, tuple[int, ...]]]:
    plan = function.get_last_executable().get_parallel_plan()
    return [(stage.first_device, stage.logical_shape) for stage in plan.stages]


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("zero3", ShardParallel()),
        ("blocks", None),
        pytest.param("zero3", None, marks=pytest.mark.slow),
        pytest.param("blocks", PipeshardParallel(num_micro_batches=2), marks=pytest.mark.slow),
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


@pytest.mark.slow  # the other tests follow an argument by its own name
def test_a_name_of_the_argument_that_the_step_does_not_have_is_followed_too() -> None:
    step, state, expected = training("blocks")
    head_norm = minialpa.parallelize(lambda other: (other**2).sum())
    assert_allclose(head_norm(state["params"]["head"]), (expected["params"]["head"] ** 2).sum(), rtol=1e-4)
    assert meshes_of(head_norm) == meshes_of(step)
    assert_read_in_place_alone(head_norm, state["params"]["head"])


def assert_read_in_place_alone(function: Any, leaf: Any) -> None:
    assert function.preshard_dynamic_args(leaf)[0] is leaf


@pytest.mark.slow  # the other tests say what follows
def test_a_training_step_and_a_method_that_asks_for_something_else_are_not_moved() -> None:
    step, state, _ = training("blocks")
    state, _ = step(state, scanned.BATCH)
    whole = minialpa.parallelize(scanned.evaluate, method=ShardParallel())
    whole(state, scanned.BATCH)
    assert len(meshes_of(whole)) == 1

    other = minialpa.parallelize(scanned.train_step, method=scanned.METHODS["zero3"])
    other_state, _ = other(jax.device_get(state), scanned.BATCH)
    again = minialpa.parallelize(scanned.train_step)
    by_itself = again.plan(jax.device_get(other_state), scanned.BATCH)
    again(other_state, scanned.BATCH)
    assert again.get_last_executable().get_parallel_plan() == by_itself


@pytest.mark.slow  # test_what_cannot_be_followed_is_refused_by_name is the short relative
def test_what_cannot_follow_is_planned_by_itself_with_a_warning_that_says_what_it_costs() -> None:
    _, state, expected = training("blocks")

    def last_layer(state: Any, batch: Any) -> Any:
        return (batch["x"] @ state["params"]["layers"]["up"][-1]).sum()

    function = minialpa.parallelize(last_layer)
    with pytest.warns(UserWarning, match=r"`.*last_layer` has arguments where `train_step` keeps.*is kept in the rows"):
        found = function(state, scanned.BATCH)
    assert_allclose(found, last_layer(expected, scanned.BATCH), rtol=1e-4)
    function(state, scanned.BATCH)  # warnings are errors: there is one


def test_a_plan_that_the_user_gave_comes_first() -> None:
    _, state, _ = training("blocks")
    evaluate = minialpa.parallelize(scanned.evaluate)
    own = evaluate.plan(jax.device_get(state), scanned.BATCH)
    evaluate.use_plan(own)
    assert evaluate.plan(state, scanned.BATCH) == own
