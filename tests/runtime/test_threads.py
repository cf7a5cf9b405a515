"""Threads that call parallelized functions of one process get the results of a single thread."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from minialpa import MinialpaError, ShardParallel
from minialpa.methods import Method
from minialpa.testing import assert_allclose
from tests.helpers import METHODS
from tests.runtime.threads import (
    Threads,
    assert_as_serial,
    make_batch,
    make_params,
    parallel_steps,
    run_threads,
    serial_runs,
    train,
)

N_THREADS, N_STEPS = 8, 6


@pytest.fixture(autouse=True)
def _many_switches() -> Iterator[None]:
    """Threads take turns a hundred times as often as they do otherwise."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)
    minialpa.shutdown()


@pytest.fixture(params=[("shard", False), ("pipeline", False), ("pipeline", True)], ids=str)
def method(request: pytest.FixtureRequest) -> Method:
    """A method that runs in this process, or on workers."""
    name, on_workers = request.param
    if on_workers:
        request.getfixturevalue("runtime")
    return METHODS[name]


def test_threads_compile_once_and_train_as_one_thread_does(method: Method) -> None:
    steps = parallel_steps(2, method)
    threads = run_threads(N_THREADS, lambda thread: train(steps, thread, N_STEPS))
    assert_as_serial(threads, serial_runs(2, N_THREADS, N_STEPS))
    assert [len(step._executables) for step in steps] == [1, 1]


def test_what_two_threads_donate_goes_to_one_of_them(method: Method) -> None:
    (step,) = parallel_steps(1, method)
    state, batch = step.preshard_dynamic_args(make_params(0), make_batch(0))
    expected, _ = step(make_params(0), make_batch(0))
    for _ in range(10):
        threads = run_threads(N_THREADS, lambda _: step(state, batch))  # noqa: B023
        assert len(threads.results) == 1
        assert all(isinstance(e, MinialpaError) and "donated" in str(e) for e in threads.errors.values())
        ((state, _),) = threads.results.values()
        assert_allclose(state, expected, rtol=2e-4, atol=1e-5)
        expected, _ = step(jax.tree.map(np.asarray, expected), make_batch(0))


def test_sessions_that_come_and_go_cost_no_call_its_result() -> None:
    (step,) = parallel_steps(1, ShardParallel())
    threads = Threads().start(4, lambda thread: train([step], thread, 30))
    while any(thread.is_alive() for thread in threads.running):
        minialpa.shutdown()
        minialpa.init("local", devices_per_host=4)
        minialpa.shutdown()
    assert_as_serial(threads.join(10), serial_runs(1, 4, 30))


def test_threads_that_init_with_other_arguments_get_an_error() -> None:
    def work(thread: int) -> None:
        minialpa.init("local", devices_per_host=1 + thread % 2)

    threads = run_threads(N_THREADS, work)
    assert len(threads.results) == N_THREADS // 2
    assert all(isinstance(error, MinialpaError) for error in threads.errors.values())
    assert len({thread % 2 for thread in threads.results}) == 1


def double(x: Any) -> Any:
    return jnp.sum(x) * 2


def test_copies_and_pickles_of_a_function_run_by_themselves() -> None:
    step = minialpa.parallelize(double, method=ShardParallel(), donate_argnums=(), batch_argnums=(0,))
    x = np.ones((8, 2), np.float32)
    step(x)
    for other in (copy.deepcopy(step), pickle.loads(pickle.dumps(minialpa.parallelize(len)))):
        assert other.get_last_executable() is None
    assert float(jax.device_get(copy.copy(step)(x))) == 32
