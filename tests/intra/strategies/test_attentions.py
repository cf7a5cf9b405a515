"""Seconds of attentions: of a kernel where cuDNN has one, and block by block elsewhere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import JaxprEqn

from minialpa.attention.operation import Attention, attention_p
from minialpa.cluster import ClusterSpec, LogicalMesh
from minialpa.intra.strategies.attentions import blockwise_s, has_kernel
from minialpa.intra.strategies.strategies import work_of
from minialpa.rules.known_rules import factors_of

H100 = ClusterSpec.preset("h100").device
CPU = ClusterSpec.preset("cpu").device


def _equation(dtype: Any, *, batch: int = 4, length: int = 1024, biases: int = 0) -> JaxprEqn:
    query = jax.ShapeDtypeStruct((batch, length, 16, 1, 64), dtype)
    key = jax.ShapeDtypeStruct((batch, length, 16, 64), dtype)
    bias = jax.ShapeDtypeStruct((1, 16, 1, length, length), dtype)
    kind = Attention(scale=0.125, n_biases=biases)
    jaxpr = jax.make_jaxpr(lambda *args: attention_p.bind(*args, kind=kind))(query, key, key, *[bias] * biases)
    eqn: JaxprEqn
    (eqn,) = jaxpr.jaxpr.eqns
    return eqn


def _seconds(eqn: JaxprEqn, device: Any) -> float:
    return sum(work_of(eqn, factors_of(eqn), LogicalMesh((1,), device=device)))


@pytest.mark.parametrize(("dtype", "biases", "expected"), [(jnp.bfloat16, 0, True), (jnp.bfloat16, 1, False)])
def test_cudnn_has_kernels_without_biases(dtype: Any, biases: int, expected: bool) -> None:
    assert has_kernel(_equation(dtype, biases=biases)) == expected
    assert not has_kernel(_equation(jnp.float32, biases=biases))


def test_on_gpus_blocks_take_longer_than_a_kernel() -> None:
    kernel, blocks = _equation(jnp.bfloat16), _equation(jnp.bfloat16, biases=1)
    assert _seconds(blocks, H100) > 5 * _seconds(kernel, H100)
    assert _seconds(blocks, H100) == pytest.approx(blockwise_s(blocks, factors_of(blocks), H100) + H100.launch_s)


def test_devices_without_rates_of_kernels_have_one_price_for_all() -> None:
    kernel, blocks = _equation(jnp.bfloat16), _equation(jnp.bfloat16, biases=1)
    flops = factors_of(kernel).flops
    assert _seconds(kernel, CPU) == pytest.approx(CPU.attention_s(flops, 0, "bfloat16"))
    assert _seconds(blocks, CPU) == pytest.approx(CPU.attention_s(flops, 0, "bfloat16"))


@pytest.mark.parametrize("length", [256, 2048])
def test_seconds_are_those_of_the_scores(length: int) -> None:
    """Twice the examples, twice the scores."""
    one, two = (_equation(jnp.float32, batch=batch, length=length) for batch in (2, 4))
    found = [blockwise_s(eqn, factors_of(eqn), H100) for eqn in (one, two)]
    assert found[1] == pytest.approx(2 * found[0])
