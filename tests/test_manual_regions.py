"""A step with `shard_map` or `pmap` inside is the same program on whole arrays, for every collective and transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import minialpa
from minialpa import ClusterSpec, PipeshardParallel, ShardParallel, TraceError, UniformStageOption, Zero3Parallel
from minialpa.ir.equations import sub_jaxprs
from minialpa.testing import assert_allclose
from minialpa.tracing.evaluation import eval_flat
from minialpa.tracing.flattening import trace_flat

XY = ("x", "y")
RING = [(i, (i + 1) % 4) for i in range(4)]


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), XY, axis_types=(AxisType.Auto,) * 2)


def square() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (16, 16))


SPLIT = P(XY)


@pytest.fixture(autouse=True)
def promotion() -> Any:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def region(fun: Callable[..., Any], ins: Any = SPLIT, outs: Any = SPLIT, **options: Any) -> Callable[..., Any]:
    return lambda *args: jax.shard_map(fun, mesh=mesh(), in_specs=ins, out_specs=outs, **options)(*args)


def unchecked(fun: Callable[..., Any], ins: Any = SPLIT, outs: Any = SPLIT) -> Callable[..., Any]:
    return region(fun, ins, outs, check_vma=False)


def summed(fun: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda x: jnp.sum(fun(x)))


@jax.custom_vjp
def doubled_sum(x: Any) -> Any:
    return 2 * lax.psum(x, "x")


doubled_sum.defvjp(lambda x: (doubled_sum(x), x), lambda x, g: (lax.psum(g, "x") * x,))


def draw(implementation: str) -> Callable[..., Any]:
    def local(x: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(3, impl=implementation), lax.axis_index(XY))
        return x + jax.random.normal(key, x.shape)

    return region(local)


def nested(x: Any) -> Any:
    def inner(x: Any) -> Any:
        return lax.psum(x, "y") + lax.axis_index("y") * lax.psum(x, "x")

    def outer(x: Any) -> Any:
        of_y = jax.shard_map(inner, in_specs=P("y", None), out_specs=P(None, "y"), axis_names={"y"})
        return of_y(x) * lax.axis_index("x")

    return region(outer, P("x"), P("x"), axis_names={"x"})(x)


def with_constraint(x: Any) -> Any:
    def local(x: Any) -> Any:
        of_y = NamedSharding(jax.sharding.get_abstract_mesh(), P(None, "y"))
        return lax.psum(lax.with_sharding_constraint(2 * x, of_y), "x")

    return region(local, P("x"), P(), axis_names={"x"})(x)


def scanned(x: Any) -> Any:
    return lax.scan(lambda c, _: (jnp.sin(lax.ppermute(c, "x", RING)), None), x, None, length=3)[0]


def branched(x: Any, w: Any) -> Any:
    return lax.cond(lax.axis_index("y") > 0, lambda x: jnp.tanh(x @ w), lambda x: x @ w / 2, x)


REGIONS: dict[str, Callable[..., Any]] = {
    "psum": region(lambda x: lax.psum(x, XY), outs=P()),
    "psum of int8": region(lambda x: lax.psum((9 * x).astype("int8"), XY), outs=P()),
    "psum of infinities": region(lambda x: lax.psum(x / jnp.where(x > 1, 0, 1), "x"), outs=P("y")),
    "psum of a constant": region(lambda x: x * lax.psum(1, "x") + lax.psum(jnp.float32(2), "y")),
    "pmean": region(lambda x: lax.pmean(x, "y"), outs=P("x")),
    "pmax and pmin": region(lambda x: (lax.pmax(x, XY), lax.pmin(x, "x")), outs=(P(), P("y"))),
    "all_gather": unchecked(lambda x: lax.all_gather(x, XY, tiled=True), outs=P(None, XY)),
    "all_gather to a new dimension": region(lambda x: lax.all_gather(x, XY, axis=1)),
    "all_gather of booleans": region(lambda x: lax.all_gather(x > 0, "x"), outs=P("x", "y")),
    "psum_scatter": region(lambda x: lax.psum_scatter(x, XY, scatter_dimension=1, tiled=True)),
    "psum_scatter of a dimension": region(lambda x: lax.psum_scatter(x.reshape(2, 8, 2), XY, scatter_dimension=1)),
    "all_to_all": region(lambda x: lax.all_to_all(x, XY, 1, 0, tiled=True)),
    "all_to_all in place": region(lambda x: lax.all_to_all(x, "x", 1, 1, tiled=True)),
    "all_to_all of a dimension": region(lambda x: lax.all_to_all(x.reshape(2, 8, 2), XY, 1, 2)),
    "ppermute around": region(lambda x: lax.ppermute(x, "x", RING)),
    "ppermute along": region(lambda x: lax.ppermute(x * jnp.nan, "x", RING[:3])),
    "ppermute of pairs": region(lambda x: lax.ppermute(x, "x", [(i, i ^ 1) for i in range(4)])),
    "ppermute of some": region(lambda x: lax.ppermute(x, "x", [(0, 2), (3, 1)])),
    "ppermute of two axes": region(lambda x: lax.ppermute(x, XY, [(i, (3 * i + 1) % 8) for i in range(8)])),
    "ppermute of equal values": unchecked(lambda x: x + lax.ppermute(jnp.ones((2, 16)), "x", [(0, 1)])),
    "pshuffle": region(lambda x: lax.pshuffle(x, "x", [2, 0, 3, 1])),
    "axis_index": region(lambda x: x * lax.axis_index(XY)),
    "no arguments": lambda x: x[:8, 0] + region(lambda: lax.axis_index(XY)[None].astype("float32"), ())(),
    "literals": region(lambda x: (1.0, x, jnp.float32(2)), outs=(P(), P(XY), P())),
    "an empty array": lambda x: region(lambda x: lax.psum(x, "x"), P(None, XY), P(None, "y"))(x[:0]),
    "threefry": draw("threefry2x32"),
    "rbg": draw("rbg"),
    "cond": region(lambda x: lax.cond(lax.axis_index("x") > 1, lambda x: x + 1, lambda x: 2 * x, x)),
    "while": region(lambda x: lax.while_loop(lambda c: c.sum() < 20, lambda c: c + jnp.abs(c) + 0.1, x)),
    "while with collectives": region(lambda x: lax.while_loop(lambda c: lax.pmax(c.max(), XY) < 9, lambda c: c + 1, x)),
    "scan": region(scanned),
    "scan with sums": region(lambda x: lax.scan(lambda c, _: (jnp.sin(c) - lax.pmean(c, "x"), None), x, length=2)[0]),
    "gradient of scan": summed(region(scanned)),
    "custom_vjp": summed(unchecked(doubled_sum, outs=P("y"))),
    "custom_jvp": summed(region(lambda x: jax.nn.relu(x) * lax.pmean(x, XY))),
    "remat around": summed(jax.checkpoint(region(lambda x: jnp.sin(jnp.sin(x) * lax.psum(x, "y"))))),
    "remat inside": summed(region(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x) * lax.psum(x, "y")) + np.arange(16)))),
    "gradient inside": region(lambda x: jax.grad(lambda z: lax.psum(jnp.sin(z * z).sum(), XY))(x)),
    # jax ends each branch of the derivative with a sum over devices that take either branch.
    "gradient of branches": summed(lambda w: region(branched, (SPLIT, P()))(square() + 1, w)),
    "nested": nested,
    "partial with a constraint": with_constraint,
    "vmap": lambda x: jax.vmap(region(lambda r: lax.psum(r, "x"), outs=P("y")))(x),
    "spmd_axis_name": lambda x: jax.vmap(region(lambda r: lax.psum(r, "x"), P("x"), P()), spmd_axis_name="y")(x),
    "pmap": lambda x: jax.pmap(lambda x: lax.pmean(x, "i") + lax.axis_index("i"), "i")(x.reshape(8, 2, 16)),
    "pmap of columns": lambda x: jax.pmap(lambda x, w: x * lax.psum(w, "i"), "i", in_axes=(1, None), out_axes=1)(
        x.reshape(2, 8, 16), x[0]
    ),
}


def primitives(eqns: Any) -> set[str]:
    """The names of the primitives of equations and of their bodies."""
    inner = [primitives(body.eqns) for eqn in eqns for body in sub_jaxprs(eqn)]
    return {eqn.primitive.name for eqn in eqns}.union(*inner)


@pytest.mark.parametrize("name", REGIONS)
def test_a_region_is_a_program_on_whole_arrays(name: str) -> None:
    fun, x = REGIONS[name], square()
    flat, _ = trace_flat(fun, jax.ShapeDtypeStruct(x.shape, x.dtype))
    kinds = primitives(flat.eqns)
    assert kinds.isdisjoint({"shard_map", "along_axis", "psum", "axis_index", "ppermute"})
    expected = jax.tree.leaves(jax.jit(fun)(x))
    actual = jax.jit(lambda x: eval_flat(flat, [x]))(x)
    for a, b in zip(actual, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_collectives_without_a_rule_are_refused_by_name() -> None:
    groups = unchecked(lambda x: lax.psum(x, "x", axis_index_groups=[[0, 1], [2, 3]]))
    with pytest.raises(TraceError, match=r"`psum` at .*test_manual_regions.py:\d+ .*has `axis_index_groups`"):
        minialpa.parallelize(groups, batch_argnums=()).plan(square())


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: lax.cond(lax.axis_index("x") > 1, lambda x: 2 * lax.psum(x, XY), lambda x: x, x),
        lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1 + lax.psum(c, "x") ** 2, x),
    ],
)
def test_collectives_where_devices_part_are_refused_by_name(fun: Callable[..., Any]) -> None:
    with pytest.raises(
        TraceError, match=r"`(cond|while)` at .*has collectives over the axis `x`, and devices along it"
    ):
        minialpa.parallelize(unchecked(fun), batch_argnums=()).plan(square())


# ---- steps -----------------------------------------------------------------------------------------------------------


def line() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("s",), axis_types=(AxisType.Auto,))


def ring_attention(q: Any, k: Any, v: Any) -> Any:
    around = [(i, (i + 1) % 8) for i in range(8)]

    def visit(carry: Any, _: None) -> Any:
        k, v, total, weights = carry
        scores = jnp.exp(q @ k.T / 4)
        moved = lax.ppermute(k, "s", around), lax.ppermute(v, "s", around)
        return (*moved, total + scores @ v, weights + scores.sum(-1)), None

    zeros = [lax.pcast(jnp.zeros(shape), "s", to="varying") for shape in (q.shape, q.shape[:1])]
    (_, _, total, weights), _ = lax.scan(visit, (k, v, *zeros), None, length=8)
    return total / weights[:, None]


def attention_loss(w: Any, x: Any) -> Any:
    attend = jax.shard_map(ring_attention, mesh=line(), in_specs=(P("s"),) * 3, out_specs=P("s"))
    return jnp.mean(attend(x @ w["q"], x @ w["k"], x @ w["v"]) ** 2)


def expert_loss(w: Any, x: Any) -> Any:
    def local(x: Any, w: Any) -> Any:
        routed = lax.all_to_all(x.reshape(8, -1, x.shape[-1]), "s", 0, 0)
        return lax.all_to_all(jnp.tanh(routed @ w[0]), "s", 0, 0).reshape(x.shape)

    return jnp.mean(jax.shard_map(local, mesh=line(), in_specs=(P("s"), P("s")), out_specs=P("s"))(x, w["e"]) ** 2)


def tensor_parallel_loss(w: Any, x: Any) -> Any:
    def local(a: Any, b: Any, x: Any) -> Any:
        return lax.psum(jnp.tanh(x @ a) @ b, "y")

    layer = jax.shard_map(local, mesh=mesh(), in_specs=(P(None, "y"), P("y"), P("x")), out_specs=P("x"))
    return jnp.mean(layer(w["q"], w["k"], layer(w["v"], w["q"], x)) ** 2)


LOSSES = {"ring attention": attention_loss, "experts": expert_loss, "tensor parallel": tensor_parallel_loss}


def whole_step_in_a_region(w: Any, x: Any) -> Any:
    def local(w: Any, x: Any) -> Any:
        value, grads = minialpa.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w["q"]) @ w["k"]) ** 2))(w)
        return jax.tree.map(lambda w, g: w - 0.1 * lax.pmean(g, "s"), w, grads), lax.pmean(value, "s")

    return jax.shard_map(local, mesh=line(), in_specs=(P(), P("s")), out_specs=(P(), P()), check_vma=False)(w, x)


def step_of(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(w: Any, x: Any) -> Any:
        value, grads = minialpa.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads), value

    return step


STEPS = {**{name: step_of(loss) for name, loss in LOSSES.items()}, "the whole step": whole_step_in_a_region}
METHODS = {
    "shard": ShardParallel(num_micro_batches=2),
    "zero3": Zero3Parallel(),
    "stages": PipeshardParallel(
        num_micro_batches=2,
        layer_option=minialpa.AutoLayerOption(layer_num=2),
        stage_option=UniformStageOption(2),
    ),
}


MOVES = pytest.mark.filterwarnings("ignore:Each call moves its results:UserWarning")


def arguments() -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), 5)
    w = {name: 0.3 * jax.random.normal(key, (16, 16)) for name, key in zip("qkv", keys, strict=False)}
    return {**w, "e": 0.3 * jax.random.normal(keys[3], (8, 16, 16))}, jax.random.normal(keys[4], (64, 16))


@MOVES
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", STEPS)
def test_steps_with_regions_train_as_under_jit(name: str, method: str) -> None:
    w, x = arguments()
    step, expected = STEPS[name], (w, None)
    parallel, actual = minialpa.parallelize(step, method=METHODS[method], donate_argnums=()), (w, None)
    for _ in range(2):
        expected, actual = jax.jit(step)(expected[0], x), parallel(actual[0], x)
    assert_allclose(actual, expected, rtol=2e-4, atol=1e-6)


@MOVES
@pytest.mark.parametrize("method", METHODS)
def test_the_authors_pmapped_evaluation_takes_the_results_of_a_pmapped_step(method: str) -> None:
    def loss_of(w: Any, x: Any) -> Any:
        return lax.pmean(jnp.mean((x @ w) ** 2), "batch")

    def step(w: Any, x: Any) -> Any:
        loss, gradient = minialpa.value_and_grad(loss_of)(w, x)
        return w - 0.1 * lax.pmean(gradient, "batch"), loss

    evaluate = jax.pmap(loss_of, axis_name="batch")
    w, x = np.ones((8, 4, 4), np.float32), np.ones((8, 2, 4), np.float32)
    expected, _ = jax.pmap(step, axis_name="batch")(w, x)
    mapped = minialpa.parallelize(jax.pmap(step, axis_name="batch"), method=METHODS[method], batch_argnums=1)
    new, loss = mapped(w, x)
    assert_allclose((new, evaluate(new, x)), (expected, evaluate(expected, x)), rtol=1e-5)
    assert new.sharding == expected.sharding and loss.shape == (8,)
    assert_allclose(mapped(new, x)[0], jax.pmap(step, axis_name="batch")(expected, x)[0], rtol=1e-5)


@MOVES
@pytest.mark.parametrize("method", METHODS)
def test_the_authors_pmapped_evaluation_takes_a_state_updated_outside_the_pmapped_gradients(method: str) -> None:
    def loss_of(w: Any, x: Any) -> Any:
        return lax.pmean(jnp.mean((jnp.tanh(x @ w) @ w) ** 2), "batch")

    gradients = jax.pmap(minialpa.value_and_grad(loss_of), axis_name="batch")

    def step(state: Any, x: Any) -> Any:
        (w, average), (loss, gradient) = state, gradients(state[0], x)
        return (w - 0.1 * gradient, 0.9 * average + 0.1 * w), loss

    evaluate = jax.pmap(loss_of, axis_name="batch")
    w, x = np.ones((8, 4, 4), np.float32) / 4, np.ones((8, 2, 4), np.float32)
    mapped, state, expected = minialpa.parallelize(step, method=METHODS[method], batch_argnums=1), (w, w), (w, w)
    for _ in range(2):
        state, expected = mapped(state, x)[0], step(expected, x)[0]
    found = [evaluate(w, x) for w in state]
    assert_allclose((state, found), (expected, [evaluate(w, x) for w in expected]), rtol=1e-5)


@MOVES
@pytest.mark.parametrize("method", [*METHODS, None])
@pytest.mark.parametrize("shape", [(8, 1), (4, 2)])
def test_the_authors_shard_map_takes_the_results_of_a_step_that_began_with_numpy(
    shape: tuple[int, int], method: str | None
) -> None:
    backwards = jax.sharding.Mesh(np.array(jax.devices()[::-1]).reshape(shape), XY)
    mesh = backwards if shape == (8, 1) else jax.make_mesh(shape, XY, axis_types=(AxisType.Auto,) * 2)
    specs = {"q": P(None, "y"), "k": P("y")}

    def loss_of(w: Any, x: Any) -> Any:
        return jnp.mean(lax.psum(jnp.tanh(x @ w["q"]) @ w["k"], "y") ** 2)

    def local(w: Any, x: Any) -> Any:
        loss, gradient = minialpa.value_and_grad(loss_of)(w, x)
        return jax.tree.map(lambda w, g: w - 0.1 * lax.pmean(g, "x"), w, gradient), lax.pmean(loss, "x")

    options = {"mesh": mesh, "in_specs": (specs, P("x")), "check_vma": False}
    step = jax.jit(jax.shard_map(local, out_specs=(specs, P()), **options))
    evaluate = jax.jit(jax.shard_map(lambda w, x: lax.pmean(loss_of(w, x), "x"), out_specs=P(), **options))
    w, x = jax.tree.map(np.asarray, ({name: arguments()[0][name] for name in "qk"}, arguments()[1]))
    mapped = minialpa.parallelize(step, method=METHODS[method] if method else None, batch_argnums=1)
    actual, expected = (w, None), (w, None)
    for _ in range(2):
        actual, expected = mapped(actual[0], x), step(expected[0], x)
        found = evaluate(actual[0], x), evaluate(expected[0], x)
        assert_allclose((actual, found[0]), (expected, found[1]), rtol=2e-4, atol=1e-6)


# ---- plans -----------------------------------------------------------------------------------------------------------


def collectives(loss: Callable[..., Any], pins: bool, *shapes: tuple[int, ...]) -> set[str]:
    """Kinds of collectives of a step on 8 H100s."""
    option = minialpa.AutoShardingOption(shardings="pin" if pins else "hint")
    w = {name: jax.ShapeDtypeStruct((256, 256), jnp.float32) for name in "qkv"}
    w["e"] = jax.ShapeDtypeStruct((8, 256, 256), jnp.float32)
    plan = minialpa.plan(
        step_of(loss),
        (w, jax.ShapeDtypeStruct((16384, 256), jnp.float32)),
        cluster=ClusterSpec.preset("h100", num_hosts=1, devices_per_host=8),
        method=ShardParallel(auto_sharding_option=option),
    )
    return {one.kind for one in plan.collectives}


def test_pinned_regions_communicate_as_their_author_wrote() -> None:
    assert "collective-permute" in collectives(attention_loss, True)
    assert collectives(expert_loss, True) == {"all-to-all", "all-reduce"}
    assert "all-reduce" in collectives(tensor_parallel_loss, True)
