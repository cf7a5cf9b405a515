"""Attention by its primitives, for tests: `fused` is what a recognised attention is in a step."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from minialpa.attention.operation import Attention, attention_gradient_p, attention_p


def causal(d: int, **facts: Any) -> Attention:
    """Attention with a causal mask, for keys of d features; facts: fields of `Attention`."""
    return Attention(**{"scale": 1 / math.sqrt(d), "right": 0} | facts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused(kind: Attention, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """The attention of [b t g r d], [b s g d], [b s g e] -> [b t g r e], without biases or masks."""
    return _forward(kind, query, key, value)[0]


def _forward(kind: Attention, query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, tuple[Any, ...]]:
    positions = [jnp.arange(x.shape[1], dtype=jnp.int32) for x in (query, key)[: kind.n_positions]]
    out, logsumexp = attention_p.bind(query, key, value, *positions, kind=kind)
    return out, (query, key, value, out, logsumexp, positions)


def _backward(kind: Attention, residuals: tuple[Any, ...], out_bar: jax.Array) -> tuple[Any, ...]:
    *arrays, positions = residuals
    dtypes = tuple(x.dtype.name for x in arrays[:3])
    return tuple(attention_gradient_p.bind(*arrays, out_bar, *positions, kind=kind, dtypes=dtypes, wants_bias=()))


fused.defvjp(_forward, _backward)
