"""The grammar of losses: a loss of each example, its reduction to one number, and the combination of several numbers.

`PER_EXAMPLE` takes scores (B, WIDTH) and the batch and returns (B,). `REDUCTIONS` takes values (B,), the scores and the
batch and returns a scalar. In `PAIRING`, examples meet in other ways than sums, and the step may be refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tests.equivalence.layers import WIDTH, detached

Batch = dict[str, jax.Array]


@dataclass(frozen=True, slots=True)
class Term:
    """One summand or factor of a loss."""

    per_example: str
    reduction: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Loss:
    """join: `sum`, `product` or `ratio` (the first over 1 plus the square of the others). decay: of the parameters."""

    terms: tuple[Term, ...]
    join: str = "sum"
    decay: float = 0.0


JOINS = ("sum", "product", "ratio")

# ---- of each example ------------------------------------------------------------------------------------------------


def _log_probability(scores: jax.Array, batch: Batch) -> jax.Array:
    return jnp.take_along_axis(jax.nn.log_softmax(scores), batch["label"][:, None], 1)[:, 0]


def _hinge(scores: jax.Array, batch: Batch) -> jax.Array:
    right = jnp.take_along_axis(scores, batch["label"][:, None], 1)
    return jnp.sum(jnp.maximum(0, 1 + scores - right), 1)


def _focal(scores: jax.Array, batch: Batch) -> jax.Array:
    log_p = _log_probability(scores, batch)
    return -((1 - jnp.exp(log_p)) ** 2) * log_p


def _two_class(scores: jax.Array, batch: Batch) -> jax.Array:
    z = scores[:, 0]
    return jax.nn.softplus(z) - z * (batch["label"] % 2).astype(z.dtype)


PER_EXAMPLE: dict[str, Callable[[jax.Array, Batch], jax.Array]] = {
    "squared": lambda s, b: jnp.sum((s - b["target"]) ** 2, -1),
    "absolute": lambda s, b: jnp.mean(jnp.abs(s - b["target"]), -1),
    "huber": lambda s, b: jnp.sum(jnp.where(jnp.abs(s - b["target"]) < 1, (s - b["target"]) ** 2, 1), -1),
    "cross entropy": lambda s, b: -_log_probability(s, b),
    "one-hot cross entropy": lambda s, b: -jnp.sum(jax.nn.one_hot(b["label"], WIDTH) * jax.nn.log_softmax(s), -1),
    "cross entropy by number": lambda s, b: -jax.nn.log_softmax(s)[jnp.arange(s.shape[0]), b["label"]],
    "focal": _focal,
    "hinge": _hinge,
    "two classes": _two_class,
    "score": lambda s, b: s[:, 0],
    "entropy": lambda s, b: -jnp.sum(jax.nn.softmax(s) * jax.nn.log_softmax(s), -1),
}

# ---- over the batch -------------------------------------------------------------------------------------------------

Reduction = Callable[[jax.Array, jax.Array, Batch], jax.Array]


def _positive(v: jax.Array) -> jax.Array:
    """A smooth positive version of any loss, away from zero."""
    return jax.nn.softplus(v) + 0.1


def _count(mask: jax.Array) -> jax.Array:
    return jnp.maximum(jnp.sum(mask.astype(jnp.float32)), 1)


def _chosen(s: jax.Array) -> jax.Array:
    """The examples with a score above zero: a mask from the model."""
    return (s[:, 0] > 0).astype(jnp.float32)


def _deviations(v: jax.Array) -> jax.Array:
    return v - jnp.mean(v)


def _balance(v: jax.Array, s: jax.Array, b: Batch) -> jax.Array:
    gates = jax.nn.softmax(s)
    chosen = jax.nn.one_hot(jnp.argmax(s, -1), WIDTH)
    return WIDTH * jnp.sum(jnp.mean(chosen, 0) * jnp.mean(gates, 0)) + jnp.mean(v)


def _entropy_of_the_mean(v: jax.Array, s: jax.Array, b: Batch) -> jax.Array:
    mean = jnp.mean(jax.nn.softmax(s), 0)
    return jnp.sum(mean * jnp.log(mean)) + jnp.mean(v)


def _covariance(v: jax.Array, s: jax.Array, b: Batch) -> jax.Array:
    z = s - jnp.mean(s, 0, keepdims=True)
    return jnp.mean((z.T @ z / s.shape[0] - jnp.eye(WIDTH)) ** 2) + jnp.mean(v)


def _decorrelated(v: jax.Array, s: jax.Array, b: Batch) -> jax.Array:
    """Standardised scores with a gain, as in Barlow Twins."""
    gain = jnp.linspace(0.5, 1.5, WIDTH, dtype=s.dtype)
    z = (s - jnp.mean(s, 0)[None]) / jnp.sqrt(jnp.var(s, 0) + 0.1)[None] * gain[None]
    return jnp.mean((z.T @ z / s.shape[0] - jnp.eye(WIDTH)) ** 2)


def _by_rewards(v: jax.Array, s: jax.Array, b: Batch) -> jax.Array:
    """Targets of the batch, standardised feature by feature, as weights."""
    z = (b["target"] - jnp.mean(b["target"], 0)[None]) / (jnp.std(b["target"], 0) + 0.1)[None]
    return jnp.mean(z * s) + 0.1 * jnp.mean(v)


def _correlation(v: jax.Array, s: jax.Array, b: Batch) -> jax.Array:
    x, y = _deviations(v), _deviations(b["target"][:, 0])
    return -jnp.sum(x * y) / jnp.sqrt(jnp.sum(x**2) * jnp.sum(y**2) + 1e-3)


def _standardised(v: jax.Array, s: jax.Array, b: Batch) -> jax.Array:
    z = _deviations(v) / (jnp.std(v) + 0.1)
    return jnp.mean(jnp.sin(z))


def _advantage(v: jax.Array, s: jax.Array, b: Batch) -> jax.Array:
    z = detached(_deviations(v) / (jnp.std(v) + 0.1))
    return jnp.mean(z * s[:, 0])


def _contrastive(v: jax.Array, s: jax.Array, b: Batch) -> jax.Array:
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(s @ s.T))) + jnp.mean(v)


def _f_score(v: jax.Array, s: jax.Array, b: Batch) -> jax.Array:
    p, t = jax.nn.sigmoid(s[:, 0]), (b["label"] % 2).astype(jnp.float32)
    return jnp.mean(v) - 2 * jnp.sum(p * t) / (jnp.sum(p) + jnp.sum(t))


def _scanned(v: jax.Array, s: jax.Array, b: Batch) -> jax.Array:
    return jax.lax.scan(lambda total, x: (total + x, None), jnp.float32(0), v)[0] / v.shape[0]


def _made_narrower(v: jax.Array, s: jax.Array, b: Batch) -> jax.Array:
    """A sum of whole numbers that float16 holds; the sum over fewer examples overflows."""
    far = 4e4 * jnp.where(jnp.arange(v.shape[0]) < v.shape[0] // 2, 1, -1).astype(v.dtype)
    total = jnp.sum(far + b["label"].astype(v.dtype)).astype(jnp.float16)
    return jnp.mean(v) * (1 + 0.01 * jnp.minimum(total.astype(v.dtype), 100))


def _with_an_absent_class(v: jax.Array, s: jax.Array, b: Batch) -> jax.Array:
    """The mean over a class without examples is 0 / 0, and a `where` hides it."""
    is_there = b["label"] < 0
    n = jnp.sum(is_there.astype(v.dtype))
    return jnp.mean(v) + jnp.where(n > 0, jnp.sum(jnp.where(is_there, v, 0)) / n, 0)


def _any_one(value: jax.Array, s: jax.Array, b: Batch) -> jax.Array:
    """A condition that holds for one example, so on one device."""
    return jnp.any((jnp.arange(s.shape[0]) == s.shape[0] // 3) & jnp.isfinite(s[:, 0]))


REDUCTIONS: dict[str, Reduction] = {
    # Linear: parts of them add up.
    "mean": lambda v, s, b: jnp.mean(v),
    "sum": lambda v, s, b: 0.1 * jnp.sum(v),
    "masked mean": lambda v, s, b: jnp.sum(v * b["mask"]) / jnp.sum(b["mask"]),
    "masked mean of at least one": lambda v, s, b: jnp.sum(v * b["mask"]) / _count(b["mask"]),
    "mean where": lambda v, s, b: jnp.mean(v, where=b["mask"] > 0),
    "weighted": lambda v, s, b: jnp.average(v, weights=b["weight"]),
    "softmax weights of the batch": lambda v, s, b: jnp.dot(jax.nn.softmax(b["weight"]), v),
    "sum under a mask of the model": lambda v, s, b: 0.1 * jnp.sum(v * _chosen(s)),
    "own weights": lambda v, s, b: jnp.mean(detached(jax.nn.sigmoid(v)) * v),
    "over the number of labels": lambda v, s, b: jnp.sum(v) / _count(b["label"] > 2),
    "made narrower": _made_narrower,
    "an absent class": _with_an_absent_class,
    "two sums": lambda v, s, b: jnp.mean(v[: v.shape[0]]) + 0.1 * jnp.sum(jnp.mean(s, 0)),
    # A function of sums that depend on the model.
    "mean of the chosen": lambda v, s, b: jnp.sum(v * _chosen(s)) / _count(_chosen(s)),
    "mean of the positive": lambda v, s, b: jnp.sum(jnp.where(v > 0.5, v, 0)) / _count(v > 0.5),
    "over a detached total": lambda v, s, b: jnp.sum(v**2) / detached(jnp.sum(jnp.abs(v)) + 1),
    "over a total": lambda v, s, b: jnp.sum(v) / (1 + jnp.sum(jnp.abs(s))),
    "over the largest": lambda v, s, b: jnp.mean(v) / (1 + detached(jnp.max(jnp.abs(v)))),
    "nanmean": lambda v, s, b: jnp.nanmean(jnp.where(v > 0.3, v, jnp.nan)),
    "mean squared": lambda v, s, b: jnp.mean(v) ** 2,
    "log of the mean": lambda v, s, b: jnp.log(jnp.mean(_positive(v))),
    "root of the mean": lambda v, s, b: jnp.sqrt(jnp.mean(_positive(v))),
    "norm": lambda v, s, b: jnp.linalg.norm(v + 0.1),
    "exp of the mean": lambda v, s, b: jnp.exp(jnp.minimum(jnp.mean(v), 3)),
    "harmonic mean": lambda v, s, b: 1 / jnp.mean(1 / _positive(v)),
    "geometric mean": lambda v, s, b: jnp.exp(jnp.mean(jnp.log(_positive(v)))),
    "logsumexp": lambda v, s, b: jax.nn.logsumexp(v),
    "tilted": lambda v, s, b: jnp.log(1 + jnp.mean(jnp.exp(0.3 * v))) / 0.3,
    "var": lambda v, s, b: jnp.var(v),
    "std": lambda v, s, b: jnp.std(v, ddof=1) + jnp.mean(v),
    "second moment": lambda v, s, b: jnp.mean(v**2) - 0.5 * jnp.mean(v) ** 2,
    "mean times mean": lambda v, s, b: jnp.mean(v) * jnp.mean(jnp.abs(s)),
    "softmax weights": lambda v, s, b: jnp.sum(jax.nn.softmax(v) * v),
    "detached weights": lambda v, s, b: jnp.sum(detached(_positive(v) / jnp.sum(_positive(v))) * v),
    "own weights over their sum": lambda v, s, b: jnp.average(v, weights=_positive(s[:, 0])),
    "balance": _balance,
    "entropy of the mean": _entropy_of_the_mean,
    "covariance": _covariance,
    "correlation": _correlation,
    "decorrelated": _decorrelated,
    "by rewards": _by_rewards,
    "standardised": _standardised,
    "advantage": _advantage,
    "softplus of deviations": lambda v, s, b: jnp.mean(jax.nn.softplus(_deviations(v))),
    "f-score": _f_score,
    "clipped mean": lambda v, s, b: jnp.minimum(jnp.mean(v), 1.3) + 0.1 * jnp.maximum(jnp.mean(v), 0.9),
    "by the mean": lambda v, s, b: jnp.where(jnp.mean(v) > 1, 2 * jnp.mean(v) - 1, jnp.mean(v) ** 2),
    "cond by the mean": lambda v, s, b: jax.lax.cond(jnp.mean(v) > 1, lambda x: x, lambda x: x**2, jnp.mean(v)),
    # A little above: the scores after a normalisation may all be the same, and the last bit would decide.
    "those above the mean": lambda v, s, b: jnp.mean(jnp.where(v > detached(jnp.mean(v)) + 0.03, v, 0.1 * v)),
    # Extremes, products, order.
    "max": lambda v, s, b: jnp.max(v),
    "min": lambda v, s, b: jnp.min(v) + jnp.mean(v),
    "max less min": lambda v, s, b: jnp.max(v) - jnp.min(v),
    "prod": lambda v, s, b: jnp.prod(0.9 + 0.1 * jnp.tanh(v)),
    "median": lambda v, s, b: jnp.median(v),
    "hardest quarter": lambda v, s, b: jnp.mean(jax.lax.top_k(v, v.shape[0] // 4)[0]),
    "contrastive": _contrastive,
    "scanned": _scanned,
    "cumulative": lambda v, s, b: jnp.mean(jnp.sin(jnp.cumsum(v))),
    "neighbours": lambda v, s, b: jnp.mean(v) + 0.1 * jnp.mean((v - jnp.roll(v, 1)) ** 2),
}
PAIRING = ("median", "hardest quarter", "contrastive", "scanned", "cumulative", "neighbours")


def loss_value(loss: Loss, scores: jax.Array, batch: Batch, params: Any) -> jax.Array:
    """The scalar loss from the scores of the examples."""
    terms = [
        t.weight * REDUCTIONS[t.reduction](PER_EXAMPLE[t.per_example](scores, batch), scores, batch) for t in loss.terms
    ]
    value, *others = terms
    for other in others:
        match loss.join:
            case "sum":
                value = value + other
            case "product":
                value = value * other
            case "ratio":
                value = value / (1 + other**2)
    if loss.decay:
        value = value + loss.decay * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
    return value


# ---- other results --------------------------------------------------------------------------------------------------

#: Further results, as functions of the loss, the scores and the batch.
RESULTS: dict[str, Callable[[jax.Array, jax.Array, Batch], Any]] = {
    "scores": lambda value, s, b: s,
    "predictions": lambda value, s, b: jnp.argmax(s, -1),
    "number correct": lambda value, s, b: jnp.sum(jnp.argmax(s, -1) == b["label"]),
    "accuracy": lambda value, s, b: jnp.mean((jnp.argmax(s, -1) == b["label"]).astype(jnp.float32)),
    "accuracy under a mask": lambda value, s, b: (
        jnp.sum(jnp.where(jnp.argmax(s, -1) == b["label"], b["mask"], 0)) / jnp.sum(b["mask"])
    ),
    "largest score": lambda value, s, b: jnp.max(s),
    "smallest score": lambda value, s, b: jnp.min(s, 0),
    "finite": lambda value, s, b: jnp.all(jnp.isfinite(s)),
    "any one": _any_one,
    "exp of the loss": lambda value, s, b: jnp.exp(jnp.minimum(value, 5)),
    "histogram": lambda value, s, b: jnp.sum(jax.nn.one_hot(jnp.argmax(s, -1), WIDTH, dtype=jnp.int32), 0),
    "mean score": lambda value, s, b: jnp.mean(s, 0),
    "deviation of scores": lambda value, s, b: jnp.std(s, 0),
    "precision": lambda value, s, b: (
        jnp.sum(((s[:, 0] > 0) & (b["label"] > 2)).astype(jnp.float32)) / _count(s[:, 0] > 0)
    ),
    "confusion": lambda value, s, b: jnp.zeros((WIDTH, WIDTH), jnp.int32).at[b["label"], jnp.argmax(s, -1)].add(1),
    "scores by feature": lambda value, s, b: s.T,
    "labels": lambda value, s, b: b["label"],
    "examples": lambda value, s, b: jnp.int32(s.shape[0]),
}
