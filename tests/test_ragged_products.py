"""`ragged_dot`, which the planner replaces by products of tiles of rows with the matrices of their groups."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import minialpa
from minialpa import ShardParallel
from minialpa.grouped import grouped_product_p
from minialpa.rules.known_rules import factors_of
from minialpa.rules.registered import jaxpr_flops
from minialpa.tracing.flattening import trace_flat
from minialpa.tracing.ragged_products import grouped_product
from tests.helpers import descent_step
from tests.rules.rule_laws import cases_of, check_all
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
    "no rows": (_gradients, (X[:0], W, 0 * SIZES)),
    "no features": (lax.ragged_dot, (X[:, :0], W[:, :0], SIZES)),
    "many tiles": (lax.ragged_dot, (floats((300, K), 0), W, np.array([100, 0, 171], np.int32))),
    "gradients of many tiles": (_gradients, (floats((300, K), 0), W, np.array([100, 0, 171], np.int32))),
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
def test_the_products_are_what_jax_compiles(case: str) -> None:
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


def test_a_row_reads_the_weights_of_its_group_alone() -> None:
    """XLA's dense form multiplies the weights of other groups by zero, which leaves NaN."""
    flat, _ = trace_flat(lax.ragged_dot, X, SPECIAL_W, SIZES)
    (found,) = jax.core.eval_jaxpr(_jaxpr(flat), flat.consts, X, SPECIAL_W, SIZES)
    groups = np.repeat(np.arange(G), SIZES)
    np.testing.assert_allclose(found, np.einsum("mk,mkn->mn", X, SPECIAL_W[groups]), rtol=1e-5)
    assert np.isfinite(found).all()


def test_small_integers_cannot_count_many_rows() -> None:
    with pytest.raises(minialpa.TraceError, match="group sizes of int8, which cannot count its 300 rows"):
        trace_flat(lax.ragged_dot, floats((300, K), 0), W, np.array([100, 40, 60], np.int8))


@hypothesis.settings(deadline=None, max_examples=6)
@hypothesis.given(data=st.data())
def test_parts_of_every_factor_make_the_whole(data: st.DataObject) -> None:
    """Also with rows of no group, empty groups, and tiles in which several groups have rows."""
    b, x, m, g = 2, 2, data.draw(st.sampled_from([4, 40, 96])), data.draw(st.sampled_from([2, 4]))
    ends = [sorted(data.draw(st.lists(st.integers(0, m), min_size=g, max_size=g))) for _ in range(b * x)]
    sizes = np.diff(np.array(ends), axis=1, prepend=0).reshape(b, x, g).astype(np.int32)

    def step(lhs: Any, rhs: Any, out_bar: Any) -> Any:
        numbers = [
            lax.RaggedDotDimensionNumbers((((3,), (2,)), ((0,), (0,))), [2], [1]),
            lax.RaggedDotDimensionNumbers((((1, 2), (1, 2)), ((0,), (0,))), [2], []),
        ]
        options = {"precision": None, "preferred_element_type": None}
        return [
            grouped_product(lhs, other, sizes, ragged_dot_dimension_numbers=one, **options)
            for one, other in zip(numbers, (rhs, out_bar), strict=True)
        ]

    found = [
        case
        for case in cases_of(step, floats((b, x, m, 4), 0), floats((b, g, 4, 6), 1), floats((b, x, m, 6), 2))
        if "grouped" in case.eqn.primitive.name
    ]
    assert len(found) == 2
    check_all(found)


def _grouped(lhs: Any, rhs: Any, summed: int = 2) -> Any:
    """Rows [m k] with matrices [g k n], or [g n k]: two rows of group 0, four of group 2."""
    bounds = [np.array(ends, np.int32)[None, None] for ends in ([0, 2, 2], [2, 2, 6])]
    whole = {"n_rows": M, "n_groups": G, "precision": None, "dtype": "float32"}
    positions = np.arange(M, dtype=np.int32)
    return grouped_product_p.bind(lhs[None, None], rhs[None], *bounds, positions, summed=summed, **whole)[0][0, 0]


def _dense(lhs: Any, rhs: Any, summed: int = 2) -> Any:
    return jnp.einsum("mk,mkn->mn" if summed == 2 else "mk,mnk->mn", lhs, rhs[np.array([0, 0, 2, 2, 2, 2])])


@pytest.mark.parametrize("summed", [2, 3])
@pytest.mark.parametrize("axes", [(0, None), (None, 1), (1, 0)])
def test_derivatives_and_batches_are_those_of_the_written_product(summed: int, axes: tuple[int | None, ...]) -> None:
    matrices = W if summed == 2 else W.swapaxes(1, 2)
    given = [x if axis is None else np.stack([x, 2 * x, -x], axis) for x, axis in zip((X, matrices), axes, strict=True)]

    def batched(fun: Any) -> Any:
        def loss(*arrays: Any) -> Any:
            return jnp.sum(jnp.sin(jax.vmap(functools.partial(fun, summed=summed), in_axes=axes)(*arrays)))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*given)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), batched(_grouped), batched(_dense)
    )

    def curvature(fun: Any) -> Any:
        directional = jax.grad(lambda x, w: jax.jvp(lambda x: jnp.sum(fun(x, w, summed) ** 2), (x,), (x,))[1], (0, 1))
        return directional(X, matrices)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), curvature(_grouped), curvature(_dense)
    )


@pytest.mark.parametrize("n_micro_batches", [1, 2])
def test_ragged_products_in_a_region_train_as_under_jit(n_micro_batches: int) -> None:
    """Each device sorts its own rows, and has some of the experts' weights."""
    mesh = jax.make_mesh((8,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, weights, chosen = floats((32, K), 0), floats((16, K, N), 1), np.arange(32, dtype=np.int32) * 5 % 16

    def region(x: Any, w: Any, chosen: Any) -> Any:
        order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=16)
        return lax.ragged_dot(x[order], lax.all_gather(w, "device", tiled=True), sizes)[jnp.argsort(order)]

    spec = jax.P("device")
    experts = jax.shard_map(region, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)

    def loss(w: Any, batch: Any) -> Any:
        return jnp.mean(experts(batch[0], w, batch[1]) ** 2)

    method = ShardParallel(num_micro_batches=n_micro_batches)
    step = minialpa.parallelize(descent_step(loss, minialpa.value_and_grad), method=method, donate_argnums=())
    expected = jax.jit(descent_step(loss, jax.value_and_grad))(weights, (rows, chosen))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6),
        step(weights, (rows, chosen)),
        expected,
    )


def test_arithmetic_is_of_the_routed_rows_and_half_a_tile_for_each_group() -> None:
    n_groups, rows = 16, 16 * 1024
    x, w = jax.ShapeDtypeStruct((rows, 8), jnp.float32), jax.ShapeDtypeStruct((n_groups, 8, 16), jnp.float32)
    sizes = np.full(n_groups, rows // n_groups, np.int32)
    flat, _ = trace_flat(lambda x, w: jax.vjp(lambda x, w: lax.ragged_dot(x, w, sizes), x, w)[1](x @ w[0]), x, w)
    products = [factors_of(eqn).flops for eqn in flat.eqns if "grouped" in eqn.primitive.name]
    routed = 2 * rows * 8 * 16
    assert len(products) == 3 and all(routed < flops < 1.15 * routed for flops in products)
    body = jax.make_jaxpr(lambda x, w: lax.ragged_dot(x, w, sizes))(x, w)
    assert routed < jaxpr_flops(body) < 1.15 * routed
