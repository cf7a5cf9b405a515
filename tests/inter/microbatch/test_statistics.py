"""Batch statistics: a normalisation whose mean and variance are averaged in the state is a micro-batch's own, wherever
it runs, beside losses on totals. All else is the whole batch's."""

from __future__ import annotations

import re
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


def _state() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    params = {"w": normal(D, D), "v": normal(D), "scale": 1 + 0.3 * normal(D), "bias": 0.2 * normal(D)}
    return {"params": params, "stats": {"mean": normal(D), "var": np.abs(normal(D))}, "steps": np.int32(3)}


def _batch(seed: int = 1) -> np.ndarray:
    """Examples whose spread and mean grow: the statistics of a part are far from the whole batch's."""
    growing = np.linspace(0.3, 2, B, dtype=np.float32)[:, None]
    return growing * np.random.default_rng(seed).standard_normal((B, D)).astype(np.float32) + growing


#: (parameters, statistics, activations) -> (normalised activations, statistics)
Normalise = Callable[[Any, Any, Any], tuple[Any, Any]]


def _averaged(stats: Any, mean: Any, var: Any, decay: Any = 0.9) -> Any:
    return {"mean": decay * stats["mean"] + (1 - decay) * mean, "var": decay * stats["var"] + (1 - decay) * var}


def _batch_norm(params: Any, stats: Any, h: Any) -> tuple[Any, Any]:
    mean, var = h.mean(0), h.var(0)
    return _adjusted(params, (h - mean[None]) * jax.lax.rsqrt(var + 0.1)[None]), _averaged(stats, mean, var)


def _adjusted(params: Any, normal: Any) -> Any:
    return normal * params["scale"][None] + params["bias"][None]


def _in_parts(normalise: Normalise, params: Any, stats: Any, h: Any, n_parts: int) -> tuple[Any, Any]:
    """The normalisation of each of `n_parts` parts of the examples by itself; statistics are averaged over these."""
    if n_parts == 1:
        return normalise(params, stats, h)
    parts = [normalise(params, stats, part) for part in jnp.split(h, n_parts)]
    average = lambda *xs: sum(xs[1:], xs[0]) / n_parts  # noqa: E731
    return jnp.concatenate([part for part, _ in parts]), jax.tree.map(average, *[new for _, new in parts])


def _scores(params: Any, stats: Any, x: Any, n_parts: int, normalise: Normalise = _batch_norm) -> tuple[Any, Any]:
    """The scores of a model with one normalisation, over each of `n_parts` parts of the batch, and new statistics."""
    normal, stats = _in_parts(normalise, params, stats, x @ params["w"], n_parts)
    return jnp.tanh(normal) @ params["v"], stats


LOSSES: dict[str, Callable[[Any], Any]] = {
    "mean": lambda s: jnp.mean(s**2),
    "deviation": lambda s: jnp.std(s),
    "product": lambda s: jnp.std(s) * jnp.mean(s**2),
    "logsumexp": lambda s: jax.nn.logsumexp(s),
    "max": lambda s: jnp.max(s),
    "detached total": lambda s: jnp.sum(s**2) / jax.lax.stop_gradient(jnp.sum(jnp.abs(s))),
}


#: (parameters, statistics, x) -> (loss, new statistics)
Objective = Callable[[Any, Any, Any], tuple[Any, Any]]


def _moved(params: Any, grads: Any, by: float) -> Any:
    return jax.tree.map(lambda p, g: p + by * g, params, grads)


def _plain(differentiate: Any, loss: Objective) -> Callable[..., Any]:
    def step(state: Any, x: Any) -> Any:
        (value, stats), grads = differentiate(loss, has_aux=True)(state["params"], state["stats"], x)
        return {"params": _moved(state["params"], grads, -0.1), "stats": stats, "steps": state["steps"] + 1}, value

    return step


def _sharpness_aware(differentiate: Any, loss: Objective) -> Callable[..., Any]:
    def step(state: Any, x: Any) -> Any:
        (_, stats), grads = differentiate(loss, has_aux=True)(state["params"], state["stats"], x)
        moved = _moved(state["params"], grads, 0.1)
        (value, stats), grads = differentiate(loss, has_aux=True)(moved, stats, x)
        return {"params": _moved(state["params"], grads, -0.1), "stats": stats, "steps": state["steps"] + 1}, value

    return step


