"""Attentions as people write them are recognised, with their derivative, and compute what they did."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minialpa.models.layers import attend
from tests.recognition.compared import array, compared, recognised

B, T, S, N, D = 2, 6, 5, 4, 3
QUERY, KEY, VALUE = array(0, B, T, N, D), array(1, B, S, N, D), array(2, B, S, N, D)
SAME = tuple(array(i, B, T, N, D) for i in range(3))
WEIGHT = array(3, B, T, N, D)


def loss_of(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A scalar function of the attention's result with a gradient that differs from element to element."""

    def loss(*args: Any) -> Any:
        return jnp.sum(jnp.sin(fun(*args)) * WEIGHT)

    return loss


def with_gradients(fun: Callable[..., Any], argnums: Any = (0, 1, 2)) -> Callable[..., Any]:
    return jax.value_and_grad(loss_of(fun), argnums)


dpa = jax.nn.dot_product_attention
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "mask": {"mask": array(5, B, N, T, T) > -1},
    "mask of keys": {"mask": array(5, B, 1, 1, T) > -1},
    "bias": {"bias": array(6, 1, N, T, T)},
    "bias and mask": {"bias": array(6, B, N, T, T), "mask": array(5, 1, 1, T, T) > -1, "is_causal": True},
    "lengths": {"query_seq_lengths": np.array([4, 6], np.int32), "key_value_seq_lengths": np.array([3, 5], np.int32)},
    "window": {"local_window_size": (2, 1)},
    "window, causal": {"local_window_size": 2, "is_causal": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_dot_product_attention(name: str) -> None:
    options = OPTIONS[name]
    fun = functools.partial(dpa, **options)
    assert recognised(fun, *SAME).counts == (1, 0)
    assert compared(with_gradients(fun), *SAME).counts == (1, 1)


def test_grouped_heads() -> None:
    for heads in (1, 2):
        args = (SAME[0], array(1, B, T, heads, D), array(2, B, T, heads, D))
        found = compared(with_gradients(functools.partial(dpa, is_causal=True)), *args)
        assert found.counts == (1, 1)
        (eqn,) = (eqn for eqn in found.step.flat.eqns if eqn.primitive.name == "minialpa_attention")
        assert eqn.invars[0].aval.shape == (B, T, heads, N // heads, D)
        assert eqn.params["kind"].right == 0 and eqn.params["kind"].n_masks == 0


def test_gradient_of_a_bias() -> None:
    for shape in ((B, N, T, T), (1, N, T, T), (B, 1, T, T), (1, N, 1, T)):
        fun = with_gradients(lambda q, k, v, bias: dpa(q, k, v, bias=bias, is_causal=True), (0, 1, 2, 3))
        assert compared(fun, *SAME, array(7, *shape)).counts == (1, 1), shape


def test_layers_of_the_models() -> None:
    assert compared(with_gradients(functools.partial(attend, causal=True)), *SAME).counts == (1, 1)
    fun = with_gradients(lambda q, k, v, bias: attend(q, k, v, bias=bias), (0, 1, 2, 3))
    assert compared(fun, *SAME, array(7, 1, N, T, T)).counts == (1, 1)


@pytest.mark.parametrize("wanted", [(0,), (2,), *(pytest.param(w, marks=pytest.mark.slow) for w in ((1,), (0, 2)))])
def test_some_gradients(wanted: tuple[int, ...]) -> None:
    fun = functools.partial(dpa, is_causal=True)
    assert compared(with_gradients(fun, wanted), *SAME).counts == (1, 1)


# ---- softmax by hand -----------------------------------------------------------------------------------------------


def _softmax_of_stopped_max(x: Any) -> Any:
    e = jnp.exp(x - jax.lax.stop_gradient(x.max(-1, keepdims=True)))
    return e / jnp.sum(e, -1, keepdims=True)


SOFTMAX = {"jax.nn": lambda x: jax.nn.softmax(x, axis=-1), "stopped max": _softmax_of_stopped_max}


@pytest.mark.parametrize("name", SOFTMAX)
@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ways_to_write_softmax(name: str, masked: bool) -> None:
    def attention(q: Any, k: Any, v: Any) -> Any:
        x = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(D)
        if masked:
            x = jnp.where(jnp.tril(jnp.ones((T, S), bool))[None, None], x, -1e9)
        return jnp.einsum("bhts,bshd->bthd", SOFTMAX[name](x), v)

    assert compared(with_gradients(attention), QUERY, KEY, VALUE).counts == (1, 1)
    assert recognised(attention, QUERY, KEY, VALUE).counts == (1, 0)


def _upcast(q: Any, k: Any, v: Any) -> Any:
    x = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) * D**-0.5
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(x).astype(v.dtype), v)


