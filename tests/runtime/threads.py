"""Threads that train at the same time, each a separate model, with the same functions; and one thread's results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import minialpa
from minialpa.testing import assert_allclose

WIDTH, N_EXAMPLES = 8, 8


def loss_fn(target: float, params: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch @ params["first"])
    minialpa.mark_pipeline_boundary()
    return jnp.mean((hidden @ params["second"] - target) ** 2)


def train_step(target: float, value_and_grad: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """A step towards `target`, written for one device: other targets are other functions."""

    def step(params: Any, batch: Any) -> Any:
        loss, grads = value_and_grad(lambda p: loss_fn(target, p, batch))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def parallel_steps(n: int, method: Any) -> list[Any]:
    return [minialpa.parallelize(train_step(i, minialpa.value_and_grad), method=method) for i in range(n)]


def make_params(thread: int) -> Any:
    rng = np.random.default_rng(thread)
    return {name: jnp.asarray(rng.standard_normal((WIDTH, WIDTH), np.float32)) for name in ("first", "second")}


def make_batch(i: int) -> Any:
    return np.random.default_rng(1000 + i).standard_normal((N_EXAMPLES, WIDTH)).astype(np.float32)


def train(steps: Sequence[Callable[..., Any]], thread: int, n_steps: int) -> Any:
    """Parameters and losses of one thread's training: it calls the functions in turn, and looks at some losses."""
    params = make_params(thread)
    losses = []
    for i in range(n_steps):
        params, loss = steps[(thread + i) % len(steps)](params, make_batch(i))
        losses.append(float(loss) if i % 7 == thread % 7 else loss)
    return jax.tree.map(np.asarray, (params, losses))


@dataclass
class Threads:
    """What each thread has returned, or raised, and how many seconds that took."""

    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    running: list[threading.Thread] = field(default_factory=list)

    def start(self, n: int, work: Callable[[int], Any]) -> Threads:
        """Begin `work(thread)` in `n` threads at the same time."""
        gate = threading.Barrier(n)

        def run(i: int) -> None:
            gate.wait()
            begun_s = time.monotonic()
            try:
                self.results[i] = work(i)
            except BaseException as error:
                self.errors[i] = error
            self.seconds[i] = time.monotonic() - begun_s

        self.running = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(n)]
        for thread in self.running:
            thread.start()
        return self

    def join(self, within_s: float) -> Threads:
        """Wait for all of them. Fails if one does not end."""
        deadline = time.monotonic() + within_s
        for thread in self.running:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in self.running), f"threads hang: {self}"
        return self


def run_threads(n: int, work: Callable[[int], Any], within_s: float = 120.0) -> Threads:
    return Threads().start(n, work).join(within_s)


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of calls that wait for each other, each in a thread."""
    threads = run_threads(len(calls), lambda i: calls[i]())
    if threads.errors:
        raise next(iter(threads.errors.values()))
    return [threads.results[i] for i in range(len(calls))]


def serial_runs(n_functions: int, n_threads: int, n_steps: int) -> dict[int, Any]:
    """The results of each thread, run on one device, one thread after the other."""
    steps = [jax.jit(train_step(i, jax.value_and_grad)) for i in range(n_functions)]
    return {thread: train(steps, thread, n_steps) for thread in range(n_threads)}


def assert_as_serial(threads: Threads, expected: dict[int, Any]) -> None:
    if threads.errors:
        raise next(iter(threads.errors.values()))
    for thread, run in expected.items():
        assert_allclose(threads.results[thread], run, rtol=2e-4, atol=1e-5)
