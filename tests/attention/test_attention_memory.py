"""Predicted memory of programs with attention, against the compiler's count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from minialpa.attention.operation import AttentionKind
from minialpa.intra.memory.xla.model import XLA_CPU
from tests.attention_calls import causal, fused
from tests.helpers import temporary_bytes


def _forward(kind: AttentionKind) -> Callable[..., Any]:
    return lambda query, key, value, _: fused(kind, query, key, value)


def _gradients(kind: AttentionKind) -> Callable[..., Any]:
    """The attention and its gradients; the cotangent is an argument."""

    def fun(query: Any, key: Any, value: Any, out_bar: Any) -> Any:
        out, pull_back = jax.vjp(lambda *xs: fused(kind, *xs), query, key, value)
        return out, pull_back(out_bar)

    return fun


def _arguments(n: int, dtype: Any, d: int = 32) -> tuple[jax.ShapeDtypeStruct, ...]:
    query, key = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((2, n, 2, 4, d), (2, n, 2, d)))
    return query, key, key, query


@pytest.mark.parametrize(
    ("fun", "dtype"), [(_forward(AttentionKind(scale=0.1)), jnp.float32), (_gradients(causal(32)), jnp.bfloat16)]
)
def test_scratch_is_that_of_the_compiled_programs_within_a_factor_of_two(fun: Callable[..., Any], dtype: Any) -> None:
    arguments = _arguments(1024, dtype)
    stats = jax.jit(fun).lower(*arguments).compile().memory_analysis()
    assert stats is not None
    # The model fuses CPU kernels as XLA fuses GPU kernels, which keep less; tests/xla_gpu compares with GPUs.
    assert stats.temp_size_in_bytes / 2 <= temporary_bytes(fun, arguments, XLA_CPU) <= 2 * stats.temp_size_in_bytes


def test_memory_is_linear_in_the_length() -> None:
    """From 8k positions to 64k: at most 8 times the bytes. All scores would take 64 times the bytes."""
    few, many = (temporary_bytes(_gradients(causal(32)), _arguments(n, jnp.bfloat16), XLA_CPU) for n in (8192, 65536))
    assert many <= 8 * few
