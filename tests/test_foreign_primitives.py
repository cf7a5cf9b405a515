"""Primitives of other libraries: replaced by their compiled form, run on whole arrays, or kept unsplit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

import minialpa
from minialpa import DataParallel, ShardParallel
from minialpa.ir.equations import sub_jaxprs
from minialpa.methods import Method
from minialpa.tracing.flattening import trace_flat

B, H = 8, 4
X = np.linspace(-1, 2, B * H, dtype=np.float32).reshape(B, H)
W = np.linspace(-0.5, 0.5, H * H, dtype=np.float32).reshape(H, H)


def _primitive(name: str, fun: Callable[..., Any]) -> Primitive:
    primitive = Primitive(name)
    primitive.def_impl(fun)
    primitive.def_abstract_eval(lambda x, **_: jax.core.ShapedArray(x.shape, x.dtype))
    return primitive


def _of_type(x: Any, *, kind: Any) -> Any:
    """As the solvers of lineax do: fails on shards, and in a `shard_map` also on whole arrays."""
    if jax.eval_shape(lambda: x) != kind:
        raise ValueError("another type")
    return jnp.sin(x) * x


typed_p = _primitive("test_typed", _of_type)
mlir.register_lowering(typed_p, mlir.lower_fun(_of_type, multiple_results=False))

#: Its derivative differs from the derivative of its compiled function.
slope_p = _primitive("test_slope", lambda x: jnp.sign(x))
ad.defjvp(slope_p, lambda t, x: 3.0 * t)
mlir.register_lowering(slope_p, mlir.lower_fun(lambda x: jnp.sign(x), multiple_results=False))

_lower_tanh = mlir.lower_fun(jnp.tanh, multiple_results=False)
#: It is compiled by code of its own.
closed_p = _primitive("test_closed", jnp.tanh)
mlir.register_lowering(closed_p, lambda context, x: _lower_tanh(context, x))

#: It is one function on most platforms only.
special_p = _primitive("test_special", jnp.tanh)
mlir.register_lowering(special_p, _lower_tanh)
mlir.register_lowering(special_p, lambda context, x: _lower_tanh(context, x), platform="cuda")


def _typed(x: Any) -> Any:
    return typed_p.bind(x, kind=jax.ShapeDtypeStruct(x.shape, x.dtype))


def _in_a_scan(fun: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: lax.scan(lambda c, _: (fun(c), None), x, length=2)[0]


def _in_a_branch(fun: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: lax.cond(jnp.sum(x[0]) > 0, fun, jnp.cos, x)


def _in_a_while(fun: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: lax.fori_loop(0, jnp.where(x[0, 0] > 9, 3, 2), lambda _, c: jax.jit(fun)(c), x)


def _names(eqns: Any) -> set[str]:
    found = {eqn.primitive.name for eqn in eqns}
    return found.union(*(_names(inner.eqns) for eqn in eqns for inner in sub_jaxprs(eqn)))


def _traced_names(fun: Callable[[Any], Any]) -> set[str]:
    flat, _ = trace_flat(fun, X)
    return _names(flat.eqns)


PLACES: dict[str, Callable[..., Any]] = {
    "the step": lambda fun: fun,
    "a scan": _in_a_scan,
    "a branch": _in_a_branch,
    "a while": _in_a_while,
}


@pytest.mark.parametrize("place", PLACES)
def test_what_is_compiled_as_a_function_is_written_out_and_by_other_code_kept(place: str) -> None:
    written = _traced_names(PLACES[place](_typed))
    assert {"sin", "mul"} <= written and "test_typed" not in written
    for primitive in (closed_p, special_p):
        assert primitive.name in _traced_names(PLACES[place](primitive.bind))


@pytest.mark.usefixtures("own_rules")
def test_a_primitive_with_a_rule_is_kept() -> None:
    ruled_p = _primitive("test_ruled", jnp.tanh)
    mlir.register_lowering(ruled_p, mlir.lower_fun(jnp.tanh, multiple_results=False))
    minialpa.register_sharding_rule(ruled_p, "b h -> b h")
    assert "test_ruled" in _traced_names(_in_a_scan(ruled_p.bind))


def _step_of(fun: Callable[[Any], Any]) -> Callable[..., Any]:
    def loss(w: jax.Array, x: jax.Array) -> Any:
        return jnp.mean((jnp.tanh(x @ w) + fun(lax.stop_gradient(x @ w))) ** 2)

    def step(w: jax.Array, x: jax.Array) -> Any:
        value, gradient = minialpa.value_and_grad(loss)(w, x)
        return w - 0.1 * gradient, value

    return step


def _check(step: Callable[..., Any], method: Method) -> list[str]:
    """Compare with the serial run; the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        parallel = minialpa.parallelize(step, method=method, batch_argnums=(1,), donate_argnums=())
        for found, expected in zip(parallel(W, X), jax.jit(step)(W, X), strict=True):
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
    return [str(one.message) for one in said if "No sharding rule" in str(one.message)]


@pytest.mark.parametrize("place", ["a scan", "a branch"])
def test_a_primitive_that_looks_at_types_runs_on_devices_and_in_micro_batches(place: str) -> None:
    assert not _check(_step_of(PLACES[place](_typed)), DataParallel(jax.devices()[:2], 2))


@pytest.mark.parametrize("place", ["the step", "a scan", "a branch"])
def test_functions_that_jax_expands_before_it_compiles_are_split(place: str) -> None:
    def fun(x: jax.Array) -> jax.Array:
        below, edges = jnp.interp(x, jnp.linspace(-1.0, 1.0, 5), jnp.arange(5.0) ** 2), jnp.linspace(-1.0, 1.0, 4)
        places = jnp.searchsorted(edges, x) + jnp.nonzero(edges > 0, size=H)[0][None]
        return jnp.ldexp(below, jnp.full(x.shape, 2)) + jnp.frexp(x)[0] + places.astype(jnp.float32)

    assert "call_hi_primitive" not in _traced_names(PLACES[place](fun))
    assert not _check(_step_of(PLACES[place](fun)), DataParallel(jax.devices()[:2], 2))


@pytest.mark.parametrize(
    ("fun", "n", "name"),
    [
        (_in_a_scan(closed_p.bind), 2, "`test_closed`"),
        (lambda x: eqxi.noinline(lambda y: jnp.tanh(y) + 1)(x), 1, "`noinline`"),
    ],
    ids=["other code", "a callback"],
)
def test_what_is_kept_is_computed_whole_with_a_warning(fun: Callable[[Any], Any], n: int, name: str) -> None:
    (said,) = _check(_step_of(fun), ShardParallel(jax.devices()[:2], n))
    assert name in said


def test_the_derivative_is_the_one_that_was_defined() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(slope_p.bind(x @ w))

    def step(w: jax.Array, x: jax.Array) -> Any:
        return minialpa.value_and_grad(loss)(w, x)

    assert not _check(step, DataParallel(jax.devices()[:2], 2))
    np.testing.assert_allclose(step(W, X)[1], 3 * np.tile(X.sum(0)[:, None], (1, H)), rtol=1e-5)
