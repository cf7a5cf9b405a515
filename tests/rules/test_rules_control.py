"""Rules of scan, while and cond: the halving law, and factors of common loops as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import minialpa.rules.table  # noqa: F401 (fills the rule table)
from minialpa.rules.factors import Factors
from minialpa.rules.known_rules import factors_of
from tests.rules.rule_laws import Case, cases_of, check_all, notation, vjp

T, B, H, L = 3, 4, 6, 2


def _floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.1, 0.9, shape).astype(np.float32)


def _control(fun: Callable[..., Any], *arguments: Any) -> list[Case]:
    """The control flow equations of a function; some may be split."""
    leaves, tree = jax.tree.flatten(arguments)
    cases = cases_of(lambda *xs: fun(*jax.tree.unflatten(tree, xs)), *leaves)
    found = [case for case in cases if case.eqn.primitive.name in ("cond", "scan", "while")]
    assert found
    return found


def _checked(fun: Callable[..., Any], *arguments: Any) -> list[Factors]:
    found = _control(fun, *arguments)
    check_all(found)
    return [factors_of(case.eqn) for case in found]


def _rnn(w: Any, u: Any, h: Any, xs: Any) -> Any:
    def step(h: Any, x: Any) -> tuple[Any, Any]:
        h = jnp.tanh(h @ w + x @ u)
        return h, h

    return lax.scan(step, h, xs)


_RNN = (_floats(H, H), _floats(8, H, seed=1), _floats(B, H, seed=2), _floats(T, B, 8, seed=3))


def test_rnn_splits_the_batch_and_input_features_stay_whole() -> None:
    (case,) = _control(_rnn, *_RNN)
    # Features of the state are contracted and fed to tanh: blocked, like time.
    assert notation(case.eqn) == "[A B], [C D], [e F], [G e H] -> [e I], [G e J]"
    assert factors_of(case.eqn).flops == T * (2 * B * H * H + 2 * B * 8 * H + 2 * B * H)


def test_rnn_gradient_splits_the_batch_and_sums_weight_gradients() -> None:
    forward, backward = _checked(vjp(_rnn), *_RNN)
    assert [forward.may_split(f, 4) for f in forward.splittable] == [True]
    (batch,) = (f for f in backward.splittable if backward.sizes[f] == B)
    partial = [r for r in range(len(backward.results)) if backward.is_partial(batch, r)]
    split = [r for r in range(len(backward.results)) if backward.affects(batch, r) and r not in partial]
    assert [len(backward.results[r]) for r in partial] == [2, 2]  # the gradients of both weights
    assert split  # gradients of states and inputs
    assert {f for f, _ in backward.counted_once} == {batch}


def test_a_hidden_dimension_of_a_body_is_split_where_its_sums_are_linear() -> None:
    def fun(ws: Any, us: Any, x: Any) -> Any:
        return lax.scan(lambda total, w: (total + jnp.sin(x @ w[0]) @ w[1], None), jnp.zeros((B, H)), (ws, us))[0]

    (factors,) = _checked(fun, _floats(L, H, 8), _floats(L, 8, H), _floats(B, H))
    hidden, time = sorted(factors.reductions, key=lambda f: -factors.sizes[f])
    assert (factors.sizes[hidden], factors.sizes[time]) == (8, L)  # all iterations add to one sum
    assert {k for f, k in factors.counted_once if f == hidden} == {1}


def test_fori_loop_and_while_split_the_batch() -> None:
    def loop(n: Any, w: Any, x: Any) -> Any:
        return lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ w), x)

    arguments = (_floats(H, H), _floats(B, H))
    for bound in (lambda w, x: loop(3, w, x), lambda w, x: loop(jnp.int32(w.sum()), w, x)):  # a scan, a while loop
        (factors,) = _checked(bound, *arguments)
        assert [factors.sizes[f] for f in factors.splittable] == [B]


def test_a_counter_is_the_same_in_all_shards_while_a_total_is_summed() -> None:
    def fun(total: Any, x: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            i, total = carry
            return (i + 1, total + jnp.sum(row)), (i, row * 2, jnp.sum(row))

        return lax.scan(step, (jnp.int32(0), total), x)

    (factors,) = _checked(fun, np.float32(5), _floats(T, B))
    (batch,) = factors.splittable
    assert [factors.is_partial(batch, r) for r in range(5)] == [False, True, False, False, True]
    assert [factors.affects(batch, r) for r in range(5)] == [False, True, False, True, True]
    assert factors.counted_once == {(batch, 1)}


def _branches(flag: Any, w: Any, x: Any) -> Any:
    return lax.cond(flag, lambda x: (jnp.sin(x @ w), jnp.sum(x)), lambda x: (x, 0.0), x)


def test_cond_shares_factors_between_branches() -> None:
    (factors,) = _checked(_branches, np.bool_(True), _floats(H, H), _floats(B, H))
    (batch,) = factors.splittable
    assert factors.results[0][0] == (batch,)
    assert factors.reductions == {batch: "sum"}  # the other branch returns zero


def test_a_switch_with_a_sum_in_one_branch_only_is_blocked() -> None:
    def fun(i: Any, s: Any, x: Any) -> Any:
        return lax.switch(i, [lambda s, x: s, lambda s, x: jnp.sum(x)], s, x)

    assert [factors.splittable for factors in _checked(fun, np.int32(0), np.float32(1), _floats(B))] == [()]


def test_an_unknown_primitive_blocks_what_it_touches() -> None:
    def fun(x: Any, y: Any) -> Any:
        def step(carry: Any, _: None) -> Any:
            x, y = carry
            return (jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x), y * 2), None

        return lax.scan(step, (x, y), None, length=2)[0]

    (case,) = _control(fun, _floats(B), _floats(B, H))
    assert notation(case.eqn) == "[A], [b c] -> [D], [b c]"
