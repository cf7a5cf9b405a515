"""What is nearly an attention is left as it was written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from tests.recognition.compared import array, compared, recognised
from tests.recognition.test_written_attentions import KEY, QUERY, VALUE, B, N, S, T, loss_of, with_gradients

Attention = Callable[[Any, Any, Any], Any]
SCALES = np.array([1.0, 2.0, 0.5, 1.0], np.float32)


def scores_of(q: Any, k: Any) -> Any:
    return jnp.einsum("bthd,bshd->bhts", q, k)


def mixed(p: Any, v: Any) -> Any:
    return jnp.einsum("bhts,bshd->bthd", p, v)


def _other_axis(q: Any, k: Any, v: Any) -> Any:
    return mixed(jax.nn.softmax(scores_of(q, k), axis=2), v)


def _heads_axis(q: Any, k: Any, v: Any) -> Any:
    return mixed(jax.nn.softmax(scores_of(q, k), axis=1), v)


def _no_sum(q: Any, k: Any, v: Any) -> Any:
    return mixed(jnp.exp(scores_of(q, k)), v)


def _other_sum(q: Any, k: Any, v: Any) -> Any:
    x = scores_of(q, k)
    return mixed(jnp.exp(x) / jnp.exp(2 * x).sum(-1, keepdims=True), v)


def _sum_of_other_scores(q: Any, k: Any, v: Any) -> Any:
    return mixed(jnp.exp(scores_of(q, k)) / jnp.exp(scores_of(q, v)).sum(-1, keepdims=True), v)


def _sum_of_neighbours_row(q: Any, k: Any, v: Any) -> Any:
    e = jnp.exp(scores_of(q, k))
    return mixed(e / jnp.roll(e.sum(-1, keepdims=True), 1, axis=2), v)


def _plus_one(q: Any, k: Any, v: Any) -> Any:
    e = jnp.exp(scores_of(q, k))
    return mixed(e / (e.sum(-1, keepdims=True) + 1), v)


def _mask_after(q: Any, k: Any, v: Any) -> Any:
    seen = jnp.tril(jnp.ones((T, S), bool))[None, None]
    return mixed(jnp.where(seen, jax.nn.softmax(scores_of(q, k)), 0), v)


def _masked_by_other_scores(q: Any, k: Any, v: Any) -> Any:
    seen = jnp.tril(jnp.ones((T, S), bool))[None, None]
    return mixed(jax.nn.softmax(jnp.where(seen, scores_of(q, k), scores_of(q, v))), v)


def _two_masked_values(q: Any, k: Any, v: Any) -> Any:
    x = jnp.where(jnp.tril(jnp.ones((T, S), bool))[None, None], scores_of(q, k), -1e9)
    return mixed(jax.nn.softmax(jnp.where((jnp.arange(S) != 1)[None, None, None], x, -1.0)), v)


def _bias_after_mask(q: Any, k: Any, v: Any) -> Any:
    x = jnp.where(jnp.tril(jnp.ones((T, S), bool))[None, None], scores_of(q, k), -3.0)
    return mixed(jax.nn.softmax(x + jnp.arange(S, dtype=jnp.float32)[None, None, None]), v)


def _scale_of_heads(q: Any, k: Any, v: Any) -> Any:
    return mixed(jax.nn.softmax(scores_of(q, k) * SCALES[None, :, None, None]), v)


def _capped(q: Any, k: Any, v: Any) -> Any:
    return mixed(jax.nn.softmax(5 * jnp.tanh(scores_of(q, k) / 5)), v)


def _dropped(q: Any, k: Any, v: Any) -> Any:
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, (B, N, T, S))
    return mixed(jnp.where(kept, jax.nn.softmax(scores_of(q, k)) / 0.5, 0), v)


def _sink(q: Any, k: Any, v: Any) -> Any:
    x = jnp.concatenate([scores_of(q, k), jnp.zeros((B, N, T, 1))], axis=-1)
    return mixed(jax.nn.softmax(x)[..., :-1], v)


def _values_of_queries(q: Any, k: Any, v: Any) -> Any:
    w = array(9, B, T, S, N, 3)
    return jnp.einsum("bhts,btshd->bthd", jax.nn.softmax(scores_of(q, k)), w)


def _squared(q: Any, k: Any, v: Any) -> Any:
    return mixed(jax.nn.softmax(scores_of(q, k)) ** 2, v)


def _weights_returned(q: Any, k: Any, v: Any) -> Any:
    p = jax.nn.softmax(scores_of(q, k))
    return mixed(p, v) + p.max(-1).swapaxes(1, 2)[..., None]


def _scores_returned(q: Any, k: Any, v: Any) -> Any:
    x = scores_of(q, k)
    return mixed(jax.nn.softmax(x), v) + x.mean(-1).swapaxes(1, 2)[..., None]


def _shifted_by_keys(q: Any, k: Any, v: Any) -> Any:
    x = scores_of(q, k)
    e = jnp.exp(x - x.max(2, keepdims=True))
    return mixed(e / jnp.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True), v)


def _masked(q: Any, k: Any, value: float = -jnp.inf) -> Any:
    """Scores; the last query sees nothing."""
    return jnp.where((jnp.arange(T) < T - 1)[None, None, :, None], scores_of(q, k), value)


def _stopped(x: Any) -> Any:
    return jnp.exp(x - jax.lax.stop_gradient(x.max(-1, keepdims=True)))


# ---- what is an attention for most numbers, but not for all


def _without_maximum(q: Any, k: Any, v: Any) -> Any:
    e = jnp.exp(scores_of(q, k))
    return mixed(e / e.sum(-1, keepdims=True), v)


def _guarded(q: Any, k: Any, v: Any) -> Any:
    e = jnp.exp(_masked(q, k))
    total = e.sum(-1, keepdims=True)
    return mixed(e / jnp.where(total > 0, total, 1), v)


def _guarded_with_maximum(q: Any, k: Any, v: Any) -> Any:
    e = _stopped(_masked(q, k, -1e9))
    total = e.sum(-1, keepdims=True)
    return mixed(e / jnp.where(total > 0, total, 1), v)


def _at_least_epsilon(q: Any, k: Any, v: Any) -> Any:
    e = _stopped(scores_of(q, k))
    return mixed(e / jnp.maximum(e.sum(-1, keepdims=True), 1e-6), v)


def _finite_maximum(q: Any, k: Any, v: Any) -> Any:
    x = _masked(q, k)
    top = x.max(-1, keepdims=True)
    e = jnp.exp(x - jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0)))
    return mixed(e / e.sum(-1, keepdims=True), v)


def _maximum_of_at_least_zero(q: Any, k: Any, v: Any) -> Any:
    x = scores_of(q, k)
    e = jnp.exp(x - jax.lax.stop_gradient(jnp.maximum(x.max(-1, keepdims=True), 0)))
    return mixed(e / e.sum(-1, keepdims=True), v)


def _by_logsumexp(q: Any, k: Any, v: Any) -> Any:
    x = scores_of(q, k)
    return mixed(jnp.exp(x - jax.nn.logsumexp(x, -1, keepdims=True)), v)


def _by_log_softmax(q: Any, k: Any, v: Any) -> Any:
    return mixed(jnp.exp(jax.nn.log_softmax(scores_of(q, k))), v)


def _times_the_inverse(q: Any, k: Any, v: Any) -> Any:
    e = _stopped(scores_of(q, k))
    return mixed(e * (1 / e.sum(-1, keepdims=True)), v)


def _divided_last(q: Any, k: Any, v: Any) -> Any:
    e = _stopped(scores_of(q, k))
    return mixed(e, v) / e.sum(-1).swapaxes(1, 2)[..., None]


def _hidden_weights(q: Any, k: Any, v: Any) -> Any:
    seen = (jnp.arange(T) < T - 1)[None, None, :, None]
    return mixed(jnp.where(seen, jax.nn.softmax(_masked(q, k)), 0), v)


def _no_nan(q: Any, k: Any, v: Any) -> Any:
    return mixed(jnp.nan_to_num(jax.nn.softmax(_masked(q, k))), v)


def _softmax_where(q: Any, k: Any, v: Any) -> Any:
    seen = jnp.broadcast_to((jnp.arange(S) < 3)[None, None, None], (B, N, T, S))
    return mixed(jax.nn.softmax(scores_of(q, k), where=seen), v)


def _infinite_score(q: Any, k: Any, v: Any) -> Any:
    return mixed(jax.nn.softmax(_masked(q, k, jnp.inf)), v)


def _nan_score(q: Any, k: Any, v: Any) -> Any:
    return mixed(jax.nn.softmax(_masked(q, k, jnp.nan)), v)


def _empty_window(q: Any, k: Any, v: Any) -> Any:
    ahead = jnp.arange(S)[None] - jnp.arange(T)[:, None]
    return mixed(jax.nn.softmax(jnp.where(((ahead <= 0) & (ahead > 0))[None, None], scores_of(q, k), -1e9)), v)


_FAR_BELOW = np.where(np.arange(S) < 3, 0, -1e4).astype(np.float32)[None, None, None]


def _rounded_sum(q: Any, k: Any, v: Any) -> Any:
    """Beside 10,000, bfloat16 has multiples of 64 only."""
    x = scores_of(q, k).astype(jnp.bfloat16) + _FAR_BELOW.astype(jnp.bfloat16)
    return mixed(jax.nn.softmax(x.astype(jnp.float32)), v)


def _sum_rounded_later(q: Any, k: Any, v: Any) -> Any:
    x = (scores_of(q, k) + _FAR_BELOW).astype(jnp.bfloat16)
    return mixed(jax.nn.softmax(x.astype(jnp.float32)), v)


def _rounded_to_float16(q: Any, k: Any, v: Any) -> Any:
    return mixed(jax.nn.softmax(scores_of(q, k).astype(jnp.float16).astype(jnp.float32)), v)


def _scaled_twice(q: Any, k: Any, v: Any) -> Any:
    return mixed(jax.nn.softmax(scores_of(q, k) * 1e30 * 1e-30), v)


def _scaled_by_zero(q: Any, k: Any, v: Any) -> Any:
    return mixed(jax.nn.softmax(scores_of(q, k) * 0), v)


def _scaled_by_the_smallest(q: Any, k: Any, v: Any) -> Any:
    return mixed(jax.nn.softmax(scores_of(q, k) / 1e-40), v)


def _plus_a_number(q: Any, k: Any, v: Any) -> Any:
    return mixed(jax.nn.softmax(scores_of(q, k) + 1e8), v)


def _numbers_that_cancel(q: Any, k: Any, v: Any) -> Any:
    x = scores_of(q, k) + 1e30
    return mixed(jax.nn.softmax(x - 1e30), v)


def _precise(q: Any, k: Any, v: Any) -> Any:
    x = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest")
    return mixed(jax.nn.softmax(x), v)


def _maximum_of_other_scores(q: Any, k: Any, v: Any) -> Any:
    x = scores_of(q, k)
    e = jnp.exp(0.5 * x - jax.lax.stop_gradient(x.max(-1, keepdims=True)))
    return mixed(e / e.sum(-1, keepdims=True), v)


def _twice_the_weights(q: Any, k: Any, v: Any) -> Any:
    return mixed(2 * jax.nn.softmax(scores_of(q, k)), v)


def _heads_of_half_weight(q: Any, k: Any, v: Any) -> Any:
    return mixed(jnp.einsum("bhts,h->bhts", jax.nn.softmax(scores_of(q, k)), jnp.full((N,), 0.5)), v)


def _cubed_total(q: Any, k: Any, v: Any) -> Any:
    e = _stopped(scores_of(q, k))
    return mixed(e * e.sum(-1, keepdims=True) ** -3, v)


NOT_FOR_ALL_NUMBERS: list[Attention] = [
    _without_maximum, _guarded, _guarded_with_maximum, _at_least_epsilon, _finite_maximum, _maximum_of_at_least_zero,
    _by_logsumexp, _by_log_softmax, _times_the_inverse, _divided_last, _hidden_weights, _no_nan, _softmax_where,
    _infinite_score, _nan_score, _empty_window, _rounded_sum, _sum_rounded_later, _rounded_to_float16,
    _scaled_twice, _scaled_by_zero, _scaled_by_the_smallest, _plus_a_number, _numbers_that_cancel, _precise,
    _maximum_of_other_scores, _twice_the_weights, _heads_of_half_weight, _cubed_total,
]  # fmt: skip
MISSES: list[Attention] = [
    _other_axis, _heads_axis, _no_sum, _other_sum, _sum_of_other_scores, _sum_of_neighbours_row, _plus_one, _mask_after,
    _masked_by_other_scores, _two_masked_values, _bias_after_mask, _scale_of_heads, _capped, _dropped, _sink,
    _values_of_queries, _squared, _weights_returned, _scores_returned, _shifted_by_keys,
    *NOT_FOR_ALL_NUMBERS,
]  # fmt: skip


@pytest.mark.parametrize("fun", MISSES, ids=lambda fun: fun.__name__)
def test_near_misses_are_left_as_written(fun: Attention) -> None:
    for written in (fun, with_gradients(fun)):
        assert recognised(written, QUERY, KEY, VALUE).counts == (0, 0)


# ---- other derivatives ---------------------------------------------------------------------------------------------


def test_an_own_derivative_of_a_softmax_is_left_as_written() -> None:
    @jax.custom_vjp
    def softmax(x: Any) -> Any:
        return jax.nn.softmax(x)

    def backward(p: Any, g: Any) -> Any:
        return (2 * p * (g - (p * g).sum(-1, keepdims=True)),)

    softmax.defvjp(lambda x: (softmax(x),) * 2, backward)
    fun = with_gradients(lambda q, k, v: mixed(softmax(scores_of(q, k)), v))
    assert recognised(fun, QUERY, KEY, VALUE).counts == (0, 0)


SEEN = (np.arange(S) < 3)[None, None, None]
DERIVATIVES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], bool]] = {
    "a mask": (lambda x: jnp.where(SEEN, x, -1e9), lambda g: jnp.where(SEEN, g, 0), True),
    "a mask whose derivative is 1": (lambda x: jnp.where(SEEN, x, -1e9), lambda g: jnp.where(SEEN, g, 1), False),
    "a mask without a derivative": (lambda x: jnp.where(SEEN, x, -1e9), lambda g: g, False),
    "a mask with another one's": (lambda x: jnp.where(SEEN, x, -1e9), lambda g: jnp.where(~SEEN, g, 0), False),
    "a scale": (lambda x: 0.5 * x, lambda g: 0.5 * g, True),
    "another scale": (lambda x: 0.5 * x, lambda g: 0.25 * g, False),
    "a scale without a derivative": (lambda x: 0.5 * x, lambda g: g, False),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_of_scores_have_to_be_their_own(name: str) -> None:
    compute, derive, is_own = DERIVATIVES[name]
    change = jax.custom_vjp(compute)
    change.defvjp(lambda x: (compute(x), None), lambda _, g: (derive(g),))

    def attention(q: Any, k: Any, v: Any) -> Any:
        return mixed(jax.nn.softmax(change(scores_of(q, k))), v)

    assert recognised(attention, QUERY, KEY, VALUE).counts == (1, 0)
    assert recognised(with_gradients(attention), QUERY, KEY, VALUE).counts == ((1, 1) if is_own else (0, 0))


def test_a_gradient_into_the_logsumexp_is_left_as_written() -> None:
    def loss(q: Any, k: Any, v: Any) -> Any:
        x = scores_of(q, k)
        lse = jax.scipy.special.logsumexp(x, axis=-1)
        return jnp.sum(jnp.sin(mixed(jnp.exp(x - lse[..., None]), v))) + jnp.sum(lse**2)

    assert compared(jax.grad(loss, (0, 1, 2)), QUERY, KEY, VALUE).counts == (0, 0)


def test_a_gradient_through_the_maximum_is_left_as_written() -> None:
    """It is 0 for numbers, but NaN for a cotangent of infinity."""

    def attention(q: Any, k: Any, v: Any, factor: float = 0.0) -> Any:
        x = scores_of(q, k)
        top = x.max(-1, keepdims=True)
        e = jnp.exp(x - top)
        total = e.sum(-1, keepdims=True)
        return mixed(e / (total * jnp.exp(factor * top) if factor else total), v)

    assert compared(attention, QUERY, KEY, VALUE).counts == (1, 0)
    assert recognised(with_gradients(attention), QUERY, KEY, VALUE).counts == (0, 0)
    assert recognised(lambda q, k, v: attention(q, k, v, 0.1), QUERY, KEY, VALUE).counts == (0, 0)


def test_two_values_of_one_softmax_are_left_as_written() -> None:
    def fun(q: Any, k: Any, v: Any) -> Any:
        p = jax.nn.softmax(scores_of(q, k))
        return mixed(p, v) * mixed(p, k)

    assert compared(with_gradients(fun), QUERY, KEY, VALUE).counts == (0, 0)


def test_an_attention_across_a_pipeline_boundary_is_left_as_written() -> None:
    def cut(is_inside: bool) -> Callable[..., Any]:
        def loss(q: Any, k: Any, v: Any) -> Any:
            p = jax.nn.softmax(scores_of(q, k))
            if is_inside:
                minialpa.mark_pipeline_boundary()
            out = mixed(p, v)
            if not is_inside:
                minialpa.mark_pipeline_boundary()
            return loss_of(lambda: out)()

        return minialpa.value_and_grad(loss, (0, 1, 2))

    assert compared(cut(True), QUERY, KEY, VALUE).counts == (0, 0)
    assert compared(cut(False), QUERY, KEY, VALUE).counts == (1, 1)


@pytest.mark.parametrize("offset, is_on_keys", [(2**31 - 1, False), (2**31 - 1, True), (-(2**31), False)])
def test_positions_that_overflow_are_no_window(offset: int, is_on_keys: bool) -> None:
    """i + 2^31 - 1 is negative for i = 1, and from -2^31 on a difference of positions overflows."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        i, j = jnp.arange(T, dtype=np.int32)[:, None], jnp.arange(S, dtype=np.int32)[None]
        mask = j - np.int32(offset) >= i if is_on_keys else j <= i + np.int32(offset)
        return mixed(jax.nn.softmax(jnp.where(mask[None, None], scores_of(q, k), -1e9)), v)

    found = compared(attention, QUERY, KEY, VALUE)
    assert found.counts == (1, 0)
    (kind,) = (eqn.params["kind"] for eqn in found.step.flat.eqns if eqn.primitive.name == "minialpa_attention")
    assert not kind.has_window and kind.n_masks == 1
