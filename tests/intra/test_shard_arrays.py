"""Barriers for GPUs: no number changes, and each array after a barrier depends on all arrays before it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minialpa.intra.shard_arrays import wait_by_data, wait_for_all


@pytest.mark.parametrize("special", [-0.0, np.nan, np.inf])
def test_arrays_stay_the_same_to_the_last_bit(special: float) -> None:
    arrays = [
        jnp.full((2, 3), special, jnp.float32),
        jnp.full((), special, jnp.bfloat16),
        jnp.arange(4),
        jnp.ones((0, 2)),
        jnp.array([True, False]),
    ]
    for same in (wait_by_data(*arrays), wait_for_all(arrays)):
        for found, given in zip(same, arrays, strict=True):
            assert found.dtype == given.dtype
            assert np.asarray(found).tobytes() == np.asarray(given).tobytes()


def test_each_array_is_computed_from_all_of_them() -> None:
    arrays = [jnp.ones((2, 3)), jnp.arange(4), jnp.ones(5)]
    jaxpr = jax.make_jaxpr(wait_by_data)(*arrays).jaxpr
    reads = {v: {v} for v in jaxpr.invars}
    for eqn in jaxpr.eqns:
        of_operands = [reads.get(v, set()) for v in eqn.invars if not hasattr(v, "val")]
        reads.update((v, set().union(*of_operands)) for v in eqn.outvars)
    waited = {jaxpr.invars[0], jaxpr.invars[2]}  # integers wait, and other arrays do not wait for them
    assert all(waited <= reads[v] for v in jaxpr.outvars)


def test_integers_alone_keep_a_plain_barrier() -> None:
    jaxpr = jax.make_jaxpr(wait_by_data)(jnp.arange(3)).jaxpr
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["optimization_barrier"]


def test_programs_for_cpus_keep_the_barrier_and_those_for_gpus_have_none() -> None:
    traced = jax.jit(lambda x, y: wait_for_all([x, y])).trace(jnp.ones(3), jnp.ones(2))
    texts = {platform: traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "cuda")}
    assert "optimization_barrier" in texts["cpu"] and "select" not in texts["cpu"]
    assert "optimization_barrier" not in texts["cuda"] and "select" in texts["cuda"]
