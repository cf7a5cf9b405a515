"""Predicted memory of small functions on GPUs, against programs that XLA compiles for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from minialpa.attention.operation import AttentionKind
from minialpa.intra.memory.xla.model import XLA_GPU
from minialpa.tracing.ragged_products import grouped_product
from minialpa.xla_gpu.compile import compile_for_gpus
from minialpa.xla_gpu.worker import GpuProgram
from tests.attention_calls import causal, fused
from tests.helpers import temporary_bytes
from tests.xla_gpu.gpu_requests import request

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra `gpu-compile`")

N, D = 2048, 1024
F32, BF16 = jnp.float32, jnp.bfloat16


def _array(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _chain(x: jax.Array) -> Any:
    return jnp.sum(jnp.exp(x * 2 + 1) * x, axis=1)


def _softmax(x: jax.Array, w: jax.Array) -> Any:
    return jax.nn.softmax(x @ w, axis=-1) @ w.T


def _block(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt((centred * centred).mean(axis=-1, keepdims=True) + 1e-5)
    return x + jax.nn.gelu(normed @ w) @ v


def _block_gradients(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
    return jax.grad(lambda *args: jnp.sum(_block(*args).astype(F32) ** 2), argnums=(0, 1, 2))(x, w, v)


def _converted(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
    return jax.nn.relu(x @ w).astype(BF16) @ v


def _updated(x: jax.Array, w: jax.Array, v: jax.Array, y: jax.Array, bias: jax.Array) -> Any:
    """Products with arguments, with the array of another kernel, and with a converted one."""
    z = x @ w - y
    return w - 0.1 * (x.T @ z), z + z @ v, z @ v.T + bias.astype(z.dtype)[None]


def _heads(x: jax.Array, w: jax.Array) -> Any:
    """Products over batches of transposed operands."""
    q = (x @ w).reshape(8, N // 8, 16, D // 16)
    scores = jnp.einsum("bthd,bshd->bhts", q, q)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.relu(scores), q)


def _convolutions(x: jax.Array, kernel: jax.Array) -> Any:
    def convolved(x: jax.Array) -> jax.Array:
        out = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.relu(out)

    return convolved(convolved(x))


def _one_hot(index: jax.Array, w: jax.Array) -> Any:
    return jax.nn.one_hot(index, D) @ w


def _ragged(x: jax.Array, w: jax.Array, out_bar: jax.Array, sizes: jax.Array) -> Any:
    """A ragged product, and the gradient of its weights."""

    def product(lhs: jax.Array, rhs: jax.Array, contract: Any, groups: Any) -> jax.Array:
        numbers = jax.lax.RaggedDotDimensionNumbers((contract, ((), ())), [0], groups)
        options = {"precision": None, "preferred_element_type": None}
        (out,) = grouped_product(lhs, rhs, sizes, ragged_dot_dimension_numbers=numbers, **options)
        return out

    return jnp.tanh(product(x, w, ((1,), (1,)), (0,))), product(x, out_bar, ((0,), (0,)), ())


def _attention(query: jax.Array, key: jax.Array, value: jax.Array, out_bar: jax.Array) -> Any:
    out, pull_back = jax.vjp(lambda *xs: fused(_KIND, *xs), query, key, value)
    return out, pull_back(out_bar)


_KIND: AttentionKind = causal(64)
_QUERY, _KEY = _array(2, N, 2, 4, 64, dtype=BF16), _array(2, N, 2, 64, dtype=BF16)

CASES: dict[str, tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]] = {
    "a chain that a sum ends": (_chain, (_array(N, D),)),
    "softmax between products": (_softmax, (_array(N, D), _array(D, D))),
    "gradients, bfloat16": (
        _block_gradients,
        (_array(N, D, dtype=BF16), _array(D, 4 * D, dtype=BF16), _array(4 * D, D, dtype=BF16)),
    ),
    "a product and its conversion": (_converted, (_array(N, D), _array(D, 4 * D), _array(4 * D, D, dtype=BF16))),
    "an update, bfloat16": (
        _updated,
        (
            *(_array(*shape, dtype=BF16) for shape in ((N, D), (D, 4 * D), (4 * D, 4 * D), (N, 4 * D))),
            _array(4 * D),
        ),
    ),
    "products of heads": (_heads, (_array(N, D, dtype=BF16), _array(D, D, dtype=BF16))),
    "convolutions, bfloat16": (_convolutions, (_array(8, 64, 64, 64, dtype=BF16), _array(3, 3, 64, 64, dtype=BF16))),
    "a product with a mask as numbers": (_one_hot, (_array(N, dtype=jnp.int32), _array(D, D))),
    "a ragged product and its gradients": (
        _ragged,
        (_array(N, D), _array(8, D, D), _array(N, D), _array(8, dtype=jnp.int32)),
    ),
    "attention and its gradients": (_attention, (_QUERY, _KEY, _KEY, _QUERY)),
}


@pytest.fixture(scope="module")
def compiled() -> dict[str, GpuProgram]:
    return dict(zip(CASES, compile_for_gpus([request(*case) for case in CASES.values()]), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_temporaries_are_not_less_than_those_of_the_compiled_function(
    case: str, compiled: dict[str, GpuProgram]
) -> None:
    fun, arguments = CASES[case]
    # A kernel may keep some sums of its threads.
    small = 0.005 * (compiled[case].argument_bytes + compiled[case].output_bytes)
    needed, predicted = compiled[case].temporary_bytes, temporary_bytes(fun, arguments, XLA_GPU)
    assert 0.98 * needed - small <= predicted <= 1.45 * needed + small
