"""Attentions that people write are recognised, with their derivative, and compute the same results."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.recognition.compared import array, compared, mixed, recognised, scores_of, softmax

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


AttentionKind = Callable[[Any, Any, Any], Any]
CAUSAL = np.tril(np.ones((T, S), bool))[None, None]
dpa = jax.nn.dot_product_attention


def _by_hand(q: Any, k: Any, v: Any) -> Any:
    x = jnp.where(jnp.tril(jnp.ones((T, S), bool))[None, None], scores_of(q, k) / math.sqrt(D), -1e9)
    e = jnp.exp(x - jax.lax.stop_gradient(x.max(-1, keepdims=True)))
    return mixed(e / jnp.sum(e, -1, keepdims=True), v)


def _upcast(q: Any, k: Any, v: Any) -> Any:
    return mixed(softmax(scores_of(q, k).astype(jnp.float32) * D**-0.5).astype(v.dtype), v)


def _matmul(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    return jnp.swapaxes(softmax(q @ jnp.swapaxes(k, -1, -2)) @ v, 1, 2)


def _vmapped(q: Any, k: Any, v: Any) -> Any:
    head = jax.vmap(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, 1, 1)
    return jax.vmap(head)(q, k, v)


def _two_masks(q: Any, k: Any, v: Any) -> Any:
    x = jnp.where(jnp.asarray(CAUSAL), scores_of(q, k), -1e9)
    return mixed(softmax(jnp.where((jnp.arange(S) != 1)[None, None, None], x, -1e9)), v)


def _additive_mask(q: Any, k: Any, v: Any) -> Any:
    return mixed(softmax(scores_of(q, k) + jnp.where(jnp.arange(S) < 4, 0.0, -1e9)[None, None, None]), v)


def _subtracted_mask(q: Any, k: Any, v: Any) -> Any:
    hidden = (jnp.arange(S) >= 4).astype(q.dtype)[None, None, None]
    return mixed(softmax(scores_of(q, k) - 1e9 * hidden), v)


def _checkpointed(q: Any, k: Any, v: Any) -> Any:
    return jax.checkpoint(_upcast)(jnp.sin(q), jnp.sin(k), v)


def _checkpointed_with_policy(q: Any, k: Any, v: Any) -> Any:
    def fun(q: Any, k: Any, v: Any) -> Any:
        seen = jnp.arange(T)[:, None] >= jnp.arange(S)[None, :]
        x = scores_of(q @ jnp.eye(D), k @ jnp.eye(D))
        return mixed(softmax(jnp.where(seen[None, None], x, -jnp.inf)), v @ jnp.eye(D))

    return jax.checkpoint(fun, policy=jax.checkpoint_policies.dots_saveable)(q, k, v)


def _keys_first(q: Any, k: Any, v: Any) -> Any:
    return jnp.einsum("hsbt,bshd->bthd", jax.nn.softmax(jnp.einsum("bshd,bthd->hsbt", k, q), axis=1), v)


def _shared_keys(q: Any, k: Any, v: Any) -> Any:
    p = softmax(jnp.einsum("bthd,bsd->bhts", q, k[:, :, 0]))
    return jnp.einsum("bhts,bsd->bthd", p, v[:, :, 0])


def _one_head(q: Any, k: Any, v: Any) -> Any:
    p = softmax(jnp.einsum("btd,bsd->bts", q[:, :, 0], k[:, :, 0]))
    return jnp.einsum("bts,bsd->btd", p, v[:, :, 0])[:, :, None]


def _over_windows(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.reshape(B, -1, 1, N, D)[:, :5].transpose(0, 2, 1, 3, 4) for x in (q, k, v))
    out = jnp.einsum("bwhts,bwshd->bwthd", softmax(jnp.einsum("bwthd,bwshd->bwhts", q, k)), v)
    return jnp.pad(out[:, 0], ((0, 0), (0, 1), (0, 0), (0, 0)))


def _heads_of_weight_one(q: Any, k: Any, v: Any) -> Any:
    return mixed(jnp.einsum("bhts,h->bhts", softmax(scores_of(q, k)), jnp.ones((3, N))[1]), v)


#: Attentions of `QUERY`, `KEY` and `VALUE`.
WRITTEN: dict[str, AttentionKind] = {
    "by hand": _by_hand,
    "scaled query": lambda q, k, v: mixed(softmax(scores_of(q * 0.7, k)), v),
    "divided by a traced root": lambda q, k, v: mixed(softmax(scores_of(q, k) / jnp.sqrt(jnp.float32(D))), v),
    "keys first": _keys_first,
    "vmapped": _vmapped,
    "additive mask": _additive_mask,
    "subtracted mask": _subtracted_mask,
    "two masks": _two_masks,
    "checkpointed": _checkpointed,
    "checkpointed with policy": _checkpointed_with_policy,
    "shared query": lambda q, k, v: mixed(softmax(jnp.einsum("thd,bshd->bhts", q[0], k)), v),
    "shared keys": _shared_keys,
    "one head": _one_head,
    "over windows": _over_windows,
    "heads of weight one": _heads_of_weight_one,
}
#: jax's own attention with options, of `SAME`.
OPTIONS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.3},
    "mask of keys": {"mask": array(5, B, 1, 1, T) > -1},
    "bias and mask": {"bias": array(6, B, N, T, T), "mask": array(5, 1, 1, T, T) > -1, "is_causal": True},
    "lengths": {"query_seq_lengths": np.array([4, 6], np.int32), "key_value_seq_lengths": np.array([3, 5], np.int32)},
    "window": {"local_window_size": (2, 1)},
}


@pytest.mark.parametrize("name", WRITTEN)
def test_ways_to_write_attention_are_recognised(name: str) -> None:
    assert recognised(WRITTEN[name], QUERY, KEY, VALUE).counts == (1, 0)
    n_attentions = 2 if name == "checkpointed" else 1
    assert recognised(with_gradients(WRITTEN[name]), QUERY, KEY, VALUE).counts == (n_attentions, 1)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_attention_are_recognised(name: str) -> None:
    fun = functools.partial(dpa, **OPTIONS[name])
    assert recognised(fun, *SAME).counts == (1, 0)
    assert recognised(with_gradients(fun), *SAME).counts == (1, 1)


def test_recognised_attentions_compute_what_they_did() -> None:
    """All of them in one program, which takes less time to compile."""

    def step(arrays: Any, same: Any, biases: Any) -> Any:
        written = [with_gradients(fun)(*arrays) for fun in WRITTEN.values()]
        with_options = [with_gradients(functools.partial(dpa, **options))(*same) for options in OPTIONS.values()]
        some = [with_gradients(functools.partial(dpa, is_causal=True), i)(*same) for i in (0, 2)]
        biased = with_gradients(lambda q, k, v, bias: dpa(q, k, v, bias=bias, is_causal=True), (0, 1, 2, 3))
        return written, with_options, some, [biased(*same, bias) for bias in biases]

    biases = [array(7, *shape) for shape in ((B, 1, T, T), (1, N, 1, T))]
    assert compared(step, (QUERY, KEY, VALUE), SAME, biases).counts == (25, 24)


def test_grouped_heads() -> None:
    args = (SAME[0], array(1, B, T, 2, D), array(2, B, T, 2, D))
    found = compared(with_gradients(functools.partial(dpa, is_causal=True)), *args)
    assert found.counts == (1, 1)
    (eqn,) = (eqn for eqn in found.step.flat.eqns if eqn.primitive.name == "minialpa_attention")
    assert eqn.invars[0].aval.shape == (B, T, 2, 2, D)
    assert eqn.params["kind"].right == 0 and eqn.params["kind"].n_masks == 0


def _of_documents(q: Any, k: Any, v: Any, documents: Any, is_padding: Any) -> Any:
    same = documents[:, None, :, None] == documents[:, None, None]
    seen = same & ~is_padding[:, None, None] & (jnp.arange(T)[:, None] >= jnp.arange(T)[None])[None, None]
    return mixed(softmax(jnp.where(seen, scores_of(q, k), -1e9)), v)


def _of_documents_as_numbers(q: Any, k: Any, v: Any, documents: Any, is_padding: Any) -> Any:
    """As by `flax.linen.make_attention_mask` and `combine_masks`."""
    pairs = jnp.equal(jnp.expand_dims(documents, -1), jnp.expand_dims(documents, -2))[:, None].astype(jnp.float32)
    keys = jnp.expand_dims(~is_padding, (1, 2)).astype(jnp.float32)
    causal = jnp.greater_equal(jnp.arange(T)[:, None], jnp.arange(T)[None]).astype(jnp.float32)[None, None]
    mask = pairs
    for other in (keys, causal):
        mask = jnp.logical_and(mask, other).astype(jnp.float32)
    return mixed(softmax(jnp.where(mask != 0, scores_of(q, k), np.finfo(np.float32).min)), v)


@pytest.mark.parametrize("fun", [_of_documents, _of_documents_as_numbers])
def test_documents_in_one_sequence(fun: Any) -> None:
    """Masks of equal documents are computed from their numbers, and masks of keys from one number for each key."""
    documents, is_padding = np.array([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 7, 7]]), array(4, B, T) > 1
    found = compared(with_gradients(fun), *SAME, documents.astype(np.int32), is_padding)
    assert found.counts == (1, 1)
    (kind,) = (eqn.params["kind"] for eqn in found.step.flat.eqns if eqn.primitive.name == "minialpa_attention")
    assert (kind.right, kind.n_segments, kind.n_masks) == (0, 2, 0)


def test_one_array_for_query_key_and_value() -> None:
    def loss(x: Any, scale: Any) -> Any:
        return loss_of(lambda x: _matmul(x, x, x))(x * scale)

    assert compared(jax.value_and_grad(loss, (0, 1)), SAME[0], jnp.float32(0.5)).counts == (1, 1)


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
