"""A Ref on the workers of a Ray cluster: it stays there between steps, and the driver reads and changes it.

The short relative, with workers in threads, is in `tests/test_refs.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ray.cluster_utils import Cluster

import minialpa
from minialpa import ShardParallel
from minialpa.support.private_jax import value_of_ref
from minialpa.testing import assert_allclose
from tests.runtime.ray.ray_cluster import start_session
from tests.two_layers import make_batch, make_params, train_step

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]


def logged(params: Any, batch: Any, log: Any) -> Any:
    params, loss = train_step(params, batch)
    log[...] = jnp.roll(log[...], 1)
    log[0] += loss
    return params, loss


def test_a_ref_on_workers_equals_plain_jax(cluster: Cluster) -> None:
    start_session(cluster.address, 2, 2)
    parallel, plain = minialpa.parallelize(logged, method=ShardParallel()), jax.jit(logged)
    found, log = make_params(), jax.new_ref(jnp.zeros(3))
    expected, plain_log = make_params(), jax.new_ref(jnp.zeros(3))
    for i in range(4):
        found, _ = parallel(found, make_batch(i), log)
        expected, _ = plain(expected, make_batch(i), plain_log)
        assert isinstance(value_of_ref(log), minialpa.arrays.RemoteArray)
        if i == 1:
            assert_allclose(log[...], plain_log[...], rtol=1e-4, atol=1e-6)
            assert isinstance(value_of_ref(log), minialpa.arrays.RemoteArray)
        if i == 2:
            log[1] = plain_log[1] = 7.0
    assert_allclose((found, log[...]), (expected, plain_log[...]), rtol=1e-4, atol=1e-6)
