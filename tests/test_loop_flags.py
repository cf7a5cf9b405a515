"""Loops with a flag for each example test the flag if their test computes the same: results are equal to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import minialpa
import minialpa.rules.table  # noqa: F401 (fills the rule table)
from minialpa import DataParallel, ShardParallel
from minialpa.ir.block import Block
from minialpa.ir.equations import sub_jaxprs
from minialpa.methods import Method
from minialpa.rules.known_rules import factors_of
from minialpa.tracing.evaluation import eval_flat
from minialpa.tracing.flags import with_flags_as_tests
from minialpa.tracing.flattening import trace_flat

B = 8
X = np.array([20, 0.1, 9, 3, 0.5, 7, 12, 1], np.float32)


def _above(x: Any) -> Any:
    return x > 1


def _above_mean(x: Any) -> Any:
    return x > jnp.mean(x)


def _reversed(x: Any) -> Any:
    return x[::-1] > 1


def _loops(eqns: Any) -> list[Any]:
    found = [eqn for eqn in eqns if eqn.primitive.name == "while"]
    return found + [loop for eqn in eqns for inner in sub_jaxprs(eqn) for loop in _loops(inner.eqns)]


def _rewritten(fun: Callable[..., Any], *args: Any) -> tuple[Block, Block]:
    """The program before and after; checks that they compute the same."""
    flat, _ = trace_flat(fun, *args)
    new = with_flags_as_tests(flat)
    run = jax.jit(lambda *xs: (eval_flat(flat, xs), eval_flat(new, xs)))
    for one, other in zip(*run(*args), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype
    return flat, new


def _loop(
    *, start: Any = _above, again: Any = _above, chosen: Any = lambda flag, x: flag, test: Any = _above,
    old: Any = lambda x: x, join: Any = jnp.logical_and,
) -> Callable[..., Any]:  # fmt: skip
    """`while any(c(x))` with a flag; each argument changes one place of it. The second flag has no reader."""

    def body(carry: Any) -> Any:
        x, flag, _, n = carry
        new = 0.5 * x
        return jnp.where(chosen(flag, x), new, old(x)), join(flag, again(new)), flag, n + 1

    def fun(x: Any) -> Any:
        first = x, start(x), start(x), 0
        return lax.while_loop(lambda c: jnp.any(test(c[0])) & (c[3] < 9), body, first)[0]

    return fun


def _of_equinox(x: Any, limit: Any = 1.0) -> Any:
    def loop(r: Any) -> Any:
        halved = lambda c: (0.5 * c[0], c[1] + 1)  # noqa: E731
        return eqxi.while_loop(lambda c: c[0] > limit, halved, (r, 0), kind="lax", max_steps=9)

    return jax.vmap(loop)(x)


#: Programs with one such loop.
SAME: dict[str, Callable[..., Any]] = {
    "by hand": _loop(),
    "in a branch": lambda x: lax.cond(x[0] > 0, _loop(), jnp.sin, x),
    "of equinox": lambda x: _of_equinox(x)[0],
}


@pytest.mark.parametrize("name", SAME)
def test_the_loop_tests_its_flag(name: str) -> None:
    before, after = _rewritten(SAME[name], X)
    (old,), (new,) = _loops(before.eqns), _loops(after.eqns)
    assert len(new.outvars) < len(old.outvars)  # the second flag is gone
    factors = factors_of(new)
    assert any(factors.sizes[f] == B for f in factors.splittable)
    if name != "by hand":
        return
    test = new.params["cond_jaxpr"].jaxpr
    (any_of,) = (eqn for eqn in test.eqns if eqn.primitive.name == "reduce_or")
    assert any_of.invars[0] in test.invars


#: The nearest loops with another flag.
OTHERS: dict[str, Callable[..., Any]] = {
    "another flag before the loop": _loop(start=lambda x: x > 2),
    "chosen by something else": _loop(chosen=lambda flag, x: x > 3),
    "the old value changes": _loop(old=lambda x: 0.9 * x),
    "the flag is only the condition": _loop(join=lambda flag, new: new),
    "examples that meet in the test": _loop(start=_above_mean, again=_above_mean, test=_above_mean),
    "examples in another order": _loop(start=_reversed, again=_reversed, test=_reversed),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_nearest_loops_stay_as_they_are(name: str) -> None:
    before, after = _rewritten(OTHERS[name], X)
    assert all(new is old for new, old in zip(after.eqns, before.eqns, strict=True))


def _step(w: jax.Array, x: jax.Array) -> Any:
    def loss(w: jax.Array, x: jax.Array) -> Any:
        ended = _of_equinox(lax.stop_gradient(x * w))[0]
        return jnp.mean((jnp.sin(x * w) + ended) ** 2)

    value, gradient = minialpa.value_and_grad(loss)(w, x)
    return w - 0.1 * gradient, value


@pytest.mark.parametrize(
    "method",
    [lambda: ShardParallel(jax.devices()[:1], 2), lambda: DataParallel(jax.devices()[:4], 1)],
    ids=["micro-batches", "devices"],
)
def test_a_loop_of_equinox_runs_in_one_pass(method: Callable[[], Method]) -> None:
    w = np.float32(1.5)
    parallel = minialpa.parallelize(_step, method=method(), batch_argnums=(1,), donate_argnums=())
    for found, expected in zip(parallel(w, X), jax.jit(_step)(w, X), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
    assert parallel.get_last_executable().get_parallel_plan().n_loops == 1
