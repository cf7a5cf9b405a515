"""Batch statistics: if the state averages the mean and variance of a normalisation, they are per micro-batch.

The place of the normalisation does not matter, nor losses on sums over the batch. All other statistics are over the
whole batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minialpa.inter.microbatch.rewrite import split_micro_batches
from minialpa.inter.microbatch.split_step import SplitStep
from minialpa.testing import assert_allclose
from minialpa.tracing.gradients import value_and_grad
from tests.equivalence.layers import Layer
from tests.equivalence.losses import Loss, Term
from tests.equivalence.model import BatchNorm, Model
from tests.equivalence.steps import Training, make_args, make_step
from tests.helpers import run_split, trace

B, D, N = 8, 4, 4
BATCH_NORM = BatchNorm()
#: Makes a step that treats each of a number of parts of the batch separately.
Parted = Callable[[int], Callable[..., Any]]


def _split_of(step: Parted, args: Any, is_own: bool) -> SplitStep:
    """The step over micro-batches, after a check of its results.

    If statistics are per micro-batch, the serial run treats the parts of the batch one by one.
    """
    split = split_micro_batches(trace(step(1), *args), N)
    assert (len(split.per_micro_batch) > 0) == is_own
    assert all(
        re.match(r"mean and variance of float32 \(batch, \d\) at .*\.py:\d+", text) for text in split.per_micro_batch
    )
    assert_allclose(run_split(split, args), jax.jit(step(N if is_own else 1))(*args), rtol=1e-4, atol=2e-5)
    return split


# ---- where a normalisation runs -------------------------------------------------------------------------------------


def _model(norm: BatchNorm = BATCH_NORM, **fields: Any) -> Model:
    return Model("vector", (norm, Layer("dense")), **fields)


def _drawn(model: Model, reduction: str = "mean", **fields: Any) -> tuple[Parted, Any]:
    """A step of the grammar of training steps, and its arguments."""
    training = Training(model, Loss((Term("squared", reduction),)), **fields)
    return lambda n_parts: make_step(training, n_parts), make_args(training)


@pytest.mark.parametrize(
    ("reduction", "scheme", "gradient"),
    [
        ("mean", "plain", "minialpa.value_and_grad"),
        ("std", "plain", "jax.value_and_grad"),
        ("max", "meta", "minialpa.value_and_grad"),
    ],
)
def test_a_normalisation_is_the_micro_batchs_own_beside_any_loss(reduction: str, scheme: str, gradient: str) -> None:
    """Only the gradient through an update needs statistics of the whole batch."""
    step, args = _drawn(_model(checkpoint=True), reduction, scheme=scheme, gradient=gradient)
    _split_of(step, args, is_own=scheme != "meta")


def test_a_normalisation_may_be_cut_by_a_stage() -> None:
    """Its derivatives come from several chunks, and meet in the loop."""
    step, args = _drawn(_model(), "max")
    traced = trace(step(1), *args)
    split = split_micro_batches(traced, N, [o.group for o in traced.origins])
    assert_allclose(run_split(split, args), jax.jit(step(N))(*args), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("variance", "averages", "is_own"),
    [
        ("squares", ("decay", "decay"), True),
        ("var", ("step", "branch"), True),
        ("deviations", ("none", "decay"), False),
    ],
)
def test_both_statistics_are_averaged_in_the_state(variance: str, averages: tuple[str, str], is_own: bool) -> None:
    step, args = _drawn(_model(BatchNorm(variance, averages)))
    assert (len(split_micro_batches(trace(step(1), *args), N).per_micro_batch) > 0) == is_own


def test_standardised_data_is_that_of_the_whole_batch_beside_a_normalisation() -> None:
    """Also with running averages: its sums are complete before the first loop."""
    step, args = _drawn(_model(data="averaged"))
    split = _split_of(step, args, is_own=True)
    assert len(split.per_micro_batch) == 1 and split.n_loops == 1


# ---- how a normalisation is written ---------------------------------------------------------------------------------

#: (parameters, statistics, activations) -> (normalised activations, statistics)
Normalise = Callable[[Any, Any, Any], tuple[Any, Any]]


def _state() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    params = {"w": normal(D, D), "v": normal(D), "scale": 1 + 0.3 * normal(D), "bias": 0.2 * normal(D)}
    return {"params": params, "stats": {"mean": normal(D), "var": np.abs(normal(D))}}


def _batch() -> np.ndarray:
    """Examples whose spread and mean grow, so that statistics of a part are far from statistics of the whole batch."""
    growing = np.linspace(0.3, 2, B, dtype=np.float32)[:, None]
    return growing * np.random.default_rng(1).standard_normal((B, D)).astype(np.float32) + growing


def _averaged(stats: Any, mean: Any, var: Any) -> Any:
    return {"mean": 0.9 * stats["mean"] + 0.1 * mean, "var": 0.9 * stats["var"] + 0.1 * var}


def _adjusted(params: Any, normal: Any) -> Any:
    return normal * params["scale"][None] + params["bias"][None]


def _batch_norm(params: Any, stats: Any, h: Any) -> tuple[Any, Any]:
    mean, var = h.mean(0), h.var(0)
    return _adjusted(params, (h - mean[None]) * jax.lax.rsqrt(var + 0.1)[None]), _averaged(stats, mean, var)


def _in_parts(normalise: Normalise, params: Any, stats: Any, h: Any, n_parts: int) -> tuple[Any, Any]:
    """The normalisation of each of `n_parts` parts of the examples; statistics are averaged over the parts."""
    if n_parts == 1:
        return normalise(params, stats, h)
    parts = [normalise(params, stats, part) for part in jnp.split(h, n_parts)]
    average = lambda *xs: sum(xs[1:], xs[0]) / n_parts  # noqa: E731
    return jnp.concatenate([part for part, _ in parts]), jax.tree.map(average, *[new for _, new in parts])


def _training(normalise: Normalise = _batch_norm) -> Parted:
    def parted(n_parts: int) -> Callable[..., Any]:
        def loss(params: Any, stats: Any, x: Any) -> Any:
            normal, stats = _in_parts(normalise, params, stats, x @ params["w"], n_parts)
            return jnp.mean((jnp.tanh(normal) @ params["v"]) ** 2), stats

        def step(state: Any, x: Any) -> Any:
            (value, stats), grads = value_and_grad(loss, has_aux=True)(state["params"], state["stats"], x)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
            return {"params": params, "stats": stats}, value

        return step

    return parted


def _is_own(normalise: Normalise) -> bool:
    """Whether a step over micro-batches has per-micro-batch statistics."""
    return len(split_micro_batches(trace(_training(normalise)(1), _state(), _batch()), N).per_micro_batch) > 0


#: Ways to write a mean over examples, or almost a mean, and whether the statistic is per micro-batch.
MEANS: dict[str, tuple[bool, Callable[[Any], Any]]] = {
    "half of the mean": (True, lambda h: 0.5 * h.mean(0)),
    "sum": (False, lambda h: h.sum(0)),
    "sum of parts": (False, lambda h: (h / len(h)).sum(0)),
    "divided twice": (True, lambda h: h.sum(0) / 2 / (len(h) / 2)),
    "one term more": (False, lambda h: h.sum(0) / (len(h) + 1)),
}


@pytest.mark.parametrize("name", MEANS)
def test_only_means_are_a_micro_batchs_own(name: str) -> None:
    """All other statistics, and means that are not recognised, are computed from the whole batch."""
    is_own, take_mean = MEANS[name]

    def normalise(params: Any, stats: Any, h: Any) -> Any:
        centred = h - h.mean(0)[None]
        var = take_mean(centred**2)
        return centred * jax.lax.rsqrt(var + 0.1)[None], _averaged(stats, h.mean(0), var)

    assert _is_own(normalise) == is_own


def _renormalised(params: Any, stats: Any, h: Any) -> Any:
    """Batch renormalisation: corrected by the distance of the statistics from their averages."""
    mean, std = h.mean(0), jnp.sqrt(h.var(0) + 0.1)
    known = jnp.sqrt(stats["var"] + 0.1)
    r = jax.lax.stop_gradient(jnp.clip(std / known, 0.5, 2))
    d = jax.lax.stop_gradient(jnp.clip((mean - stats["mean"]) / known, -1, 1))
    normal = (h - mean[None]) / std[None] * r[None] + d[None]
    return _adjusted(params, normal), _averaged(stats, mean, std**2)


def _by_averages(params: Any, stats: Any, h: Any) -> Any:
    stats = _averaged(stats, h.mean(0), h.var(0))
    return (h - stats["mean"][None]) * jax.lax.rsqrt(stats["var"] + 0.1)[None], stats


def _unbiased(params: Any, stats: Any, h: Any) -> Any:
    """Variances of the elements of a micro-batch, computed in two ways."""
    mean, n = h.mean(0), h.shape[0]
    var = jnp.mean((h - mean[None]) ** 2, 0) * (n / (n - 1))
    squares = (jnp.mean(h**2, 0) - mean**2) * n / (n - 1)
    normal = (h - mean[None]) * jax.lax.rsqrt(var + 0.1)[None]
    return _adjusted(params, normal), _averaged(stats, mean, squares)


def test_two_updates_in_a_step_have_statistics_of_the_micro_batch() -> None:
    def parted(n_parts: int) -> Callable[..., Any]:
        return lambda state, x: _training()(n_parts)(_training()(n_parts)(state, x)[0], x)

    _split_of(parted, (_state(), _batch()), is_own=True)


@pytest.mark.parametrize("normalise", [_renormalised, _by_averages, _unbiased])
def test_running_averages_are_averages_over_micro_batches_however_they_are_written(normalise: Normalise) -> None:
    _split_of(_training(normalise), (_state(), _batch()), is_own=True)


# ---- statistics of the whole batch ----------------------------------------------------------------------------------


def _of_others(params: Any, stats: Any, h: Any) -> Any:
    """The averages are of other activations than the normalised ones."""
    normal = (h - h.mean(0)[None]) * jax.lax.rsqrt(h.var(0) + 0.1)[None]
    return _adjusted(params, normal), _averaged(stats, jnp.sin(h).mean(0), jnp.sin(h).var(0))


def _gated(params: Any, stats: Any, h: Any) -> Any:
    mean, var = h.mean(0), h.var(0)
    return h * jax.nn.sigmoid(h * mean[None]) * jax.lax.rsqrt(var + 0.1)[None], _averaged(stats, mean, var)


@pytest.mark.parametrize("normalise", [_of_others, _gated])
def test_other_statistics_are_the_whole_batchs(normalise: Normalise) -> None:
    assert not _is_own(normalise)


def test_averages_beside_the_state_that_is_handed_on_are_a_log() -> None:
    def parted(n_parts: int) -> Callable[..., Any]:
        def step(state: Any, x: Any) -> Any:
            new, value = _training()(n_parts)(state, x)
            return new["stats"], {**new, "stats": state["stats"]}, value

        return step

    _split_of(parted, (_state(), _batch()), is_own=False)


def test_a_normalisation_of_all_examples_at_once_makes_all_of_its_kind_exact() -> None:
    """A sort mixes the examples. The code after it is on the whole batch, and so is equal code elsewhere."""

    def parted(n_parts: int) -> Callable[..., Any]:
        def step(state: Any, x: Any) -> Any:
            new, value = _training()(n_parts)(state, x)
            normal, stats = _batch_norm(new["params"], new["stats"], jnp.sort(x @ new["params"]["w"], 0))
            return {**new, "stats": stats}, value, normal

        return step

    _split_of(parted, (_state(), _batch()), is_own=False)
