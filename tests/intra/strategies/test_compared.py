"""Values that a comparison reads are complete: partial sums that readers reduce in two ways differ in the last bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import minialpa
from minialpa.intra.strategies.compared import compared_values
from minialpa.tracing.flattening import trace_flat

X, W = jnp.ones((4, 6)), jnp.ones((6, 8))


def products_compared(fun: Callable[..., Any], *args: Any) -> list[bool]:
    """For each matrix product of a function, whether its result is compared."""
    flat = trace_flat(fun, *args)[0].without_dead_operations()
    compared = compared_values(flat.eqns)
    return [eqn.outvars[0] in compared for eqn in flat.eqns if eqn.primitive.name == "dot_general"]


def test_the_operand_of_a_maximum_is_compared_by_its_derivative() -> None:
    assert products_compared(jax.grad(lambda x, w: jnp.maximum(x @ w, 0.0).sum()), X, W)[0]
    assert products_compared(jax.grad(lambda x, w: (x @ w).max()), X, W)[0]


def test_a_value_is_compared_after_moves() -> None:
    assert products_compared(lambda x, w: (x @ w).T.reshape(4, 8) == 1.0, X, W) == [True]


def test_a_value_is_compared_after_linear_equations_and_casts() -> None:
    def is_largest(x: Any, w: Any) -> Any:
        y = x @ w
        return y - 1.0 == y.max() - 1.0, y.astype(jnp.bfloat16) == y.max().astype(jnp.bfloat16)

    assert products_compared(is_largest, X, W) == [True]
    assert products_compared(lambda x, w: jnp.tanh(x @ w) == 1.0, X, W) == [False]


def test_a_threshold_that_the_step_computes_compares() -> None:
    def largest(x: Any, w: Any) -> Any:
        y = x @ w
        return jnp.where(y >= jnp.sort(y, axis=1)[:, 5:6], y, 0.0)

    assert products_compared(largest, X, W) == [True]
    assert products_compared(lambda x, w: jnp.where(x @ w > 0.0, 1.0, 0.0), X, W) == [False]


@pytest.mark.parametrize("compares", [True, False])
def test_a_comparison_in_a_scan_reads_operands_of_the_scan(compares: bool) -> None:
    def layers(x: Any, w: Any) -> Any:
        y = x @ w

        def body(carry: Any, v: Any) -> Any:
            z = carry @ v
            return z, (y == 1.0).sum() if compares else y.sum()

        return lax.scan(body, jnp.ones((2, 8)), jnp.ones((3, 8, 8)))

    assert products_compared(layers, X, W)[0] is compares


def test_a_softmax_has_no_comparison() -> None:
    assert not any(products_compared(jax.grad(lambda x, w: jax.nn.logsumexp(x @ w)), X, W)[:1])


def test_a_plan_that_leaves_a_compared_value_partial_is_refused() -> None:
    """Two readers would sum x @ w over devices in two ways, and the derivative of the maximum would compare the two."""

    def step(w: Any, x: Any) -> Any:
        value, grad = minialpa.value_and_grad(lambda w: jnp.maximum(x @ w, 0.0).sum())(w)
        return w - grad, value

    args = (jnp.ones((64, 64)), jnp.ones((64, 64)))
    cluster = minialpa.ClusterSpec.preset("cpu", devices_per_host=4)
    plan = minialpa.plan(step, args, cluster=cluster, method=minialpa.ShardParallel())
    data = json.loads(plan.to_json())
    product, _, equality, *_ = data["plan"]["stages"][0]["equation_specs"]
    product[:3] = [["R,S0", "S0,R"], ["R,R+P0"], ["R,R+P0"]]
    equality[:3] = [["S0,R", "S0,R"], ["S0,R"], ["R,R"]]

    edited = minialpa.Plan.from_json(json.dumps(data))
    with pytest.raises(minialpa.VerifyError, match=r"\[0\]\[2\]\[0\]` is R,R\+P0; expected no partial sum"):
        minialpa.phases(edited, step, args)
