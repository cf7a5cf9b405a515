"""Rules of functions, primitives, foreign functions and custom_partitioning that users give, and the check of rules."""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import BATCHING, ArrayMapping, SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive
from jax.sharding import NamedSharding, PartitionSpec

import minialpa
from minialpa import DataParallel, ShardingError
from minialpa.rules import known_rules
from minialpa.rules.known_rules import factors_of, primitives_without_rule
from minialpa.support.private_jax import define_function
from minialpa.testing import assert_allclose
from minialpa.tracing.flattening import trace_flat
from tests.lapack_call import lu_by_lapack
from tests.rules.rule_laws import cases_of, check_all, notation, vjp
from tests.rules.rule_programs import floats

#: Removes the rules that a test registers.
pytestmark = pytest.mark.usefixtures("own_rules")


def _attention(q: Any, k: Any, v: Any, *, scale: float = 1.0) -> Any:
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


attention = minialpa.register_sharding_rule(_attention, "b q h d, b k h d, b k h e -> b q h e")


def _texts(fun: Any, *arrays: Any) -> list[str]:
    """The factors of the kernels of a function, which keep the laws."""
    kernels = [case for case in cases_of(fun, *arrays) if known_rules.is_kernel(case.eqn)]
    check_all(kernels)
    return [notation(case.eqn) for case in kernels]


def _qkv() -> tuple[Any, Any, Any]:
    return floats((4, 6, 2, 8), 0), floats((4, 6, 2, 8), 1), floats((4, 6, 2, 8), 2)


# ---- functions -------------------------------------------------------------------------------------------------------


def test_a_function_is_one_equation_with_its_rule() -> None:
    assert _texts(attention, *_qkv()) == ["[a b c D], [a E c D], [a E c f] -> [a b c f]"]
    assert_allclose(attention(*_qkv(), scale=0.3), _attention(*_qkv(), scale=0.3))
    assert attention.__name__ == "_attention"


def test_its_derivative_has_a_rule_that_follows() -> None:
    forward, backward = _texts(vjp(attention), *_qkv())
    results = "[a b c D], [a E c D], [a E c f] sum(b) sum(f)"
    assert backward == f"{forward.partition(' ->')[0]}, [a b c f] -> {results}"
    assert_allclose(vjp(attention)(*_qkv()), vjp(_attention)(*_qkv()))


def test_vmap_and_other_transformations_of_it_work() -> None:
    q, k, v = (x[:1, :2, :1, :2] for x in _qkv())
    one = lambda fun: jax.vmap(lambda q, v: jnp.sum(fun(q[None], k, v[None])))  # noqa: E731
    assert_allclose(one(attention)(q, v), one(_attention)(q, v))
    batched = jax.vmap(attention, in_axes=(1, None, 1), out_axes=1)
    pair = (jnp.stack([q, -q], 1), k, jnp.stack([v, v], 1))
    assert_allclose(batched(*pair), jax.vmap(_attention, in_axes=(1, None, 1), out_axes=1)(*pair))
    (text,) = _texts(batched, *pair)
    assert text == "[a 1 b 1 C], [1 D 1 C], [a 1 D 1 e] -> [a 1 b 1 e]"


def test_arguments_may_be_trees_and_static() -> None:
    @functools.partial(minialpa.register_sharding_rule, rule="b i, i j, j -> b j, b", static_argnums=(1,))
    def dense(x: Any, name: str, params: Any, *, negate: bool = False) -> Any:
        out = x @ params["a w"] + params["b"][None]
        return {"out": -out if negate else out, name: jnp.argmax(out, 1)}

    params = {"a w": floats((6, 4), 0), "b": floats((4,), 1)}
    x = floats((8, 6), 2)
    assert_allclose(dense(x, "z", params)["out"], x @ params["a w"] + params["b"][None])
    assert_allclose(dense(x, "z", params, negate=True)["out"], -(x @ params["a w"] + params["b"][None]))
    assert dense(x, "z", params)["z"].dtype == jnp.int32
    gradient = jax.grad(lambda p: jnp.sum(dense(x, "z", p)["out"]))(params)
    assert_allclose(gradient["b"], np.full(4, 8.0, np.float32))
    # `j` is not in the second result, which depends on all of it.
    assert _texts(lambda x: dense(x, "z", params), x) == ["[a B], [B C], [C] -> [a C], [a]"]
    with pytest.raises(ShardingError, match=r"`dense` has .* must be hashable, but `negate` is not .*by position"):
        dense(x, "z", params, negate=np.ones(2))


