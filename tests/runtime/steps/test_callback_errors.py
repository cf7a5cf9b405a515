"""Errors of Python code that a step calls reach the caller as `jax.jit` raises them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from minialpa import AutoLayerOption, PipeshardParallel, ShardParallel, UniformStageOption, WorkerError

W, X = np.eye(4, dtype=np.float32), np.ones((8, 4), np.float32)
PIPELINE = PipeshardParallel(jax.devices()[:2], 2, layer_option=AutoLayerOption(2), stage_option=UniformStageOption(2))


def _checked(x: Any) -> Any:
    if np.max(x) > 100:
        raise KeyError("a batch that is not normalised")
    return np.asarray(x)


def _step(w: Any, x: Any) -> Any:
    x = jax.pure_callback(_checked, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    loss, gradient = minialpa.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) @ w))(w)
    return w - 0.1 * gradient, loss


@pytest.mark.filterwarnings("ignore:No sharding rule for `pure_callback`")
@pytest.mark.parametrize(
    "method",
    [ShardParallel(jax.devices()[:1]), PIPELINE],
    ids=["one function", "a pipeline"],
)
def test_the_error_is_that_of_jax(method: Any) -> None:
    step = minialpa.parallelize(_step, method=method, batch_argnums=(1,), donate_argnums=())
    for _ in range(2):  # the second call is like the first
        jax.block_until_ready(step(W, X))
    for _ in range(2):
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"KeyError.*not normalised") as raised:
            jax.block_until_ready(step(W, 1000 * X))
        assert not isinstance(raised.value, WorkerError)
    jax.block_until_ready(step(W, X))
