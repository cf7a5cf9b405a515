"""Threads that call parallelized functions on workers get the results of a single thread, or an error."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import minialpa
from minialpa import MinialpaError, WorkerError
from minialpa.runtime.cluster.cluster_runtime import ClusterRuntime
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

N_THREADS = 8


@pytest.mark.usefixtures("runtime")
def test_functions_whose_meshes_do_not_fit_together_take_turns() -> None:
    steps = [*parallel_steps(1, METHODS["shard"]), *parallel_steps(1, METHODS["pipeline"])]

    def work(thread: int) -> Any:
        return train(steps[thread % 2 : thread % 2 + 1], thread, 2)

    assert_as_serial(run_threads(4, work, 300), serial_runs(1, 4, 2))


def _shutdown(_: ClusterRuntime) -> None:
    minialpa.shutdown()


def _kill(runtime: ClusterRuntime) -> None:
    runtime.launcher.end(runtime.workers[1:])


@pytest.mark.parametrize("end", [_shutdown, _kill], ids=["shutdown", "a worker that dies"])
def test_the_end_of_a_session_reaches_all_threads(runtime: ClusterRuntime, end: Callable[..., None]) -> None:
    steps = parallel_steps(1, METHODS["pipeline"])
    train(steps, 0, 2)
    threads = Threads().start(N_THREADS, lambda thread: train(steps, thread, 10_000))
    time.sleep(0.3)
    begun_s = time.monotonic()
    end(runtime)
    threads.join(10)
    assert time.monotonic() - begun_s < 10 and len(threads.errors) == N_THREADS
    for error in threads.errors.values():
        assert isinstance(error, MinialpaError), repr(error)
        if end is _kill:
            assert isinstance(error, WorkerError) and error.stage == 1 and "its process died" in str(error)


@pytest.mark.usefixtures("runtime")
def test_an_interrupt_of_one_thread_costs_the_others_nothing() -> None:
    steps = parallel_steps(1, METHODS["pipeline"])
    train(steps, 0, 1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threads = Threads().start(4, lambda thread: train(steps, thread, 30))
        for _ in range(3):
            timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                while True:
                    np.asarray(steps[0](make_params(9), make_batch(9))[1])
    finally:
        signal.signal(signal.SIGINT, before)
    threads.join(60)
    if threads.errors:  # it came when only some workers had their call of a step
        assert all("only some workers had its call" in str(error) for error in threads.errors.values())
    else:
        assert_as_serial(threads, serial_runs(1, 4, 30))


@pytest.mark.usefixtures("runtime")
def test_values_that_are_fetched_while_another_thread_donates_them() -> None:
    (step,) = parallel_steps(1, METHODS["pipeline"])
    batch, states = make_batch(0), [step(make_params(0), make_batch(0))[0]]
    done, n_steps = threading.Event(), 50

    def work(thread: int) -> None:
        if thread == 0:
            for _ in range(n_steps):
                states.append(step(states[-1], batch)[0])
            done.set()
        while not done.is_set():
            try:
                assert np.all(np.isfinite(np.asarray(states[-1]["first"])))
            except WorkerError as error:
                assert "deleted or donated" in str(error)

    threads = run_threads(4, work)
    assert not threads.errors, threads.errors
    expected = make_params(0)
    for _ in range(n_steps + 1):
        expected, _ = step(expected, batch)
    assert_allclose(states[-1], expected, rtol=2e-4, atol=1e-5)
