"""Stages of several chunks: training, memory and errors of the schedules `1f1b-interleaved`, `zb` and `zb-v`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from minialpa import (
    AutoShardingOption,
    ClusterSpec,
    ManualStageOption,
    PipeshardParallel,
    ShardingError,
    UniformStageOption,
    mark_pipeline_boundary,
)
from minialpa.errors import InfeasibleError
from minialpa.inter.lower.emit import emit_program
from minialpa.inter.schedule.chunks import Chunks, check_chunks, chunks_of
from minialpa.ir.equations import aval_bytes
from minialpa.options import ManualLayerOption, StageOption
from minialpa.plan import Plan
from minialpa.programs.program import Free, Program, Run, Transfer
from minialpa.testing import assert_allclose
from tests.helpers import descent_step, trace

WIDTH, BATCH = 8, 24


def loss(params: Any, batch: Any) -> jax.Array:
    """Layers with a boundary after each, a skip over half of them, and a head with the first layer's weight."""
    x, y = batch
    ws = params["w"]
    skip = x
    for i, w in enumerate(ws):
        x = jnp.tanh(x @ w) + (skip if i == len(ws) // 2 else 0.5 * x)
        skip = x if i == 0 else skip
        if i + 1 < len(ws):
            mark_pipeline_boundary()
    return jnp.mean((x @ ws[0].T + params["b"] - y) ** 2)


def arguments(n_layers: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    ws = [0.3 * rng.standard_normal((WIDTH, WIDTH), np.float32) for _ in range(n_layers)]
    x, y = rng.standard_normal((2, BATCH, WIDTH), np.float32)
    return {"w": ws, "b": np.zeros((1, WIDTH), np.float32)}, (x, y)


def method(n_micro_batches: int, stages: StageOption, schedule: str = "1f1b-interleaved") -> PipeshardParallel:
    return PipeshardParallel(
        num_micro_batches=n_micro_batches,
        pipeline_schedule=schedule,
        layer_option=ManualLayerOption(),
        stage_option=stages,
    )


def uniform(n_stages: int, n_chunks: int) -> UniformStageOption:
    return UniformStageOption(num_stages=n_stages, submesh_physical_shape=(1, 1), num_chunks=n_chunks)


def by_hand(layer_ids: list[list[int]]) -> ManualStageOption:
    n = len(layer_ids)
    return ManualStageOption(layer_ids, [(1, 1)] * n, [(1,)] * n)


def planned(n_stages: int, n_chunks: int, n_micro_batches: int) -> Plan:
    cluster = ClusterSpec.preset("cpu", devices_per_host=n_stages)
    step, args = descent_step(loss, minialpa.value_and_grad), arguments(n_stages * n_chunks)
    return minialpa.plan(step, args, cluster=cluster, method=method(n_micro_batches, uniform(n_stages, n_chunks)))


@pytest.mark.parametrize(
    ("schedule", "layers"),
    [
        ("1f1b-interleaved", [[0, 1, 3], [2, 4]]),
        ("zb", [[0, 1, 3], [2, 4]]),
        ("zb", [[0, 4], [1, 3], [2]]),
        ("zb-v", [[0, 1, 4], [2, 3]]),
    ],
)
def test_skips_and_tied_weights_train_as_on_one_device(schedule: str, layers: list[list[int]]) -> None:
    """On manual stages, with layers that are not neighbours."""
    params, batch = arguments(5)
    serial = jax.jit(descent_step(loss, jax.value_and_grad))
    chosen = method(3, by_hand(layers), schedule)
    step = minialpa.parallelize(descent_step(loss, minialpa.value_and_grad), method=chosen)
    expected = actual = params
    for _ in range(2):
        expected, expected_loss = serial(expected, batch)
        actual, actual_loss = step(actual, batch)
        assert_allclose(actual_loss, expected_loss, rtol=1e-5, atol=1e-6)
    assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    plan = step.get_last_executable().get_parallel_plan()
    assert [list(stage.layers) for stage in plan.stages] == layers
    if layers[1] == [2, 4]:
        assert all(re.search(rf"layers {text}\s", plan.summary()) for text in ("0-1, 3", "2, 4"))


def test_a_step_without_gradients_runs_through_the_chunks() -> None:
    params, batch = arguments(4)
    chosen = method(4, uniform(2, 2))
    actual = minialpa.parallelize(lambda params, batch: loss(params, batch), method=chosen)(params, batch)
    assert_allclose(actual, loss(params, batch), rtol=1e-5, atol=1e-6)


def test_one_more_chunk_saves_bubble_time() -> None:
    """T = n t + (p - 1) t / v + transfers + update, for stages of equal chunks."""
    plan = planned(2, 2, 6)
    t = [s.compute_s + s.communication_s for s in plan.stages]
    (first, second), update = t, max(s.update_s for s in plan.stages)
    link = plan.cluster.intra_host
    loop = plan.cost.total_s - update - 2 * link.alpha_s
    crossing = loop - 6 * max(first, second) - min(first, second) / 2
    rows = BATCH // 6 * WIDTH * 4
    # The first layer's result, and its gradient in two parts.
    assert crossing == pytest.approx(3 * rows * link.beta_s_per_byte)


# ---- memory ---------------------------------------------------------------------------------------------------------


def bytes_at_most(program: Program, n_meshes: int) -> list[int]:
    """Peak bytes of the buffers of each mesh after any instruction; every mesh is one device."""
    size: dict[int, int] = {}
    for run in (one for one in program.instructions if isinstance(one, Run)):
        f = program.functions[run.function]
        avals = (*f.in_avals, *f.out_avals)
        size.update((b, aval_bytes(aval)) for b, aval in zip((*run.inputs, *run.outputs), avals, strict=True))

    mesh_of = {slot.buffer: slot.mesh for slot in program.inputs if slot.rows is None}
    most = [0] * n_meshes
    for instruction in program.instructions:
        match instruction:
            case Run(function, inputs, outputs):
                mesh_of.update(dict.fromkeys((*inputs, *outputs), program.functions[function].mesh))
            case Transfer(_, target, mesh):
                mesh_of[target] = mesh
            case Free(buffers):
                mesh_of = {b: mesh for b, mesh in mesh_of.items() if b not in buffers}
        held = [sum(size.get(b, 0) for b, mesh in mesh_of.items() if mesh == k) for k in range(n_meshes)]
        most = list(map(max, most, held))
    return most


def test_the_plan_foresees_what_the_program_holds() -> None:
    plan = planned(2, 3, 8)
    assert [stage.layers for stage in plan.stages] == [(0, 2, 4), (1, 3, 5)]
    held = bytes_at_most(emit_program(trace(descent_step(loss, minialpa.value_and_grad), *arguments(6)), plan), 2)
    for stage, n_bytes in zip(plan.stages, held, strict=True):
        assert 0.8 * n_bytes <= stage.peak_bytes <= 1.5 * n_bytes


def test_a_memory_limit_counts_the_chunks_in_flight() -> None:
    params, batch = arguments(6)
    wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct((64 * x.shape[0], x.shape[1]), x.dtype), batch)

    def limited(n_bytes: float) -> Plan:
        option = AutoShardingOption(memory_limit_bytes=n_bytes)
        chosen = replace(method(8, uniform(2, 3)), default_auto_sharding_option=option)
        cluster = ClusterSpec.preset("cpu", devices_per_host=2)
        step = descent_step(loss, minialpa.value_and_grad)
        return minialpa.plan(step, (params, wide), cluster=cluster, method=chosen)

    free = limited(1e12)
    most = max(free.cost.peak_bytes)
    in_flight = max(most - stage.fixed_bytes for stage in free.stages)
    assert in_flight > 0.5 * most  # so the kept values of chunks set the limit
    with pytest.raises(InfeasibleError, match=r"Stage \d "):
        limited(most - 0.2 * in_flight)


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_chunks_are_runs_of_neighbouring_layers_in_order() -> None:
    assert chunks_of([(0, 1, 4), (2, 3, 5)]) == Chunks(((0, 1), (2, 3), (4,), (5,)), (0, 1, 0, 1))
    assert chunks_of([()]) == Chunks(((),), (0,))
    assert chunks_of([(0, 1, 4), (2, 3, 5)]).of_group([0, 0, 1, 3, 5]) == (0, 0, 0, 1, 3)
    check_chunks(chunks_of([(0, 3), (1, 4), (2, 5)]), "inference")


@pytest.mark.parametrize(
    ("stages", "schedule", "message"),
    [
        ([(0, 2), (1, 3)], "1f1b", "but stage 0 has the layers 0, 2, stage 1 has the layers 1, 3. Use .*`1f1b-int"),
        ([(0, 3), (1, 2)], "1f1b-interleaved", "equally often"),
        ([(0, 3), (1, 2)], "zb-h1", r"but stage 0 has the layers 0, 3.* Use the schedule `zb-v`, .*num_chunks=1"),
        (
            [(0, 2), (1, 3)],
            "zb-v",
            r"two runs of layers in a V, but stage 0 has the layers 0, 2.*\[\[0, 3\], \[1, 2\]\]",
        ),
        ([(0, 1), (2, 3)], "zb-v", r"Option\(num_chunks=2\).*or use the schedule `zb-h1`"),
        ([(0, 4), (1, 2), (3,)], "zb", "to the stages 0 to 2 in turn"),
        ([(0, 5), (1, 4), (2, 3)], "1f1b-interleaved", "to the stages 0 to 2 in turn.*now stage 0 has the layers 0, 5"),
        ([(0, 1), (2, 3)], "1f1b-interleaved", r"but stage 0 has the layers 0, 1.*Option\(num_chunks=2\)"),
    ],
)
def test_stages_of_another_schedule_are_refused(stages: Any, schedule: str, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        check_chunks(chunks_of(stages), schedule)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (by_hand([[2, 0], [1, 3]]), "once and in order"),
        (uniform(2, 3), "`num_stages=2` and `num_chunks=3` need at least 6 layers, but the model has 4"),
        ("auto", '"1f1b-interleaved"` does not work with `stage_option="auto"`'),
    ],
)
def test_stages_that_cannot_be_are_refused(stages: Any, message: str) -> None:
    step = descent_step(loss, minialpa.value_and_grad)
    with pytest.raises(ShardingError, match=message):
        minialpa.plan(step, arguments(4), cluster=ClusterSpec.preset("cpu"), method=method(2, stages))
