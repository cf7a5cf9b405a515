"""Loops that each example ends by itself: what is split, by the halving law, and the nearest loops that may not be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import minialpa.rules.table  # noqa: F401 (fills the rule table)
from minialpa.rules.known_rules import factors_of
from minialpa.tracing.flattening import trace_flat
from tests.rules.rule_laws import Case, cases_of, check_all, notation, vjp

B, H = 4, 3
X = np.linspace(0.2, 9.0, B * H, dtype=np.float32).reshape(B, H)
NONE = np.zeros(B, bool)


def _loops(fun: Callable[..., Any], *arguments: Any) -> list[Case]:
    found = [case for case in cases_of(fun, *arguments) if case.eqn.primitive.name in ("scan", "while")]
    assert found
    check_all(found)  # whatever is split is split rightly
    return found


def _splits_examples(case: Case) -> bool:
    factors = factors_of(case.eqn)
    return any(factors.sizes[f] == B for f in factors.splittable)


# ---- a test for each example, under vmap ----------------------------------------------------------------------------


def _halved(x: Any, limit: Any = 1.0) -> Any:
    return lax.while_loop(lambda x: jnp.sum(x**2) > limit, lambda x: 0.5 * x, x)


def _rejected(x: Any, key: Any) -> Any:
    def body(c: Any) -> Any:
        key, draw = jax.random.split(c[1])
        return jax.random.normal(draw, (H,)), key

    return lax.while_loop(lambda c: jnp.sum(c[0]) > 1, body, (x, key))


PER_EXAMPLE: dict[str, Callable[[], list[Case]]] = {
    "a limit of its own": lambda: _loops(jax.vmap(_halved), X, np.arange(1, B + 1, dtype=np.float32)),
    "a key of its own": lambda: _loops(jax.vmap(_rejected), X, jax.random.split(jax.random.key(0), B)),
    "in a scan": lambda: _loops(
        jax.vmap(lambda xs: lax.scan(lambda c, x: (_halved(c + x), c), jnp.zeros(H), xs)), np.stack([X, X], 1)
    ),
}


@pytest.mark.parametrize("name", PER_EXAMPLE)
def test_a_loop_that_each_example_ends_by_itself_is_split(name: str) -> None:
    assert all(_splits_examples(case) for case in PER_EXAMPLE[name]())


def test_examples_that_meet_in_the_body_are_not_split() -> None:
    def fun(x: Any) -> Any:
        return lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: 0.5 * x - 0.1 * lax.pmean(x, "examples"), x)

    (case,) = _loops(jax.vmap(fun, axis_name="examples"), X)
    assert not _splits_examples(case)


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
    """Tokens until all examples have ended; `pads`: those that have ended go on with token 0."""

    def body(c: Any) -> Any:
        i, done, x, tokens = c
        new = tokens.at[:, i].set(jnp.where(done, 0, jnp.argmax(x, 1) + 1))
        tokens = new if pads else jnp.where(done[:, None], tokens, new)
        return i + 1, done | (tokens[:, i] == 2), jnp.where(done[:, None], x, jnp.roll(x, 1, 1)), tokens

    start = (0, jnp.zeros(B, bool), x, jnp.full((B, 6), 7))
    return lax.while_loop(lambda c: (c[0] < 6) & jnp.logical_not(jnp.all(c[1])), body, start)


def _two_limits(x: Any, of_test: Any, of_body: Any) -> Any:
    return lax.while_loop(lambda x: _any_above(x, of_test), lambda x: _kept(x, of_body), x)


BY_HAND: dict[str, Callable[[], list[Case]]] = {
    "kept by the condition": lambda: _loops(lambda x: lax.while_loop(_any_above, _kept, x), X),
    "kept by a flag, with counters": lambda: _loops(_with_counters, X),
    "decoding": lambda: _loops(_decoded, X),
    "a limit from outside": lambda: _loops(lambda x, limit: _two_limits(x, limit, limit), X, X[:1]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_loop_that_leaves_ended_examples_as_they_are_is_split(name: str) -> None:
    assert all(_splits_examples(case) for case in BY_HAND[name]())


def test_the_counter_of_a_loop_is_that_of_the_last_shard() -> None:
    (case,) = _loops(_with_counters, X)
    assert notation(case.eqn) == "[], [a], [a], [a B] -> [], [a], [a], [a C] max(a)"


def _while(test: Callable[..., Any], body: Callable[..., Any], *start: Any) -> Case:
    (case,) = _loops(lambda *start: lax.while_loop(lambda c: test(*c), lambda c: body(*c), start), *start)
    return case


ZERO, KEY = np.int32(0), jax.random.key(0)

#: The nearest loops whose examples depend on when the others end.
TOGETHER: dict[str, Callable[[], Case]] = {
    "nothing is kept": lambda: _while(_any_above, lambda x: (0.5 * x,), X),
    "kept by another limit": lambda: _while(_any_above, lambda x: (_kept(x, 0.5),), X),
    "one of two is kept": lambda: _while(lambda x, y: _any_above(x), lambda x, y: (_kept(x), y + x), X, X),
    "equal limits that are not the same": lambda: _loops(_two_limits, X, np.float32(2), np.float32(2))[0],
    "until the first has ended": lambda: _while(
        lambda x: jnp.all(x > 0.1), lambda x: (jnp.where(x > 0.1, 0.5 * x, x),), X
    ),
    # The largest of values among which one is not a number is none either.
    "the largest": lambda: _while(lambda x: jnp.max(x) > 1, lambda x: (_kept(x),), X),
    "a limit that changes": lambda: _while(
        lambda i, x: jnp.any(x > i.astype(jnp.float32)),
        lambda i, x: (i + 1, jnp.where(x > i.astype(jnp.float32), 0.9 * x, x)),
        ZERO,
        X,
    ),
    "a key that all share": lambda: _while(
        lambda key, x: _any_above(x),
        lambda key, x: (jax.random.split(key)[0], jnp.where(x > 1, x * jax.random.uniform(key), x)),
        KEY,
        X,
    ),
    "steps of two": lambda: _while(lambda i, x: _any_above(x), lambda i, x: (i + 2, _kept(x)), ZERO, X),
    "a narrow counter": lambda: _while(
        lambda i, x: _any_above(x), lambda i, x: (i + jnp.int8(1), _kept(x)), np.int8(0), X
    ),
    "a total": lambda: _while(
        lambda total, x: _any_above(x), lambda total, x: (total + jnp.sum(x), _kept(x)), np.float32(0), X
    ),
    "a flag for all": lambda: _while(lambda go, x: go, lambda go, x: (_any_above(x), _kept(x)), np.bool_(True), X),
    "a flag that others raise": lambda: _while(
        lambda done, x: ~jnp.all(done),
        lambda done, x: (done & (x[:, 0] < 1) | (x[:, 0] < 1), jnp.where(done[:, None], x, 0.5 * x)),
        NONE,
        X,
    ),
    "padding behind the end": lambda: _loops(lambda x: _decoded(x, pads=True), X)[0],
}


@pytest.mark.parametrize("name", TOGETHER)
def test_a_loop_whose_examples_depend_on_each_other_stays_whole(name: str) -> None:
    assert not _splits_examples(TOGETHER[name]())


# ---- a scan over the examples ---------------------------------------------------------------------------------------

W = np.linspace(-1, 1, H * H, dtype=np.float32).reshape(H, H)


def _mapped(w: Any, x: Any) -> Any:
    return lax.map(lambda row: jnp.tanh(row @ w), x)


def _scan(step: Callable[..., Any], start: Any, *, reverse: bool = False) -> Case:
    leaves, tree = jax.tree.flatten(start)
    (case,) = _loops(lambda x, *start: lax.scan(step, tree.unflatten(start), x, reverse=reverse), X, *leaves)
    return case


def test_map_over_the_examples_is_split() -> None:
    (case,) = _loops(_mapped, W, X)
    assert notation(case.eqn) == "[A b], [c D] -> [c b]"


def test_what_examples_add_to_is_a_sum() -> None:
    case = _scan(lambda total, row: (jnp.sum(row) + (total + 1.0), jnp.sin(row)), np.float32(3))
    assert notation(case.eqn) == "[], [a B] -> [], [a C] sum(a)"
    assert factors_of(case.eqn).once == {(0, 0)}


START = np.float32(1)
#: Scans in which an example sees what earlier ones have left.
IN_TURN: dict[str, Callable[[], Case]] = {
    "a product": lambda: _scan(lambda c, row: (c * jnp.sum(row), row), START),
    "a sum that is read": lambda: _scan(lambda c, row: (c + jnp.sum(row), row * c), START),
    "a sum that is a result": lambda: _scan(lambda c, row: (c + jnp.sum(row), c), START),
    "twice the sum": lambda: _scan(lambda c, row: (c + c + jnp.sum(row), row), START),
    "a sum of the other": lambda: _scan(lambda c, row: ((c[1] + 1, c[0] + 1), row), (START, START)),
    "a difference": lambda: _scan(lambda c, row: (jnp.sum(row) - c, row), START),
    "a position": lambda: _scan(lambda i, row: (i + 1, row * i.astype(jnp.float32)), ZERO),
}


@pytest.mark.parametrize("name", IN_TURN)
def test_a_scan_that_passes_something_on_is_not_split(name: str) -> None:
    assert not _splits_examples(IN_TURN[name]())


# ---- linear solves --------------------------------------------------------------------------------------------------


def test_the_gradient_of_an_iterative_solver_for_each_example_is_split() -> None:
    def solve(x: Any) -> Any:
        return jax.scipy.sparse.linalg.cg(lambda v: v * (1 + x**2), x)[0]

    flat, _ = trace_flat(vjp(jax.vmap(solve)), X)
    loops = [factors_of(eqn) for eqn in flat.eqns if eqn.primitive.name == "while"]
    assert loops
    assert all(any(factors.sizes[f] == B for f in factors.splittable) for factors in loops)
