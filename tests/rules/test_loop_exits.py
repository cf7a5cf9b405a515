"""Loops with an exit for each example: split factors, by the halving law, and the nearest loops without a split."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import JaxprEqn

import minialpa.rules.table  # noqa: F401 (fills the rule table)
from minialpa.rules.known_rules import factors_of
from minialpa.tracing.flattening import trace_flat
from tests.rules.rule_laws import cases_of_all, check_all, equations_of, notation, vjp

B, H = 4, 3
X = np.linspace(0.2, 9.0, B * H, dtype=np.float32).reshape(B, H)
NONE = np.zeros(B, bool)
ZERO, START, KEY = np.int32(0), np.float32(1), jax.random.key(0)

#: A function and its arguments.
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def _loops(program: Program) -> list[JaxprEqn]:
    fun, arguments = program
    eqns = equations_of(jax.make_jaxpr(fun)(*arguments).jaxpr)
    found = [eqn for eqn in eqns if eqn.primitive.name in ("scan", "while")]
    assert found
    return found


def _notation(program: Program) -> str:
    (eqn,) = _loops(program)
    return notation(eqn)


def _splits_examples(eqn: JaxprEqn) -> bool:
    factors = factors_of(eqn)
    return any(factors.sizes[f] == B for f in factors.splittable)


# ---- a test for each example, under vmap ----------------------------------------------------------------------------


def _halved(x: Any, limit: Any = 1.0) -> Any:
    return lax.while_loop(lambda x: jnp.sum(x**2) > limit, lambda x: 0.5 * x, x)


def _rejected(x: Any, key: Any) -> Any:
    def body(c: Any) -> Any:
        key, draw = jax.random.split(c[1])
        return jax.random.normal(draw, (H,)), key

    return lax.while_loop(lambda c: jnp.sum(c[0]) > 1, body, (x, key))


def _halved_in_a_scan(xs: Any) -> Any:
    return lax.scan(lambda c, x: (_halved(c + x), c), jnp.zeros(H), xs)


def _meeting(x: Any) -> Any:
    return lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: 0.5 * x - 0.1 * lax.pmean(x, "examples"), x)


# ---- a loop over the batch by hand ----------------------------------------------------------------------------------


def _any_above(x: Any, limit: Any = 1.0) -> Any:
    return jnp.any(x > limit)


def _kept(x: Any, limit: Any = 1.0) -> Any:
    return jnp.where(x > limit, 0.5 * x, x)


def _with_counters(x: Any) -> Any:
    def body(c: Any) -> Any:
        i, n, done, x = c
        x = jnp.where(done[:, None], x, 0.5 * x)
        return i + 1, n + (~done).astype(jnp.int32), done | (jnp.max(x, 1) < 1), x

    start = (0, jnp.zeros(B, jnp.int32), jnp.zeros(B, bool), x)
    return lax.while_loop(lambda c: (c[0] < 9) & ~jnp.all(c[2]), body, start)


def _decoded(x: Any, *, pads: bool = False) -> Any:
    """Tokens until all examples have ended; `pads`: ended examples continue with token 0."""

    def body(c: Any) -> Any:
        i, done, x, tokens = c
        new = tokens.at[:, i].set(jnp.where(done, 0, jnp.argmax(x, 1) + 1))
        tokens = new if pads else jnp.where(done[:, None], tokens, new)
        return i + 1, done | (tokens[:, i] == 2), jnp.where(done[:, None], x, jnp.roll(x, 1, 1)), tokens

    start = (0, jnp.zeros(B, bool), x, jnp.full((B, 6), 7))
    return lax.while_loop(lambda c: (c[0] < 6) & jnp.logical_not(jnp.all(c[1])), body, start)


def _two_limits(x: Any, of_test: Any, of_body: Any) -> Any:
    return lax.while_loop(lambda x: _any_above(x, of_test), lambda x: _kept(x, of_body), x)


def _while(test: Callable[..., Any], body: Callable[..., Any], *start: Any) -> Program:
    return lambda *start: lax.while_loop(lambda c: test(*c), lambda c: body(*c), start), start


# ---- a scan over the examples ---------------------------------------------------------------------------------------

W = np.linspace(-1, 1, H * H, dtype=np.float32).reshape(H, H)


def _scan(step: Callable[..., Any], start: Any) -> Program:
    leaves, tree = jax.tree.flatten(start)
    return lambda x, *start: lax.scan(step, tree.unflatten(start), x), (X, *leaves)


WITH_COUNTERS: Program = (_with_counters, (X,))
MAPPED: Program = (lambda w, x: lax.map(lambda row: jnp.tanh(row @ w), x), (W, X))
SUMMED = _scan(lambda total, row: (jnp.sum(row) + (total + 1.0), jnp.sin(row)), np.float32(3))

#: Loops with an exit for each example, loops that keep ended examples, and loops over the examples.
APART: dict[str, Program] = {
    "a limit of its own": (jax.vmap(_halved), (X, np.arange(1, B + 1, dtype=np.float32))),
    "a key of its own": (jax.vmap(_rejected), (X, jax.random.split(KEY, B))),
    "in a scan": (jax.vmap(_halved_in_a_scan), (np.stack([X, X], 1),)),
    "kept by the condition": (lambda x: lax.while_loop(_any_above, _kept, x), (X,)),
    "kept by a flag, with counters": WITH_COUNTERS,
    "decoding": (_decoded, (X,)),
    "a limit from outside": (lambda x, limit: _two_limits(x, limit, limit), (X, X[:1])),
    "a map": MAPPED,
    "a sum": SUMMED,
}

#: The nearest loops whose examples depend on each other, or on the exits of other examples.
TOGETHER: dict[str, Program] = {
    "a mean of the examples": (jax.vmap(_meeting, axis_name="examples"), (X,)),
    "nothing is kept": _while(_any_above, lambda x: (0.5 * x,), X),
    "kept by another limit": _while(_any_above, lambda x: (_kept(x, 0.5),), X),
    "one of two is kept": _while(lambda x, y: _any_above(x), lambda x, y: (_kept(x), y + x), X, X),
    "equal limits that are not the same": (_two_limits, (X, np.float32(2), np.float32(2))),
    "until the first has ended": _while(lambda x: jnp.all(x > 0.1), lambda x: (jnp.where(x > 0.1, 0.5 * x, x),), X),
    # The largest of values with a NaN is a NaN.
    "the largest": _while(lambda x: jnp.max(x) > 1, lambda x: (_kept(x),), X),
    "a limit that changes": _while(
        lambda i, x: jnp.any(x > i.astype(jnp.float32)),
        lambda i, x: (i + 1, jnp.where(x > i.astype(jnp.float32), 0.9 * x, x)),
        ZERO,
        X,
    ),
    "a key that all share": _while(
        lambda key, x: _any_above(x),
        lambda key, x: (jax.random.split(key)[0], jnp.where(x > 1, x * jax.random.uniform(key), x)),
        KEY,
        X,
    ),
    "steps of two": _while(lambda i, x: _any_above(x), lambda i, x: (i + 2, _kept(x)), ZERO, X),
    "a narrow counter": _while(lambda i, x: _any_above(x), lambda i, x: (i + jnp.int8(1), _kept(x)), np.int8(0), X),
    "a total": _while(lambda total, x: _any_above(x), lambda total, x: (total + jnp.sum(x), _kept(x)), START, X),
    "a flag for all": _while(lambda go, x: go, lambda go, x: (_any_above(x), _kept(x)), np.bool_(True), X),
    "a flag that others raise": _while(
        lambda done, x: ~jnp.all(done),
        lambda done, x: (done & (x[:, 0] < 1) | (x[:, 0] < 1), jnp.where(done[:, None], x, 0.5 * x)),
        NONE,
        X,
    ),
    "padding behind the end": (functools.partial(_decoded, pads=True), (X,)),
    # In these scans, an example reads a carry of earlier ones.
    "a product": _scan(lambda c, row: (c * jnp.sum(row), row), START),
    "a sum that is read": _scan(lambda c, row: (c + jnp.sum(row), row * c), START),
    "a sum that is a result": _scan(lambda c, row: (c + jnp.sum(row), c), START),
    "twice the sum": _scan(lambda c, row: (c + c + jnp.sum(row), row), START),
    "a sum of the other": _scan(lambda c, row: ((c[1] + 1, c[0] + 1), row), (START, START)),
    "a difference": _scan(lambda c, row: (jnp.sum(row) - c, row), START),
    "a position": _scan(lambda i, row: (i + 1, row * i.astype(jnp.float32)), ZERO),
}


@pytest.mark.parametrize("name", APART)
def test_a_loop_whose_examples_are_apart_is_split(name: str) -> None:
    assert all(map(_splits_examples, _loops(APART[name])))


@pytest.mark.parametrize("name", TOGETHER)
def test_a_loop_whose_examples_depend_on_each_other_stays_whole(name: str) -> None:
    assert not any(map(_splits_examples, _loops(TOGETHER[name])))


@pytest.mark.parametrize("programs", [APART, TOGETHER], ids=["apart", "together"])
def test_whatever_is_split_is_split_rightly(programs: dict[str, Program]) -> None:
    cases = cases_of_all(list(programs.values()))
    check_all([case for case in cases if case.eqn.primitive.name in ("scan", "while")])


def test_counters_and_sums_are_combined() -> None:
    """The counter of a loop comes from the last shard; a carry to which examples add is a sum, which starts once."""
    assert _notation(WITH_COUNTERS) == "[], [a], [a], [a B] -> [], [a], [a], [a C] max(a)"
    assert _notation(MAPPED) == "[A b], [c D] -> [c b]"
    assert _notation(SUMMED) == "[], [a B] -> [], [a C] sum(a)"
    (eqn,) = _loops(SUMMED)
    assert factors_of(eqn).counted_once == {(0, 0)}


# ---- linear solves --------------------------------------------------------------------------------------------------


def test_the_gradient_of_an_iterative_solver_for_each_example_is_split() -> None:
    def solve(x: Any) -> Any:
        return jax.scipy.sparse.linalg.cg(lambda v: v * (1 + x**2), x)[0]

    flat, _ = trace_flat(vjp(jax.vmap(solve)), X)
    loops = [factors_of(eqn) for eqn in flat.eqns if eqn.primitive.name == "while"]
    assert loops
    assert all(any(factors.sizes[f] == B for f in factors.splittable) for factors in loops)