def _scaled_query(q: Any, k: Any, v: Any) -> Any:
    x = jnp.einsum("bthd,bshd->bhts", q * 0.7, k)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(x), v)


def _scaled_key(q: Any, k: Any, v: Any) -> Any:
    x = jnp.einsum("bthd,bshd->bhts", q, k / 1.3)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(x), v)


def _divided_by_traced_root(q: Any, k: Any, v: Any) -> Any:
    x = jnp.einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(jnp.float32(D))
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(x), v)


def _keys_first(q: Any, k: Any, v: Any) -> Any:
    x = jnp.einsum("bshd,bthd->hsbt", k, q)
    return jnp.einsum("hsbt,bshd->bthd", jax.nn.softmax(x, axis=1), v)


def _matmul(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    p = jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2), axis=-1)
    return jnp.swapaxes(p @ v, 1, 2)


def _vmapped(q: Any, k: Any, v: Any) -> Any:
    def head(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.softmax(q @ k.T) @ v

    return jax.vmap(jax.vmap(head, 1, 1))(q, k, v)


def _additive_mask(q: Any, k: Any, v: Any) -> Any:
    bias = jnp.where(jnp.arange(S) < 4, 0.0, -1e9)[None, None, None]
    x = jnp.einsum("bthd,bshd->bhts", q, k) + bias
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(x), v)


def _subtracted_mask(q: Any, k: Any, v: Any) -> Any:
    x = jnp.einsum("bthd,bshd->bhts", q, k) - 1e9 * (jnp.arange(S) >= 4).astype(q.dtype)[None, None, None]
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(x), v)


def _infinite_mask(q: Any, k: Any, v: Any) -> Any:
    seen = jnp.arange(T)[:, None] >= jnp.arange(S)[None, :]
    x = jnp.where(seen[None, None], jnp.einsum("bthd,bshd->bhts", q, k), -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(x), v)


def _two_masks(q: Any, k: Any, v: Any) -> Any:
    x = jnp.einsum("bthd,bshd->bhts", q, k)
    x = jnp.where(jnp.asarray(np.tril(np.ones((T, S), bool)))[None, None], x, -1e9)
    x = jnp.where((jnp.arange(S) != 1)[None, None, None], x, -1e9)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(x), v)


def _checkpointed(q: Any, k: Any, v: Any) -> Any:
    return jax.checkpoint(_upcast)(jnp.sin(q), jnp.sin(k), v)


def _checkpointed_with_policy(q: Any, k: Any, v: Any) -> Any:
    def fun(q: Any, k: Any, v: Any) -> Any:
        return _infinite_mask(q @ jnp.eye(D), k @ jnp.eye(D), v @ jnp.eye(D))

    return jax.checkpoint(fun, policy=jax.checkpoint_policies.dots_saveable)(q, k, v)


def _shared_query(q: Any, k: Any, v: Any) -> Any:
    x = jnp.einsum("thd,bshd->bhts", q[0], k)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(x), v)


def _shared_keys(q: Any, k: Any, v: Any) -> Any:
    x = jnp.einsum("bthd,bsd->bhts", q, k[:, :, 0])
    return jnp.einsum("bhts,bsd->bthd", jax.nn.softmax(x), v[:, :, 0])