def test_integers_have_no_cotangents() -> None:
    look_up = minialpa.register_sharding_rule(lambda table, i: table[i], "n d, b -> b d", need_replication="n")
    table, i = floats((6, 4), 0), np.array([1, 3, 1, 5], np.int32)
    assert_allclose(
        jax.grad(lambda t: jnp.sum(look_up(t, i) ** 2))(table), jax.grad(lambda t: jnp.sum(t[i] ** 2))(table)
    )
    _, backward = _texts(lambda t: vjp(lambda t: look_up(t, i))(t), table)
    assert backward.startswith("[A b], [c], [c b] -> [A b]")


def test_reductions_are_summed() -> None:
    dot = minialpa.register_sharding_rule(lambda x, y: x @ y, "i k, k j -> i j", reductions="k")
    forward, backward = _texts(vjp(dot), floats((4, 6), 0), floats((6, 8), 1))
    assert forward == "[a b], [b c] -> [a c] sum(b)"
    assert backward.startswith("[a b], [b c], [a c] -> [a b], [b c]")
    largest = minialpa.register_sharding_rule(lambda x: jnp.max(x, 1), "i k -> i", reductions={"k": "max"})
    assert _texts(vjp(largest), floats((4, 6), 0)) == ["[a b] -> [a] max(b)", "[a B], [a] -> [a B]"]


def test_errors_name_the_function() -> None:
    with pytest.raises(ShardingError, match=r"`relu`.* has 1 dimensions for operand 0, whose shape is"):
        minialpa.register_sharding_rule(jax.nn.relu, "b -> b")(floats((4, 2), 0))
    with pytest.raises(ShardingError, match=r"`halved` allows splitting `b`.*instead of"):
        factors_of(trace_flat(minialpa.register_sharding_rule(halved, "b -> c b"), floats((4,), 0))[0].eqns[-1])
    with pytest.raises(ShardingError, match=r"reads a value of the step from an enclosing function. Pass"):
        jax.jit(lambda x: minialpa.register_sharding_rule(lambda y: x + y, "b -> b")(x))(floats((4,), 0))
    with pytest.raises(ShardingError, match=r"`halved` already has another sharding rule"):
        minialpa.register_sharding_rule(halved, "b -> c b", need_replication="b")
    with pytest.raises(ShardingError, match=r"jax has no primitive `tanhh`. Do you mean `tanh`"):
        minialpa.register_sharding_rule("tanhh", "b -> b")
    with pytest.raises(ShardingError, match="Import the library that defines it first"):
        minialpa.register_sharding_rule("my_missing_kernel", "b -> b")
    with pytest.raises(ShardingError, match="Remove `localize` from the rule of"):
        minialpa.register_sharding_rule(_attention, "b -> b", localize=lambda params, operands, results: params)


def halved(x: Any) -> Any:
    """Two rows of four numbers, for x of any length."""
    return jnp.ones((2, 4)) * jnp.sum(x)


def _step(operation: Any, value_and_grad: Any) -> Any:
    def step(w: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            h = (batch["x"] @ w["in"]).reshape(-1, 4, 2, 4)
            out = operation(h, h * 0.5, h).reshape(-1, 4, 8) @ w["out"]
            return jnp.mean((out - batch["y"]) ** 2)

        value, gradient = value_and_grad(loss)(w)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradient), value

    return step


