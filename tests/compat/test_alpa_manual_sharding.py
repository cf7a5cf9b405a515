"""Scripts with Alpa's `ManualShardingOption`: shardings follow the script, and numbers are equal to `jax.jit`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import minialpa
import minialpa.compat.alpa as alpa
from minialpa.compat.alpa import AutoShardingOption, PipeshardParallel, ShardParallel, Zero2Parallel

AXES = ("data", "model")
MANUAL = AutoShardingOption(enable_auto_sharding=False)


def shard_method(option: alpa.ManualShardingOption, **others: Any) -> ShardParallel:
    """On four devices as a (2, 2) mesh."""
    mesh = alpa.LocalPhysicalDeviceMesh(jax.local_devices()[:4]).get_logical_mesh((2, 2), (1, 1), (1, 1))
    return ShardParallel(mesh, auto_sharding_option=MANUAL, manual_sharding_option=option, **others)


def specs_of(placements: Any) -> list[P]:
    """The PartitionSpecs of leaves that are on one mesh each."""
    return [spec for placement in jax.tree.leaves(placements) for spec in placement.sharding_specs]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((P(("data", "model")), P("data", "model")), [P(("x", "y")), P("x", "y")]),
        ([None, P(None, "model")], [P(), P(None, "y")]),
        (P("data"), [P("x"), P("x")]),
    ],
)
def test_arguments_and_results_are_sharded_as_the_script_has_it(given: Any, expected: list[P]) -> None:
    a = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    results = {"a": (P("data", None), None), "b": P(None, "model")}
    method = shard_method(alpa.ManualShardingOption(AXES, None, given, results))
    step = alpa.parallelize(lambda a, b: {"a": (a * 2, a + 1), "b": [a - b]}, method=method)
    executable = step.get_executable(a, a)
    assert specs_of(executable.get_input_placement_specs()) == expected
    assert specs_of(executable.get_output_placement_specs()) == [P("x"), P(), P(None, "y")]
    np.testing.assert_array_equal(np.stack(jax.tree.leaves(executable(a, a))), np.stack([a * 2, a + 1, a - a]))


def two_layers(grad: Any, constrained: bool) -> Any:
    """A step on weights and a batch, with the hidden values constrained by a bare PartitionSpec or not."""

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            hidden = jnp.tanh(batch["x"] @ params["in"])
            if constrained:
                hidden = jax.lax.with_sharding_constraint(hidden, P("data", "model"))
            alpa.mark_pipeline_boundary()
            return jnp.mean((hidden @ params["out"]) ** 2)

        return jax.tree.map(lambda p, g: p - g, params, grad(loss)(params))

    return step


def weights_and_batch() -> tuple[Any, Any]:
    key_in, key_out, key_x = jax.random.split(jax.random.key(0), 3)
    params = {"in": jax.random.normal(key_in, (6, 8)), "out": jax.random.normal(key_out, (8, 10))}
    return params, {"x": jax.random.normal(key_x, (32, 6))}


def assert_like_one_device(actual: Any) -> None:
    expected = jax.jit(two_layers(jax.grad, constrained=False))(*weights_and_batch())
    alpa.testing.assert_allclose(actual, expected)


#: Tensor parallel weights and a batch in data parallel parts.
MEGATRON = ({"in": P(None, "model"), "out": P("model", None)}, P("data"))


def test_gradients_are_accumulated_under_shardings_by_hand() -> None:
    method = shard_method(alpa.ManualShardingOption(AXES, in_axis_resources=MEGATRON), num_micro_batches=2)
    step = alpa.parallelize(two_layers(alpa.grad, constrained=True), method=method)
    assert_like_one_device(step(*weights_and_batch()))
    executable = step.get_last_executable()
    assert specs_of(executable.get_input_placement_specs()) == [P(None, "y"), P("y"), P("x")]
    # New weights get the shardings of the arguments, although the script does not fix the results.
    assert specs_of(executable.get_output_placement_specs()) == [P(None, "y"), P("y")]
    # The saved plan knows the names of the axes, too.
    plan = minialpa.Plan.from_json(executable.get_parallel_plan().to_json())
    assert_like_one_device(minialpa.parallelize(two_layers(minialpa.grad, True), method=plan)(*weights_and_batch()))


def pipeline_method(option: alpa.ManualShardingOption, stages: Any) -> PipeshardParallel:
    return PipeshardParallel(
        num_micro_batches=2,
        layer_option="manual",
        stage_option=stages,
        manual_sharding_option=option,
        default_auto_sharding_option=AutoShardingOption(False),
    )


def test_each_stage_has_axes_of_its_own() -> None:
    alpa.init("local", num_nodes=1, num_devices_per_node=4)
    stages = alpa.ManualStageOption([[0], [1]], [(1, 2)] * 2, [(1, 2)] * 2, [{}] * 2)
    names = (("one", "model"), ("one", "data"))
    option = alpa.ManualShardingOption(None, names, ({"in": P(None, "model"), "out": None}, None))
    option.pipeline_intermediate_axes = (("data", 0),)
    step = alpa.parallelize(two_layers(alpa.grad, constrained=True), method=pipeline_method(option, stages))
    assert_like_one_device(step(*weights_and_batch()))

    executable = step.get_last_executable()
    assert specs_of(executable.get_input_placement_specs()) == [P(None, "y"), P(), P()]
    # The second stage receives its part of 16 examples.
    texts = dict(zip(executable.function_names, executable.get_hlo_text(), strict=True))
    (text,) = [text for name, text in texts.items() if name.startswith("forward1")]
    assert "f32[8,8]" in text[text.index("ENTRY") :].splitlines()[0]


def test_equal_stages_have_the_shape_of_hosts_and_devices() -> None:
    alpa.init("local")
    stages = alpa.UniformStageOption(2, submesh_physical_shape=[1, 4])
    method = pipeline_method(alpa.ManualShardingOption(AXES, in_axis_resources=MEGATRON), stages)
    plan = alpa.parallelize(two_layers(alpa.grad, constrained=True), method=method).plan(*weights_and_batch())
    assert [stage.logical_shape for stage in plan.stages] == [(1, 4)] * 2


def test_3d_methods_take_shardings_by_hand() -> None:
    alpa.init("local")
    option = alpa.ManualShardingOption(AXES, in_axis_resources=MEGATRON)
    method = alpa.get_3d_parallel_method(2, 4, 2, 1, manual_sharding_option=option)
    plan = alpa.parallelize(two_layers(alpa.grad, constrained=True), method=method).plan(*weights_and_batch())
    assert plan.stages[0].logical_shape == (4, 2)
    assert [spec.partition_specs for spec in plan.input_specs] == [(P(None, "y"),), (P("y"),), (P("x"),)]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (alpa.ManualShardingOption(), "needs names for the axes"),
        (
            alpa.ManualShardingOption(AXES, in_axis_resources=(P("dta"), None)),
            "has the mesh axes dta, but `axis_names` lists data, model. Use these names",
        ),
        (alpa.ManualShardingOption(AXES, out_axis_resources=[None, None]), "`out_axis_resources` is no pytree prefix"),
        (
            alpa.ManualShardingOption(AXES, in_axis_resources=("data", None)),
            "Pass PartitionSpecs and None as leaves of `in_axis_resources`; got 'data'",
        ),
        (alpa.ManualShardingOption(("data",)), r"`axis_names` is \('data',\), but the .* shape \(2, 2\). Give 2 names"),
        (alpa.ManualShardingOption(submesh_axis_names=(AXES, ("a", "b"))), "different names for 2 stages"),
    ],
)
def test_an_option_that_cannot_hold_says_why(option: alpa.ManualShardingOption, message: str) -> None:
    with pytest.raises(minialpa.MinialpaError, match=message):
        step = alpa.parallelize(two_layers(alpa.grad, constrained=False), method=shard_method(option))
        step.plan(*weights_and_batch())


def test_what_is_no_option_is_refused() -> None:
    for method in (ShardParallel(manual_sharding_option=1), Zero2Parallel(None, 1, None, alpa.ManualShardingOption())):
        with pytest.raises(
            minialpa.ShardingError,
            match="Pass a `ManualShardingOption` as `manual_sharding_option` of `ShardParallel` or",
        ):
            method.read()
