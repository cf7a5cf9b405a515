"""Sums over examples that a result needs whole: stacked by a scan, or after a barrier."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from minialpa import DataParallel, Zero3Parallel
from minialpa.testing import assert_allclose

WEIGHTS = np.random.default_rng(0).normal(size=(3, 8, 8)).astype(np.float32) * 0.3
BATCH = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)


def _sums(h: Any) -> Any:
    return jnp.sum(h, 0)


def _sums_after_a_barrier(h: Any) -> Any:
    return jax.lax.optimization_barrier(jnp.sum(h, 0))


@pytest.mark.parametrize(
    ("noted", "method"),
    [
        (_sums, Zero3Parallel(jax.devices()[:2])),
        (_sums_after_a_barrier, DataParallel(jax.devices()[:2])),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_results_may_be_sums_that_a_scan_stacks(noted: Any, method: Any) -> None:
    def step(weights: Any, batch: Any) -> Any:
        def loss_of(weights: Any) -> Any:
            def layer(h: Any, w: Any) -> Any:
                h = jnp.tanh(h @ w)
                return h, noted(h)

            h, notes = jax.lax.scan(jax.checkpoint(layer), batch, weights)
            return jnp.mean(h**2), notes

        (loss, notes), gradient = minialpa.value_and_grad(loss_of, has_aux=True)(weights)
        return weights - 0.1 * gradient, (loss, notes)

    found = minialpa.parallelize(step, method=method, batch_argnums=(1,))(WEIGHTS, BATCH)
    assert_allclose(found, jax.jit(step)(WEIGHTS, BATCH), rtol=1e-5, atol=1e-5)
