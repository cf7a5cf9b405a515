"""Compiled functions: equal ones are compiled once, and few calls are unfinished at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import minialpa
from minialpa.runtime.steps import compiled as compiled_functions
from minialpa.runtime.steps.compiled import PacedCall, compile_all, lower

#: XLA runs at most 32 calls on a device at a time, and half of them are left to others.
MOST_UNFINISHED = 16


class Device:
    """A device that ends calls in order, each when it is waited for: the slowest device possible."""

    def __init__(self, fails: bool = False) -> None:
        self.n_calls, self.n_ended, self.most_unfinished, self.fails = 0, 0, 0, fails

    def call(self) -> list[Result]:
        self.n_calls += 1
        self.most_unfinished = max(self.most_unfinished, self.n_calls - self.n_ended)
        return [Result(self, self.n_calls), Result(self, self.n_calls)]


class Result:
    """An array of the call with a number, which a later call may donate."""

    def __init__(self, device: Device, number: int) -> None:
        self.device, self.number, self.taken = device, number, False

    def is_deleted(self) -> bool:
        return self.taken

    def block_until_ready(self) -> None:
        if self.taken:
            raise RuntimeError("BlockHostUntilReady() called on deleted or donated buffer")
        self.device.n_ended = max(self.device.n_ended, self.number)
        if self.device.fails:
            raise RuntimeError("an error of the call")


@given(st.lists(st.booleans(), min_size=40, max_size=80), st.booleans())
def test_few_calls_are_unfinished_whichever_results_are_taken_over(taken: Sequence[bool], fails: bool) -> None:
    """An error of a call is left to the reader of its results."""
    device = Device(fails)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PacedCall, "_n_calls", 0)
        patch.setattr(PacedCall, "_marker", None)
        run = PacedCall(device.call)
        for is_taken in taken:
            _, result = run()
            result.taken = is_taken
    assert device.most_unfinished <= MOST_UNFINISHED
    # A few calls may always run ahead: devices do not wait for Python.
    assert any(taken) or device.n_calls - device.n_ended >= compiled_functions._PERIOD


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


def lowered(function: Callable[..., Any], *, aval: Any = None, n_devices: int = 1, **options: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()[:n_devices]), ("x",))
    places = [NamedSharding(mesh, PartitionSpec("x"))]
    avals = [jax.ShapeDtypeStruct((4,), jnp.float32) if aval is None else aval]
    given = {"donated": (), **options}
    return lower(function, avals, mesh=mesh, in_shardings=places, out_shardings=places, **given)


def compiled(*functions: Callable[..., Any], n_devices: int = 2) -> list[Any]:
    return compile_all(lowered(function, n_devices=n_devices) for function in functions)


def scaled(by: Any) -> Callable[[Any], tuple[Any, ...]]:
    return lambda x: (x * by,)


def test_equal_functions_are_compiled_once_and_others_are_not() -> None:
    table = np.arange(4, dtype=np.float32)
    functions = [scaled(2.0), scaled(2.0), scaled(3.0), scaled(table), scaled(table + 1), scaled(table.copy())]
    made = compiled(*functions)
    assert [made.index(one) for one in made] == [0, 0, 2, 3, 4, 3]
    x = np.ones(4, np.float32)
    for function, (wanted,) in zip(made, (function(x) for function in functions), strict=True):
        np.testing.assert_array_equal(function(x)[0], np.broadcast_to(wanted, (4,)))


def test_large_constants_are_compared_to_the_last_element() -> None:
    """Texts of programs may leave elements of constants out."""
    one = np.random.default_rng(0).standard_normal((512, 512), np.float32)
    other = one.copy()
    other[300, 300] += 1
    first, second, third = compiled(*(lambda x, c=c: (x + c[300:304, 300] @ c[:4, :4],) for c in (one, other, one)))
    assert first is third and first is not second


def test_calls_back_into_python_are_not_shared() -> None:
    """Their texts are equal: functions are named by their numbers there."""

    def calling(function: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
        return lambda x: (jax.pure_callback(function, jax.ShapeDtypeStruct(x.shape, x.dtype), x),)

    made = compiled(calling(lambda x: x + 1), calling(lambda x: x + 2), n_devices=1)
    assert [float(call(np.zeros(4, np.float32))[0][0]) for call in made] == [1.0, 2.0]


def test_weak_types_and_donated_arguments_tell_functions_apart() -> None:
    """The text of a program has no weak types."""
    weak = jax.ShapeDtypeStruct((4,), jnp.float32, weak_type=True)
    double = scaled(2.0)
    made = compile_all([lowered(double), lowered(double, aval=weak), lowered(double, donated=(0,)), lowered(double)])
    assert [made.index(one) for one in made] == [0, 1, 2, 0]


def test_functions_are_compiled_with_their_options() -> None:
    hiding = (("xla_gpu_enable_latency_hiding_scheduler", True),)
    double = scaled(2.0)
    made = compile_all(lowered(double, compiler_options=options) for options in ((), hiding, hiding))
    assert [made.index(one) for one in made] == [0, 1, 1]
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        compile_all([lowered(double, compiler_options=(("xla_no_such_option", True),))])
