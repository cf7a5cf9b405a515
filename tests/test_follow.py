"""`FollowParallel`: an evaluation with the numbers of plain jax, on the meshes and in the shardings of the training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import minialpa
from minialpa import CreateStateParallel, FollowParallel, ShardingError
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


def test_a_last_batch_of_another_size_is_planned_without_the_split() -> None:
    step, state, expected = training("zero3")
    evaluate = minialpa.parallelize(scanned.evaluate, method=FollowParallel(step))
    evaluate(state, scanned.BATCH)
    last = {name: rows[:3] for name, rows in scanned.BATCH.items()}
    with pytest.warns(UserWarning, match="planned without the option"):
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