def test_a_step_with_a_registered_function_trains() -> None:
    w = {"in": floats((8, 8), 0), "out": floats((8, 8), 1)}
    batch = {"x": floats((8, 4, 8), 2), "y": floats((8, 4, 8), 3)}
    step = minialpa.parallelize(
        _step(attention, minialpa.value_and_grad), method=DataParallel(jax.devices()[:4], 2), batch_argnums=(1,)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = step(w, batch)
    assert_allclose(found, _step(_attention, jax.value_and_grad)(w, batch), rtol=1e-5, atol=1e-6)

    text = _program_text(step.get_executable(w, batch))
    assert "minialpa_function" in text and "f32[1,4,2,4]" in text and "f32[4,4,2,4]" not in text


def _program_text(executable: Any) -> str:
    """The programs of one device."""
    return "".join(str(jax.make_jaxpr(function.fun)(*function.in_avals)) for function in executable.program.functions)


# ---- primitives ------------------------------------------------------------------------------------------------------


def _tile_primitive(name: str) -> Primitive:
    """Repeats rows of an array; its parameter `shape` is the shape of the result."""
    primitive = Primitive(name)
    run = lambda x, *, shape: jnp.broadcast_to(x[:, None], shape) + 0  # noqa: E731
    primitive.def_impl(run)
    primitive.def_abstract_eval(lambda x, *, shape: jax.core.ShapedArray(shape, x.dtype))
    define_function(primitive, lambda x, *, shape: [run(x, shape=shape)])
    return primitive


def test_a_primitive_takes_its_rule_by_object_or_name() -> None:
    tile = _tile_primitive("my_tile")
    fun = lambda x: tile.bind(x, shape=(4, 3))  # noqa: E731
    x = floats((4,), 0)
    assert primitives_without_rule(trace_flat(fun, x)[0].eqns) == ["my_tile"]
    assert factors_of(trace_flat(fun, x)[0].eqns[-1]).splittable == ()

    minialpa.register_sharding_rule(
        tile, "b -> b n", localize=lambda params, operands, results: dict(params, shape=results[0])
    )
    assert _texts(fun, x) == ["[a] -> [a B]"]
    assert primitives_without_rule(trace_flat(fun, x)[0].eqns) == []
    for name in ("my_tile", "add"):
        with pytest.raises(ShardingError, match=f"`{name}` already has a sharding rule"):
            minialpa.register_sharding_rule(name, "b -> b n")

    # A parameter that holds a shape needs `localize`.
    other = _tile_primitive("my_other_tile")
    minialpa.register_sharding_rule("my_other_tile", "b -> b n")
    with pytest.raises(ShardingError, match=r"`my_other_tile` allows splitting `b`.*or pass `localize`"):
        factors_of(trace_flat(lambda x: other.bind(x, shape=(4, 3)), x)[0].eqns[-1])


def test_a_rule_counts_also_where_the_operation_was_seen_before() -> None:
    tile = _tile_primitive("my_late_tile")
    x = floats((4, 2), 0)
    fun = lambda x: jax.lax.map(lambda row: tile.bind(row, shape=(2, 3)), x)  # noqa: E731
    (eqn,) = [eqn for eqn in trace_flat(fun, x)[0].eqns if eqn.primitive.name == "scan"]
    iterations = [4]  # which are independent
    assert [factors_of(eqn).sizes[f] for f in factors_of(eqn).splittable] == iterations
    minialpa.register_sharding_rule(
        tile, "b -> b n", localize=lambda params, operands, results: dict(params, shape=results[0])
    )
    assert [factors_of(eqn).sizes[f] for f in factors_of(eqn).splittable] == [*iterations, 2]


# ---- foreign functions -----------------------------------------------------------------------------------------------


def test_a_foreign_function_takes_its_rule_by_target() -> None:
    x = np.random.default_rng(0).normal(size=(4, 2, 3, 3)).astype(np.float32)
    assert primitives_without_rule(trace_flat(lu_by_lapack, x)[0].eqns) == ["ffi:lapack_sgetrf_ffi"]

    minialpa.register_sharding_rule("ffi:lapack_sgetrf_ffi", "... n m -> ... n m, ... p, ...", need_replication="n m p")
    assert _texts(lu_by_lapack, x) == ["[a b C D] -> [a b C D], [a b E], [a b]"]
    assert _texts(jax.vmap(lu_by_lapack), x) == ["[a b C D] -> [a b C D], [a b E], [a b]"]
    found = minialpa.check_sharding_rule(lu_by_lapack, x)
    assert [one.parts for one in found] == [2, 2]
    with pytest.raises(ShardingError, match=r"`lapack_sgetrf_ffi` already has a sharding rule"):
        minialpa.register_sharding_rule("ffi:lapack_sgetrf_ffi", "b -> b")


def test_a_foreign_function_with_a_rule_runs_on_shards() -> None:
    minialpa.register_sharding_rule("ffi:lapack_sgetrf_ffi", "... n m -> ... n m, ... p, ...", need_replication="n m p")

    def step(w: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            factors, _, _ = lu_by_lapack(jax.lax.stop_gradient(batch))
            return jnp.mean((factors @ w) ** 2)

        return w - 0.1 * minialpa.grad(loss)(w)

    w, batch = floats((3, 3), 0), np.random.default_rng(0).normal(size=(8, 3, 3)).astype(np.float32)
    expected = step(w, batch)
    parallel = minialpa.parallelize(step, method=DataParallel(jax.devices()[:2], 2), batch_argnums=(1,))
    assert_allclose(parallel(w, batch), expected, rtol=1e-5, atol=1e-6)
    text = _program_text(parallel.get_executable(w, batch))
    assert re.findall(r"f32\[([\d,]+)\]\s+\w+:i32\[\S+\s+\w+:i32\[\S+\s+= ffi_call", text) == ["2,3,3"]


# ---- custom_partitioning ---------------------------------------------------------------------------------------------


def _partitioned(fun: Any, local: Any = None, accept: Any = None, **rule: Any) -> Any:
    """`fun` under custom_partitioning, with shards computed by `local` and all shardings accepted by default."""

    def partition(mesh: Any, args: Any, results: Any) -> Any:
        shardings = jax.tree.map(lambda x: x.sharding, (args, results))
        own, out = shardings if accept is None else accept(*shardings)
        return mesh, fun if local is None else local(args), out, own

    call = custom_partitioning(fun)
    call.def_partition(partition, **rule)
    return call


def _matmul(x: Any, y: Any) -> Any:
    return x @ y


def _softmax(x: Any) -> Any:
    return jax.nn.softmax(x)


def _fft(x: Any) -> Any:
    return jnp.fft.fft(x)


def _first_dims(args: Any, result: Any) -> Any:
    """Shardings whose last dimension is whole."""
    cut = lambda s: NamedSharding(s.mesh, PartitionSpec(*s.spec[:-1], None))  # noqa: E731
    return tuple(map(cut, args)), cut(result)


def _sums(args: Any) -> Any:
    axis = args[0].sharding.spec[1]
    return lambda x, y: x @ y if axis is None else jax.lax.psum(x @ y, axis)


def test_custom_partitioning_brings_its_rule() -> None:
    x, y = floats((8, 6), 0), floats((6, 4), 1)
    matmul = {"sharding_rule": "i k, k j -> i j", "reduction_factors": ("k",)}
    expected = "[a b], [b c] -> [a c] sum(b)"
    assert _texts(_partitioned(_matmul, **matmul), x, y) == [expected]
    assert _texts(_partitioned(_matmul, _sums, **matmul), x, y) == [expected]
    rule = SdyShardingRule(
        (ArrayMapping("i", "k"), ArrayMapping("k", "j")), (ArrayMapping("i", "j"),), reduction_factors=("k",)
    )
    assert _texts(_partitioned(_matmul, sharding_rule=rule), x, y) == [expected]
    called = _partitioned(_matmul, sharding_rule=lambda mesh, operands, results: rule)
    assert _texts(called, x, y) == [expected]

    leading = SdyShardingRule(
        (ArrayMapping(BATCHING, "d"),), (ArrayMapping(BATCHING, "d"),), permutation_factors=("d",)
    )
    assert _texts(_partitioned(_softmax, sharding_rule=leading), x) == ["[a B] -> [a B]"]
    merged = _partitioned(lambda x: x.reshape(8, 2, 3) * 1, lambda args: lambda x: x.reshape(-1, 2, 3) * 1,
                          sharding_rule="b (h d) -> b h d")  # fmt: skip
    assert _texts(merged, x) == ["[a (B C)] -> [a B C]"]


def test_what_partition_does_not_accept_is_not_split() -> None:
    """The example in jax's own documentation: the rule lets the last dimension be split, and `partition` does not."""
    x = floats((8, 6), 0)
    fft = _partitioned(_fft, accept=_first_dims, sharding_rule="...i -> ...i")
    assert _texts(fft, x) == ["[a B] -> [a B]"]

    def one_at_a_time(args: Any) -> Any:
        if None not in args[0].sharding.spec:
            raise NotImplementedError
        return lambda x: 2 * x

    assert _texts(_partitioned(lambda x: 2 * x, one_at_a_time, sharding_rule="i j -> i j"), x) == ["[a B] -> [a B]"]


def test_custom_partitioning_without_a_rule_is_replicated_with_a_warning() -> None:
    call = _partitioned(lambda x: 2 * x)
    flat, _ = trace_flat(call, floats((8, 6), 0))
    assert factors_of(flat.eqns[-1]).splittable == ()
    (name,) = primitives_without_rule(flat.eqns)
    assert name.startswith("custom_partitioning")


# ---- checking --------------------------------------------------------------------------------------------------------


def test_the_check_reports_what_it_cut() -> None:
    found = minialpa.check_sharding_rule(attention, *_qkv())
    assert {(one.operation, one.parts) for one in found} == {("_attention", 2)}
    assert found[0].arrays == "operand 0: 0, operand 1: 0, operand 2: 0, result 0: 0"


def test_the_check_finds_custom_partitioning_that_lies() -> None:
    lying = _partitioned(lambda x: jnp.cumsum(x, 0), sharding_rule="i j -> i j")
    with pytest.raises(ShardingError, match=r"custom_partitioning.* differs from the whole result"):
        minialpa.check_sharding_rule(lying, floats((4, 6), 0))
