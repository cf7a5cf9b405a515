"""Attentions in float16 are infinite and NaN at the same places as the written ones, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minialpa.tracing.evaluation import eval_flat
from tests.attention_calls import blocks_of
from tests.recognition.compared import array, assert_same_floats, recognised

B, T, N, D = 2, 7, 2, 4
HALF = jnp.float16
EPS = float(jnp.finfo(HALF).eps)
CAUSAL = (np.arange(T)[:, None] >= np.arange(T))[None, None]
#: The first query sees no key, and no query sees key 2.
SEEN = ((np.arange(T)[:, None] > np.arange(T)) & (np.arange(T) != 2))[None, None]
ARRAYS = [array(i, B, T, N, D).astype(HALF) for i in range(4)]
#: Factors of queries and keys, values, and the cotangent.
SIZES = [
    (1, 1, 1), (10, 1, 1), (100, 1, 1), (500, 1, 1), (1000, 1, 1), (1, 1, 1e-3), (1, 1, 2.0**12), (1, 1, 2.0**14),
    (1, 1, 2.0**15), (1, 2.0**14, 1), (1, 100, 1000), (300, 1, 2.0**15),
]  # fmt: skip
AttentionKind = Callable[[Any, Any, Any], Any]


@pytest.fixture(autouse=True)
def _blocks_of_three() -> Iterator[None]:
    with blocks_of(3):
        yield


def _written(product: Any = HALF, scaled: Any = HALF, softmax: Any = HALF, scale: float = 0.5, mask: Any = None) -> Any:
    """An attention, with the dtypes of the product, of the scale and of the softmax."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        x = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=product).astype(scaled)
        x = (x if scale == 1 else x * scale).astype(softmax)
        if mask is not None:
            x = jnp.where(mask, x, jnp.finfo(x.dtype).min)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(x).astype(v.dtype), v)

    return attention


def _with_gradients(fun: AttentionKind) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        out, pull = jax.vjp(fun, *args[:3])
        return out, *pull(args[3].astype(out.dtype))

    return run


F32 = jnp.float32
CASES: dict[str, AttentionKind] = {
    "causal": _written(mask=CAUSAL),
    "softmax in float32": _written(softmax=F32, mask=SEEN),
    "scale in float32": _written(scaled=F32, softmax=F32, mask=CAUSAL),
    "product in float32": _written(product=F32, scaled=F32, softmax=F32, mask=SEEN),
    "a large scale": _written(scale=8.0),
    "values in float32": lambda q, k, v: _written(softmax=F32, scale=0.125)(q, k, v.astype(F32)),
}
SHORT = ("causal", "softmax in float32")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SHORT else pytest.mark.slow) for n in CASES])
def test_infinity_and_nan_are_where_they_are_as_written(name: str) -> None:
    """With overflow of scores and, as under a loss scale, of p_bar."""
    written = _with_gradients(CASES[name])
    found = recognised(written, *ARRAYS)
    assert found.counts == (1, 1)
    new, old = jax.jit(lambda *xs: eval_flat(found.step.flat, xs)), jax.jit(written)
    for sizes in SIZES:
        of_scores, of_values, of_cotangent = sizes
        factors = (of_scores, of_scores, of_values, of_cotangent)
        with np.errstate(over="ignore"):
            args = [(x.astype(np.float64) * factor).astype(HALF) for x, factor in zip(ARRAYS, factors, strict=True)]
        if name == "values in float32" and np.isinf(args[3]).any():
            continue  # infinite cotangents: sum_e out_bar out is infinite where sum_s p p_bar is NaN
        # Of terms of this size, gradients of queries and keys are small differences.
        p_bar = 4 * D * of_values * of_cotangent
        bounds = [4 * of_values, *([min(p_bar, 65504) * 4 * of_scores] * 2), 4 * T * of_cotangent]
        for x, expected, bound in zip(new(*args), old(*args), bounds, strict=True):
            assert_same_floats(x, expected, 2 * EPS * bound + 1e-6, f"{name} {sizes}")


def test_attentions_of_jax() -> None:
    """CPUs do not have its products, of float16 with sums in float32."""

    def attention(scale: float) -> AttentionKind:
        return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=scale)

    with jax.numpy_dtype_promotion("standard"):
        assert recognised(_with_gradients(attention(0.5)), *ARRAYS).counts == (1, 1)
        # The cotangents of the scores are rounded to float16 where they may be infinite.
        assert recognised(_with_gradients(attention(2.0)), *ARRAYS).counts == (0, 0)


# ---- values beyond the range of float16 ------------------------------------------------------------------------------


@pytest.mark.parametrize("n_keys, counts", [(255, (1, 1)), (256, (0, 0))])
def test_squares_of_totals_are_finite(n_keys: int, counts: Any) -> None:
    """The derivative of a softmax in float16 divides by the square of its total."""
    shapes = [jax.ShapeDtypeStruct((1, n, 1, D), HALF) for n in (4, n_keys, n_keys, 4)]
    args = [np.zeros(x.shape, x.dtype) for x in shapes]
    assert recognised(_with_gradients(_written()), *args).counts == counts
    assert recognised(_with_gradients(_written(softmax=F32)), *args).counts == (1, 1)
    assert recognised(_written(), *args[:3]).counts == (1, 0)


@pytest.mark.parametrize("n_keys, count", [(65504, 1), (65505, 0)])
def test_totals_are_finite(n_keys: int, count: int) -> None:
    args = [np.zeros((1, n, 1, D), HALF) for n in (2, n_keys, n_keys)]
    assert recognised(_written(), *args).counts == (count, 0)
