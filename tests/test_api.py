"""`parallelize` and its functions: arguments of every kind, donation, caching, planning, executables."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import minialpa
from minialpa import MinialpaError, ShardParallel
from minialpa.methods import DataParallel, PipeshardParallel
from minialpa.testing import assert_allclose
from tests import plans

WIDTH, N_EXAMPLES = 8, 16
Params = dict[str, jax.Array]


@pytest.fixture(autouse=True)
def _fresh_session() -> Iterator[None]:
    minialpa.shutdown()
    yield
    minialpa.shutdown()


def make_params(seed: int = 0) -> Params:
    keys = jax.random.split(jax.random.key(seed), 2)
    return {name: jax.random.normal(k, (WIDTH, WIDTH)) * 0.3 for name, k in zip(("w", "v"), keys, strict=True)}


def make_batch(n: int = N_EXAMPLES, seed: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((n, WIDTH), np.float32) for name in ("x", "y")}


def loss_fn(params: Params, batch: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2)


def descend(params: Any, grads: Any, rate: Any = 0.1) -> Any:
    return jax.tree.map(lambda p, g: p - jnp.asarray(rate, p.dtype) * g, params, grads)


def train_step(params: Params, batch: Any) -> tuple[Params, jax.Array]:
    value, grads = minialpa.value_and_grad(loss_fn)(params, batch)
    return descend(params, grads), value


def grad_step(params: Params, batch: Any) -> Params:
    grads: Params = minialpa.grad(loss_fn)(params, batch)
    return grads


def assert_same(step: Callable[..., Any], *args: Any, method: Any = None, **kwargs: Any) -> Any:
    """The parallelized step gives what the step gives; returns the ParallelizedFunc."""
    expected = step(*args, **kwargs)
    parallel = minialpa.parallelize(step, method=method)
    assert_allclose(parallel(*args, **kwargs), expected, rtol=1e-4, atol=1e-5)
    return parallel


# ---- arguments ------------------------------------------------------------------------------------------------------


@functools.partial(jax.tree_util.register_dataclass, data_fields=["params", "count"], meta_fields=["name"])
@dataclasses.dataclass
class Model:
    params: Params
    count: jax.Array
    name: str


class Pair(NamedTuple):
    x: Any
    y: Any


def test_any_pytree_goes_in_and_comes_out() -> None:
    def step(model: Model, batch: Pair, extras: tuple[Any, list[Any]]) -> tuple[Model, Pair, list[Any]]:
        value, grads = minialpa.value_and_grad(loss_fn)(model.params, {"x": batch.x, "y": batch.y})
        new = Model(descend(model.params, grads), model.count + 1, model.name)
        return new, Pair(value, extras[0] * value), [extras[1][0], None]

    model = Model(make_params(), jnp.zeros((), jnp.int32), "a")
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
        grads = minialpa.grad(loss_fn)(params, batch)
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
    with pytest.raises(TypeError, match="unexpected keyword"):
        parallel(params, batch, speed=1)


@pytest.mark.parametrize("batch_argnums", [0, -2])
def test_batch_argnums_take_numbers_from_both_ends(batch_argnums: Any) -> None:
    def step(batch: Any, params: Params) -> Any:
        return train_step(params, batch)

    method = ShardParallel(num_micro_batches=2, devices=jax.local_devices()[:1])
    parallel = minialpa.parallelize(step, method=method, batch_argnums=batch_argnums)
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


def test_the_decorator_works_with_and_without_arguments() -> None:
    @minialpa.parallelize
    def plain(params: Params, batch: Any) -> Any:
        """Evaluates the loss."""
        return loss_fn(params, batch)

    @minialpa.parallelize(method=DataParallel())
    def with_method(params: Params, batch: Any) -> Any:
        return loss_fn(params, batch)

    params, batch = make_params(), make_batch()
    assert_allclose(plain(params, batch), loss_fn(params, batch))
    assert_allclose(with_method(params, batch), loss_fn(params, batch))
    assert plain.__name__ == "plain" and plain.__doc__ == "Evaluates the loss."


def test_a_step_counter_compiles_once_whether_number_or_array() -> None:
    def step(state: dict[str, Any], batch: Any) -> Any:
        grads = minialpa.grad(loss_fn)(state["params"], batch)
        return {"params": descend(state["params"], grads), "step": state["step"] + 1}

    parallel = minialpa.parallelize(step)
    state: Any = {"params": make_params(), "step": 0}
    for _ in range(3):
        state = parallel(state, make_batch())
    assert int(state["step"]) == 3 and len(parallel._executables) == 1
    for step_count in (np.int32(7), jnp.int32(8)):  # not weakly typed
        parallel({"params": make_params(), "step": step_count}, make_batch())
        assert len(parallel._executables) == 2


def test_a_weak_number_and_an_array_keep_their_own_results() -> None:
    def scale(x: jax.Array, batch: Any, rate: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return x * rate

    x, batch = jnp.ones((8,), jnp.int8), make_batch()
    parallel = minialpa.parallelize(scale)
    for number in (jnp.float32, jnp.int32):
        value = number(2)
        for rate in (value.item(), jnp.asarray(value.item()), value, np.asarray(value)):
            assert parallel(x, batch, rate).dtype == scale(x, batch, rate).dtype, repr(rate)
    assert len(parallel._executables) == 4


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


def test_a_constant_in_the_new_state_can_be_donated() -> None:
    def step(state: dict[str, Any], batch: Any) -> Any:
        grads = minialpa.grad(loss_fn)(state["params"], batch)
        rate = 0.1 * (1 + state["warm"].astype(jnp.float32))
        params = descend(state["params"], grads, rate)
        return {"params": params, "warm": jnp.int32(0), "total": state["total"] + state["warm"]}

    def start() -> Any:
        return {"params": make_params(), "warm": jnp.int32(1), "total": jnp.int32(0)}

    parallel = minialpa.parallelize(step)
    state, expected = start(), start()
    for _ in range(3):
        state, expected = parallel(state, make_batch()), step(expected, make_batch())
    assert_allclose(state, expected)


# ---- donation -------------------------------------------------------------------------------------------------------


def is_deleted(tree: Any) -> bool:
    flags = {leaf.is_deleted() for leaf in jax.tree.leaves(tree)}
    assert len(flags) == 1, flags
    return flags.pop()


def test_a_replaced_state_is_donated() -> None:
    parallel = minialpa.parallelize(train_step, method=ShardParallel(num_micro_batches=2))
    first, _ = parallel(make_params(), make_batch())
    second, _ = parallel(first, make_batch())
    assert is_deleted(first) and not is_deleted(second)


def regular_loss(params: Params, batch: Any) -> jax.Array:
    """A loss whose gradients depend on the parameters element by element, too."""
    return loss_fn(params, batch) + 0.1 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))


def sum_in_scan(params: Params, batch: Any) -> Params:
    parts = jax.tree.map(lambda x: x.reshape(2, -1, WIDTH), batch)
    add = lambda total, part: (jax.tree.map(jnp.add, total, jax.grad(regular_loss)(params, part)), None)  # noqa: E731
    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)[0]


def of_norm_one(params: Params, batch: Any) -> Params:
    grads = jax.grad(regular_loss)(params, batch)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g / norm, grads)


@pytest.mark.parametrize("gradients", [jax.grad(regular_loss), sum_in_scan, of_norm_one])
def test_states_are_donated_and_gradients_are_not_where_gradients_are_those_of_jax(gradients: Any) -> None:
    step = minialpa.parallelize(
        lambda params, batch: (descend(params, gradients(params, batch)), 0.0), method=ShardParallel()
    )
    first, _ = step(make_params(), make_batch())
    second, _ = step(first, make_batch())
    assert is_deleted(first) and not is_deleted(second)
    minialpa.parallelize(gradients, method=ShardParallel(), batch_argnums=(1,))(second, make_batch())
    assert not is_deleted(second)


def test_gradients_do_not_donate_parameters() -> None:
    params = jax.tree.map(jnp.asarray, make_params())
    parallel = minialpa.parallelize(grad_step)
    placed, batch = parallel.preshard_dynamic_args(params, make_batch())
    parallel(placed, batch)
    assert not is_deleted(params) and not is_deleted(placed) and not is_deleted(batch)


def test_evaluation_donates_nothing() -> None:
    parallel = minialpa.parallelize(lambda params, batch: (params, loss_fn(params, batch)))
    params, _ = parallel(make_params(), make_batch())
    parallel(params, make_batch())
    assert not is_deleted(params)


def test_donation_is_what_the_caller_says() -> None:
    keep = minialpa.parallelize(train_step, donate_argnums=())
    params, _ = keep(make_params(), make_batch())
    keep(params, make_batch())
    assert not is_deleted(params)
    for donate in (0, (0,)):
        give = minialpa.parallelize(grad_step, donate_argnums=donate)
        placed, batch = give.preshard_dynamic_args(make_params(), make_batch())
        give(placed, batch)
        assert is_deleted(placed)


def test_an_array_may_be_passed_twice() -> None:
    shared = make_params()["w"]
    params = {"w": shared, "v": shared}
    parallel = minialpa.parallelize(train_step)
    expected = train_step(params, make_batch())
    assert_allclose(parallel(params, make_batch()), expected)
    placed = parallel.preshard_dynamic_args(params, make_batch())[0]
    tied = {"w": placed["w"], "v": placed["w"]}
    assert_allclose(parallel(tied, make_batch()), expected)
    both = minialpa.parallelize(lambda a, batch, b: (a @ b, jnp.mean(batch["x"])))
    assert_allclose(both(shared, make_batch(), shared)[0], shared @ shared)


# ---- shapes and caching ---------------------------------------------------------------------------------------------


def test_threads_may_share_a_function() -> None:
    parallel = minialpa.parallelize(grad_step)
    params, sizes = make_params(), (8, 16) * 8
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: parallel(params, make_batch(n)), sizes))
    for n, grads in zip(sizes, found, strict=True):
        assert_allclose(grads, grad_step(params, make_batch(n)))


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


@pytest.mark.parametrize("kind", ["with shardings", "arrays in part"])
def test_every_way_to_write_a_shape_finds_the_program_of_the_arrays(kind: str) -> None:
    args = make_params(), jax.tree.map(jnp.asarray, make_batch())
    mesh = jax.make_mesh((8,), ("x",))  # a mesh whose types contain shardings
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("x"))
    shapes: Any = {
        "with shardings": lambda: jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
        ),
        "arrays in part": lambda: (args[0], jax.tree.map(jax.typeof, args[1])),
    }[kind]()
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

        def loss(p: Params) -> jax.Array:
            x = jnp.tanh(batch["x"] @ p["w"])
            minialpa.mark_pipeline_boundary()
            return jnp.mean((x @ p["v"] - batch["y"]) ** 2)

        value, grads = minialpa.value_and_grad(loss)(params)
        return descend(params, grads), {"loss": value}

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


def test_allocation_sizes_are_bytes_of_the_largest_program(pipeline: Any) -> None:
    executable = pipeline.get_last_executable()
    sizes = executable.get_stage_allocation_size()
    assert len(sizes) == 2 and min(sizes) > WIDTH * WIDTH * 4 / 4
    assert executable.get_total_allocation_size() == max(sizes)


def test_debug_info_is_complete(pipeline: Any, tmp_path: Any) -> None:
    executable = pipeline.get_last_executable()
    executable.dump_debug_info(str(tmp_path / "deep" / "info"))
    root = tmp_path / "deep" / "info"
    assert minialpa.Plan.load(root / "plan.json") == executable.get_parallel_plan()
    assert "Stage 1" in (root / "summary.txt").read_text()
    assert "params['w']" in (root / "placements.txt").read_text()
    instructions = (root / "instructions.txt").read_text()
    assert "forward0 Run" in instructions and "accumulate1 Accumulate" in instructions
    assert len(list(root.glob("*.hlo.txt"))) == len(executable.function_names)
    assert json.loads((root / "plan.json").read_text())["version"] == 6


# ---- gradients ------------------------------------------------------------------------------------------------------


def summed(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.sum(x, 0), tree)


@pytest.mark.parametrize(
    "step",
    [
        lambda p, b: jax.jit(lambda p: minialpa.grad(loss_fn)(p, b))(p),
        lambda p, b: minialpa.grad(lambda p: jnp.sum(minialpa.grad(loss_fn)(p, b)["w"] ** 2))(p),
        lambda p, b: summed(
            jax.vmap(lambda x, y: minialpa.grad(loss_fn)(p, {"x": x[None], "y": y[None]}))(b["x"], b["y"])
        ),
        lambda p, b: jax.lax.scan(
            lambda p, row: (descend(p, minialpa.grad(loss_fn)(p, {"x": row[0][None], "y": row[1][None]})), None),
            p,
            (b["x"], b["y"]),
        )[0],
    ],
    ids=["under jit", "of a gradient", "under vmap", "in a loop"],
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
    for n in (1, 2):
        parallel = minialpa.parallelize(step, method=ShardParallel(num_micro_batches=n))
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
    with_aux = lambda p, b: (loss_fn(p, b), b["x"])  # noqa: E731
    assert_allclose(minialpa.grad(loss_fn)(params, batch), jax.grad(loss_fn)(params, batch), rtol=0, atol=0)
    ours = minialpa.value_and_grad(with_aux, (0, 1), True)(params, batch)
    assert_allclose(ours, jax.value_and_grad(with_aux, (0, 1), True)(params, batch), rtol=0, atol=0)
    assert jax.tree.structure(ours) == jax.tree.structure(jax.value_and_grad(with_aux, (0, 1), True)(params, batch))
    jitted = jax.jit(minialpa.grad(loss_fn))(params, batch)
    assert_allclose(jitted, jax.grad(loss_fn)(params, batch))
    with pytest.raises(TypeError, match="scalar-output"):
        minialpa.grad(lambda x: x)(jnp.ones(3))


def test_a_parallelized_function_inside_a_transformation_says_so() -> None:
    parallel = minialpa.parallelize(loss_fn)
    with pytest.raises(MinialpaError, match=r"cannot be called inside `jax\.jit`"):
        jax.jit(parallel)(make_params(), make_batch())


@pytest.mark.parametrize(
    ("method", "n_layers"),
    [
        (PipeshardParallel(layer_option="manual", stage_option=minialpa.UniformStageOption(num_stages=1)), 2),
        (PipeshardParallel(layer_option=minialpa.AutoLayerOption(layer_num=3), stage_option="auto"), 3),
    ],
)
def test_the_last_answer_lists_all_layers_of_one_stage(method: Any, n_layers: int) -> None:
    """And a script may give it back, as stages that it chose."""
    cluster = minialpa.ClusterSpec.preset("a100-80gb", num_hosts=1, devices_per_host=1)
    args = plans.make_args()
    minialpa.plan(plans.train_step, args, cluster=cluster, method=method)
    _, layers, submeshes, shapes, options = minialpa.get_last_dp_result()
    assert layers == (tuple(range(n_layers)),)
    given = minialpa.ManualStageOption(layers, submeshes, shapes, options)
    again = minialpa.plan(
        plans.train_step, args, cluster=cluster, method=dataclasses.replace(method, stage_option=given)
    )
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
    for n_devices in (8, 4, 8, 4):
        minialpa.shutdown()
        minialpa.init(devices_per_host=n_devices)
        new, _ = parallel(make_params(), make_batch())
        assert len(new["w"].sharding.device_set) == n_devices
        plans_of.append(parallel.get_last_executable().get_parallel_plan())
    assert [cluster.n_devices for cluster in made] == [8, 4]
    assert plans_of[0] is plans_of[2] and plans_of[1] is plans_of[3]


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


@pytest.mark.parametrize("follows", [False, True])
def test_use_plan_is_refused_where_it_would_be_ignored(follows: bool) -> None:
    args = make_params(), make_batch()
    source = minialpa.parallelize(train_step, method=ShardParallel())
    plan = source.plan(*args)
    method = minialpa.FollowParallel(source) if follows else plan
    with pytest.raises(minialpa.ShardingError, match="use_plan"):
        minialpa.parallelize(train_step, method=method).use_plan(plan)
