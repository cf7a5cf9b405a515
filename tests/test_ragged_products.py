"""`ragged_dot`, which the planner replaces by the dense product of its compiled form."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import minialpa
from minialpa import ClusterSpec, Plan, ShardParallel
from minialpa.rules.known_rules import factors_of
from minialpa.rules.registered import jaxpr_flops
from minialpa.tracing.flattening import trace_flat
from minialpa.tracing.ragged_products import ragged_products
from tests.helpers import descent_step
from tests.rules.rule_programs import floats

M, K, N, G = 6, 4, 5, 3
X, W, Y = floats((M, K), 0), floats((G, K, N), 1), floats((M, N), 2)
SIZES = np.array([2, 0, 4], np.int32)
#: A product with zero does not remove these numbers.
SPECIAL_X = np.where(np.arange(M * K).reshape(M, K) % 11 == 5, np.inf, X).astype(np.float32)
SPECIAL_W = np.where(np.arange(G)[:, None, None] == 1, np.nan, W).astype(np.float32)


def _general(contract: Any, batch: Any, ragged: int, groups: tuple[int, ...]) -> Callable[..., Any]:
    numbers = lax.RaggedDotDimensionNumbers((contract, batch), [ragged], groups)
    return lambda lhs, rhs, sizes: lax.ragged_dot_general(lhs, rhs, sizes, numbers)


def _gradients(x: Any, w: Any, sizes: Any) -> Any:
    return jax.grad(lambda x, w: jnp.sum(lax.ragged_dot(x, w, sizes) ** 2), argnums=(0, 1))(x, w)


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "more rows than there are": (lax.ragged_dot, (X, W, SIZES + 2)),
    "sizes that overflow": (lax.ragged_dot, (floats((300, K), 0), W, np.array([100, 40, 60], np.int8))),
    "weights of no number": (lax.ragged_dot, (X, SPECIAL_W, SIZES)),
    "bfloat16": (lax.ragged_dot, (X.astype(jnp.bfloat16), W.astype(jnp.bfloat16), SIZES)),
    "gradients of infinite rows": (_gradients, (SPECIAL_X, W, SIZES)),
    "vmap": (jax.vmap(lax.ragged_dot), (np.stack([X, 2 * X]), np.stack([W, 3 * W]), np.stack([SIZES, SIZES[::-1]]))),
    "summed rows of infinite numbers": (_general(((0,), (0,)), ((), ()), 0, ()), (SPECIAL_X, Y, SIZES)),
    "summed rows, outer dimensions": (
        _general(((0, 2), (1, 0)), ((1,), (2,)), 2, ()),
        (floats((3, 2, M), 0), floats((M, 3, 2, N), 1), np.broadcast_to(SIZES, (2, 3, G))),
    ),
    "rows, outer dimensions": (
        _general(((0,), (1,)), ((1,), (0,)), 3, (2,)),
        (floats((K, 2, 3, M), 0), floats((2, K, G, N), 1), np.arange(18, dtype=np.int32).reshape(2, 3, G) % 4),
    ),
    "batches": (_general(((2,), (1,)), ((0,), (0,)), 0, ()), (floats((M, 3, K), 0), floats((M, K, N), 1), SIZES)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_dense_product_is_what_jax_compiles(case: str) -> None:
    fun, arguments = CASES[case]
    flat, _ = trace_flat(fun, *arguments)
    assert not any("ragged" in eqn.primitive.name for eqn in flat.eqns)
    found = jax.core.eval_jaxpr(_jaxpr(flat), flat.consts, *arguments)
    for one, expected in zip(found, jax.tree.leaves(jax.jit(fun)(*arguments)), strict=True):
        assert one.dtype == expected.dtype
        wide = [np.asarray(array).astype(np.float64) for array in (one, expected)]
        np.testing.assert_allclose(*wide, rtol=1e-2 if one.dtype == jnp.bfloat16 else 1e-5, atol=1e-6)


def _jaxpr(flat: Any) -> Any:
    empty = jax.make_jaxpr(lambda: ())().jaxpr
    return empty.replace(
        constvars=list(flat.constvars), invars=list(flat.invars), outvars=list(flat.outvars), eqns=list(flat.eqns)
    )


def _experts(weights: Any, batch: Any) -> Any:
    """A mixture of experts: the largest element of a row chooses its expert."""
    x, y = batch
    expert = jnp.argmax(x[:, :G], axis=1)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=G)
    hidden = jax.nn.relu(lax.ragged_dot(x[order], weights["in"], sizes))
    out = lax.ragged_dot(hidden, weights["out"], sizes)
    return jnp.mean((out[jnp.argsort(order)] - y) ** 2)


def _arguments(m: int, d: int, f: int, g: int) -> Any:
    weights = {"in": floats((g, d, f), 0), "out": floats((g, f, d), 1)}
    return weights, (floats((m, d), 2), floats((m, d), 3))


def test_experts_train_on_devices_as_on_one() -> None:
    arguments = _arguments(16, 8, 16, G)
    expected = jax.jit(descent_step(_experts, jax.value_and_grad))(*arguments)
    method = ShardParallel(num_micro_batches=2)
    step = minialpa.parallelize(descent_step(_experts, minialpa.value_and_grad), method=method, donate_argnums=())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), step(*arguments), expected)


def test_products_and_gradients_have_the_arithmetic_of_all_groups() -> None:
    n_groups = 16
    x, w, sizes = floats((32, 8), 0), floats((n_groups, 8, 16), 1), np.full(n_groups, 2, np.int32)
    flat, _ = trace_flat(lambda x, w: jax.vjp(lambda x, w: lax.ragged_dot(x, w, sizes), x, w)[1](x @ w[0]), x, w)
    products = [factors_of(eqn).flops for eqn in flat.eqns if eqn.primitive.name == "dot_general"]
    routed = 2 * 32 * 8 * 16
    assert sorted(products) == [routed, *[n_groups * routed] * 3]  # `x @ w[0]`, the product and its two gradients
    body = jax.make_jaxpr(lambda x, w: lax.ragged_dot(x, w, sizes))(x, w)
    assert n_groups * routed <= jaxpr_flops(body) < 1.5 * n_groups * routed


def test_a_summary_names_each_line_with_its_groups_and_one_inside_a_loop() -> None:
    cluster = ClusterSpec.preset("h100", devices_per_host=1)
    step, arguments = descent_step(_experts, jax.value_and_grad), _arguments(16, 8, 16, G)
    plan = minialpa.plan(step, arguments, cluster=cluster, method=ShardParallel(devices=cluster))
    text = " ".join(plan.summary(full=True).split())
    found = re.findall(r"`ragged_dot` at (\S+):\d+ \(\w+\) is compiled as a dense product over 3 groups", text)
    assert found == [__file__] * 2 and text.count("3 times the arithmetic of the routed rows") == 2
    assert "(1 more product)" in plan.summary()
    assert plan.explain("findings").count("is compiled as a dense product over 3 groups") == 2
    assert Plan.from_json(plan.to_json()) == plan

    loop = lambda x, w: lax.scan(lambda c, w: (lax.ragged_dot(c, w, SIZES), None), x, w)  # noqa: E731
    flat, _ = trace_flat(loop, X, W[None, :, :, :K])
    assert [found.n_groups for found in ragged_products(flat.eqns)] == [G]
