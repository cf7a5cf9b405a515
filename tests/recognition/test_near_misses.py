"""Near misses of an attention stay unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from tests.recognition.compared import array, compared, mixed, recognised, scores_of, softmax
from tests.recognition.test_written_attentions import KEY, QUERY, VALUE, B, N, S, T, loss_of, with_gradients

AttentionKind = Callable[[Any, Any, Any], Any]
HEADS = np.array([1.0, 2.0, 0.5, 1.0], np.float32)[None, :, None, None]
CAUSAL = np.tril(np.ones((T, S), bool))[None, None]
#: All queries but the last see all keys, and the last one sees no key.
BUT_THE_LAST = (np.arange(T) < T - 1)[None, None, :, None]
FAR_BELOW = np.where(np.arange(S) < 3, 0, -1e4).astype(np.float32)[None, None, None]


def masked(x: Any, value: float = -jnp.inf) -> Any:
    return jnp.where(BUT_THE_LAST, x, value)


def exp(x: Any, top: Any = None) -> Any:
    """exp(x - max x), without the derivative of the maximum."""
    return jnp.exp(x - jax.lax.stop_gradient(x.max(-1, keepdims=True) if top is None else top))


def _ahead() -> Any:
    return (jnp.arange(S)[None] - jnp.arange(T)[:, None])[None, None]


def total(e: Any) -> Any:
    return e.sum(-1, keepdims=True)


def normalised(e: Any) -> Any:
    return e / total(e)


def guarded(e: Any) -> Any:
    return e / jnp.where(total(e) > 0, total(e), 1)


def top_of(x: Any) -> Any:
    return x.max(-1, keepdims=True)


#: Weights of scores x [b h t s].
WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "over heads": lambda x: jax.nn.softmax(x, axis=1),
    "without a sum": jnp.exp,
    "a sum of other weights": lambda x: exp(x) / total(exp(2 * x)),
    "the sum of the neighbour": lambda x: exp(x) / jnp.roll(total(exp(x)), 1, axis=2),
    "a mask after the softmax": lambda x: jnp.where(CAUSAL, softmax(x), 0),
    "two masked scores": lambda x: softmax(
        jnp.where((np.arange(S) != 1)[None, None, None], jnp.where(CAUSAL, x, -1e9), -1.0)
    ),
    "a bias after a mask": lambda x: softmax(
        jnp.where(CAUSAL, x, -3.0) + np.arange(S, dtype=np.float32)[None, None, None]
    ),
    "a scale for each head": lambda x: softmax(x * HEADS),
    "capped": lambda x: softmax(5 * jnp.tanh(x / 5)),
    "dropped": lambda x: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), softmax(x) / 0.5, 0),
    "a sink": lambda x: softmax(jnp.concatenate([x, jnp.zeros((B, N, T, 1))], axis=-1))[..., :-1],
    "squared": lambda x: softmax(x) ** 2,
    "shifted by keys": lambda x: jnp.exp(x - x.max(2, keepdims=True)) / total(jnp.exp(x - top_of(x))),
    # Attentions for most numbers, but not for all.
    "without a maximum": lambda x: normalised(jnp.exp(x)),
    "a guarded total": lambda x: guarded(exp(masked(x, -1e9))),
    "at least epsilon": lambda x: exp(x) / jnp.maximum(total(exp(x)), 1e-6),
    "a finite maximum": lambda x: normalised(
        exp(masked(x), jnp.where(jnp.isfinite(top_of(masked(x))), top_of(masked(x)), 0))
    ),
    "a maximum of at least zero": lambda x: normalised(exp(x, jnp.maximum(top_of(x), 0))),
    "the maximum of other scores": lambda x: normalised(exp(0.5 * x, top_of(x))),
    "by logsumexp": lambda x: jnp.exp(x - jax.nn.logsumexp(x, -1, keepdims=True)),
    "by log_softmax": lambda x: jnp.exp(jax.nn.log_softmax(x)),
    "times the inverse": lambda x: exp(x) * (1 / total(exp(x))),
    "a cubed total": lambda x: exp(x) * total(exp(x)) ** -3,
    "without NaN": lambda x: jnp.nan_to_num(softmax(masked(x))),
    "softmax where": lambda x: jax.nn.softmax(
        x, where=jnp.broadcast_to((np.arange(S) < 3)[None, None, None], (B, N, T, S))
    ),
    "an infinite score": lambda x: softmax(masked(x, jnp.inf)),
    "an empty window": lambda x: softmax(jnp.where((_ahead() <= 0) & (_ahead() > 0), x, -1e9)),
    # Beside 10,000, bfloat16 has multiples of 64 only.
    "a rounded sum": lambda x: softmax((x.astype(jnp.bfloat16) + FAR_BELOW.astype(jnp.bfloat16)).astype(jnp.float32)),
    "a sum that is rounded": lambda x: softmax((x + FAR_BELOW).astype(jnp.bfloat16).astype(jnp.float32)),
    "rounded to float16": lambda x: softmax(x.astype(jnp.float16).astype(jnp.float32)),
    "scaled twice": lambda x: softmax(x * 1e30 * 1e-30),
    "scaled by zero": lambda x: softmax(x * 0),
    "divided by the smallest": lambda x: softmax(x / 1e-40),
    "numbers that cancel": lambda x: softmax(x + 1e30 - 1e30),
    "twice the weights": lambda x: 2 * softmax(x),
    "heads of half weight": lambda x: jnp.einsum("bhts,h->bhts", softmax(x), jnp.full((N,), 0.5)),
}


def _by_weights(weights: Callable[[Any], Any]) -> AttentionKind:
    return lambda q, k, v: mixed(weights(scores_of(q, k)), v)


def _values_of_queries(q: Any, k: Any, v: Any) -> Any:
    return jnp.einsum("bhts,btshd->bthd", softmax(scores_of(q, k)), array(9, B, T, S, N, 3))


def _two_values(q: Any, k: Any, v: Any) -> Any:
    p = softmax(scores_of(q, k))
    return mixed(p, v) * mixed(p, k)


def _with_other_result(q: Any, k: Any, v: Any, result: Callable[[Any], Any]) -> Any:
    x = scores_of(q, k)
    return mixed(softmax(x), v) + result(x).swapaxes(1, 2)[..., None]


MISSES: dict[str, AttentionKind] = {
    **{name: _by_weights(weights) for name, weights in WEIGHTS.items()},
    "a sum of other scores": lambda q, k, v: mixed(jnp.exp(scores_of(q, k)) / total(jnp.exp(scores_of(q, v))), v),
    "masked by other scores": lambda q, k, v: mixed(softmax(jnp.where(CAUSAL, scores_of(q, k), scores_of(q, v))), v),
    "values of queries": _values_of_queries,
    "two values of one softmax": _two_values,
    "weights that are a result": lambda q, k, v: _with_other_result(q, k, v, lambda x: softmax(x).max(-1)),
    "scores that are a result": lambda q, k, v: _with_other_result(q, k, v, lambda x: x.mean(-1)),
    "divided last": lambda q, k, v: (
        mixed(exp(scores_of(q, k)), v) / exp(scores_of(q, k)).sum(-1).swapaxes(1, 2)[..., None]
    ),
    "precise": lambda q, k, v: mixed(softmax(jnp.einsum("bthd,bshd->bhts", q, k, precision="highest")), v),
}


@pytest.mark.parametrize("name", MISSES)
def test_near_misses_are_left_as_written(name: str) -> None:
    for written in (MISSES[name], with_gradients(MISSES[name])):
        assert recognised(written, QUERY, KEY, VALUE).counts == (0, 0)


# ---- other derivatives ---------------------------------------------------------------------------------------------


def test_an_own_derivative_of_a_softmax_is_left_as_written() -> None:
    own = jax.custom_vjp(softmax)

    def backward(p: Any, g: Any) -> Any:
        return (2 * p * (g - (p * g).sum(-1, keepdims=True)),)

    own.defvjp(lambda x: (softmax(x),) * 2, backward)
    fun = with_gradients(lambda q, k, v: mixed(own(scores_of(q, k)), v))
    assert recognised(fun, QUERY, KEY, VALUE).counts == (0, 0)


SEEN = (np.arange(S) < 3)[None, None, None]
DERIVATIVES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], bool]] = {
    "a mask": (lambda x: jnp.where(SEEN, x, -1e9), lambda g: jnp.where(SEEN, g, 0), True),
    "a mask without a derivative": (lambda x: jnp.where(SEEN, x, -1e9), lambda g: g, False),
    "a mask with another one's": (lambda x: jnp.where(SEEN, x, -1e9), lambda g: jnp.where(~SEEN, g, 0), False),
    "a scale": (lambda x: 0.5 * x, lambda g: 0.5 * g, True),
    "another scale": (lambda x: 0.5 * x, lambda g: 0.25 * g, False),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_of_scores_have_to_be_their_own(name: str) -> None:
    compute, derive, is_own = DERIVATIVES[name]
    change = jax.custom_vjp(compute)
    change.defvjp(lambda x: (compute(x), None), lambda _, g: (derive(g),))

    def attention(q: Any, k: Any, v: Any) -> Any:
        return mixed(softmax(change(scores_of(q, k))), v)

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


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32])
def test_unsigned_differences_of_positions_are_no_window(dtype: Any) -> None:
    """i - j is large where j > i."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        i, j = jnp.arange(T, dtype=dtype)[:, None], jnp.arange(S, dtype=dtype)[None]
        return mixed(jax.nn.softmax(jnp.where((i - j < 3)[None, None], scores_of(q, k), -1e9)), v)

    found = compared(attention, QUERY, KEY, VALUE)
    assert found.counts == (1, 0)
    (kind,) = (eqn.params["kind"] for eqn in found.step.flat.eqns if eqn.primitive.name == "minialpa_attention")
    assert not kind.has_window and kind.n_masks == 1
