"""Attention with all scores at once, as users write it: the oracle of blockwise attention."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from minialpa.attention.operation import AttentionKind, attention_gradient_p, attention_p


def written(query: Any, key: Any, value: Any, *others: Any, kind: AttentionKind) -> jax.Array:
    """out [b t g r e] in the widest dtype of the operands, at least float32; others are operands of `attention_p`."""
    n, first_bias = kind.n_positions, kind.n_positions + 2 * kind.n_segments
    end = first_bias + kind.n_biases
    positions, segments, biases, masks = others[:n], others[n:first_bias], others[first_bias:end], others[end:]
    dtype = functools.reduce(np.promote_types, (x.dtype for x in (query, key, value, *biases)), np.float32)
    query, key, value, *biases = (x.astype(dtype) for x in (query, key, value, *biases))

    score = jnp.einsum("btgrd,bsgd->bgrts", query, key) * jnp.asarray(kind.scale, dtype)
    for bias in biases:
        score = score + bias
    seen = [*masks, *(queries == keys for queries, keys in zip(segments[::2], segments[1::2], strict=True))]
    if positions:
        ahead = positions[1][None, :] - positions[0][:, None]
        if kind.left is not None:
            seen.append((ahead >= -kind.left)[None, None, None])
        if kind.right is not None:
            seen.append((ahead <= kind.right)[None, None, None])
    if seen:
        score = jnp.where(functools.reduce(jnp.logical_and, seen), score, jnp.asarray(kind.masked_score, dtype))
    weight = jnp.exp(score - lax.stop_gradient(score.max(axis=-1, keepdims=True)))
    return jnp.einsum("bgrts,bsge->btgre", weight / weight.sum(axis=-1, keepdims=True), value)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Operands of `attention_p`, their kind, and a cotangent of the result."""

    kind: AttentionKind
    operands: tuple[jax.Array, ...]
    out_bar: jax.Array

    @property
    def biases(self) -> tuple[jax.Array, ...]:
        return self.operands[self.first_bias : self.first_bias + self.kind.n_biases]

    @property
    def first_bias(self) -> int:
        return 3 + self.kind.n_positions + 2 * self.kind.n_segments


def make_case(
    rng: np.random.Generator,
    kind: AttentionKind,
    *,
    sizes: tuple[int, int, int, int, int, int, int],
    dtypes: Sequence[Any] = (np.float32,) * 3,
    bias_shapes: Sequence[tuple[int, ...]] = (),
    mask_shapes: Sequence[tuple[int, ...]] = (),
    seen: float = 0.7,
    positions: tuple[Any, Any] | None = None,
) -> Case:
    """Random operands; sizes are b, t, s, g, r, d, e, and shapes are of [b g r t s]."""
    b, t, s, g, r, d, e = sizes

    def normal(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    operands = [
        normal(shape, dtype) for shape, dtype in zip(((b, t, g, r, d), (b, s, g, d), (b, s, g, e)), dtypes, strict=True)
    ]
    if kind.has_window:
        chosen = positions or (np.arange(t) + max(0, s - t), np.arange(s))
        operands += [jnp.asarray(x, np.int32) for x in chosen]
    for _ in range(kind.n_segments):
        documents = jnp.sort(jnp.asarray(rng.integers(0, 4, (b, 1, 1, max(s, t))), np.int32))
        operands += [documents[..., :t, None], documents[..., None, :s]]
    operands += [normal(shape, np.float32) for shape in bias_shapes]
    operands += [jnp.asarray(rng.random(shape) < seen) for shape in mask_shapes]
    return Case(kind=kind, operands=tuple(operands), out_bar=normal((b, t, g, r, e), dtypes[2]))


def with_gradients(case: Case) -> tuple[Any, list[Any]]:
    """out, and the cotangents of query, key, value and all biases, by the primitives."""
    kind, names = case.kind, [x.dtype.name for x in (*case.operands[:3], *case.biases)]

    @jax.jit
    def run(operands: Any, out_bar: Any) -> Any:
        out, logsumexp = attention_p.bind(*operands, kind=kind)
        all_operands = (*operands[:3], out, logsumexp, out_bar, *operands[3:])
        flags = (True,) * kind.n_biases
        return out, attention_gradient_p.bind(*all_operands, kind=kind, dtypes=tuple(names), with_bias_gradient=flags)

    return run(case.operands, case.out_bar)


def written_with_gradients(case: Case) -> tuple[Any, list[Any]]:
    """The same by jax's own derivative of the written program."""
    differentiable = (*case.operands[:3], *case.biases)
    end = case.first_bias + case.kind.n_biases
    before, masks = case.operands[3 : case.first_bias], case.operands[end:]

    @jax.jit
    def run(arrays: Any, out_bar: Any) -> Any:
        def fun(*arrays: Any) -> jax.Array:
            return written(*arrays[:3], *before, *arrays[3:], *masks, kind=case.kind)

        out, pull = jax.vjp(fun, *arrays)
        return out, pull(out_bar.astype(out.dtype))

    return run(differentiable, case.out_bar)


def assert_same(case: Case, tolerance: float = 2e-5) -> None:
    """The primitives compute what the written program does, NaN and infinity included."""
    out, bars = with_gradients(case)
    expected_out, expected_bars = written_with_gradients(case)
    assert out.dtype == case.operands[2].dtype
    for name, x, expected in zip(
        ("out", "query", "key", "value", *("bias",) * len(case.biases)),
        (out, *bars),
        (expected_out, *expected_bars),
        strict=True,
    ):
        x, expected = np.asarray(x, np.float64), np.asarray(expected, np.float64)
        assert x.shape == expected.shape
        finite = expected[np.isfinite(expected)]
        size = np.abs(finite).max(initial=1.0)
        np.testing.assert_allclose(x, expected, rtol=tolerance, atol=tolerance * size, err_msg=name)
