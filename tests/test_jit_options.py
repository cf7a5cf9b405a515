"""`parallelize` takes the options of `jax.jit`, and functions that are jitted already, with the results of `jax.jit`.

Shardings are pins: the plan has them, or an error names them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import minialpa
from minialpa import (
    AutoLayerOption,
    AutoShardingOption,
    FollowParallel,
    InfeasibleError,
    MinialpaError,
    PipeshardParallel,
    ShardingError,
    ShardParallel,
    TraceError,
    UniformStageOption,
)
from minialpa.testing import assert_allclose

pytestmark = pytest.mark.usefixtures("fresh_session")

AUTO = (jax.sharding.AxisType.Auto,) * 2
TWO_STAGES = PipeshardParallel(num_micro_batches=2, layer_option=AutoLayerOption(2), stage_option=UniformStageOption(2))


def mesh_of(data: int = 2, model: int = 4) -> jax.sharding.Mesh:
    return jax.make_mesh((data, model), ("data", "model"), axis_types=AUTO, devices=jax.devices()[: data * model])


def on(*spec: Any, mesh: jax.sharding.Mesh | None = None) -> NamedSharding:
    return NamedSharding(mesh or mesh_of(), P(*spec))


def state() -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    return {"a": jax.random.normal(keys[0], (16, 32)), "b": jax.random.normal(keys[1], (32, 8))}


def batch() -> Any:
    return {"x": jax.random.normal(jax.random.key(7), (64, 16)), "mask": None}


def step(params: Any, data: Any, rate: Any = 0.1) -> Any:
    def loss(params: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(data["x"] @ params["a"]) @ params["b"]) ** 2)

    value, grads = minialpa.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - jnp.asarray(rate, p.dtype) * g, params, grads), value


def shardings(mesh: jax.sharding.Mesh | None = None) -> Any:
    return {"a": on("data", "model", mesh=mesh), "b": on(None, "model", mesh=mesh)}


def as_pinned(result: Any, pins: Any) -> None:
    """Each leaf of `result` has the sharding of its pin."""
    for leaf, pin in zip(jax.tree.leaves(result), jax.tree.leaves(pins), strict=True):
        assert leaf.sharding.is_equivalent_to(pin, leaf.ndim), (leaf.sharding, pin)


def planned_arguments(parallel: Any) -> list[P]:
    """The spec of each argument leaf in the program of the last call, on its first mesh."""
    placed = parallel.get_last_executable().get_input_placement_specs()
    return [leaf.partition_specs[0] for leaf in jax.tree.leaves(placed)]


def equal(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


# ---- shardings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_micro_batches", [1, 2])
@pytest.mark.parametrize("method", [ShardParallel, minialpa.AutoParallel])
def test_arguments_and_results_have_the_pinned_shardings(method: Any, n_micro_batches: int) -> None:
    pins: Any = {
        "in_shardings": (shardings(), {"x": on("data"), "mask": None}),
        "out_shardings": (shardings(), on()),
    }
    parallel = minialpa.parallelize(step, method=method(num_micro_batches=n_micro_batches), **pins)
    found = parallel(state(), batch())
    equal(found, jax.jit(step, **pins)(state(), batch()))
    as_pinned(found, (*jax.tree.leaves(shardings()), on()))
    assert planned_arguments(parallel) == [P("x", "y"), P(None, "y"), P("x")]
    # New states have the shardings of old ones: the next call moves nothing and runs the same program.
    parallel(found[0], batch())
    assert len(parallel._executables) == 1


@pytest.mark.parametrize(
    ("ins", "outs", "expected"),
    [
        (on("data"), None, [P("x"), P("x")]),  # one for all leaves of all arguments
        ((None, on("model")), "auto", [None, P("y")]),
        ([on("data"), None], None, [P("x"), None]),
        ((on(None, ("data", "model")), on()), (None, on(None, "data")), [P(None, ("x", "y")), P()]),
        ((on("model"), {"b": on(), "empty": None}), on("model", "data"), [P("y"), P()]),
    ],
)
def test_prefixes_and_none_are_as_of_jit(ins: Any, outs: Any, expected: Any) -> None:
    def both(a: jax.Array, b: dict[str, Any]) -> Any:
        return a * 2, {"sum": a + b["b"], "none": None}

    a = jnp.arange(64.0).reshape(8, 8)
    given: Any = {"in_shardings": ins} | ({} if outs == "auto" else {"out_shardings": outs})
    parallel = minialpa.parallelize(both, method=ShardParallel(), batch_argnums=(), **given)
    found = parallel(a, {"b": a + 1, "empty": ()})
    equal(found, jax.jit(both, **given)(a, {"b": a + 1, "empty": ()}))
    specs = [
        leaf.partition_specs[0] for leaf in jax.tree.leaves(parallel.get_last_executable().get_input_placement_specs())
    ]
    for spec, want in zip(specs, expected, strict=True):
        assert want is None or spec == want
    pins = outs if isinstance(outs, tuple) else (outs, outs)
    for leaf, pin in zip(jax.tree.leaves(found), pins, strict=True):
        if isinstance(pin, NamedSharding):
            as_pinned(leaf, pin)


def test_bare_specs_are_over_the_mesh_of_the_caller_or_the_axes_of_the_plan() -> None:
    a = jnp.arange(64.0).reshape(8, 8)
    parallel = minialpa.parallelize(lambda a: a + 1, out_shardings=P("data", "model"), method=ShardParallel())
    with jax.set_mesh(mesh_of(4, 2)):
        as_pinned(parallel(a), on("data", "model", mesh=mesh_of(4, 2)))
    with jax.set_mesh(mesh_of(2, 4)):
        as_pinned(parallel(a), on("data", "model"))
    with pytest.warns(DeprecationWarning, match="with mesh"), mesh_of(4, 2):
        as_pinned(parallel(a), on("data", "model", mesh=mesh_of(4, 2)))
    with pytest.raises(MinialpaError, match=r"`out_shardings` pins `result`.* the axes x, y"):
        parallel(a)
    option = AutoShardingOption(axis_names=("data", "model"))
    named = ShardParallel(logical_shape=(4, 2), auto_sharding_option=option)
    named_pins = minialpa.parallelize(lambda a: a + 1, out_shardings=P("data", "model"), method=named)
    as_pinned(named_pins(a), on("data", "model", mesh=mesh_of(4, 2)))


def test_a_step_planned_once_runs_by_its_exported_specs() -> None:
    method = ShardParallel(logical_shape=(2, 4))
    ins, outs = minialpa.parallelize(step, method=method).export_specs(state(), batch())
    again = minialpa.parallelize(step, method=method, in_shardings=ins, out_shardings=outs)
    assert again.export_specs(state(), batch()) == (ins, outs)
    equal(again(state(), batch()), jax.jit(step)(state(), batch()))


def test_another_order_of_the_axes_is_refused_because_shards_would_be_on_other_devices() -> None:
    parallel = minialpa.parallelize(step, method=ShardParallel(logical_shape=(4, 2)), in_shardings=(shardings(), None))
    with pytest.raises(InfeasibleError, match=r"fixed on a mesh of {'data': 2, 'model': 4}.* mesh of shape \(4, 2\)"):
        parallel(state(), batch())


def test_axes_of_length_one_split_nothing() -> None:
    mesh = jax.make_mesh((1, 8, 1), ("replica", "data", "model"), axis_types=AUTO[:1] * 3)
    pin = NamedSharding(mesh, P(("replica", "data"), "model"))
    found = minialpa.parallelize(lambda a: a + 1, out_shardings=pin, method=ShardParallel())(jnp.ones((8, 8)))
    as_pinned(found, pin)


def test_explicit_axes_pin_as_auto_ones() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    pin = NamedSharding(mesh, P("data", "model"))
    found = minialpa.parallelize(lambda a: a + 1, out_shardings=pin, method=ShardParallel())(jnp.ones((8, 8)))
    as_pinned(found, pin)


def test_a_search_takes_stages_with_the_mesh_of_the_pins() -> None:
    mesh = mesh_of(2, 2)
    pins = (shardings(mesh), None)
    stages = minialpa.AutoStageOption(planned_steps=float("inf"), submesh_physical_shape_space=[(1, 4)])
    search = PipeshardParallel(num_micro_batches=2, layer_option=AutoLayerOption(2), stage_option=stages)
    parallel = minialpa.parallelize(step, method=search, in_shardings=pins)
    found = parallel(state(), batch())
    equal(found, jax.jit(step)(state(), batch()))
    plan = parallel.get_last_executable().get_parallel_plan()
    assert [stage.logical_shape for stage in plan.stages] == [(2, 2)] * 2
    assert [leaf.sharding.spec for leaf in found[0].values()] == [P("x", "y"), P(None, "y")]
    # Four of eight devices.
    free = minialpa.parallelize(step, in_shardings=pins).plan(state(), batch())
    assert {stage.logical_shape for stage in free.stages} == {(2, 2)}


def test_a_pinned_result_may_differ_from_the_argument_that_it_replaces() -> None:
    pins: Any = {"in_shardings": (on("data"), None), "out_shardings": (on(None, "model"), None)}
    fun: Any = lambda w, x: (w * 2, jnp.sum(x))  # noqa: E731
    parallel = minialpa.parallelize(fun, method=ShardParallel(), donate_argnums=0, **pins)
    w, x = jnp.arange(64.0).reshape(8, 8), jnp.ones((16, 2))
    found = parallel(w + 0, x)
    equal(found, jax.jit(fun)(w, x))
    as_pinned(found[0], on(None, "model"))


@pytest.mark.parametrize("wrap", [lambda fun, **pins: functools.partial(minialpa.parallelize, **pins)(fun), jax.jit])
def test_pins_are_on_dynamic_arguments_only(wrap: Any) -> None:
    def scaled(kind: str, w: jax.Array, n: int, x: jax.Array) -> Any:
        return w * n if kind == "w" else x * n

    pins: Any = {"static_argnums": (0, 2), "in_shardings": (on("data"), on("model"))}
    w = jnp.arange(64.0).reshape(8, 8)
    parallel = minialpa.parallelize(wrap(scaled, **pins)) if wrap is jax.jit else wrap(scaled, **pins)
    for kind in ("w", "x"):
        equal(parallel(kind, w, 3, w + 1), jax.jit(scaled, **pins)(kind, w, 3, w + 1))
    with pytest.raises(ShardingError, match="`in_shardings` is no pytree prefix"):
        minialpa.parallelize(scaled, static_argnums=(0, 2), in_shardings=(on(),) * 4)("w", w, 3, w)


def test_static_arguments_that_are_found_may_have_an_entry() -> None:
    def scaled(w: jax.Array, kind: str, x: jax.Array) -> Any:
        return w + x if kind == "sum" else w - x

    w = jnp.arange(64.0).reshape(8, 8)
    for pins in ((on("data"), None, on("model")), (on("data"), on("model"))):
        parallel = minialpa.parallelize(scaled, in_shardings=pins, method=ShardParallel())
        equal(parallel(w, "sum", x=w), w + w)
        assert planned_arguments(parallel) == [P("x"), P("y")]


def test_pins_hold_on_each_stage() -> None:
    mesh = mesh_of(2, 2)
    pins: Any = {"in_shardings": (shardings(mesh), on("data", mesh=mesh)), "out_shardings": (shardings(mesh), None)}
    parallel = minialpa.parallelize(step, method=TWO_STAGES, **pins)
    equal(parallel(state(), batch()), jax.jit(step)(state(), batch()))
    plan = parallel.get_last_executable().get_parallel_plan()
    assert [stage.logical_shape for stage in plan.stages] == [(2, 2), (2, 2)]
    specs = {value.path: set(value.partition_specs) for value in (*plan.input_specs, *plan.output_specs)}
    assert specs["params['a']"] == specs["result[0]['a']"] == {P("x", "y")}
    assert specs["params['b']"] == specs["result[0]['b']"] == {P(None, "y")}
    assert specs["data['x']"] == {P("x")}
    # A saved plan holds them, too.
    saved = minialpa.Plan.from_json(plan.to_json())
    equal(minialpa.parallelize(step, method=saved, **pins)(state(), batch()), jax.jit(step)(state(), batch()))


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (
            TWO_STAGES,
            {"in_shardings": (shardings(), None)},
            r"on a mesh of \{'data': 2, 'model': 4\}.* form a mesh of shape \(4,\)",
        ),
        (ShardParallel(logical_shape=(8,)), {"out_shardings": (shardings(), None)}, "form a mesh of shape"),
        (ShardParallel(), {"in_shardings": (on("data", mesh=mesh_of(2, 2)), None)}, r"form a mesh of shape \(8,\)"),
        (ShardParallel(), {"in_shardings": (shardings(), on("model"), None)}, "`in_shardings` is no pytree prefix"),
        (ShardParallel(), {"out_shardings": ({"a": None}, None)}, "`out_shardings` is no pytree prefix"),
        (ShardParallel(), {"in_shardings": (shardings(), "data")}, "leaves of `in_shardings`; got 'data'"),
        (ShardParallel(), {"in_shardings": "data"}, "leaves of `in_shardings`; got 'data'"),
        (ShardParallel(), {"in_shardings": SingleDeviceSharding(jax.devices()[0])}, "leaves of `in_shardings`; got S"),
        (
            ShardParallel(),
            {"in_shardings": (on("data"), None), "out_shardings": (None, on(mesh=mesh_of(4, 2)))},
            None,
        ),
        (
            ShardParallel(),
            {"in_shardings": (on("data"), None), "out_shardings": (on("data", mesh=mesh_of(4, 2)), None)},
            "on several meshes",
        ),
        (ShardParallel(), {"out_shardings": (None, on("data"))}, r"`out_shardings` pins `result\[1\]`.* 1 entries"),
        (
            ShardParallel(),
            {"in_shardings": (on(("model", "data")), None)},
            r"splits one dimension over \('model', 'data'\), which is not the order of the mesh",
        ),
        (
            ShardParallel(),
            {"in_shardings": 3},
            "leaves of `in_shardings`; got 3",
        ),
        (
            ShardParallel(auto_sharding_option=AutoShardingOption(axis_names=("dp", "tp"))),
            {"in_shardings": (on("data"), None)},
            "`axis_names` is",
        ),
    ],
)
def test_a_pin_that_cannot_hold_is_refused_by_name(method: Any, options: Any, message: str | None) -> None:
    parallel = minialpa.parallelize(step, method=method, **options)
    if message is None:  # a replicated leaf is replicated on each mesh
        equal(parallel(state(), batch()), jax.jit(step)(state(), batch()))
        return
    with pytest.raises(MinialpaError, match=message):
        parallel(state(), batch())


def test_an_uneven_pin_and_one_in_host_memory_are_refused_by_name() -> None:
    in_host = NamedSharding(mesh_of(), P(), memory_kind="pinned_host")
    with pytest.raises(ShardingError, match=r"`in_shardings` pins `w`.* in `pinned_host`"):
        minialpa.parallelize(lambda w: w, in_shardings=in_host, method=ShardParallel())(jnp.ones(6))
    with pytest.raises(ShardingError, match=r"`in_shardings` pins `w`.* 4 devices, which do not divide 6"):
        minialpa.parallelize(lambda w: w, in_shardings=on("model"), method=ShardParallel())(jnp.ones(6))


def test_random_keys_stay_whole_or_are_refused() -> None:
    fun: Any = lambda keys: jax.vmap(jax.random.uniform)(keys)  # noqa: E731
    keys = jax.random.split(jax.random.key(0), 8)
    for pin, holds in ((on(), True), (on("data"), False)):
        parallel = minialpa.parallelize(fun, in_shardings=pin, method=ShardParallel())
        if holds:
            equal(parallel(keys), jax.jit(fun)(keys))
        else:
            with pytest.raises(ShardingError, match="`in_shardings` pins `keys`"):
                parallel(keys)


def test_plans_that_are_made_elsewhere_must_hold_the_pins() -> None:
    saved = minialpa.parallelize(step, method=ShardParallel(logical_shape=(2, 4))).plan(state(), batch())
    pinned = minialpa.parallelize(step, method=saved, in_shardings=(on("model", "data"), None))
    with pytest.raises(ShardingError, match=r"`in_shardings` pins `params\['a'\]`"):
        pinned(state(), batch())

    train = minialpa.parallelize(step, method=ShardParallel(logical_shape=(2, 4)), in_shardings=(shardings(), None))
    params, _ = train(state(), batch())
    read: Any = lambda params: jnp.sum(params["a"])  # noqa: E731
    follow = minialpa.parallelize(read, method=FollowParallel(train), in_shardings=(shardings(),))
    equal(follow(params), jnp.sum(params["a"]))
    with pytest.raises(MinialpaError, match=r"`in_shardings` pins|mesh"):
        minialpa.parallelize(read, method=FollowParallel(train), in_shardings=on("model"))(params)
    create = minialpa.parallelize(
        lambda: state(), method=minialpa.CreateStateParallel(train, (batch(),)), out_shardings=shardings()
    )
    with pytest.raises(ShardingError, match="Leave `in_shardings` and `out_shardings` out"):
        create()


def test_one_function_pins_each_structure_of_arguments() -> None:
    parallel = minialpa.parallelize(lambda tree: jax.tree.map(lambda x: x + 1, tree), out_shardings=on("data"))
    for tree in ([jnp.ones((8, 8))], {"w": jnp.ones((8, 8))}, (jnp.ones((8, 8)), jnp.ones(4))):
        found = parallel(tree)
        equal(found, jax.tree.map(lambda x: x + 1, tree))
        for leaf in jax.tree.leaves(found):
            as_pinned(leaf, on("data"))


def test_names_of_arguments_and_results_do_not_collide() -> None:
    fun: Any = lambda result: [result[0] + 1]  # noqa: E731
    pins: Any = {"in_shardings": on("data"), "out_shardings": on("model")}
    with pytest.raises(ShardingError, match="Rename the argument `result`"):
        minialpa.parallelize(fun, method=ShardParallel(), **pins)([jnp.ones((8, 8))])
    with pytest.raises(ShardingError, match=r"`in_shardings` pins `tree\['\*'\]`, but `\*` stands for any text"):
        minialpa.parallelize(lambda tree: tree, in_shardings=on("data"))({"*": jnp.ones(8), "b": jnp.ones(8)})


def test_an_array_that_is_returned_twice_has_one_sharding() -> None:
    def twice(w: jax.Array) -> Any:
        new = w + 1
        return new, new, w

    w = jnp.ones((8, 8))
    found = minialpa.parallelize(twice, method=ShardParallel(), out_shardings=(on("data"), on("data"), None))(w)
    as_pinned(found[:2], (on("data"),) * 2)
    fun = functools.partial(minialpa.parallelize, twice, method=ShardParallel(), in_shardings=on("model"))
    # An argument that is returned unchanged may have two.
    as_pinned(fun(out_shardings=(None, None, on("data")))(w)[2], on("data"))
    with pytest.raises(ShardingError, match="an array that is returned twice has one sharding"):
        fun(out_shardings=(on("data"), on("model"), None))(w)


# ---- other options --------------------------------------------------------------------------------------------------


def test_options_without_meaning_are_accepted_or_refused_with_advice() -> None:
    parallel = minialpa.parallelize(step, keep_unused=True, inline=True, method=ShardParallel())
    equal(parallel(state(), batch()), jax.jit(step)(state(), batch()))
    for name, advice in (("backend", "`devices` of a method"), ("compiler_options", "Plans hold")):
        with pytest.raises(ShardingError, match=rf"`{name}` is an option of `jax.jit`.*{advice}"):
            minialpa.parallelize(step, **{name: None})
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'in_sharding'.*in_shardings"):
        minialpa.parallelize(step, in_sharding=None)
    with pytest.raises(TraceError, match="`params` is in `static_argnums` and in `donate_argnums`"):
        minialpa.parallelize(step, static_argnums=0, donate_argnames="params")


# ---- functions that are jitted already ------------------------------------------------------------------------------


def by_kind(w: jax.Array, x: jax.Array, kind: str = "once", *, n: int = 2) -> Any:
    return w * (n if kind == "often" else 1), jnp.sum(x)


def test_a_jitted_function_brings_its_options() -> None:
    mesh = mesh_of()
    jitted = jax.jit(
        by_kind,
        static_argnums=2,
        static_argnames=("n",),
        donate_argnums=0,
        in_shardings=(NamedSharding(mesh, P("data")), None),
        out_shardings=(NamedSharding(mesh, P("data", "model")), None),
        keep_unused=True,
    )
    w, x = jnp.arange(64.0).reshape(8, 8), jnp.ones((16, 2))
    parallel = minialpa.parallelize(jitted, method=ShardParallel())
    for kind, n in (("often", 5), ("once", 5), ("often", 4)):
        (given,) = parallel.preshard_dynamic_args(w + 0, x, kind, n=n)[0][:1]
        found = parallel(given, x, kind, n=n)
        equal(found, by_kind(w, x, kind, n=n))
        as_pinned(found[0], on("data", "model"))
    found = parallel(found[0], x)
    # Options of `parallelize` win.
    own = minialpa.parallelize(jitted, method=ShardParallel(), donate_argnums=(), in_shardings=None, out_shardings=on())
    given = own.preshard_dynamic_args(w + 0, x)[0]
    found = own(given, x)
    assert not given.is_deleted()
    as_pinned(found, (on(), on()))


def test_a_jitted_step_donates_what_it_names() -> None:
    jitted = jax.jit(lambda old, kept: (old * 2, kept * 2), donate_argnames="old")
    parallel = minialpa.parallelize(jitted, method=ShardParallel())
    old, kept = parallel.preshard_dynamic_args(jnp.ones((8, 8)), jnp.ones((8, 8)))
    equal(parallel(old, kept), (jnp.full((8, 8), 2.0),) * 2)
    assert old.is_deleted() and not kept.is_deleted()


def test_an_argument_with_a_donated_name_is_replaced_once() -> None:
    # `jax.jit` keeps the names and the numbers of these arguments.
    jitted = jax.jit(lambda old, kept: (old * 2, kept * 2), donate_argnames="old")
    old, kept = jax.device_put((jnp.ones((8, 8)), jnp.ones((8, 8))), (on("data"), on(None, "model")))
    results = minialpa.parallelize(jitted, method=ShardParallel(), batch_argnums=())(old, kept)
    as_pinned(results, (on("data"), on(None, "model")))


def test_partials_of_jit_of_partials_bind_as_written() -> None:
    def fun(a: Any, b: Any, kind: str, c: Any, d: Any = 1.0) -> Any:
        return a + b * 2 + c * 3 + d if kind == "sum" else a

    one = jnp.ones((8, 8))
    inner = functools.partial(fun, one)  # b, kind, c, d
    jitted = jax.jit(inner, static_argnums=1, donate_argnums=(0, 2), in_shardings=(on("data"), on("model"), None))
    outer = functools.partial(jitted, one * 5, "sum")  # c, d
    parallel = minialpa.parallelize(outer, method=ShardParallel(), batch_argnums=())
    expected = fun(one, one * 5, "sum", one * 7, one)
    equal(parallel(one * 7, one), expected)
    assert planned_arguments(parallel)[0] == P("y")
    c = parallel.preshard_dynamic_args(one * 7, one)[0]
    parallel(c, one)
    assert c.is_deleted()
    by_name = functools.partial(functools.partial(jax.jit(fun, static_argnames="kind"), kind="sum"), one)
    equal(minialpa.parallelize(by_name, batch_argnums=())(one * 5, c=one * 7, d=one), expected)


def test_a_function_that_is_jitted_twice_has_the_options_of_the_outer_jit() -> None:
    inner = jax.jit(lambda w, x: (w * 2, x), donate_argnums=1)
    parallel = minialpa.parallelize(jax.jit(inner, donate_argnums=0), method=ShardParallel())
    w, x = parallel.preshard_dynamic_args(jnp.ones((8, 8)), jnp.ones((8, 8)))
    equal(parallel(w, x)[0], jnp.full((8, 8), 2.0))
    assert w.is_deleted() and not x.is_deleted()


class Model:
    def __init__(self, rate: float) -> None:
        self.rate = rate

    @functools.partial(jax.jit, static_argnums=(0, 2), donate_argnums=1)
    def step(self, w: jax.Array, often: bool) -> Any:
        return w * self.rate if often else w

    @jax.jit
    def __call__(self, w: jax.Array) -> Any:
        return w * 3

    @functools.partial(minialpa.parallelize, method=ShardParallel())
    @functools.partial(jax.jit, static_argnames=("self", "often"), donate_argnames="w")
    def decorated(self, w: jax.Array, often: bool = True) -> Any:
        return w * self.rate if often else w


@pytest.mark.parametrize("name", ["step", "decorated"])
def test_methods_of_classes_bind(name: str) -> None:
    for model in (Model(2.0), Model(3.0)):
        bound = getattr(model, name)
        parallel = bound if name == "decorated" else minialpa.parallelize(bound, method=ShardParallel())
        w = parallel.preshard_dynamic_args(jnp.ones((8, 8)), True)[0]
        equal(parallel(w, True), jnp.full((8, 8), model.rate))
        assert w.is_deleted()
        equal(parallel(jnp.ones((8, 8)), False), jnp.ones((8, 8)))


def test_objects_whose_call_is_jitted_are_functions() -> None:
    @jax.tree_util.register_static
    class Tripled(Model): ...

    equal(minialpa.parallelize(Tripled(1.0), method=ShardParallel())(jnp.ones((8, 8))), jnp.full((8, 8), 3.0))


def test_static_options_of_a_wrapper_are_replaced_as_a_whole() -> None:
    jitted = jax.jit(lambda n, m, x: x * n if m else x, static_argnums=(0, 1), donate_argnums=2)
    parallel = minialpa.parallelize(jitted, static_argnames="m", method=ShardParallel())
    equal(parallel(3, True, jnp.ones(8)), jnp.full(8, 3.0))
    (call_static,) = {name for name, _ in parallel._bind((3, True, jnp.ones(8)), {}).static}
    assert call_static == 1
    # What `parallelize` makes static is no longer donated.
    static = minialpa.parallelize(jax.jit(lambda n, x: x * n, donate_argnums=(0, 1)), static_argnums=0)
    equal(static(3, jnp.ones(8)), jnp.full(8, 3.0))


def test_keywords_of_any_name_may_be_static() -> None:
    def fun(x: jax.Array, **options: Any) -> Any:
        return x * 2 if options["kind"] == "double" else x + options["y"]

    for parallel in (
        minialpa.parallelize(jax.jit(fun, static_argnames="kind")),
        minialpa.parallelize(fun, static_argnames="kind"),
    ):
        equal(parallel(jnp.ones(8), kind="double", y=jnp.ones(8)), jnp.full(8, 2.0))
        equal(parallel(jnp.ones(8), kind="other", y=jnp.ones(8)), jnp.full(8, 2.0))


def test_options_that_have_no_meaning_here_are_refused_or_warned_of() -> None:
    with pytest.warns(UserWarning, match="`compiler_options` of the jitted function"):
        minialpa.parallelize(jax.jit(step, compiler_options={"xla_cpu_enable_fast_math": False}))
    with pytest.warns(DeprecationWarning), pytest.raises(ShardingError, match=r"`backend` is an option of `jax.jit`"):
        minialpa.parallelize(jax.jit(step, backend="cpu"))


def test_a_jitted_function_is_known_by_its_own_name() -> None:
    parallel = minialpa.parallelize(jax.jit(step), method=ShardParallel())
    assert "step" in repr(parallel)
    assert parallel.get_executable(state(), batch()).name == "step"


# ---- equinox and flax.nnx -------------------------------------------------------------------------------------------


def test_filter_jit_donates_and_keeps_values_static() -> None:
    eqx = pytest.importorskip("equinox")

    def make_step(model: Any, x: jax.Array, n: int, scale: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
        for _ in range(n):
            model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))
        return model, loss, {"n": n, "scale": scale["by"] * 2}

    model = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (16, 4))
    expected = eqx.filter_jit(make_step)(model, x, 3, {"by": 2})
    for donate, deleted in (("all", True), ("all-except-first", False), ("none", None)):
        parallel = minialpa.parallelize(eqx.filter_jit(make_step, donate=donate), method=ShardParallel())
        given = parallel.preshard_dynamic_args(
            jax.tree.map(lambda a: a + 0 if eqx.is_array(a) else a, model), x, 3, {"by": 2}
        )
        found = parallel(*given)
        assert found[2] == expected[2] and type(found[2]["n"]) is int
        equal(eqx.filter(found[:2], eqx.is_array), eqx.filter(expected[:2], eqx.is_array))
        weight = given[0].layers[0].weight
        assert deleted is None or weight.is_deleted() == deleted


def test_methods_under_filter_jit_bind() -> None:
    eqx = pytest.importorskip("equinox")

    class Scaled(eqx.Module):
        by: jax.Array

        @eqx.filter_jit
        def __call__(self, x: jax.Array, n: int) -> Any:
            return self.by * sum(x for _ in range(n))

        @eqx.filter_jit
        def step(self, x: jax.Array, n: int) -> Any:
            return self.by * sum(x for _ in range(n))

    model = Scaled(jnp.asarray(3.0))
    for fun in (model, model.step, eqx.filter_jit(model.step), functools.partial(model.step, n=2)):
        args = (jnp.ones(8),) if isinstance(fun, functools.partial) else (jnp.ones(8), 2)
        equal(minialpa.parallelize(fun, method=ShardParallel())(*args), jnp.full(8, 6.0))


def nnx_model() -> Any:
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self, rngs: Any) -> None:
            self.inner = nnx.Linear(8, 16, rngs=rngs)
            self.norm = nnx.BatchNorm(16, rngs=rngs)
            self.outer = nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            out: jax.Array = self.outer(jnp.tanh(self.norm(self.inner(x))))
            return out

    return Net(nnx.Rngs(0))


def nnx_step(model: Any, x: jax.Array, rate: float) -> Any:
    nnx = sys.modules["flax.nnx"]
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p, g: p - rate * g, params, grads))
    return loss


def weights(model: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(sys.modules["flax.nnx"].state(model))]


@pytest.mark.parametrize("options", [{}, {"graph_updates": False}])
@pytest.mark.parametrize("by_name", [False, True])
def test_modules_under_nnx_jit_are_updated_in_place(options: Any, by_name: bool) -> None:
    nnx = pytest.importorskip("flax.nnx")
    static = {"static_argnames": "rate"} if by_name else {"static_argnums": 2}
    jitted = nnx.jit(nnx_step, donate_argnums=0, **static, **options)
    parallel = minialpa.parallelize(jitted, method=ShardParallel())
    x = jax.random.normal(jax.random.key(1), (16, 8))
    plain, model = nnx_model(), nnx_model()
    before = model.inner.kernel
    for _ in range(2):
        expected = nnx.jit(nnx_step, **static, **options)(plain, x, rate=0.5)
        equal(parallel(model, x, rate=0.5), expected)
    assert model.inner.kernel is before
    equal(weights(model), weights(plain))


def test_shardings_of_nnx_jit_pin_the_modules() -> None:
    nnx = pytest.importorskip("flax.nnx")
    ins = (None, on("data"))
    pinned = nnx.jit(lambda model, x: model(x), in_shardings=ins, out_shardings=on("data", "model"))
    x = jax.random.normal(jax.random.key(1), (16, 8))
    found = minialpa.parallelize(pinned, method=ShardParallel(), batch_argnums=1)(nnx_model(), x)
    equal(found, nnx_model()(x))
    as_pinned(found, on("data", "model"))
    # A module that the step changes keeps its pin.
    whole = nnx.jit(functools.partial(nnx_step, rate=0.5), in_shardings=(on(), on("data")))
    model = nnx_model()
    minialpa.parallelize(whole, method=ShardParallel())(model, x)
    as_pinned(model.inner.kernel.get_value(), on())
    # A filter chooses variables: here kernels, whose names sort between those of other variables.
    kernels = nnx.StateSharding({nnx.PathContains("kernel"): on(None, "model"), ...: None})
    by_filter = nnx.jit(nnx_step, in_shardings=(kernels, None), static_argnums=2)
    plain = nnx_model()
    expected = nnx_step(plain, x, 0.5)
    model = nnx_model()
    parallel = minialpa.parallelize(by_filter, method=ShardParallel())
    equal(parallel(model, x, 0.5), expected)
    as_pinned([model.inner.kernel.get_value(), model.outer.kernel.get_value()], (on(None, "model"),) * 2)
    equal(weights(model), weights(plain))
    assert parallel.get_last_executable().get_parallel_plan().stages[0].logical_shape == (2, 4)
    with pytest.raises(ShardingError, match="leaves of `out_shardings`; got StateSharding"):
        minialpa.parallelize(nnx_step, out_shardings=kernels)(model, x, 0.5)


def test_changes_of_modules_under_jax_jit_are_lost_as_in_jax() -> None:
    pytest.importorskip("flax.nnx")
    model, x = nnx_model(), jax.random.normal(jax.random.key(1), (16, 8))
    fun: Callable[..., Any] = jax.jit(nnx_step, static_argnums=2)
    before = weights(model)
    expected = fun(model, x, 0.5)
    equal(weights(model), before)
    equal(minialpa.parallelize(fun, method=ShardParallel())(model, x, 0.5), expected)
    equal(weights(model), before)


def test_partials_of_modules_are_refused_by_name() -> None:
    nnx = pytest.importorskip("flax.nnx")
    model = nnx_model()
    jitted = nnx.jit(nnx_step, static_argnums=2)
    for bound in (nnx.jit_partial(nnx_step, model, graph=False), nnx.cached_partial(jitted, model)):
        with pytest.raises(TraceError, match=r"`nnx\..*_partial` holds arguments.* the modules as arguments"):
            minialpa.parallelize(bound)
    for partial in (functools.partial(jitted, model), functools.partial(jitted, model=model)):
        with pytest.raises(TraceError, match=r"`nnx_step`, or its object, holds an nnx Net"):
            minialpa.parallelize(partial)
    equal(minialpa.parallelize(functools.partial(jitted, rate=0.5))(nnx_model(), jnp.ones((8, 8))), 0.0)
