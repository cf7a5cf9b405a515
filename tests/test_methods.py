"""Compiled programs keep the guarantees of methods and options; errors name the option that cannot be kept."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import minialpa
from minialpa import (
    AutoLayerOption,
    AutoParallel,
    AutoShardingOption,
    AutoStageOption,
    ClusterSpec,
    DataParallel,
    InfeasibleError,
    LogicalMesh,
    ManualStageOption,
    MinialpaError,
    PipeshardParallel,
    Plan,
    ShardingError,
    ShardParallel,
    UniformStageOption,
    Zero2Parallel,
    Zero3Parallel,
    hlo,
    models,
)
from minialpa.methods import Method
from minialpa.testing import assert_allclose
from tests.methods_doc import HIDDEN, OPTIMIZERS, executable_of, held, traffic, training

PARAMETER_BYTES = 2 * 4 * (HIDDEN * HIDDEN + HIDDEN)
LOSS_BYTES = 4
#: Rows and columns of both matrices. If these are in parts, Adafactor sums them over devices and gathers them.
FACTORED_BYTES = {"Adafactor": 2 * 4 * HIDDEN}
#: An invalid value for all options.
WRONG: Any = "wrong"
CLUSTER = ClusterSpec.preset("cpu", devices_per_host=4)


def sharded(shape: tuple[int, ...], n_micro_batches: int = 1, **fields: Any) -> ShardParallel:
    return ShardParallel(LogicalMesh(shape), n_micro_batches, AutoShardingOption(**fields))


def run(method: Method) -> Any:
    """Run one step, compare it with the serial one, and return the executable."""
    step, state, batch = training(OPTIMIZERS["Adam"])
    parallel = minialpa.parallelize(lambda state, batch: step(minialpa.value_and_grad, state, batch), method=method)
    expected = jax.jit(lambda state, batch: step(jax.value_and_grad, state, batch))(state, batch)
    assert_allclose(parallel(state, batch), expected, rtol=2e-4, atol=1e-6)
    return parallel.get_last_executable()


def plan_of(method: Method) -> Plan:
    step, state, batch = training(OPTIMIZERS["Adam"])
    parallel = minialpa.parallelize(lambda state, batch: step(minialpa.value_and_grad, state, batch), method=method)
    plan: Plan = parallel.plan(state, batch)
    return plan


def specs(plan: Plan, prefix: str) -> set[P]:
    """PartitionSpecs of the arguments whose paths begin with `prefix`."""
    return {spec.partition_specs[0] for spec in plan.input_specs if spec.path.startswith(prefix)}


def examples(plan: Plan) -> set[Any]:
    """The mesh axes that split the dimension of the examples."""
    return {(*spec, None)[0] for spec in specs(plan, "batch")}


# ---- what the names promise -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "shape", "n", "optimizer"),
    [
        *((Zero3Parallel, (4,), 1, optimizer) for optimizer in OPTIMIZERS),
        (Zero2Parallel, (2, 2), 2, "Adam"),
        (Zero2Parallel, (1, 4), 1, "Adafactor"),
    ],
)
def test_zero_reduces_gathers_and_updates_parts(
    method: type[ShardParallel], shape: tuple[int, ...], n: int, optimizer: str
) -> None:
    executable = executable_of(method(LogicalMesh(shape), n), OPTIMIZERS[optimizer])
    vectors = FACTORED_BYTES.get(optimizer, 0)
    n_gathers = n if method is Zero3Parallel else 1
    found = traffic(executable)
    # Adafactor sums norms, too: a few scalars for each parameter.
    assert LOSS_BYTES <= found.pop("all-reduce") <= LOSS_BYTES + (4 * 4 * 4 if vectors else 0)
    assert found == {
        "reduce-scatter": PARAMETER_BYTES + vectors,
        "all-gather": n_gathers * PARAMETER_BYTES + vectors,
    }
    _, state, _ = training(OPTIMIZERS[optimizer])
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state["opt"]) if leaf.size > 1)
    parameters, held_state = held(executable)
    assert parameters == PARAMETER_BYTES / (4 if method is Zero3Parallel else 1)
    assert held_state == state_bytes / 4


def test_data_parallel_all_reduces_gradients_and_nothing_else() -> None:
    executable = executable_of(DataParallel(LogicalMesh((2, 2))), OPTIMIZERS["Adam"])
    assert traffic(executable) == {"all-reduce": PARAMETER_BYTES + LOSS_BYTES}
    assert specs(executable.get_parallel_plan(), "state") == {P()}


def test_an_array_that_some_devices_divide_is_in_as_many_parts() -> None:
    """Six elements on 2 x 2 devices are in two parts."""

    def step(state: Any, batch: Any) -> Any:
        loss, grads = minialpa.value_and_grad(lambda p: ((batch @ p["w"]) ** 2).mean())({"w": state["w"]})
        momentum = 0.9 * state["m"] + grads["w"]
        return {"w": state["w"] - 0.1 * momentum, "m": momentum}, loss

    state = {name: np.ones((6, 3), np.float32) for name in "wm"}
    batch = np.ones((8, 6), np.float32)
    found = minialpa.parallelize(step, method=Zero2Parallel(LogicalMesh((2, 2)))).plan(state, batch)
    assert specs(found, "state['m']") <= {P("x"), P("y")}
    assert specs(found, "state['w']") == {P()}


def test_an_update_that_has_to_gather_its_state_is_reported() -> None:
    optimizer = optax.apply_if_finite(optax.adam(1e-3), 5)
    with pytest.warns(UserWarning, match=r"`cond` at .*\.py.* gathers optimizer state .*`state\['opt'\]\.inner_state"):
        executable_of(Zero2Parallel(LogicalMesh((4,))), optimizer)


# ---- options of sharding --------------------------------------------------------------------------------------------


def test_stage_3_alone_is_zero_3() -> None:
    shape = (2, 2)
    alone = executable_of(sharded(shape, force_zero_stage_3=True), OPTIMIZERS["Adam"])
    named = executable_of(Zero3Parallel(LogicalMesh(shape)), OPTIMIZERS["Adam"])
    assert traffic(alone) == traffic(named)
    assert alone.get_parallel_plan().inputs == named.get_parallel_plan().inputs


@pytest.mark.parametrize(
    ("shape", "axis", "wanted"),
    [((4,), 0, "x"), ((2, 2), 1, "y"), ((1, 4), 0, None)],
)
def test_one_axis_splits_the_examples_and_no_other(shape: tuple[int, ...], axis: int, wanted: str | None) -> None:
    plan = plan_of(sharded(shape, force_batch_dim_to_mesh_dim=axis))
    assert examples(plan) == {wanted}
    forward = [op for op in plan.stages[0].operators if op.part == "forward"]
    assert forward
    assert {op.result.dims[0] for op in forward} == {() if wanted is None else (axis,)}


def test_examples_and_operators_of_a_scan_are_split_over_their_own_axes(key: jax.Array) -> None:
    sizes = {"n_layers": 2, "hidden": 64, "ffn": 256, "batch_size": 8, "seq_len": 8}
    case = models.build("llama", scan_layers=True, **sizes)
    method = ShardParallel(LogicalMesh((2, 2), (1, 1), (1, 0.1)), 1, AutoShardingOption(force_batch_dim_to_mesh_dim=0))
    parallel = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=method)
    plan = parallel.plan(jax.eval_shape(case.init, key), case.make_batch(0, 8))
    assert examples(plan) == {"x"}
    assert any("y" in spec for spec in specs(plan, "state.params['blocks']"))


@pytest.mark.slow  # the next test plans a scan with one axis for its layers' operators, too
def test_zero3_gathers_one_scanned_layer_at_a_time_where_memory_is_short(key: jax.Array) -> None:
    n_layers, hidden, ffn = 6, 64, 256
    sizes = {"n_layers": n_layers, "hidden": hidden, "ffn": ffn, "batch_size": 8, "seq_len": 8, "learning_rate": 1e-4}
    case = models.build("llama", scan_layers=True, remat_blocks=True, **sizes)
    args = case.init(key), case.make_batch(0, 8)
    expected = jax.jit(case.train_step(jax.value_and_grad))(*args)

    def executable(memory_limit_bytes: float | None = None) -> Any:
        method = sharded((4,), force_zero_stage_3=True, memory_limit_bytes=memory_limit_bytes)
        parallel = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=method)
        assert_allclose(parallel(case.init(key), args[1]), expected, rtol=1e-3, atol=1e-4)
        return parallel.get_last_executable()

    (peak_bytes,) = executable().get_parallel_plan().cost.peak_bytes
    found = [c for text in executable(0.5 * peak_bytes).get_hlo_text() for c in hlo.collectives(text)]
    gathers = [(c.times, c.n_bytes) for c in found if c.kind == "all-gather"]
    largest_bytes = 4 * hidden * ffn
    assert (n_layers, largest_bytes) in gathers
    assert max(n_bytes for _, n_bytes in gathers) < n_layers * largest_bytes


@pytest.mark.parametrize(
    ("shape", "name", "kind"),
    [((2, 2), "allow_all_gather", "all-gather"), ((4,), "allow_all_to_all", "all-to-all")],
)
def test_a_collective_that_is_not_allowed_is_not_used(shape: tuple[int, ...], name: str, kind: str) -> None:
    executable = executable_of(sharded(shape, allow_replicated_parameters=False, **{name: False}), OPTIMIZERS["Adam"])
    assert kind not in traffic(executable)
    assert P() not in specs(executable.get_parallel_plan(), "state['params']")


def test_reductions_that_need_a_gather_are_not_split_where_it_is_not_allowed() -> None:
    """No collective multiplies, so a product over devices gathers its factors."""

    def product(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.prod(jnp.tanh(x @ weights), axis=0)

    fixed = {"x": P("x"), "weights": P()}
    kinds = []
    for allowed in (True, False):
        method = sharded((4,), allow_all_gather=allowed, force_batch_dim_to_mesh_dim=None, fixed_specs=fixed)
        arguments = np.ones((16, 16), np.float32), np.ones((64, 16), np.float32)
        executable = minialpa.parallelize(product, method=method, batch_argnums=(1,)).get_executable(*arguments)
        kinds.append(set(traffic(executable)))
    assert "all-gather" in kinds[0]
    assert "all-gather" not in kinds[1]


def test_nothing_is_split_without_auto_sharding_but_what_is_fixed() -> None:
    option = {"enable_auto_sharding": False, "fixed_specs": {"state['params']*['kernel']": P("x")}}
    executable = run(sharded((4,), **option))
    plan = executable.get_parallel_plan()
    assert specs(plan, "state['params'][0]['kernel']") == {P("x")}
    assert specs(plan, "batch") == specs(plan, "state['opt']") == {P()}
    assert set(traffic(executable)) == {"all-gather"}


@pytest.mark.parametrize(
    ("space", "wanted"), [("data_parallel_only", {"x"}), ("model_parallel_only", {None})], ids=["data", "model"]
)
def test_a_search_keeps_to_its_space(space: Any, wanted: set[Any]) -> None:
    stages = AutoStageOption(submesh_logical_shape_space=space)
    method = PipeshardParallel(CLUSTER, 1, layer_option=AutoLayerOption(2), stage_option=stages)
    plan = plan_of(method)
    assert examples(plan) == wanted
    assert all(stage.logical_shape[space == "data_parallel_only"] == 1 for stage in plan.stages)
    products = [op for stage in plan.stages for op in stage.operators if op.part == "forward"]
    assert {bool(op.result.dims[0]) for op in products} == {space == "data_parallel_only"}


def test_a_search_keeps_to_the_submeshes_that_it_is_given() -> None:
    stages = AutoStageOption([(1, 2)], planned_steps=math.inf)
    plan = plan_of(AutoParallel(CLUSTER, stage_option=stages))
    assert {stage.submesh for stage in plan.stages} == {(1, 2)}


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("effort", ["fast", "proof"])
def test_planning_effort_is_for_the_shardings_of_all_stages(effort: Any) -> None:
    own = AutoShardingOption(allow_all_to_all=False)
    stages = UniformStageOption(2, submesh_autosharding_option=own)
    method = PipeshardParallel(CLUSTER, 2, layer_option=AutoLayerOption(2), stage_option=stages)
    step, state, batch = training(OPTIMIZERS["Adam"])
    fun = minialpa.parallelize(
        lambda state, batch: step(minialpa.value_and_grad, state, batch), method=method, planning_effort=effort
    )
    plan = fun.plan(state, batch)
    assert [stage.option for stage in plan.stages] == [dataclasses.replace(own, planning_effort=effort)] * 2
    assert all(stage.gap == 0 and stage.optimal for stage in plan.stages) or effort == "fast"
    with pytest.raises(ShardingError, match=r"`planning_effort` must be .*got 'slow'"):
        minialpa.parallelize(step, planning_effort="slow")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AutoStageOption(submesh_logical_shape_space=WRONG), "`submesh_logical_shape_space` must be .*'wrong'"),
        (lambda: AutoStageOption([4]), r"`submesh_physical_shape_space` must be .*; got \[4\]"),
        (lambda: AutoStageOption(planned_steps=math.nan), "`planned_steps` must be a number >= 0 or None; got nan"),
        (lambda: AutoShardingOption(fixed_specs={"x": ("x",)}), "`fixed_specs` must be a mapping from strings"),
        (lambda: AutoShardingOption(force_batch_dim_to_mesh_dim=3), "`force_batch_dim_to_mesh_dim` must be 0, 1, 2"),
        (lambda: AutoShardingOption(memory_limit_bytes=0), "`memory_limit_bytes` must be a number > 0 or None; got 0"),
        (lambda: AutoShardingOption(enable_auto_sharding=False, prefer_reduce_scatter=True), "`prefer_reduce_scatter`"),
        (
            lambda: AutoShardingOption(force_data_parallel=True, allow_replicated_parameters=False),
            "replicates parameters, which contradicts `allow_replicated_parameters=False`. Remove one",
        ),
        (lambda: AutoLayerOption(remat="half"), "`remat` must be 'none', .*'offload', .*'auto', True, or False; got"),
        (lambda: ManualStageOption([0, 1], [(1, 4)], [(4,)]), "`forward_stage_layer_ids` must be a tuple of tuples"),
        (
            lambda: ManualStageOption([[0], [1]], [(1, 4)], [(4,)], [{}]),
            "has 2 stages in `forward_stage_layer_ids`, but 1 in `submesh_physical_shapes`, 1 in .* and 1 in",
        ),
        (
            lambda: ManualStageOption([[0]], [(1, 4)], [(4,)], [{"force_data": True}]),
            r"has `force_data`, which is no field of `AutoShardingOption`\. Do you mean `force_data_parallel`\?",
        ),
        (lambda: ManualStageOption([[0]], [(1, 4)], [(4,)], [{"attention": "f"}]), "`attention` must be 'auto', "),
        (
            lambda: ShardParallel(auto_sharding_option={"force_data_parallel": True}),
            r"must be an AutoShardingOption or None; .* Write `AutoShardingOption\(force_data_parallel=True\)`\.",
        ),
        (lambda: ShardParallel(num_micro_batches=2**26), "`num_micro_batches` must be an integer from 1 to 1,048,576"),
        (lambda: ShardParallel(submesh=4), "`submesh` must be a pair of integers >= 1 or None; got 4"),
        (lambda: PipeshardParallel(layer_option="guess"), "`layer_option` must be 'manual', .*'guess'"),
        (lambda: PipeshardParallel(pipeline_schedule="2f2b"), "`pipeline_schedule` must be '1f1b', .*got '2f2b'"),
        (lambda: AutoParallel(stage_option="auto"), "`stage_option` must be an AutoStageOption; got 'auto'"),
    ],
)  # fmt: skip
def test_values_that_options_and_methods_cannot_have(make: Any, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        make()


def test_a_method_refuses_options_that_are_not_what_it_stands_for() -> None:
    option = AutoShardingOption(prefer_reduce_scatter=True)
    with pytest.raises(ShardingError, match=r"`DataParallel` sets `prefer_reduce_scatter=False`, but .*=True`. Remove"):
        DataParallel(None, 1, option).options()
    assert Zero3Parallel(None, 1, option).options().sharding == AutoShardingOption(
        force_data_parallel=True, prefer_reduce_scatter=True, force_zero_stage_3=True
    )


def refused(method: Method, error: type[MinialpaError] = InfeasibleError, batch_size: int = 16) -> str:
    """The message with which planning refuses a method."""
    step, state, batch = training(OPTIMIZERS["Adam"])
    batch = {name: x[:batch_size] for name, x in batch.items()}
    parallel = minialpa.parallelize(lambda state, batch: step(minialpa.value_and_grad, state, batch), method=method)
    with pytest.raises(error) as caught:
        parallel.plan(state, batch)
    return str(caught.value)


@pytest.mark.parametrize(
    ("method", "batch_size", "parts"),
    [
        (DataParallel(LogicalMesh((4,)), 2), 12, ["Data parallelism splits", "4 devices", "has 6", "micro-batch"]),
        (
            sharded((4, 2), force_batch_dim_to_mesh_dim=0),
            6,
            ["`force_batch_dim_to_mesh_dim=0`", "4 devices", "`batch['x']`", "has 6"],
        ),
    ],
)
def test_examples_that_cannot_be_split_as_asked(method: Method, batch_size: int, parts: list[str]) -> None:
    message = refused(method, batch_size=batch_size)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "method",
    [
        sharded((2, 2), allow_all_gather=False, prefer_reduce_scatter=True),
        Zero2Parallel(LogicalMesh((4,)), 2, AutoShardingOption(allow_all_gather=False)),
        PipeshardParallel(
            CLUSTER, 1, layer_option=AutoLayerOption(2), stage_option=AutoStageOption(planned_steps=math.inf),
            default_auto_sharding_option=AutoShardingOption(allow_all_gather=False, force_zero_stage_3=True),
        ),
    ],
    ids=["two axes", "zero 2", "search"],
)  # fmt: skip
def test_an_infeasible_option_is_named_with_the_operation(method: Method) -> None:
    message = refused(method)
    # Weights of 32 features, or activations of 16 examples if the weights stay split.
    assert re.search(r"`allow_all_gather=False` cannot be kept, because float32\[(32|16, 32)", message), message
    assert ".py:" in message
    names = {ShardParallel: "prefer_reduce_scatter", Zero2Parallel: "Zero2Parallel"}
    assert f"`{names.get(type(method), 'force_zero_stage_3')}`" in message  # type: ignore[arg-type]


def test_a_method_that_is_to_change_says_how() -> None:
    method = Zero3Parallel()
    with pytest.raises(AttributeError, match=r"`dataclasses\.replace\(method, num_micro_batches=\.\.\.\)`"):
        method.num_micro_batches = 2  # type: ignore[misc]


def test_what_nothing_answers_to_is_refused() -> None:
    assert "`fixed_specs` has the key `nothing`" in refused(sharded((4,), fixed_specs={"nothing": P()}), ShardingError)
    both = dataclasses.replace(sharded((4,)), logical_shape=(2, 2))
    assert "`logical_shape` is (2, 2)" in refused(both, ShardingError)
    no_such_submesh = PipeshardParallel(CLUSTER, 1, stage_option=AutoStageOption([(1, 1), (1, 5)]))
    assert "has (1, 5), but the cluster has 1 hosts of 4 devices" in refused(no_such_submesh, ShardingError)
    pipeline = PipeshardParallel(LogicalMesh((4,)), 1, layer_option=AutoLayerOption(2))
    assert "`devices` is a LogicalMesh of (4,)" in refused(pipeline, ShardingError)
