"""Attention by its primitives, for tests: `fused`, the form after recognition, and a step with it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from minialpa.attention import blockwise
from minialpa.attention.operation import AttentionKind, attention_gradient_p, attention_p


@contextmanager
def blocks_of(side: int) -> Iterator[None]:
    """Within this context, attentions run in blocks of `side` positions, so that short arrays have several."""
    before, caches = blockwise.SIDE, (blockwise.attend, blockwise.differentiate)
    blockwise.SIDE = side
    for fun in caches:
        fun.clear_cache()
    try:
        yield
    finally:
        blockwise.SIDE = before
        for fun in caches:
            fun.clear_cache()


def causal(d: int, **facts: Any) -> AttentionKind:
    """Attention with a causal mask, for keys of d features; facts: fields of `AttentionKind`."""
    return AttentionKind(**{"scale": 1 / math.sqrt(d), "right": 0} | facts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused(kind: AttentionKind, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """The attention of [b t g r d], [b s g d], [b s g e] -> [b t g r e], without biases or masks."""
    return _forward(kind, query, key, value)[0]


def _forward(
    kind: AttentionKind, query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, tuple[Any, ...]]:
    positions = [jnp.arange(x.shape[1], dtype=jnp.int32) for x in (query, key)[: kind.n_positions]]
    out, logsumexp = attention_p.bind(query, key, value, *positions, kind=kind)
    return out, (query, key, value, out, logsumexp, positions)


def _backward(kind: AttentionKind, residuals: tuple[Any, ...], out_bar: jax.Array) -> tuple[Any, ...]:
    *arrays, positions = residuals
    dtypes = tuple(x.dtype.name for x in arrays[:3])
    return tuple(
        attention_gradient_p.bind(*arrays, out_bar, *positions, kind=kind, dtypes=dtypes, with_bias_gradient=())
    )


fused.defvjp(_forward, _backward)


Step = Callable[[Any, Any], tuple[Any, Any]]
_B, _S, _G, _R, _D, _LAYERS = 8, 16, 2, 2, 4, 2
_HIDDEN = _G * _R * _D


def _layer(weights: Any, x: jax.Array) -> jax.Array:
    b, s, _ = x.shape
    query = (x @ weights["query"]).reshape(b, s, _G, _R, _D)
    key, value = ((x @ weights[name]).reshape(b, s, _G, _D) for name in ("key", "value"))
    x = x + fused(causal(_D), query, key, value).reshape(x.shape) @ weights["out"]
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"]


def two_layers(grad: Callable[..., Any]) -> Step:
    """A training step of two layers with attention; grad: `value_and_grad` of jax or of minialpa."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for weights in params:
            x = _layer(weights, x)
        return jnp.mean((x - batch["y"]) ** 2)

    def step(params: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = grad(loss)(params, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return step


def two_layers_arguments(b: int = _B, s: int = _S) -> tuple[Any, Any]:
    """Weights and a batch of b examples of s positions."""
    rng = np.random.default_rng(0)
    shapes = {
        "query": (_HIDDEN, _HIDDEN),
        "key": (_HIDDEN, _G * _D),
        "value": (_HIDDEN, _G * _D),
        "out": (_HIDDEN, _HIDDEN),
        "up": (_HIDDEN, 2 * _HIDDEN),
        "down": (2 * _HIDDEN, _HIDDEN),
    }

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    params = [{name: draw(shape) for name, shape in shapes.items()} for _ in range(_LAYERS)]
    return params, {name: draw((b, s, _HIDDEN)) * 4 for name in "xy"}
