"""Loops that each example ends by itself, over micro-batches and on meshes: the serial run, in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import minialpa
from minialpa import DataParallel, ShardParallel
from minialpa.methods import Method

B, H = 16, 8
_RNG = np.random.default_rng(0)
W = 0.4 * _RNG.standard_normal((H, H)).astype(np.float32)
# Examples end after different numbers of iterations, and the last ones need most.
X = (np.linspace(0.3, 30, B)[:, None] * _RNG.standard_normal((B, H))).astype(np.float32)

Layer = Callable[[jax.Array, jax.Array], Any]


def _halved(w: jax.Array, x: jax.Array) -> Any:
    return jax.vmap(lambda row: lax.while_loop(lambda r: jnp.sum(r**2) > 4, lambda r: 0.5 * r, row))(x)


def _halved_by_hand(w: jax.Array, x: jax.Array) -> Any:
    """The second result is the number of iterations, which is that of the last example."""

    def body(c: Any) -> Any:
        n, x = c
        return n + 1, jnp.where(jnp.abs(x) > 1, 0.5 * x, x)

    n, x = lax.while_loop(lambda c: jnp.any(jnp.abs(c[1]) > 1), body, (0, x))
    return x, n


def _mapped(w: jax.Array, x: jax.Array) -> Any:
    return lax.map(lambda row: jnp.tanh(row @ w), x)


def _solved(w: jax.Array, x: jax.Array) -> Any:
    return jax.vmap(lambda v: jnp.linalg.solve(jnp.eye(H) + w @ w.T + jnp.outer(v, v), v))(x)


def _halved_together(w: jax.Array, x: jax.Array) -> Any:
    return lax.while_loop(lambda x: jnp.any(jnp.abs(x) > 1), lambda x: 0.5 * x, x)


def _step_of(layer: Layer) -> Callable[..., Any]:
    def loss(w: jax.Array, x: jax.Array) -> Any:
        if layer in (_mapped, _solved):
            return jnp.mean(layer(w, x) ** 2), None
        out = lax.stop_gradient(layer(w, lax.stop_gradient(x @ w)))  # loops have no derivative backwards
        rows, n = out if isinstance(out, tuple) else (out, None)
        return jnp.mean((jnp.tanh(x @ w) + rows) ** 2), n

    def step(w: jax.Array, x: jax.Array) -> Any:
        (value, n), gradient = minialpa.value_and_grad(loss, has_aux=True)(w, x)
        return w - 0.1 * gradient, value, n

    return step


def _check(layer: Layer, method: Method) -> None:
    step = _step_of(layer)
    parallel = minialpa.parallelize(step, method=method, batch_argnums=(1,), donate_argnums=())
    for found, expected in zip(*map(jax.tree.leaves, (parallel(W, X), jax.jit(step)(W, X))), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)

    plan = parallel.get_last_executable().get_parallel_plan()
    assert plan.n_loops == 1 + (layer is _halved_together)


@pytest.mark.parametrize("layer", [_halved, _halved_by_hand, _solved, _halved_together])
def test_two_micro_batches_compute_the_step_in_one_pass_unless_examples_meet(layer: Layer) -> None:
    _check(layer, ShardParallel(jax.devices()[:1], 2))


@pytest.mark.parametrize("layer", [_halved_by_hand, _mapped])
def test_devices_run_loops_of_their_own(layer: Layer) -> None:
    _check(layer, DataParallel(jax.devices()[:4], 2))