def _meta(differentiate: Any, loss: Objective) -> Callable[..., Any]:
    """The gradient of the loss behind an update, through that update."""

    def behind(params: Any, stats: Any, x: Any) -> Any:
        (_, stats), grads = differentiate(loss, has_aux=True)(params, stats, x)
        return loss(_moved(params, grads, -0.1), stats, x)

    return _plain(differentiate, behind)


SCHEMES = {"plain": _plain, "sharpness-aware": _sharpness_aware, "meta": _meta}
GRADIENTS = {"marked": value_and_grad, "plain jax": jax.value_and_grad}
WRAPS: dict[str, Callable[..., Any]] = {"": lambda loss: loss, "remat": jax.checkpoint}
#: Each scheme, gradient and wrap is among them.
CASES = [
    ("mean", "plain", "marked", "remat"),
    ("deviation", "sharpness-aware", "plain jax", ""),
    ("max", "meta", "marked", ""),
]


def _is_own(step: Callable[[Any, int], Callable[..., Any]], differentiate: Any = value_and_grad) -> bool:
    """Whether a step over micro-batches has statistics of the micro-batch."""
    return len(split_micro_batches(trace(step(differentiate, 1), _state(), _batch()), N).own) > 0


def _assert_equal(step: Callable[[Any, int], Callable[..., Any]], differentiate: Any, args: Any, is_own: bool) -> None:
    """That micro-batches compute what the serial run does, on parts of the batch if they have statistics of their own.

    step: of what takes the gradients, and the number of parts.
    """
    split = split_micro_batches(trace(step(differentiate, 1), *args), N)
    assert len(split.own) == is_own
    assert all(re.match(r"mean and variance of float32 \(batch, 4\) at .*test_statistics.py:\d+", x) for x in split.own)
    expected = jax.jit(step(jax.value_and_grad, N if is_own else 1))(*args)
    for got, right in zip(jax.tree.leaves(run_split(split, args)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=2e-5)


def _training(loss: str, scheme: str = "plain", wrap: str = "", normalise: Normalise = _batch_norm) -> Any:
    def step(differentiate: Any, n_parts: int) -> Callable[..., Any]:
        def objective(params: Any, stats: Any, x: Any) -> Any:
            scores, stats = _scores(params, stats, x, n_parts, normalise)
            return LOSSES[loss](scores), stats

        return SCHEMES[scheme](differentiate, WRAPS[wrap](objective))

    return step


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_normalisation_is_the_micro_batchs_own_beside_any_loss(case: tuple[str, str, str, str]) -> None:
    loss, scheme, gradient, wrap = case
    _assert_equal(_training(loss, scheme, wrap), GRADIENTS[gradient], (_state(), _batch()), scheme != "meta")


@pytest.mark.parametrize("loss", ["product", "logsumexp", "detached total"])
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_losses_on_totals_leave_statistics_to_the_micro_batch(loss: str, gradient: str) -> None:
    assert _is_own(_training(loss), GRADIENTS[gradient])


def test_a_normalisation_may_be_cut_by_a_stage() -> None:
    """Its derivatives come from several chunks, and still meet in the loop."""
    args = _state(), _batch()
    traced = trace(_training("max")(value_and_grad, 1), *args)
    n_groups = traced.n_groups
    expected = jax.jit(_training("max")(jax.value_and_grad, N))(*args)
    for n_chunks in (2, n_groups):
        chunk_of = [None if o.group is None else o.group * n_chunks // n_groups for o in traced.origins]
        got = run_split(split_micro_batches(traced, N, chunk_of), args)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


#: Ways to write a mean over examples, or nearly one, and whether a micro-batch takes its own.
MEANS: dict[str, tuple[bool, Callable[[Any], Any]]] = {
    "half of the mean": (True, lambda h: 0.5 * h.mean(0)),
    "unbiased": (True, lambda h: h.sum(0) / (len(h) - 1)),
    "sum": (False, lambda h: h.sum(0)),
    "sum of parts": (False, lambda h: (h / len(h)).sum(0)),
    "divided twice": (True, lambda h: h.sum(0) / 2 / (len(h) / 2)),
    "one term more": (False, lambda h: h.sum(0) / (len(h) + 1)),
}


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("name", MEANS)
def test_only_means_are_a_micro_batchs_own(name: str, gradient: str) -> None:
    """What is no mean, or not seen to be one, is computed from the whole batch."""
    is_own, take_mean = MEANS[name]

    def normalise(params: Any, stats: Any, h: Any) -> Any:
        centred = h - h.mean(0)[None]
        var = take_mean(centred**2)
        return centred * jax.lax.rsqrt(var + 0.1)[None], _averaged(stats, h.mean(0), var)

    assert _is_own(_training("mean", normalise=normalise), GRADIENTS[gradient]) == is_own
    if name in ("half of the mean", "unbiased", "divided twice") and gradient == "marked":
        _assert_equal(_training("mean", normalise=normalise), value_and_grad, (_state(), _batch()), True)


# ---- ways to average ------------------------------------------------------------------------------------------------


def _with(average: Callable[..., Any]) -> Normalise:
    """BatchNorm whose new statistics are `average(statistics, mean, variance, number of examples)`."""

    def normalise(params: Any, stats: Any, h: Any) -> Any:
        mean, var = h.mean(0), h.var(0)
        normal = _adjusted(params, (h - mean[None]) * jax.lax.rsqrt(var + 0.1)[None])
        return normal, average(stats, mean, var, h.shape[0])

    return normalise


def _renormalised(params: Any, stats: Any, h: Any) -> Any:
    """Batch renormalisation: corrected by how far the statistics are from their averages."""
    mean, std = h.mean(0), jnp.sqrt(h.var(0) + 0.1)
    known = jnp.sqrt(stats["var"] + 0.1)
    r = jax.lax.stop_gradient(jnp.clip(std / known, 0.5, 2))
    d = jax.lax.stop_gradient(jnp.clip((mean - stats["mean"]) / known, -1, 1))
    normal = (h - mean[None]) / std[None] * r[None] + d[None]
    return _adjusted(params, normal), _averaged(stats, mean, std**2)


def _under_vmap(params: Any, stats: Any, h: Any) -> Any:
    def one(row: Any) -> Any:
        mean = jax.lax.pmean(row, "batch")
        var = jax.lax.pmean((row - mean) ** 2, "batch")
        return (row - mean) * jax.lax.rsqrt(var + 0.1), mean, var

    normal, mean, var = jax.vmap(one, axis_name="batch", out_axes=(0, None, None))(h)
    return _adjusted(params, normal), _averaged(stats, mean, var)


def _fused(params: Any, stats: Any, h: Any) -> Any:
    mean, squares = h.mean(0), (h**2).mean(0)
    factor = params["scale"] * jax.lax.rsqrt(squares - mean**2 + 0.1)
    normal = h * factor[None] + (params["bias"] - mean * factor)[None]
    return normal, _averaged(stats, mean, squares)


def _by_averages(params: Any, stats: Any, h: Any) -> Any:
    stats = _averaged(stats, h.mean(0), h.var(0), 0.5)
    return (h - stats["mean"][None]) * jax.lax.rsqrt(stats["var"] + 0.1)[None], stats


def _first(stats: Any, mean: Any, var: Any, n: int) -> Any:
    """In the first step, the statistics themselves."""
    new = _averaged(stats, mean, var)
    is_first = stats["var"][0] > 9
    return {"mean": jnp.where(is_first, mean, new["mean"]), "var": jnp.where(is_first, var, new["var"])}


AVERAGES: dict[str, Normalise] = {
    "deviation": _with(lambda s, mean, var, n: _averaged(s, mean, jnp.sqrt(var))),
    "unbiased": _with(lambda s, mean, var, n: _averaged(s, mean, var * n / (n - 1))),
    "first": _with(_first),
    "fused": _fused,
    "renormalised": _renormalised,
    "by averages": _by_averages,
    "under vmap": _under_vmap,
}


@pytest.mark.parametrize("name", AVERAGES)
def test_running_averages_are_seen_however_they_are_written(name: str) -> None:
    assert _is_own(_training("mean", normalise=AVERAGES[name]), jax.value_and_grad)


@pytest.mark.parametrize("name", ["unbiased", "renormalised", "by averages"])
def test_running_averages_are_averages_over_micro_batches(name: str) -> None:
    _assert_equal(_training("mean", normalise=AVERAGES[name]), jax.value_and_grad, (_state(), _batch()), True)


def test_unbiased_variances_are_of_the_elements_of_a_micro_batch() -> None:
    def normalise(params: Any, stats: Any, h: Any) -> Any:
        mean, n = h.mean(0), h.shape[0]
        var = jnp.mean((h - mean[None]) ** 2, 0) * (n / (n - 1))
        squares = (jnp.mean(h**2, 0) - mean**2) * n / (n - 1)
        normal = (h - mean[None]) * jax.lax.rsqrt(var + 0.1)[None]
        return _adjusted(params, normal), _averaged(stats, mean, squares)

    _assert_equal(_training("mean", normalise=normalise), value_and_grad, (_state(), _batch()), True)


# ---- statistics of the whole batch ----------------------------------------------------------------------------------


def _whitened(params: Any, stats: Any, h: Any) -> Any:
    centred = h - h.mean(0)[None]
    covariance = centred.T @ centred / h.shape[0]
    normal = centred @ jnp.linalg.inv(jnp.linalg.cholesky(covariance + jnp.eye(D)))
    return _adjusted(params, normal), _averaged(stats, h.mean(0), jnp.diag(covariance))


def _of_others(params: Any, stats: Any, h: Any) -> Any:
    """The averages are of other activations than those that are normalised."""
    normal = (h - h.mean(0)[None]) * jax.lax.rsqrt(h.var(0) + 0.1)[None]
    return _adjusted(params, normal), _averaged(stats, jnp.sin(h).mean(0), jnp.sin(h).var(0))


def _gated(params: Any, stats: Any, h: Any) -> Any:
    mean, var = h.mean(0), h.var(0)
    return h * jax.nn.sigmoid(h * mean[None]) * jax.lax.rsqrt(var + 0.1)[None], _averaged(stats, mean, var)


WHOLE: dict[str, Normalise] = {
    "variances alone": _with(lambda s, mean, var, n: {**s, "var": 0.9 * s["var"] + 0.1 * var}),
    "averages for a log": _with(lambda s, mean, var, n: {**s, "log": _averaged(s, mean, var)}),
    "whitened": _whitened,
    "averages of others": _of_others,
    "gated": _gated,
}


@pytest.mark.parametrize("name", WHOLE)
def test_other_statistics_are_the_whole_batchs(name: str) -> None:
    assert not _is_own(_training("mean", normalise=WHOLE[name]))


def test_averages_beside_the_state_that_is_handed_on_are_a_log() -> None:
    def step(differentiate: Any, n_parts: int) -> Callable[..., Any]:
        def run(state: Any, x: Any) -> Any:
            new, value = _training("mean")(differentiate, n_parts)(state, x)
            return new["stats"], {**new, "stats": state["stats"]}, value

        return run

    _assert_equal(step, value_and_grad, (_state(), _batch()), False)


def test_standardised_data_is_that_of_the_whole_batch_beside_a_normalisation() -> None:
    """Also with running averages, and with parameters that scale it; its totals are known before the first loop."""

    def step(differentiate: Any, n_parts: int) -> Callable[..., Any]:
        def loss(params: Any, stats: Any, x: Any) -> Any:
            normal, seen = _batch_norm(params, stats["data"], x)
            scores, stats = _scores(params, stats["model"], normal, n_parts)
            return jnp.mean(scores**2), {"data": seen, "model": stats}

        return _plain(differentiate, loss)

    state = {**_state(), "stats": {"data": _state()["stats"], "model": _state()["stats"]}}
    split = split_micro_batches(trace(step(value_and_grad, 1), state, _batch()), N)
    assert len(split.own) == 1 and split.n_loops == 1
    expected = jax.jit(step(jax.value_and_grad, N))(state, _batch())
    for got, right in zip(jax.tree.leaves(run_split(split, (state, _batch()))), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=2e-5)


def test_a_normalisation_of_all_examples_at_once_makes_all_of_its_kind_exact() -> None:
    """A sort mixes the examples, so what runs behind it is of the whole batch, and so is the same code elsewhere."""

    def step(differentiate: Any, n_parts: int) -> Callable[..., Any]:
        def run(state: Any, x: Any) -> Any:
            new, value = _training("mean")(differentiate, n_parts)(state, x)
            normal, stats = _batch_norm(new["params"], new["stats"], jnp.sort(x @ new["params"]["w"], 0))
            return {**new, "stats": stats}, value, normal

        return run

    _assert_equal(step, value_and_grad, (_state(), _batch()), False)
