"""Compiled functions on CPU devices: few calls are unfinished at a time, whatever becomes of their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minialpa
from minialpa.runtime.steps import compiled as compiled_functions
from minialpa.runtime.steps.compiled import PacedCall

#: XLA runs at most 32 calls on a device at a time, and half of them are left to others.
MOST_UNFINISHED = 16


class Device:
    """A device that ends calls in order, and none before somebody waits for it: the slowest one that there is."""

    def __init__(self) -> None:
        self.n_calls, self.n_ended, self.most_unfinished = 0, 0, 0

    def call(self) -> list[Result]:
        self.n_calls += 1
        self.most_unfinished = max(self.most_unfinished, self.n_calls - self.n_ended)
        return [Result(self, self.n_calls), Result(self, self.n_calls)]


class Result:
    """An array that the call with a number makes, and that a later call may take over."""

    def __init__(self, device: Device, number: int) -> None:
        self.device, self.number, self.taken = device, number, False

    def is_deleted(self) -> bool:
        return self.taken

    def block_until_ready(self) -> None:
        if self.taken:
            raise RuntimeError("BlockHostUntilReady() called on deleted or donated buffer")
        self.device.n_ended = max(self.device.n_ended, self.number)


@given(st.lists(st.booleans(), min_size=40, max_size=80))
def test_few_calls_are_unfinished_whichever_results_are_taken_over(taken: Sequence[bool]) -> None:
    device = Device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PacedCall, "_n_calls", 0)
        patch.setattr(PacedCall, "_marker", None)
        run = PacedCall(device.call, 1)
        for is_taken in taken:
            _, result = run()
            result.taken = is_taken
    assert device.most_unfinished <= MOST_UNFINISHED
    # A few calls may always run ahead: devices do not wait for Python.
    assert any(taken) or device.n_calls - device.n_ended >= compiled_functions._PERIOD


def test_an_error_of_a_call_is_left_to_who_reads_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed(Result):
        def block_until_ready(self) -> None:
            super().block_until_ready()
            raise RuntimeError("an error of the call")

    monkeypatch.setattr(PacedCall, "_n_calls", 0)
    monkeypatch.setattr(PacedCall, "_marker", None)
    device = Device()
    run = PacedCall(lambda: [Failed(device, device.call()[0].number)], 0)
    for _ in range(40):
        run()
    assert device.most_unfinished <= MOST_UNFINISHED


def test_steps_that_take_over_all_their_results_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that returns its state alone: every result is gone after the next call."""
    waited: list[bool] = []
    original = compiled_functions._await
    monkeypatch.setattr(compiled_functions, "_await", lambda result: waited.append(original(result)) or waited[-1])
    train = minialpa.parallelize(
        lambda state, x: {"w": state["w"] + jnp.sum(x)},
        method=minialpa.ShardParallel(devices=jax.devices()[:8]),
        donate_argnums=0,
        batch_argnums=(),
    )
    state: Any = {"w": jnp.zeros((8, 8))}
    for _ in range(40):
        state = train(state, jnp.ones(8))
    assert waited.count(True) >= 4
    np.testing.assert_array_equal(state["w"], 320.0)


def test_the_loss_of_a_training_step_marks_its_end() -> None:
    """Not the step count before it, which the next call takes over, and which is as small."""
    train = minialpa.parallelize(
        lambda state, x: ({"n": state["n"] + 1, "w": state["w"] * 2}, jnp.sum(x * state["w"])),
        method=minialpa.ShardParallel(devices=jax.devices()[:8]),
        donate_argnums=0,
        batch_argnums=(),
    )
    executable = train.get_executable({"n": jnp.int32(0), "w": jnp.ones(8)}, jnp.ones(8))
    (function,) = executable.runner.compiled
    assert isinstance(function, PacedCall)
    assert function._number == 2
