"""Drawn models: layers in a row between an input projection or embedding and a head; (batch, key) in, scores out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import minialpa
import tests.equivalence.attention_layers  # noqa: F401 - adds its layers to the rules
from tests.equivalence.layers import (
    OWN,
    RETURNS_WEIGHTS,
    SHAPES,
    WIDTH,
    Layer,
    apply_layer,
    batch_norm,
    init,
    init_batch_norm,
    init_layer,
    narrowed,
)

TOKENS = 12
POOLS = ("mean", "max", "last")


@dataclass(frozen=True, slots=True)
class BatchNorm:
    """variance: a key of `layers.VARIANCES`. averages: of the mean and the variance, keys of `layers.AVERAGES`."""

    variance: str = "deviations"
    averages: tuple[str, str] = ("decay", "decay")

    @property
    def may_be_own(self) -> bool:
        """Whether a micro-batch may use its own statistics."""
        return all(name in OWN for name in self.averages)


#: Preparation of inputs of floats; `averaged` standardises them and keeps running statistics.
DATA = ("as it is", "centred", "standardised", "averaged")


@dataclass(frozen=True, slots=True)
class Model:
    """kind: of the activations. boundary: the number of layers before the pipeline boundary; None for no boundary.

    from_tokens: a sequence is embedded from integers. tied: the head is the transpose of the input projection.
    narrows: parameters are read in a narrower type, which keeps their values. data: one of `DATA`.
    """

    kind: str
    layers: tuple[Layer | BatchNorm, ...]
    boundary: int | None = None
    from_tokens: bool = False
    tied: bool = False
    pool: str = "mean"
    checkpoint: bool = False
    narrows: bool = False
    data: str = "as it is"

    @property
    def has_batch_norm(self) -> bool:
        """Whether micro-batches may have their own statistics."""
        return any(isinstance(layer, BatchNorm) and layer.may_be_own for layer in self.layers)


def init_model(model: Model, rng: np.random.Generator) -> tuple[Any, Any]:
    """Parameters; and running statistics, with the weights that layers return."""
    rows = TOKENS if model.from_tokens else WIDTH
    params: dict[str, Any] = {"in": init("in", (), (rows, WIDTH), rng)}
    if model.from_tokens:
        params["in"] *= 2
    if not model.tied:  # a tied head of an embedding has a score for each token
        params["head"] = init("head", (), (WIDTH, WIDTH), rng)
    stats: dict[str, Any] = {}
    for i, layer in enumerate(model.layers):
        if isinstance(layer, BatchNorm):
            params[f"layer{i}"], stats[f"layer{i}"] = init_batch_norm(rng)
        else:
            params[f"layer{i}"] = init_layer(layer, rng)
            if layer.wrap == RETURNS_WEIGHTS:
                stats[f"layer{i}"] = init_layer(layer, rng)
    if model.data == "averaged":
        stats["data"] = init_batch_norm(rng)[1]
    if model.narrows:
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), params)
    return params, stats


def make_batch(model: Model, size: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A batch whose parts differ: a sum over one part is far from the sum over the whole batch."""
    shape = (size, *SHAPES[model.kind])
    growing = np.linspace(0.4, 1.6, size, dtype=np.float32).reshape(-1, *(1,) * (len(shape) - 1))
    batch = {
        "target": growing.reshape(-1, 1) * rng.standard_normal((size, WIDTH)) + growing.reshape(-1, 1) - 1,
        "label": rng.integers(0, WIDTH, size).astype(np.int32),
        "mask": (rng.random(size) < np.linspace(0.3, 0.9, size)).astype(np.float32),
        "weight": rng.random(size) + 0.1,
    }
    batch["mask"][-1] = 1
    if model.from_tokens:
        batch["x"] = rng.integers(0, TOKENS, shape[:2]).astype(np.int32)
    else:
        batch["x"] = growing * rng.standard_normal(shape) + 0.3 * (growing - 1)
    return {k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in batch.items()}


def model_scores(model: Model, params: Any, stats: Any, x: jax.Array, key: jax.Array, ghosts: int) -> Any:
    """Scores (B, WIDTH) and the new running statistics. ghosts: parts of the batch with separate BatchNorm."""

    def run(params: Any, stats: Any, x: jax.Array, key: jax.Array) -> Any:
        if model.narrows:
            params = {name: narrowed(p) if name in ("in", "head") else p for name, p in params.items()}
        new_stats = dict(stats)
        if not model.from_tokens:
            x = _prepared(model.data, x, new_stats)
        h = params["in"][x] if model.from_tokens else x @ params["in"]
        for i, layer in enumerate(model.layers):
            if i == model.boundary:
                minialpa.mark_pipeline_boundary()
            p = params[f"layer{i}"]
            if isinstance(layer, BatchNorm):
                parts = ghosts if layer.may_be_own else 1
                h, new_stats[f"layer{i}"] = batch_norm(layer.variance, layer.averages, p, stats[f"layer{i}"], h, parts)
            else:
                own = jax.random.fold_in(key, i)
                h, returned = apply_layer(layer, p, h, own, narrows=model.narrows)
                if returned is not None:
                    new_stats[f"layer{i}"] = returned
        return _pooled(model, h) @ (params["in"].T if model.tied else params["head"]), new_stats

    return (jax.checkpoint(run) if model.checkpoint else run)(params, stats, x, key)


def _prepared(data: str, x: jax.Array, new_stats: dict[str, Any]) -> jax.Array:
    """Inputs for the model; their running statistics are added to `new_stats`."""
    axes = tuple(range(x.ndim - 1))
    mean, var = jnp.mean(x, axes, keepdims=True), jnp.var(x, axes, keepdims=True)
    if data == "averaged":
        found = {"mean": mean.reshape(-1), "var": var.reshape(-1)}
        new_stats["data"] = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, new_stats["data"], found)
    if data == "centred":
        return x - mean
    return x if data == "as it is" else (x - mean) / jnp.sqrt(var + 0.1)


def _pooled(model: Model, h: jax.Array) -> jax.Array:
    axes = tuple(range(1, h.ndim - 1))
    if not axes:
        return h
    match model.pool:
        case "mean":
            return jnp.mean(h, axes)
        case "max":
            # Not `jnp.max`: XLA on CPUs may compute `h` twice, rounded differently. Then no entry is the largest, and
            # the gradient is 0 / 0, also in plain jax.
            return jnp.sort(h.reshape(h.shape[0], -1, WIDTH), 1)[:, -1]
    return h[(slice(None), *(-1 for _ in axes))]
