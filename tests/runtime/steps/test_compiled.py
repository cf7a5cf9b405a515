"""Compiled functions: equal ones are compiled once; few calls are unfinished at a time, and no result is kept that is
not needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from minialpa.runtime.steps.compiled import PacedCall, compile_all, lower


class Result:
    """An array that notes whether somebody waited for it, and may have been taken over by another call."""

    def __init__(self, taken: bool) -> None:
        self.taken, self.waited = taken, False

    def block_until_ready(self) -> None:
        self.waited = True
        if self.taken:
            raise RuntimeError("BlockHostUntilReady() called on deleted or donated buffer")


@pytest.mark.parametrize("taken", [False, True])
def test_a_call_waits_for_the_smallest_result_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch, taken: bool) -> None:
    monkeypatch.setattr(PacedCall, "_unfinished", deque())
    calls: list[list[Result]] = []

    def compiled(*_: Any) -> list[Result]:
        calls.append([Result(taken), Result(taken), Result(taken)])
        return calls[-1]

    run = PacedCall(compiled, sizes=[6, 1, 4])
    for _ in range(40):
        assert run("x") is calls[-1]
    waited = [smallest.waited for _, smallest, _ in calls]
    assert waited == [True] * 24 + [False] * 16
    assert not any(large.waited or middle.waited for large, _, middle in calls)


def compiled(*functions: Callable[..., Any], n_devices: int = 2, aval: Any = None, donated: Any = ()) -> list[Any]:
    mesh = Mesh(np.array(jax.devices()[:n_devices]), ("x",))
    avals = [jax.ShapeDtypeStruct((4,), jnp.float32) if aval is None else aval]
    specs = [PartitionSpec("x")]
    return compile_all(
        lower(function, avals, mesh=mesh, in_specs=specs, out_specs=specs, donated=donated) for function in functions
    )


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
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    spec = [PartitionSpec()]

    def lowered(aval: Any, donated: Any) -> Any:
        return lower(scaled(2.0), [aval], mesh=mesh, in_specs=spec, out_specs=spec, donated=donated)

    strong = jax.ShapeDtypeStruct((4,), jnp.float32)
    made = compile_all(lowered(*each) for each in ((strong, ()), (weak, ()), (strong, (0,)), (strong, ())))
    assert [made.index(one) for one in made] == [0, 1, 2, 0]
