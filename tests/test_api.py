"""`parallelize` and its functions: arguments of every kind, donation, caching, planning, executables."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import minialpa
from minialpa import MinialpaError, ShardParallel
from minialpa.methods import PipeshardParallel
from minialpa.testing import assert_allclose
from tests import plans
from tests.plans import N_EXAMPLES, WIDTH, loss_of, make_batch, make_params, train_step

Params = dict[str, jax.Array]


pytestmark = pytest.mark.usefixtures("fresh_session")


def descend(params: Any, grads: Any, rate: Any = 0.1) -> Any:
    return jax.tree.map(lambda p, g: p - jnp.asarray(rate, p.dtype) * g, params, grads)


def assert_same(step: Callable[..., Any], *args: Any, method: Any = None, **kwargs: Any) -> Any:
    """The parallelized step gives the results of the step; returns the ParallelizedFunc."""
    expected = step(*args, **kwargs)
    parallel = minialpa.parallelize(step, method=method)
    assert_allclose(parallel(*args, **kwargs), expected, rtol=1e-4, atol=1e-5)
    return parallel


# ---- arguments ------------------------------------------------------------------------------------------------------


@functools.partial(jax.tree_util.register_dataclass, data_fields=["params"], meta_fields=["name"])
@dataclasses.dataclass
class Model:
    params: Params
    name: str


class Pair(NamedTuple):
    x: Any
    y: Any


def test_any_pytree_goes_in_and_comes_out() -> None:
    def step(model: Model, batch: Pair, extras: tuple[Any, list[Any]]) -> tuple[Model, Pair, list[Any]]:
        value, grads = minialpa.value_and_grad(loss_of)(model.params, {"x": batch.x, "y": batch.y})
        new = Model(descend(model.params, grads), model.name)
        return new, Pair(value, extras[0] * value), [extras[1][0], None]

    model = Model(make_params(), "a")
    extras = (jnp.float32(2), [jnp.arange(3)])
    parallel = assert_same(step, model, Pair(**make_batch()), extras)
    new, pair, rest = parallel(model, Pair(**make_batch()), extras)
    assert isinstance(new, Model) and new.name == "a" and isinstance(pair, Pair) and rest[1] is None


def test_keyword_arguments_and_defaults() -> None:
    traced = []

    def step(params: Params, batch: Any, rate: float = 0.1, *, decay: float = 0.0) -> Any:
        traced.append(type(rate))
        if isinstance(rate, float) and rate > 0.5:  # a default that is not passed stays a Python value
            raise AssertionError
        grads = minialpa.grad(loss_of)(params, batch)
        return descend(params, grads, rate), decay

    params, batch = make_params(), make_batch()
    parallel = minialpa.parallelize(step, donate_argnums=())
    expected = parallel(params, batch)
    assert traced == [float]
    assert_allclose(parallel(params, batch=batch), expected)
    assert_allclose(parallel(batch=batch, params=params), expected)
    assert traced == [float]  # the same call, however it is written
    new, decay = parallel(params, rate=0.2, decay=np.float32(3), batch=batch)
    assert_allclose(new, step(params, batch, 0.2)[0])
    assert float(decay) == 3
    with pytest.raises(TypeError, match=r"unexpected keyword argument `speed`\. Its arguments are params, batch"):
        parallel(params, batch, speed=1)


def test_batch_argnums_take_a_number_from_the_end() -> None:
    method = ShardParallel(num_micro_batches=2, devices=jax.local_devices()[:1])
    parallel = minialpa.parallelize(lambda batch, params: train_step(params, batch), method=method, batch_argnums=-2)
    assert_allclose(parallel(make_batch(), make_params()), train_step(make_params(), make_batch()))


def test_static_arguments_are_found() -> None:
    seen = []

    def step(params: Params, batch: Any, mode: str, train: bool, act: Callable[[Any], Any]) -> Any:
        seen.append((mode, train))
        out = act(batch["x"] @ params["w"])
        return {"mean": jnp.mean, "sum": jnp.sum}[mode](out) if train else out

    params, batch = make_params(), make_batch()
    parallel = minialpa.parallelize(step)
    for mode, train, act in (("mean", True, jnp.tanh), ("sum", True, jnp.tanh), ("sum", False, jnp.tanh)):
        assert_allclose(parallel(params, batch, mode, train, act), step(params, batch, mode, train, act))
    assert len(parallel._executables) == 3
    parallel(params, batch, "mean", True, act=jnp.tanh)
    assert len(parallel._executables) == 3


def test_a_step_counter_compiles_once_whether_number_or_array() -> None:
    def step(state: dict[str, Any], batch: Any) -> Any:
        grads = minialpa.grad(loss_of)(state["params"], batch)
        return {"params": descend(state["params"], grads), "step": state["step"] + 1}

    parallel = minialpa.parallelize(step)
    state: Any = {"params": make_params(), "step": 0}
    for _ in range(3):
        state = parallel(state, make_batch())
    assert int(state["step"]) == 3 and len(parallel._executables) == 1
    for step_count in (np.int32(7), jnp.int32(8)):  # not weakly typed
        parallel({"params": make_params(), "step": step_count}, make_batch())
        assert len(parallel._executables) == 2


# ---- what a step may contain ----------------------------------------------------------------------------------------


def test_primitives_without_a_rule_are_replicated_and_named_in_one_warning() -> None:
    def twice(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + jax.lax.linalg.symmetric_product(x, x), None

    def step(params: Params, batch: Any) -> Any:
        x = jnp.tanh(batch["x"].T @ batch["x"]) + params["w"][:WIDTH, :WIDTH]
        x, _ = jax.lax.scan(twice, x, None, length=2)
        return params, jax.lax.linalg.cholesky_update(jnp.tril(x).T, x[0])

    parallel = minialpa.parallelize(step)
    args = make_params(), make_batch()
    with pytest.warns(
        UserWarning, match="No sharding rule for `cholesky_update`, `symmetric_product`: every device"
    ) as caught:
        actual = parallel(*args)
    assert len(caught) == 1
    assert_allclose(actual, step(make_params(), make_batch()), rtol=1e-3)


def test_results_that_are_arguments_or_constants_belong_to_the_caller() -> None:
    table, host = jnp.arange(3.0), np.arange(4)

    def step(params: Params, batch: Any, more: jax.Array) -> Any:
        new = jnp.tanh(params["w"])
        return params, batch["x"], 3.0, table, host, jnp.zeros(2), more, (new, new)

    params, batch, more = make_params(), jax.tree.map(jnp.asarray, make_batch()), jnp.ones(5)
    parallel = minialpa.parallelize(step)
    expected = step(params, batch, more)
    for _ in range(2):
        out = parallel(params, batch, more)
        assert_allclose(out, expected)
        out[-1][0].delete()
        np.asarray(out[-1][1])
        for leaf in jax.tree.leaves(out[:-1]):  # as a later call does that donates them
            leaf.delete()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, batch, more, table)))


# ---- donation -------------------------------------------------------------------------------------------------------


def is_deleted(tree: Any) -> bool:
    flags = {leaf.is_deleted() for leaf in jax.tree.leaves(tree)}
    assert len(flags) == 1, flags
    return flags.pop()


def regular_loss(params: Params, batch: Any) -> jax.Array:
    """A loss whose gradients depend on the parameters element by element, too."""
    return loss_of(params, batch) + 0.1 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))


def sum_in_scan(params: Params, batch: Any) -> Params:
    parts = jax.tree.map(lambda x: x.reshape(2, -1, WIDTH), batch)
    add = lambda total, part: (jax.tree.map(jnp.add, total, jax.grad(regular_loss)(params, part)), None)  # noqa: E731
    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)[0]


def of_norm_one(params: Params, batch: Any) -> Params:
    grads = jax.grad(regular_loss)(params, batch)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g / norm, grads)


@pytest.mark.parametrize("gradients", [minialpa.grad(regular_loss), jax.grad(regular_loss), sum_in_scan, of_norm_one])
def test_states_are_donated_and_what_gradients_read_is_not(gradients: Any) -> None:
    step = minialpa.parallelize(
        lambda params, batch: (descend(params, gradients(params, batch)), 0.0), method=ShardParallel()
    )
    first, _ = step(make_params(), make_batch())
    second, _ = step(first, make_batch())
    assert is_deleted(first) and not is_deleted(second)
    batch = jax.tree.map(jnp.asarray, make_batch())
    minialpa.parallelize(gradients, method=ShardParallel(), batch_argnums=(1,))(second, batch)
    assert not is_deleted(second) and not is_deleted(batch)


def test_evaluation_donates_nothing() -> None:
    parallel = minialpa.parallelize(lambda params, batch: (params, loss_of(params, batch)))
    params, _ = parallel(make_params(), make_batch())
    parallel(params, make_batch())
    assert not is_deleted(params)


def test_donation_is_what_the_caller_says() -> None:
    keep = minialpa.parallelize(train_step, donate_argnums=())
    params, _ = keep(make_params(), make_batch())
    keep(params, make_batch())
    assert not is_deleted(params)
    give = minialpa.parallelize(minialpa.grad(loss_of), donate_argnums=0)
    placed, batch = give.preshard_dynamic_args(make_params(), make_batch())
    give(placed, batch)
    assert is_deleted(placed)


def test_an_array_may_be_passed_twice() -> None:
    shared = make_params()["w"]
    params = {"w": shared, "v": shared}
    expected = train_step(params, make_batch())
    parallel = minialpa.parallelize(train_step)
    assert_allclose(parallel(params, make_batch()), expected)
    placed = parallel.preshard_dynamic_args(params, make_batch())[0]
    assert_allclose(parallel({"w": placed["w"], "v": placed["w"]}, make_batch()), expected)
    assert not is_deleted(params)  # they are the caller's


# ---- shapes and caching ---------------------------------------------------------------------------------------------


def test_methods_choose_devices() -> None:
    few = jax.local_devices()[4:6]
    for method in (ShardParallel(devices=few), minialpa.get_3d_parallel_method(1, 2, 1, 1, devices=few)):
        new, _ = minialpa.parallelize(train_step, method=method)(make_params(), make_batch())
        assert new["w"].sharding.device_set == set(few)
    method = ShardParallel(devices=minialpa.LogicalMesh((2, 2)))
    parallel = minialpa.parallelize(train_step, method=method)
    parallel(make_params(), make_batch())
    assert parallel.get_last_executable().get_parallel_plan().stages[0].logical_shape == (2, 2)


# ---- planning -------------------------------------------------------------------------------------------------------


def test_every_way_to_write_a_shape_finds_the_program_of_the_arrays() -> None:
    params, batch = args = make_params(), jax.tree.map(jnp.asarray, make_batch())
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("x"))
    shapes = (
        {"w": jax.ShapeDtypeStruct(params["w"].shape, params["w"].dtype, sharding=sharding), "v": params["v"]},
        jax.tree.map(jax.typeof, batch),
    )
    parallel = minialpa.parallelize(train_step, method=ShardParallel(), donate_argnums=())
    executable = parallel.get_executable(*shapes)
    assert_allclose(parallel(*args), train_step(*args), rtol=1e-5, atol=1e-6)
    assert parallel.get_last_executable() is executable
    assert parallel.plan(*shapes) == parallel.plan(*args)


# ---- executables ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipeline() -> Any:
    def step(params: Params, batch: Any, mode: str) -> tuple[Params, dict[str, jax.Array]]:
        assert mode == "train"
        new, value = train_step(params, batch)
        return new, {"loss": value}

    minialpa.shutdown()
    method = PipeshardParallel(num_micro_batches=2, layer_option="manual", stage_option="uniform")
    parallel = minialpa.parallelize(step, method=method)
    parallel.get_executable(make_params(), make_batch(), "train")
    return parallel


def test_placement_specs_have_the_structure_of_arguments_and_results(pipeline: Any) -> None:
    executable = pipeline.get_last_executable()
    params, batch = executable.get_input_placement_specs()
    assert params["w"].mesh_ids == (0,) and params["v"].mesh_ids == (1,)
    assert isinstance(params["w"].partition_specs[0], PartitionSpec) and params["w"].shape == (WIDTH, WIDTH)
    assert batch["x"].mesh_ids == (0,) and batch["y"].mesh_ids == (1,)
    new, metrics = executable.get_output_placement_specs()
    assert new["v"].partition_specs == params["v"].partition_specs and new["v"].mesh_ids == (1,)
    assert metrics["loss"].path == "result[1]['loss']" and "mesh" in str(metrics["loss"])


def test_presharded_arguments_lie_where_the_step_reads_them(pipeline: Any) -> None:
    args = (make_params(), make_batch(), "train")
    params, _, mode = pipeline.preshard_dynamic_args(*args)
    assert mode == "train"
    expected = pipeline(*args)
    devices = [params[name].sharding.device_set for name in ("w", "v")]
    assert len(devices[0]) == len(devices[1]) == 4 and not devices[0] & devices[1]
    assert_allclose(pipeline(params, make_batch(), "train"), expected)
    assert is_deleted(params)  # used in place, so donated


def test_the_allocation_size_of_a_step_is_the_largest_of_its_stages(pipeline: Any) -> None:
    executable = pipeline.get_last_executable()
    sizes = executable.get_stage_allocation_size()
    assert len(sizes) == 2 and min(sizes) > WIDTH * WIDTH * 4 / 4
    assert executable.get_total_allocation_size() == max(sizes)


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step",
    [
        lambda p, b: jax.jit(lambda p: minialpa.grad(loss_of)(p, b))(p),
        lambda p, b: jax.lax.scan(
            lambda p, row: (descend(p, minialpa.grad(loss_of)(p, {"x": row[0][None], "y": row[1][None]})), None),
            p,
            (b["x"], b["y"]),
        )[0],
    ],
    ids=["under jit", "in a loop"],
)
def test_gradients_in_unusual_places(step: Any) -> None:
    assert_same(step, make_params(), make_batch())


def test_several_argnums_auxiliary_values_and_constants() -> None:
    def loss(params: Params, scale: jax.Array, batch: Any, unused: jax.Array) -> Any:
        out = batch["x"] @ params["w"] * scale
        return jnp.mean(out**2), {"out": out, "constant": 1.0, "host": np.arange(3), "total": jnp.sum(out)}

    def step(params: Params, batch: Any, scale: jax.Array) -> Any:
        grad_fn = minialpa.value_and_grad(loss, argnums=(0, 1, 3), has_aux=True)
        return grad_fn(params, scale, batch, jnp.ones(2))

    params, batch, scale = make_params(), make_batch(), jnp.float32(2)
    expected = jax.value_and_grad(loss, argnums=(0, 1, 3), has_aux=True)(params, scale, batch, jnp.ones(2))
    parallel = minialpa.parallelize(step, method=ShardParallel(num_micro_batches=2))
    assert_allclose(parallel(params, batch, scale), expected, rtol=1e-4, atol=1e-5)


def test_integer_leaves_have_no_gradients_where_jax_allows_them() -> None:
    def loss(tree: Any, batch: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ tree["w"][tree["order"]]) ** 2)

    def step(tree: Any, batch: Any) -> Any:
        grads = minialpa.grad(loss, allow_int=True)(tree, batch)
        return {"w": tree["w"] - 0.1 * grads["w"], "order": tree["order"]}

    tree = {"w": make_params()["w"], "order": jnp.arange(WIDTH)[::-1]}
    expected = tree["w"] - 0.1 * jax.grad(loss, allow_int=True)(tree, make_batch())["w"]
    assert_allclose(minialpa.parallelize(step)(tree, make_batch()), {"w": expected, "order": tree["order"]})
    with pytest.raises(TypeError, match="real- or complex-valued inputs"):
        minialpa.parallelize(lambda t, b: minialpa.grad(loss)(t, b))(tree, make_batch())


def test_gradients_outside_parallelize_are_those_of_jax() -> None:
    params, batch = make_params(), make_batch()
    with_aux = lambda p, b: (loss_of(p, b), b["x"])  # noqa: E731
    ours = minialpa.value_and_grad(with_aux, (0, 1), True)(params, batch)
    expected = jax.value_and_grad(with_aux, (0, 1), True)(params, batch)
    assert_allclose(ours, expected, rtol=0, atol=0)
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    with pytest.raises(TypeError, match="scalar-output"):
        minialpa.grad(lambda x: x)(jnp.ones(3))


def test_a_parallelized_function_inside_a_transformation_says_so() -> None:
    parallel = minialpa.parallelize(loss_of)
    with pytest.raises(MinialpaError, match=r"cannot be called inside `jax\.jit`"):
        jax.jit(parallel)(make_params(), make_batch())


def test_the_last_answer_lists_all_layers_of_one_stage() -> None:
    """And a script may give it back, as stages that it chose."""
    method = PipeshardParallel(layer_option=minialpa.AutoLayerOption(layer_num=3), stage_option="auto")
    cluster = minialpa.ClusterSpec.preset("a100-80gb", num_hosts=1, devices_per_host=1)
    args = plans.make_args()
    minialpa.plan(train_step, args, cluster=cluster, method=method)
    _, layers, submeshes, shapes, options = minialpa.get_last_dp_result()
    assert layers == ((0, 1, 2),)
    given = minialpa.ManualStageOption(layers, submeshes, shapes, options)
    again = minialpa.plan(train_step, args, cluster=cluster, method=dataclasses.replace(method, stage_option=given))
    assert minialpa.get_last_dp_result().forward_stage_layer_ids == layers
    assert len(again.stages) == 1


# ---- plans that are made once ---------------------------------------------------------------------------------------


def count_plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The clusters of the plans that are made from here on."""
    from minialpa.inter import pipeline

    made, plan_step = [], pipeline.plan_step

    def counted(traced: Any, cluster: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(cluster)
        return plan_step(traced, cluster, *args, **kwargs)

    monkeypatch.setattr(pipeline, "plan_step", counted)
    return made


def test_a_session_like_an_earlier_one_plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_plans(monkeypatch)
    parallel = minialpa.parallelize(train_step, method=ShardParallel())
    plans_of = []
    for n_devices in (8, 4, 8):
        minialpa.shutdown()
        minialpa.init(devices_per_host=n_devices)
        new, _ = parallel(make_params(), make_batch())
        assert len(new["w"].sharding.device_set) == n_devices
        plans_of.append(parallel.get_last_executable().get_parallel_plan())
    assert [cluster.n_devices for cluster in made] == [8, 4]
    assert plans_of[0] is plans_of[2]


def test_use_plan_takes_the_place_of_planning_where_the_plan_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    args = make_params(), make_batch()
    minialpa.init(devices_per_host=8)
    in_micro_batches = ShardParallel(num_micro_batches=2)
    plan = minialpa.parallelize(train_step, method=in_micro_batches, donate_argnums=()).plan(*args)

    made = count_plans(monkeypatch)
    parallel = minialpa.parallelize(train_step, method=ShardParallel(), donate_argnums=())
    parallel.use_plan(minialpa.Plan.from_json(plan.to_json()))
    assert_allclose(parallel(*args), train_step(*args))
    assert parallel.get_last_executable().get_parallel_plan() == plan and not made

    # Other shapes, and other devices, are planned by the method.
    other = make_params(), make_batch(2 * N_EXAMPLES)
    assert_allclose(parallel(*other), train_step(*other))
    minialpa.shutdown()
    minialpa.init(devices_per_host=4)
    assert_allclose(parallel(*args), train_step(*args))
    assert [cluster.n_devices for cluster in made] == [8, 4]


def test_use_plan_is_refused_where_it_would_be_ignored() -> None:
    source = minialpa.parallelize(train_step, method=ShardParallel())
    plan = source.plan(make_params(), make_batch())
    for method in (minialpa.FollowParallel(source), plan):
        with pytest.raises(minialpa.ShardingError, match="use_plan"):
            minialpa.parallelize(train_step, method=method).use_plan(plan)
