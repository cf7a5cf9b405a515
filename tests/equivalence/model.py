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
    """variance: a key of `layers.VARIANCES`."""

    variance: str = "deviations"


@dataclass(frozen=True, slots=True)
class Model:
    """kind: of the activations. boundary: the number of layers before the pipeline boundary; None for no boundary.

    from_tokens: a sequence is embedded from integers. tied: the head is the transpose of the input projection.
    narrows: parameters are read in a narrower type, in which they have the same values.
    """

    kind: str
    layers: tuple[Layer | BatchNorm, ...]
    boundary: int | None = None
    from_tokens: bool = False
    tied: bool = False
    pool: str = "mean"
    checkpoint: bool = False
    narrows: bool = False

    @property
    def has_batch_norm(self) -> bool:
        return any(isinstance(layer, BatchNorm) for layer in self.layers)


def init_model(model: Model, rng: np.random.Generator) -> tuple[Any, Any]:
    """Parameters, and running statistics of the BatchNorm layers."""
    rows = TOKENS if model.from_tokens else WIDTH
    params: dict[str, Any] = {"in": init("in", (), (rows, WIDTH), rng)}
    if model.from_tokens:
        params["in"] *= 2
    if not model.tied:  # a tied head of an embedding has a score for each token
        params["head"] = init("head", (), (WIDTH, WIDTH), rng)
    stats = {}
    for i, layer in enumerate(model.layers):
        if isinstance(layer, BatchNorm):
            params[f"layer{i}"], stats[f"layer{i}"] = init_batch_norm(rng)
        else:
            params[f"layer{i}"] = init_layer(layer, rng)
    if model.narrows:
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), params)
    return params, stats


def make_batch(model: Model, size: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A batch whose parts differ: what a part of it computes as its own total is far from the whole batch's."""
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
    """Scores (B, WIDTH) and the new running statistics. ghosts: parts of the batch that BatchNorm sees one by one."""

    def run(params: Any, stats: Any, x: jax.Array, key: jax.Array) -> Any:
        if model.narrows:
            params = {name: narrowed(p) if name in ("in", "head") else p for name, p in params.items()}
        h = params["in"][x] if model.from_tokens else x @ params["in"]
        new_stats = dict(stats)
        for i, layer in enumerate(model.layers):
            if i == model.boundary:
                minialpa.mark_pipeline_boundary()
            p = params[f"layer{i}"]
            if isinstance(layer, BatchNorm):
                h, new_stats[f"layer{i}"] = batch_norm(layer.variance, p, stats[f"layer{i}"], h, ghosts)
            else:
                h = apply_layer(layer, p, h, jax.random.fold_in(key, i), narrows=model.narrows)
        return _pooled(model, h) @ (params["in"].T if model.tied else params["head"]), new_stats

    return (jax.checkpoint(run) if model.checkpoint else run)(params, stats, x, key)


def _pooled(model: Model, h: jax.Array) -> jax.Array:
    axes = tuple(range(1, h.ndim - 1))
    if not axes:
        return h
    match model.pool:
        case "mean":
            return jnp.mean(h, axes)
        case "max":
            # Not `jnp.max`: XLA on CPUs may compute `h` twice, rounded differently; then no entry is the largest, and
            # the gradient is 0 / 0, in plain jax too.
            return jnp.sort(h.reshape(h.shape[0], -1, WIDTH), 1)[:, -1]
    return h[(slice(None), *(-1 for _ in axes))]
