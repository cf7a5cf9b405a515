"""Attentions in scans over layers, in loops and branches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minialpa.recognition.step import recognise
from tests.helpers import trace
from tests.recognition.compared import all_equations, array, compared, recognised

B, T, N, D, LAYERS = 2, 6, 2, 3, 3
X = array(0, B, T, N * D)
WEIGHTS = array(1, LAYERS, 4, N * D, N * D) * 0.3


def layer(x: Any, w: Any) -> tuple[Any, Any]:
    t = x.shape[1]
    q, k, v = (jnp.reshape(x @ w[i], (*x.shape[:2], N, D)) for i in range(3))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(jnp.float32(D))
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool))[None, None], scores, jnp.finfo(jnp.float32).min)
    out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    return x + jnp.reshape(out, x.shape) @ w[3], None


def scanned(body: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def loss(weights: Any, x: Any) -> Any:
        y, _ = jax.lax.scan(body, x, weights, **options)
        return jnp.sum(jnp.sin(y))

    return jax.value_and_grad(loss, (0, 1))


BODIES = {
    "remat": (jax.checkpoint(layer), (2, 1)),
    "saved products": (
        jax.checkpoint(layer, prevent_cse=False, policy=jax.checkpoint_policies.dots_saveable),
        (1, 1),
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_scans_over_layers(name: str) -> None:
    body, counts = BODIES[name]
    assert compared(scanned(body), WEIGHTS, X).counts == counts


def test_a_scan_becomes_the_same_program_each_time() -> None:
    """Other processes use plans of one process, so a plan must not depend on the addresses of variables."""
    steps = [recognise(trace(scanned(layer), WEIGHTS, X, batch=()), everywhere=True) for _ in range(2)]
    first, second = ([str(eqn.params["jaxpr"]) for eqn in step.flat.eqns if "jaxpr" in eqn.params] for step in steps)
    assert len(first) == 2
    assert first == second


def test_no_body_has_all_scores() -> None:
    length = 77
    arrays = (jax.ShapeDtypeStruct(shape, np.float32) for shape in (WEIGHTS.shape, (1, length, N * D)))
    step = recognise(trace(scanned(layer), *arrays, batch=()), everywhere=True)
    shapes = [var.aval.shape for eqn in all_equations(step.flat.eqns) for var in eqn.outvars]
    assert any(length in shape for shape in shapes)
    assert not any(shape.count(length) == 2 for shape in shapes)


def test_a_scan_whose_stacked_results_are_also_results() -> None:
    def loss(weights: Any, x: Any) -> Any:
        y, ys = jax.lax.scan(lambda x, w: (layer(x, w)[0], jnp.sin(x)), x, weights)
        return jnp.sum(jnp.sin(y)) + jnp.sum(ys**2), ys

    assert recognised(jax.value_and_grad(loss, (0, 1), has_aux=True), WEIGHTS, X).counts == (1, 1)


def test_a_scan_over_blocks_of_queries() -> None:
    """The derivative reads the queries, which are rows of an array and not computed in the scan."""

    def loss(query: Any, key: Any, value: Any) -> Any:
        blocks = jnp.moveaxis(jnp.reshape(jnp.tanh(query), (B, 2, T // 2, N, D)), 1, 0)
        out = jax.lax.map(lambda block: jax.nn.dot_product_attention(block, key, value), blocks)
        return jnp.sum(jnp.sin(out))

    arrays = [array(seed, B, T, N, D) for seed in (2, 3, 4)]
    assert compared(jax.value_and_grad(loss, (0, 1, 2)), *arrays).counts == (1, 1)


def test_a_scan_in_a_scan() -> None:
    def loss(weights: Any, x: Any) -> Any:
        y, _ = jax.lax.scan(layer, x, weights)
        return jnp.sum(jnp.sin(y))

    def step(weights: Any, xs: Any) -> Any:
        def accumulate(total: Any, x: Any) -> Any:
            return total + jax.grad(loss)(weights, x), None

        total, _ = jax.lax.scan(accumulate, jnp.zeros_like(weights), xs)
        return total

    assert compared(step, WEIGHTS, array(3, 2, *X.shape)).counts == (1, 1)


def test_a_scan_whose_probabilities_are_stacked_results_is_left_as_written() -> None:
    def attention(x: Any, w: Any) -> tuple[Any, Any]:
        p = jax.nn.softmax(x @ w[0] @ jnp.swapaxes(x, 1, 2))
        return x + p @ x, p

    def run(weights: Any, x: Any) -> Any:
        return jax.lax.scan(attention, x, weights)

    assert recognised(run, WEIGHTS, X).counts == (0, 0)


def test_loops_and_branches() -> None:
    def loop(weights: Any, x: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, layer(c[1], weights[0])[0]), (0, x))[1]

    def branch(weights: Any, x: Any) -> Any:
        return jax.lax.cond(x[0, 0, 0] > 0, lambda: layer(x, weights[0])[0], lambda: x)

    assert compared(lambda weights, x: (loop(weights, x), branch(weights, x)), WEIGHTS, X).counts == (2, 0)


def test_a_scan_that_reads_rows_of_another_order_is_computed_as_written() -> None:
    # The second scan reads in iteration i what the first wrote in iteration i, but not of the same layer.
    def step(weights: Any, x: Any) -> Any:
        def first(x: Any, w: Any) -> tuple[Any, Any]:
            scores = x @ w[0] @ jnp.swapaxes(x, 1, 2)
            return x + 1, jnp.exp(scores - scores.max(-1, keepdims=True))

        def second(x: Any, e: Any) -> tuple[Any, Any]:
            return x + (e / e.sum(-1, keepdims=True)) @ x, None

        _, es = jax.lax.scan(first, x, weights)
        return jax.lax.scan(second, x, es[::-1])[0], jax.lax.scan(second, x, es)[0]

    compared(step, WEIGHTS, X)