def _one_head(q: Any, k: Any, v: Any) -> Any:
    p = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q[:, :, 0], k[:, :, 0]))
    return jnp.einsum("bts,bsd->btd", p, v[:, :, 0])[:, :, None]


def _over_windows(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.reshape(B, -1, 1, N, D)[:, :5].transpose(0, 2, 1, 3, 4) for x in (q, k, v))
    p = jax.nn.softmax(jnp.einsum("bwthd,bwshd->bwhts", q, k))
    out = jnp.einsum("bwhts,bwshd->bwthd", p, v)
    return jnp.pad(out[:, 0], ((0, 0), (0, 1), (0, 0), (0, 0)))


WRITTEN = {
    "upcast": (_upcast, 1),
    "scaled query": (_scaled_query, 1),
    "scaled key": (_scaled_key, 1),
    "divided by a traced root": (_divided_by_traced_root, 1),
    "keys first": (_keys_first, 1),
    "matmul": (_matmul, 1),
    "vmapped": (_vmapped, 1),
    "additive mask": (_additive_mask, 1),
    "subtracted mask": (_subtracted_mask, 1),
    "infinite mask": (_infinite_mask, 1),
    "two masks": (_two_masks, 1),
    "checkpointed": (_checkpointed, 2),
    "checkpointed with policy": (_checkpointed_with_policy, 1),
    "shared query": (_shared_query, 1),
    "shared keys": (_shared_keys, 1),
    "one head": (_one_head, 1),
    "over windows": (_over_windows, 1),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_ways_to_write_attention(name: str) -> None:
    fun, attentions = WRITTEN[name]
    assert compared(with_gradients(fun), QUERY, KEY, VALUE).counts == (attentions, 1)
    assert recognised(fun, QUERY, KEY, VALUE).counts == (1, 0)


def test_one_array_for_query_key_and_value() -> None:
    def loss(x: Any, scale: Any) -> Any:
        return loss_of(lambda x: _matmul(x, x, x))(x * scale)

    assert compared(jax.value_and_grad(loss, (0, 1)), SAME[0], jnp.float32(0.5)).counts == (1, 1)


def test_two_layers_with_one_mask() -> None:
    def two(x: Any, y: Any) -> Any:
        x = dpa(x, y, y, is_causal=True) + x
        return dpa(x, x, x, is_causal=True) + x

    assert compared(with_gradients(two, (0, 1)), *SAME[:2]).counts == (2, 2)


def test_half_precision() -> None:
    args = tuple(jnp.asarray(x, jnp.bfloat16) for x in SAME)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(dpa(q, k, v, is_causal=True).astype(jnp.float32) * WEIGHT)

    with jax.numpy_dtype_promotion("standard"):
        found = compared(jax.grad(loss, (0, 1, 2)), *args, tolerance=3e-2)
    assert found.counts == (1, 1)
    (eqn,) = (eqn for eqn in found.step.flat.eqns if eqn.primitive.name == "minialpa_attention")
    assert {str(atom.aval.dtype) for atom in eqn.invars[:3]} == {"bfloat16"}


def test_attentions_with_few_scores_are_left_as_written() -> None:
    assert recognised(with_gradients(dpa), *SAME, everywhere=False).counts == (0, 0)
    long = tuple(jax.ShapeDtypeStruct((1, 256, 1, 2), jnp.float32) for _ in range(3))
    assert recognised(jax.grad(lambda *a: jnp.sum(dpa(*a) ** 2)), *long, everywhere=False).counts == (1, 1)


def test_a_mask_of_heads_that_is_all_ones() -> None:
    def fun(q: Any, k: Any, v: Any) -> Any:
        heads = jnp.ones((3, N))[1]
        p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        return jnp.einsum("bhts,bshd->bthd", jnp.einsum("bhts,h->bhts", p, heads), v)

    assert compared(with_gradients(fun), QUERY, KEY, VALUE).counts == (1, 1)
