"""What is nearly an attention is left as it was written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from tests.recognition.compared import array, compared
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


MISSES: list[Attention] = [
    _other_axis, _heads_axis, _no_sum, _other_sum, _sum_of_other_scores, _sum_of_neighbours_row, _plus_one, _mask_after,
    _masked_by_other_scores, _two_masked_values, _bias_after_mask, _scale_of_heads, _capped, _dropped, _sink,
    _values_of_queries, _squared, _weights_returned, _scores_returned, _shifted_by_keys,
]  # fmt: skip


@pytest.mark.parametrize("fun", MISSES, ids=lambda fun: fun.__name__)
def test_near_misses_are_left_as_written(fun: Attention) -> None:
    assert compared(with_gradients(fun), QUERY, KEY, VALUE).counts == (0, 0)


# ---- other derivatives ---------------------------------------------------------------------------------------------


def _with_rule(rule: Callable[[Any, Any], Any]) -> Attention:
    """An attention whose softmax has a derivative of its own: rule(p, p_bar)."""

    @jax.custom_vjp
    def softmax(x: Any) -> Any:
        return jax.nn.softmax(x)

    def forward(x: Any) -> Any:
        p = jax.nn.softmax(x)
        return p, p

    softmax.defvjp(forward, lambda p, p_bar: (rule(p, p_bar),))
    return lambda q, k, v: mixed(softmax(scores_of(q, k)), v)


RULES: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "its own": (lambda p, g: p * (g - (p * g).sum(-1, keepdims=True)), True),
    "twice as much": (lambda p, g: 2 * p * (g - (p * g).sum(-1, keepdims=True)), False),
    "no mean": (lambda p, g: p * g, False),
    "half the mean": (lambda p, g: p * (g - 0.5 * (p * g).sum(-1, keepdims=True)), False),
    "clipped": (lambda p, g: jnp.clip(p * (g - (p * g).sum(-1, keepdims=True)), -0.1, 0.1), False),
    "plus p": (lambda p, g: p * (1 + g - (p * g).sum(-1, keepdims=True)), False),
    "straight": (lambda p, g: g, False),
    "mean over queries": (lambda p, g: p * (g - (p * g).sum(-2, keepdims=True)), False),
    "none": (lambda p, g: jnp.zeros_like(g), None),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", RULES)
def test_other_derivatives_compute_what_they_did(name: str) -> None:
    rule, is_own = RULES[name]
    found = compared(with_gradients(_with_rule(rule)), QUERY, KEY, VALUE)
    if is_own:
        assert found.counts == (1, 1)


def test_a_gradient_into_the_logsumexp_is_left_as_written() -> None:
    def loss(q: Any, k: Any, v: Any) -> Any:
        x = scores_of(q, k)
        lse = jax.scipy.special.logsumexp(x, axis=-1)
        return jnp.sum(jnp.sin(mixed(jnp.exp(x - lse[..., None]), v))) + jnp.sum(lse**2)

    assert compared(jax.grad(loss, (0, 1, 2)), QUERY, KEY, VALUE).counts == (0, 0)


def test_a_stopped_maximum_is_not_needed_and_a_wrong_one_is_noticed() -> None:
    def attention(q: Any, k: Any, v: Any, factor: float) -> Any:
        x = scores_of(q, k)
        top = x.max(-1, keepdims=True)
        e = jnp.exp(x - top)
        return mixed(e / (e.sum(-1, keepdims=True) * (jnp.exp(factor * top) if factor else 1)), v)

    for factor, counts in ((0.0, (1, 1)), (0.1, (0, 0))):
        fun = with_gradients(lambda q, k, v, f=factor: attention(q, k, v, f))
        assert compared(fun, QUERY, KEY, VALUE).counts == counts


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
