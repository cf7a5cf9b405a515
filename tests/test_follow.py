"""`CreateStateParallel` and `FollowParallel`: the numbers of plain jax, on the devices of the training state."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import minialpa
from minialpa import AutoShardingOption, CreateStateParallel, FollowParallel, ShardingError, ShardParallel
from minialpa.methods import Method
from minialpa.runtime.arrays import BlockedArray
from minialpa.runtime.cluster.in_process import ThreadActor
from minialpa.testing import assert_allclose
from tests import scanned_training as scanned
from tests.checkpoint_cases import bits
from tests.runtime.cluster.in_process_session import in_process_session


@pytest.fixture(scope="module", autouse=True)
def _one_session() -> Iterator[None]:
    minialpa.shutdown()
    yield
    minialpa.shutdown()


@functools.cache
def training_step(name: str) -> Any:
    """Compiled once for the tests of one session."""
    return minialpa.parallelize(scanned.train_step, method=scanned.METHODS[name])


init = jax.jit(scanned.init)


# ---- states ----------------------------------------------------------------------------------------------------------


def assert_read_in_place(step: Any, state: Any, batch: Any) -> None:
    """The step takes every leaf in place: placing the arguments makes no new array."""
    placed = step.preshard_dynamic_args(state, batch)[0]
    for (path, found), given in zip(jax.tree.leaves_with_path(placed), jax.tree.leaves(state), strict=True):
        assert found is given, jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("blocks", "local"),
        pytest.param("blocks", "cluster", marks=pytest.mark.slow),
        pytest.param("zero3", "cluster", marks=pytest.mark.slow),
    ],
)
def test_a_state_has_the_bits_of_plain_jax_and_is_read_in_place(name: str, where: str) -> None:
    """Before any call of the step, which is compiled once."""
    with in_process_session(1, 4) if where == "cluster" else nullcontext():
        step = training_step(name)
        create = minialpa.parallelize(scanned.init, method=CreateStateParallel(step, (scanned.BATCH,)))
        key = jax.random.key(3)
        state = create(key)
        expected = init(key)
        assert jax.tree.structure(state) == jax.tree.structure(expected)
        assert bits(state) == bits(expected)
        assert_read_in_place(step, state, scanned.BATCH)
        if name == "blocks":
            assert isinstance(state["params"]["layers"]["up"], BlockedArray)

        compiled = step.get_last_executable()
        assert create.plan(key) == compiled.get_parallel_plan()
        _, loss = step(state, scanned.BATCH)
        assert step.get_last_executable() is compiled, "the step was compiled twice"
        np.testing.assert_allclose(float(loss), float(jax.jit(scanned.train_step)(expected, scanned.BATCH)[1]), 1e-4)
        assert not key.is_deleted(), "the state shares memory with the argument"


def test_one_other_argument_may_be_given_by_itself() -> None:
    x, y = jnp.ones(2), jnp.ones(3)
    with_pair = minialpa.parallelize(lambda state, batch: state)
    with_both = minialpa.parallelize(lambda state, x, y: state)
    for given, expected in ((x, (x,)), ((x,), (x,)), ((x, y), ((x, y),)), ([x, y], ([x, y],))):
        assert CreateStateParallel(with_pair, given).other_args == expected
    assert CreateStateParallel(with_both, (x, y)).other_args == (x, y)
    assert CreateStateParallel(minialpa.parallelize(lambda state, x, y=0: state), (x, y)).other_args == (x, y)


def test_a_state_that_the_step_cannot_take_is_refused_by_name() -> None:
    step = minialpa.parallelize(scanned.train_step, method=ShardParallel())
    with pytest.raises(ShardingError, match="`train_step` must be a function that `parallelize` returned; got"):
        CreateStateParallel(scanned.train_step, (scanned.BATCH,))  # type: ignore[arg-type]
    create = minialpa.parallelize(scanned.init, method=CreateStateParallel(step, (scanned.BATCH,)), donate_argnums=(0,))
    with pytest.raises(ShardingError, match="`donate_argnums`"):
        create(jax.random.key(0))
    create = minialpa.parallelize(scanned.init, method=CreateStateParallel(step, (scanned.BATCH,)))
    with pytest.raises(ShardingError, match=r"`train_step\.export_specs`"):
        create.export_specs(jax.random.key(0))


# ---- evaluations -----------------------------------------------------------------------------------------------------


def training(name: str) -> tuple[Any, Any, Any]:
    """A parallelized step, the state that it reads, and the same state in plain jax."""
    step = training_step(name)
    expected = init(jax.random.key(0))
    return step, step.preshard_dynamic_args(expected, scanned.BATCH)[0], expected


@pytest.mark.parametrize(("name", "n_micro_batches"), [("zero3", 2), ("blocks", None)])
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
    with pytest.raises(ShardingError, match=r"`v\['w'\]` may be `a\['w'\]` or `b\['w'\]`.*Give the argument the name"):
        by_guess.plan(weights, x)
    mixed = minialpa.parallelize(lambda a, v, x: (x @ a["w"] @ v["w"]).sum(), method=FollowParallel(step))
    with pytest.warns(UserWarning, match=r"`v\['w'\]` may be `a\['w'\]` or `b\['w'\]`.*calls may move it"):
        assert mixed.plan(weights, weights, x).input_specs[0].partition_specs == (P("x"),)


def test_an_argument_may_be_a_part_of_the_state_and_a_last_batch_is_planned_without_the_split() -> None:
    step, state, expected = training("zero3")
    params = state["params"]
    evaluate = minialpa.parallelize(scanned.evaluate_params, method=FollowParallel(step))
    wanted = jax.jit(scanned.evaluate_params)(expected["params"], scanned.BATCH)
    assert_allclose(evaluate(params, scanned.BATCH), wanted, rtol=1e-4)
    assert_read_in_place(evaluate, params, scanned.BATCH)

    last = {name: rows[:3] for name, rows in scanned.BATCH.items()}
    with pytest.warns(UserWarning, match="planned without this split"):
        found = evaluate(params, last)
    assert_allclose(found, jax.jit(scanned.evaluate_params)(expected["params"], last), rtol=1e-4)
    assert_read_in_place(evaluate, params, last)


def test_what_cannot_be_followed_is_refused_by_name() -> None:
    step = minialpa.parallelize(scanned.train_step, method=scanned.METHODS["blocks"])
    state = init(jax.random.key(0))
    with pytest.raises(ShardingError, match=r"no plan yet\. Call `src_func` first"):
        minialpa.parallelize(scanned.evaluate, method=FollowParallel(step))(state, scanned.BATCH)

    step = training_step("blocks")
    step.get_executable(state, scanned.BATCH)
    with pytest.raises(ShardingError, match=r"but no argument matches\. `src_func` has .*this function has"):
        minialpa.parallelize(lambda w, batch: (batch @ w).sum(), method=FollowParallel(step))(
            np.ones((8, 3), np.float32), scanned.BATCH["x"]
        )

    def last_layer(state: Any, batch: Any) -> Any:
        return (batch["x"] @ state["params"]["layers"]["up"][-1]).sum()

    with pytest.raises(ShardingError, match=r"`state\['params'\]\['layers'\]\['up'\]` and keeps layers 0 to \d+, "):
        minialpa.parallelize(last_layer, method=FollowParallel(step))(state, scanned.BATCH)


# ---- functions without `FollowParallel` ------------------------------------------------------------------------------


def meshes_of(function: Any) -> list[tuple[int, tuple[int, ...]]]:
    plan = function.get_last_executable().get_parallel_plan()
    return [(stage.first_device, stage.logical_shape) for stage in plan.stages]


@pytest.mark.parametrize(("name", "method"), [("zero3", ShardParallel()), ("blocks", None)])
def test_a_function_with_a_state_on_the_meshes_of_a_training_step_runs_there(name: str, method: Method | None) -> None:
    plain = init(jax.random.key(0))
    evaluate = minialpa.parallelize(scanned.evaluate_params, method=method)
    evaluate(plain["params"], scanned.BATCH)  # before any training: planned by itself

    step = training_step(name)
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


# ---- workers ---------------------------------------------------------------------------------------------------------


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
