"""Seconds of work: attentions by kernels of cuDNN or block by block, and products that leave processors idle."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import JaxprEqn

from minialpa.attention.operation import AttentionKind, attention_p
from minialpa.cluster import ClusterSpec, LogicalMesh
from minialpa.intra.strategies.work import blockwise_s, has_kernel, waste, work_of
from minialpa.rules.known_rules import factors_of

H100 = ClusterSpec.preset("h100").device
CPU = ClusterSpec.preset("cpu").device


def _equation(dtype: Any, *, batch: int = 4, biases: int = 0) -> JaxprEqn:
    length = 1024
    query = jax.ShapeDtypeStruct((batch, length, 16, 1, 64), dtype)
    key = jax.ShapeDtypeStruct((batch, length, 16, 64), dtype)
    bias = jax.ShapeDtypeStruct((1, 16, 1, length, length), dtype)
    kind = AttentionKind(scale=0.125, n_biases=biases)
    jaxpr = jax.make_jaxpr(lambda *args: attention_p.bind(*args, kind=kind))(query, key, key, *[bias] * biases)
    eqn: JaxprEqn
    (eqn,) = jaxpr.jaxpr.eqns
    return eqn


def _seconds(eqn: JaxprEqn, device: Any) -> float:
    return sum(work_of(eqn, factors_of(eqn), LogicalMesh((1,), device=device)))


def test_on_gpus_blocks_take_longer_than_a_kernel() -> None:
    kernel, blocks = _equation(jnp.bfloat16), _equation(jnp.bfloat16, biases=1)
    assert has_kernel(kernel) and not has_kernel(blocks) and not has_kernel(_equation(jnp.float32))
    assert _seconds(blocks, H100) > 5 * _seconds(kernel, H100)
    assert _seconds(blocks, H100) == pytest.approx(blockwise_s(blocks, factors_of(blocks), H100) + H100.launch_s)

    # A device without rates of kernels has one price for both.
    expected = CPU.attention_s(factors_of(kernel).flops, 0, "bfloat16")
    assert _seconds(kernel, CPU) == _seconds(blocks, CPU) == pytest.approx(expected)


def test_twice_the_examples_take_twice_the_seconds() -> None:
    one, two = (_equation(jnp.float32, batch=batch) for batch in (2, 4))
    found = [blockwise_s(eqn, factors_of(eqn), H100) for eqn in (one, two)]
    assert found[1] == pytest.approx(2 * found[0])


def test_whole_rounds_of_tiles_waste_nothing_and_one_tile_more_is_another_round() -> None:
    # 128 x 256 tiles: 11 rows of 12 tiles are one round of 132 processors.
    assert waste(1, 11 * 128, 12 * 256, 4096, 132) == 1.0
    assert waste(1, 11 * 128, 24 * 256, 4096, 132) == 1.0
    assert 1.0 < waste(1, 128 * 133, 256, 128, 132) <= 2 * 132 / 133


def test_small_products_with_long_sums_are_split_and_large_ones_waste_little() -> None:
    assert waste(1, 768, 768, 32768, 108) < waste(1, 768, 768, 128, 108)
    sizes = [waste(1, 2**k, 2**k, 512, 132) for k in (8, 10, 12, 14)]
    assert min(sizes) >= 1.0 and sizes[-1] < 1.05 < sizes[0]


@pytest.mark.parametrize(("preset", "slower"), [("h100", 1), ("a100-80gb", 1), ("v100-p3.16xlarge", 8)])
def test_devices_of_a_host_send_through_adapters_of_their_own_if_there_are_any(preset: Any, slower: float) -> None:
    alone = ClusterSpec.preset(preset, num_hosts=2, devices_per_host=1).logical_mesh((2, 1), (2,))
    together = ClusterSpec.preset(preset, num_hosts=2, devices_per_host=8).logical_mesh((2, 8), (2, 8))
    assert together.beta[0] == pytest.approx(slower * alone.beta[0])
