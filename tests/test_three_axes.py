"""Logical meshes of three axes, where users ask for them: by a shape, by stages, by shardings of their programs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import minialpa
from minialpa import (
    AutoLayerOption,
    AutoParallel,
    AutoShardingOption,
    AutoStageOption,
    ClusterSpec,
    ManualStageOption,
    PipeshardParallel,
    ShardParallel,
    models,
)
from minialpa.inter.search.submeshes import candidates
from minialpa.methods import Method
from minialpa.testing import assert_allclose
from tests.modern import script

pytestmark = [pytest.mark.usefixtures("fresh_session"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

#: Examples over x, widths over y, hidden features over z.
ON_THREE = {"force_batch_dim_to_mesh_dim": 0, "fixed_specs": {"*['up']": P("y", "z"), "*['down']": P("z", "y")}}


def make_step(value_and_grad: Any) -> Any:
    def step(params: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            x = batch["x"]
            for layer in params:
                x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
            return jnp.mean((x - batch["y"]) ** 2)

        loss, grads = value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def arguments(width: int = 16, n_examples: int = 16) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    up, down = (width, 4 * width), (4 * width, width)
    params = [
        {"down": 0.2 * rng.standard_normal(down, np.float32), "up": 0.2 * rng.standard_normal(up, np.float32)}
        for _ in range(2)
    ]
    return params, {name: rng.standard_normal((n_examples, width), np.float32) for name in ("x", "y")}


def stages(*shapes: tuple[int, ...], option: dict[str, Any], n_micro_batches: int = 2) -> PipeshardParallel:
    """A stage on an equal part of eight devices for each shape."""
    n = 8 // len(shapes)
    layers = [[0], [1]] if len(shapes) == 2 else [[0, 1]]
    manual = ManualStageOption(layers, [(1, n)] * len(shapes), list(shapes), [option] * len(shapes))
    return PipeshardParallel(
        num_micro_batches=n_micro_batches, layer_option=AutoLayerOption(layer_num=2), stage_option=manual
    )


METHODS: dict[str, Method] = {
    "fixed": ShardParallel(logical_shape=(2, 2, 2), auto_sharding_option=AutoShardingOption(**ON_THREE)),
    "examples on the last axis": ShardParallel(
        logical_shape=(2, 2, 2),
        num_micro_batches=2,
        auto_sharding_option=AutoShardingOption(
            force_batch_dim_to_mesh_dim=2, fixed_specs={"*['up']": P(("x", "y"))}, prefer_reduce_scatter=True
        ),
    ),
    "zero 3": ShardParallel(logical_shape=(2, 2, 2), auto_sharding_option=AutoShardingOption(force_zero_stage_3=True)),
    "one stage": stages((2, 2, 2), option=ON_THREE),
    "two stages": stages((2, 1, 2), (1, 2, 2), option=ON_THREE),
}


@pytest.mark.parametrize("name", METHODS)
def test_steps_on_three_axes_have_the_numbers_of_one_device(name: str) -> None:
    step = minialpa.parallelize(make_step(minialpa.value_and_grad), method=METHODS[name])
    assert_allclose(step(*arguments()), jax.jit(make_step(jax.value_and_grad))(*arguments()), rtol=1e-5, atol=1e-6)
    plan = step.get_last_executable().get_parallel_plan()
    assert {len(stage.logical_shape) for stage in plan.stages} == {3}
    used = {axis for value in plan.inputs for spec in value.specs for axis in spec.axes}
    assert used == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "moe", "resnet"])
@pytest.mark.parametrize("shapes", [[(2, 2, 2)], [(2, 1, 2), (1, 2, 2)]])
def test_models_on_three_axes_train_as_on_one_device(name: str, shapes: list[tuple[int, ...]], key: jax.Array) -> None:
    sizes = {"filters": 4, "width_factor": 1, "stage_sizes": (1, 1)} if name == "resnet" else {"n_layers": 2}
    case = models.build(name, batch_size=16, learning_rate=1e-4, **sizes)
    option = {"force_batch_dim_to_mesh_dim": 0, "allow_replicated_parameters": False}
    n = 1 if name == "resnet" else 2  # BatchNorm has statistics per micro-batch
    method = stages(*shapes, option=option, n_micro_batches=n)
    states = []
    for step in (
        jax.jit(case.train_step(jax.value_and_grad)),
        minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=method),
    ):
        state = jax.jit(case.init)(key)
        for i in range(2):
            state, metrics = step(state, case.make_batch(i, case.batch_size))
        states.append((state.params, metrics))
    assert_allclose(states[1], states[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", [ShardParallel, AutoParallel])
def test_pins_on_a_mesh_of_three_axes_keep_all_axes(method: Any) -> None:
    """In `jax.set_mesh`: `with_sharding_constraint` inside the step, and the shardings of its arrays."""
    pin = AutoShardingOption(shardings="pin")
    ours = script.under_minialpa("three_axes", method(auto_sharding_option=pin))
    metrics, state, _ = script.train(ours)
    expected, of_author, _ = script.train(script.as_written("three_axes"))
    assert_allclose((metrics, state), (expected, of_author), rtol=1e-5, atol=1e-6)

    plan = ours.step.get_last_executable().get_parallel_plan()
    assert [stage.logical_shape for stage in plan.stages] == [(2, 2, 2)]
    specs = {value.path: str(value.specs[0]) for value in plan.inputs}
    assert set(specs.values()) == {"S2,S1", "S1,S2", "S01,R"}
    assert [one.added_s for one in plan.user_shardings] == [0.0] * len(plan.user_shardings)


def test_in_shardings_on_three_axes_fix_the_shape_of_a_search() -> None:
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    layer = {"up": NamedSharding(mesh, P("fsdp", "tensor")), "down": NamedSharding(mesh, P("tensor", "fsdp"))}
    rows = NamedSharding(mesh, P(("data", "fsdp")))
    step = minialpa.parallelize(
        make_step(minialpa.value_and_grad), method=AutoParallel(), in_shardings=([layer] * 2, rows)
    )
    assert_allclose(step(*arguments()), jax.jit(make_step(jax.value_and_grad))(*arguments()), rtol=1e-5, atol=1e-6)
    (stage,) = step.get_last_executable().get_parallel_plan().stages
    assert stage.logical_shape == (2, 2, 2)


def test_a_search_has_three_axes_only_for_a_mesh_of_the_user() -> None:
    cluster, option = ClusterSpec.preset("h100", num_hosts=2), AutoStageOption()
    own = candidates(cluster, option)
    assert all(len(one.logical_shape) < 3 for one in own)
    assert [one for one in candidates(cluster, option, None, (2, 4, 2)) if one not in own] == [
        minialpa.inter.search.submeshes.Candidate((2, 8), (2, 4, 2))
    ]


def test_collectives_on_three_axes_are_those_of_the_compiled_program() -> None:
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra `gpu-compile`")
    cluster = ClusterSpec.preset("h100", num_hosts=2, devices_per_host=4)
    step = minialpa.parallelize(
        make_step(minialpa.value_and_grad),
        method=ShardParallel(
            devices=cluster, logical_shape=(2, 2, 2), auto_sharding_option=AutoShardingOption(**ON_THREE)
        ),
    )
    (stage,) = step.check(*arguments(256, 1024), target="h100").stages
    assert len(stage.planned_collectives) > 1
    assert stage.compiled_collectives == pytest.approx(stage.planned_collectives, rel=0.02)
