"""Batch statistics: a normalisation over examples is a micro-batch's own, wherever it runs, beside losses on totals."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minialpa.inter.microbatch.rewrite import split_micro_batches
from minialpa.tracing.gradients import value_and_grad
from tests.helpers import run_split, trace

B, D, N = 8, 4, 4


def _params() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return {"w": normal(D, D), "v": normal(D), "scale": 1 + 0.3 * normal(D), "bias": 0.2 * normal(D)}


def _scores(params: Any, x: Any, n_parts: int) -> Any:
    """A model with one normalisation, over each of `n_parts` parts of the batch."""
    hidden = x @ params["w"]
    parts = hidden.reshape(n_parts, B // n_parts, D) if n_parts > 1 else hidden
    mean = parts.mean(-2, keepdims=True)
    variance = parts.var(-2, keepdims=True)
    normed = ((parts - mean) * jax.lax.rsqrt(variance + 1e-3)).reshape(B, D)
    return jnp.tanh(normed * params["scale"][None] + params["bias"][None]) @ params["v"]


LOSSES: dict[str, Callable[[Any], Any]] = {
    "mean": lambda s: jnp.mean(s**2),
    "deviation": lambda s: jnp.std(s),
    "product": lambda s: jnp.std(s) * jnp.mean(s**2),
    "logsumexp": lambda s: jax.nn.logsumexp(s),
    "max": lambda s: jnp.max(s),
    "detached total": lambda s: jnp.sum(s**2) / jax.lax.stop_gradient(jnp.sum(jnp.abs(s))),
}


def _plain(differentiate: Any, loss: Any) -> Callable[..., Any]:
    def step(params: Any, x: Any) -> Any:
        value, grads = differentiate(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def _sharpness_aware(differentiate: Any, loss: Any) -> Callable[..., Any]:
    def step(params: Any, x: Any) -> Any:
        _, grads = differentiate(loss)(params, x)
        moved = jax.tree.map(lambda p, g: p + 0.1 * g, params, grads)
        value, grads = differentiate(loss)(moved, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def _meta(differentiate: Any, loss: Any) -> Callable[..., Any]:
    """The gradient of the loss behind an update, through that update."""

    def behind(params: Any, x: Any) -> Any:
        _, grads = differentiate(loss)(params, x)
        return loss(jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), x)

    return _plain(differentiate, behind)


SCHEMES = {"plain": _plain, "sharpness-aware": _sharpness_aware, "meta": _meta}
GRADIENTS = {"marked": value_and_grad, "plain jax": jax.value_and_grad}
WRAPS: dict[str, Callable[..., Any]] = {"": lambda loss: loss, "remat": jax.checkpoint}
_ALL = list(itertools.product(LOSSES, SCHEMES, GRADIENTS, WRAPS))
#: A few that always run; each loss, scheme, gradient and wrap is among them.
_SOME = [
    ("mean", "plain", "marked", "remat"),
    ("deviation", "sharpness-aware", "marked", ""),
    ("product", "plain", "plain jax", ""),
    ("logsumexp", "sharpness-aware", "plain jax", "remat"),
    ("max", "meta", "marked", ""),
    ("detached total", "meta", "plain jax", ""),
]


def _check(loss: str, scheme: str, gradient: str, wrap: str) -> None:
    def step(differentiate: Any, n_parts: int) -> Callable[..., Any]:
        wrapped = WRAPS[wrap](lambda params, x: LOSSES[loss](_scores(params, x, n_parts)))
        return SCHEMES[scheme](differentiate, wrapped)

    args = _params(), np.random.default_rng(1).standard_normal((B, D)).astype(np.float32)
    split = split_micro_batches(trace(step(GRADIENTS[gradient], 1), *args), N)
    # Where a plan lists no statistics, everything is the whole batch's.
    expected = jax.jit(step(jax.value_and_grad, N if split.own else 1))(*args)
    assert (len(split.own) > 0) == (scheme != "meta")
    for got, right in zip(jax.tree.leaves(run_split(split, args)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", _SOME, ids=" ".join)
def test_a_normalisation_is_the_micro_batchs_own_beside_any_loss(case: tuple[str, str, str, str]) -> None:
    _check(*case)


@pytest.mark.parametrize("loss", ["mean", "max"])
def test_a_normalisation_may_be_cut_by_a_stage(loss: str) -> None:
    """Its derivatives come from several chunks, and still meet in the loop."""
    args = _params(), np.random.default_rng(1).standard_normal((B, D)).astype(np.float32)

    def step(differentiate: Any, n_parts: int) -> Callable[..., Any]:
        return _plain(differentiate, lambda params, x: LOSSES[loss](_scores(params, x, n_parts)))

    traced = trace(step(value_and_grad, 1), *args)
    n_groups = traced.n_groups
    expected = jax.jit(step(jax.value_and_grad, N))(*args)
    for n_chunks in (2, 4, n_groups):
        chunk_of = [None if o.group is None else o.group * n_chunks // n_groups for o in traced.origins]
        got = run_split(split_micro_batches(traced, N, chunk_of), args)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in _ALL if case not in _SOME], ids=" ".join)
def test_every_normalisation_is_the_micro_batchs_own(case: tuple[str, str, str, str]) -> None:
    _check(*case)


#: Ways to write a mean over examples, or nearly one, and whether a micro-batch takes its own.
MEANS: dict[str, tuple[bool, Callable[[Any], Any]]] = {
    "mean": (True, lambda h: h.mean(0)),
    "divided sum": (True, lambda h: h.sum(0) / len(h)),
    "reciprocal": (True, lambda h: (1 / len(h)) * h.sum(0)),
    "half of the mean": (True, lambda h: 0.5 * h.mean(0)),
    "unbiased": (True, lambda h: h.sum(0) / (len(h) - 1)),
    "sum": (False, lambda h: h.sum(0)),
    "sum of parts": (False, lambda h: (h / len(h)).sum(0)),
    "divided twice": (False, lambda h: h.sum(0) / 2 / (len(h) / 2)),
    "one term more": (False, lambda h: h.sum(0) / (len(h) + 1)),
    "weights": (False, lambda h: jnp.full(len(h), 1 / len(h)) @ h),
}


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("name", MEANS)
def test_only_means_are_a_micro_batchs_own(name: str, gradient: str) -> None:
    """What is no mean, or not seen to be one, is computed from the whole batch."""
    is_own, mean = MEANS[name]

    def step(differentiate: Any, n_parts: int) -> Callable[..., Any]:
        def normalised(hidden: Any) -> Any:
            centred = hidden - hidden.mean(0)[None]
            return centred * jax.lax.rsqrt(mean(centred**2) + 0.1)[None]

        def loss(params: Any, x: Any) -> Any:
            hidden = x @ params["w"]
            size = B // n_parts
            parts = [normalised(hidden[k * size : (k + 1) * size] if n_parts > 1 else hidden) for k in range(n_parts)]
            return jnp.mean(jnp.tanh(jnp.concatenate(parts) * params["scale"][None]) @ params["v"] ** 2)

        return _plain(differentiate, loss)

    args = _params(), np.random.default_rng(1).standard_normal((B, D)).astype(np.float32)
    split = split_micro_batches(trace(step(GRADIENTS[gradient], 1), *args), N)
    assert (len(split.own) > 0) == is_own
    expected = jax.jit(step(jax.value_and_grad, N if is_own else 1))(*args)
    for got, right in zip(jax.tree.leaves(run_split(split, args)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)


def test_a_normalisation_of_all_examples_at_once_makes_all_of_its_kind_exact() -> None:
    """A sort mixes the examples, so what runs behind it is of the whole batch, and so is the same code elsewhere."""

    def normalised(hidden: Any, params: Any) -> Any:
        mean, variance = hidden.mean(0)[None], hidden.var(0)[None]
        return (hidden - mean) * jax.lax.rsqrt(variance + 0.1) * params["scale"][None]

    def step(differentiate: Any) -> Callable[..., Any]:
        def scores(params: Any, x: Any) -> Any:
            return normalised(x @ params["w"], params) @ params["v"]

        def run(params: Any, x: Any) -> Any:
            new, value = _plain(differentiate, lambda p, x: jnp.mean(jnp.tanh(scores(p, x))))(params, x)
            return new, value, scores(new, jnp.sort(x @ new["w"], 0))

        return run

    args = _params(), np.random.default_rng(1).standard_normal((B, D)).astype(np.float32)
    split = split_micro_batches(trace(step(value_and_grad), *args), N)
    assert not split.own
    expected = jax.jit(step(jax.value_and_grad))(*args)
    for got, right in zip(jax.tree.leaves(run_split(split, args)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)
