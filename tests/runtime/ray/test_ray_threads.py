"""Threads that call parallelized functions on a Ray cluster: as if one of them had made all the calls, or an error."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ray.cluster_utils import Cluster

import minialpa
from minialpa import MinialpaError, WorkerError
from minialpa.session import current_session
from minialpa.testing import assert_allclose
from tests.helpers import METHODS
from tests.runtime.ray.faults import SOON_S, worker_pid
from tests.runtime.ray.ray_cluster import WORKER_ENV
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

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]

N_THREADS = 8


@pytest.fixture
def address(cluster: Cluster) -> Iterator[str]:
    start(cluster.address)
    yield cluster.address
    minialpa.shutdown()


def start(address: str) -> None:
    minialpa.init(cluster="ray", address=address, num_hosts=2, devices_per_host=1, worker_env=WORKER_ENV)


@pytest.mark.slow  # tests/runtime/cluster/test_in_process_cluster.py has its short relative
def test_threads_start_the_meshes_once_and_train_as_one_thread_does(address: str) -> None:
    steps = parallel_steps(2, METHODS["pipeline"])
    threads = run_threads(N_THREADS, lambda thread: train(steps, thread, 6))
    assert_as_serial(threads, serial_runs(2, N_THREADS, 6))
    assert [len(step._executables) for step in steps] == [1, 1]
    assert sorted(worker.number for worker in current_session().runtime.workers) == [0, 1]

    # The same session goes on, whatever becomes of one thread's arguments.
    batch = make_batch(0)
    state, _ = steps[0](make_params(0), batch)
    expected, _ = steps[0](steps[0](make_params(0), batch)[0], batch)
    threads = run_threads(N_THREADS, lambda _: steps[0](state, batch))
    assert len(threads.results) == 1
    assert all(isinstance(error, WorkerError) for error in threads.errors.values())
    assert all("donated" in str(error) for error in threads.errors.values())
    ((state, _),) = threads.results.values()
    assert_allclose(state, expected, rtol=2e-4, atol=1e-5)

    # The end of the session reaches all of them at once.
    threads = Threads().start(N_THREADS, lambda thread: train(steps, thread, 10_000))
    time.sleep(0.5)
    begun_s = time.monotonic()
    minialpa.shutdown()
    threads.join(5)
    assert time.monotonic() - begun_s < 5
    assert len(threads.errors) == N_THREADS
    assert all(isinstance(error, MinialpaError) for error in threads.errors.values()), [
        *map(repr, threads.errors.values())
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shard", "pipeline"])
@pytest.mark.parametrize("n_functions", [1, 2])
@pytest.mark.parametrize("is_cold", [True, False], ids=["cold", "warm"])
def test_threads_train_as_one_thread_does_twenty_times(
    cluster: Cluster, name: str, n_functions: int, is_cold: bool
) -> None:
    expected = serial_runs(n_functions, N_THREADS, 50)
    for i in range(20):
        if is_cold or i == 0:
            minialpa.shutdown()
            start(cluster.address)
            steps = parallel_steps(n_functions, METHODS[name])
        if not is_cold and i == 0:
            train(steps, 0, n_functions)
        assert_as_serial(run_threads(N_THREADS, lambda thread: train(steps, thread, 50)), expected)  # noqa: B023
    minialpa.shutdown()


@pytest.mark.slow
def test_functions_whose_meshes_do_not_fit_together_take_turns(address: str) -> None:
    steps = [*parallel_steps(1, METHODS["shard"]), *parallel_steps(1, METHODS["pipeline"])]

    def work(thread: int) -> Any:
        return train(steps[thread % 2 : thread % 2 + 1], thread, 3)

    assert_as_serial(run_threads(4, work, 300), serial_runs(1, 4, 3))


@pytest.mark.slow
def test_a_worker_that_dies_is_told_of_to_all_threads(address: str) -> None:
    steps = parallel_steps(1, METHODS["pipeline"])
    train(steps, 0, 2)
    threads = Threads().start(N_THREADS, lambda thread: train(steps, thread, 10_000))
    time.sleep(0.5)
    os.kill(worker_pid(1), signal.SIGKILL)
    begun_s = time.monotonic()
    threads.join(SOON_S)
    assert time.monotonic() - begun_s < SOON_S
    assert len(threads.errors) == N_THREADS
    for error in threads.errors.values():
        assert isinstance(error, WorkerError) and error.stage == 1 and "its process died" in str(error)

    start(address)
    assert_as_serial(run_threads(2, lambda thread: train(steps, thread, 3)), serial_runs(1, 2, 3))


@pytest.mark.slow
def test_an_interrupt_of_one_thread_costs_the_others_nothing(address: str) -> None:
    steps = parallel_steps(1, METHODS["pipeline"])
    train(steps, 0, 1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threads = Threads().start(4, lambda thread: train(steps, thread, 60))
        for _ in range(5):
            timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                while True:
                    np.asarray(steps[0](make_params(9), make_batch(9))[1])
    finally:
        signal.signal(signal.SIGINT, before)
    threads.join(60)
    if threads.errors:  # where it came when some workers had been told of a step
        assert all("some workers had been told" in str(error) for error in threads.errors.values())
    else:
        assert_as_serial(threads, serial_runs(1, 4, 60))


@pytest.mark.slow
def test_values_that_are_fetched_while_another_thread_donates_them(address: str) -> None:
    (step,) = parallel_steps(1, METHODS["pipeline"])
    batch, states = make_batch(0), [step(make_params(0), make_batch(0))[0]]
    done = threading.Event()

    def work(thread: int) -> int:
        if thread == 0:
            for _ in range(200):
                states.append(step(states[-1], batch)[0])
            done.set()
            return 0
        n_fetched = 0
        while not done.is_set():
            try:
                assert np.all(np.isfinite(np.asarray(states[-1]["first"])))
                n_fetched += 1
            except WorkerError as error:
                assert "deleted or donated" in str(error)
        return n_fetched

    threads = run_threads(4, work)
    assert not threads.errors, threads.errors
    expected = make_params(0)
    for _ in range(201):
        expected, _ = step(expected, batch)
    assert_allclose(states[-1], expected, rtol=2e-4, atol=1e-5)
