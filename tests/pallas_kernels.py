"""Kernels for tests: flash attention and a normalisation of rows, forward and backward in Pallas, in interpret mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl


def _block(length: int, most: int = 4) -> int:
    return next(n for n in range(min(length, most), 0, -1) if length % n == 0)


# ---- attention: [examples, positions, heads, features] ---------------------------------------------------------------


def _forward_kernel(q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any, statistics_ref: Any) -> None:
    """A block of queries against all keys."""
    scores = q_ref[...] @ k_ref[...].T
    largest = jnp.max(scores, 1)
    weights = jnp.exp(scores - largest[:, None])
    total = jnp.sum(weights, 1)
    out_ref[...] = weights @ v_ref[...] / total[:, None]
    statistics_ref[...] = largest + jnp.log(total)


def _query_gradient_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, bar_ref: Any, s_ref: Any, d_ref: Any, o_ref: Any
) -> None:
    weights = jnp.exp(q_ref[...] @ k_ref[...].T - s_ref[...][:, None])
    scores_bar = weights * (bar_ref[...] @ v_ref[...].T - d_ref[...][:, None])
    o_ref[...] = scores_bar @ k_ref[...]


def _key_gradient_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, bar_ref: Any, s_ref: Any, d_ref: Any, k_bar_ref: Any, v_bar_ref: Any
) -> None:
    weights = jnp.exp(q_ref[...] @ k_ref[...].T - s_ref[...][:, None])
    scores_bar = weights * (bar_ref[...] @ v_ref[...].T - d_ref[...][:, None])
    k_bar_ref[...] = scores_bar.T @ q_ref[...]
    v_bar_ref[...] = weights.T @ bar_ref[...]


def _whole(shape: tuple[int, ...]) -> pl.BlockSpec:
    return pl.BlockSpec((None, shape[1], None, shape[3]), lambda b, h, i: (b, 0, h, 0))


def _rows(shape: tuple[int, ...], block: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, block, None, shape[3]), lambda b, h, i: (b, i, h, 0))


def _numbers(block: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, block), lambda b, h, i: (b, h, i))


def _all_numbers(length: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, length), lambda b, h, i: (b, h, 0))


def _forward(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    n, length, heads, _ = q.shape
    block = _block(length)
    return pl.pallas_call(
        _forward_kernel,
        grid=(n, heads, length // block),
        in_specs=[_rows(q.shape, block), _whole(k.shape), _whole(v.shape)],
        out_specs=[_rows(q.shape, block), _numbers(block)],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((n, heads, length), q.dtype)],
        interpret=True,
        name="flash_forward",
    )(q, k, v)


def _backward(saved: Any, out_bar: Any) -> tuple[Any, Any, Any]:
    q, k, v, out, statistics = saved
    n, length, heads, _ = q.shape
    delta = jnp.einsum("bthd,bthd->bht", out, out_bar)
    arrays = (q, k, v, out_bar, statistics, delta)

    block = _block(length)
    q_bar = pl.pallas_call(
        _query_gradient_kernel,
        grid=(n, heads, length // block),
        in_specs=[
            _rows(q.shape, block), _whole(k.shape), _whole(v.shape), _rows(q.shape, block), _numbers(block),
            _numbers(block),
        ],
        out_specs=_rows(q.shape, block),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        interpret=True,
        name="flash_query_gradient",
    )(*arrays)  # fmt: skip

    block = _block(k.shape[1])
    k_bar, v_bar = pl.pallas_call(
        _key_gradient_kernel,
        grid=(n, heads, k.shape[1] // block),
        in_specs=[
            _whole(q.shape), _rows(k.shape, block), _rows(v.shape, block), _whole(q.shape), _all_numbers(length),
            _all_numbers(length),
        ],
        out_specs=[_rows(k.shape, block), _rows(v.shape, block)],
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
        interpret=True,
        name="flash_key_gradient",
    )(*arrays)  # fmt: skip
    return q_bar, k_bar, v_bar


@jax.custom_vjp
def flash_attention(q: Any, k: Any, v: Any) -> Any:
    """softmax(q k^T) v for each example and head."""
    return _forward(q, k, v)[0]


def _saved(q: Any, k: Any, v: Any) -> Any:
    out, statistics = _forward(q, k, v)
    return out, (q, k, v, out, statistics)


flash_attention.defvjp(_saved, _backward)


def plain_attention(q: Any, k: Any, v: Any) -> Any:
    """`flash_attention` in plain operations."""
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k)), v)


# ---- rows ------------------------------------------------------------------------------------------------------------


def _row_call(kernel: Callable[..., None], name: str, *arrays: Any) -> Any:
    """A kernel on blocks of the rows of arrays [rows, features]."""
    rows, features = arrays[0].shape
    block = 2 if rows % 2 == 0 else 1
    spec = pl.BlockSpec((block, features), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        grid=(rows // block,),
        in_specs=[spec] * len(arrays),
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype),
        interpret=True,
        name=name,
    )(*arrays)


def _norm_kernel(x_ref: Any, out_ref: Any) -> None:
    x = x_ref[...]
    out_ref[...] = x * jax.lax.rsqrt(jnp.mean(x**2, 1, keepdims=True) + 1e-2)


def _norm_gradient_kernel(x_ref: Any, bar_ref: Any, out_ref: Any) -> None:
    x, bar = x_ref[...], bar_ref[...]
    scale = jax.lax.rsqrt(jnp.mean(x**2, 1, keepdims=True) + 1e-2)
    out_ref[...] = scale * bar - x * scale**3 * jnp.mean(x * bar, 1, keepdims=True)


@jax.custom_vjp
def row_norm(x: Any) -> Any:
    """Rows [rows, features], divided by the root of their mean square."""
    return _row_call(_norm_kernel, "row_norm", x)


row_norm.defvjp(
    lambda x: (row_norm(x), x), lambda x, bar: (_row_call(_norm_gradient_kernel, "row_norm_gradient", x, bar),)
)


def plain_norm(x: Any) -> Any:
    """`row_norm` in plain operations."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, 1, keepdims=True) + np.float32(1e-2))
