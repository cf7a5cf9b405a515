"""Plans beside what XLA for GPUs makes of them: real compilations, in processes of their own."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import minialpa
from minialpa import ClusterSpec, PipeshardParallel, Plan, ShardParallel, UniformStageOption, models
from minialpa.cli import main
from minialpa.inter.lower.exported_functions import export_function
from minialpa.programs.program import Function
from minialpa.xla_gpu.compile import GpuCompileError, compile_for_gpus
from minialpa.xla_gpu.targets import TARGETS
from minialpa.xla_gpu.worker import Request
from tests.helpers import descent_step

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra `gpu-compile`")

H100 = ClusterSpec.preset("h100", devices_per_host=4)


def _request(fun: Callable[..., Any], *shapes: tuple[int, ...], donated: tuple[int, ...] = ()) -> Request:
    avals = tuple(jax.core.ShapedArray(shape, jnp.dtype("float32")) for shape in shapes)
    outs = jax.eval_shape(fun, *avals)
    split = PartitionSpec("x")
    function = Function(
        name="f",
        mesh=0,
        fun=fun,
        in_avals=avals,  # type: ignore[arg-type]
        in_specs=(split,) * len(avals),
        out_avals=tuple(outs),
        out_specs=(split,) * len(outs),
        donated=donated,
    )
    return Request(export_function(function, (4,), "cuda"), (4,), 1, TARGETS["h100"])


def test_memory_is_that_of_the_arrays_and_donated_ones_count_once() -> None:
    def fun(x: jax.Array, y: jax.Array) -> tuple[jax.Array]:
        return (x + y,)

    kept, donated = compile_for_gpus(
        [_request(fun, (64, 256), (64, 256)), _request(fun, (64, 256), (64, 256), donated=(0,))]
    )
    shard = 64 * 256 * 4 // 4
    assert kept.argument_bytes == 2 * shard and kept.peak_bytes == 3 * shard
    assert donated.peak_bytes == 2 * shard


def test_gpus_without_tables_of_kernels_are_compiled_for_and_too_old_ones_are_refused() -> None:
    request = _request(lambda x: (jnp.tanh(x),), (64, 256))
    (made,) = compile_for_gpus([dataclasses.replace(request, target=TARGETS["a100-80gb"])])
    assert made.argument_bytes == 64 * 256 * 4 // 4
    with pytest.raises(GpuCompileError, match="gpu-compile-cuda12"):
        compile_for_gpus([dataclasses.replace(request, target=TARGETS["v100"])])


def test_a_folder_keeps_programs_and_half_of_one_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = _request(lambda x: (jnp.sin(x),), (8, 8))
    first = compile_for_gpus([request, request], cache=tmp_path)
    assert first[0] == first[1] and len(list(tmp_path.iterdir())) == 1

    with monkeypatch.context() as patch:
        patch.setattr("minialpa.xla_gpu.compile._Process", None)  # nothing is compiled
        assert compile_for_gpus([request], cache=tmp_path) == first[:1]
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert compile_for_gpus([request], cache=tmp_path) == first[:1]


def test_a_target_that_xla_does_not_know_is_an_error_that_names_the_function_and_ends_the_processes() -> None:
    request = _request(lambda x: (x + 1,), (8, 8))
    before = threading.active_count()
    with pytest.raises(GpuCompileError, match="`f`"):
        compile_for_gpus([dataclasses.replace(request, target=dataclasses.replace(request.target, name='"'))])
    assert threading.active_count() == before


METHODS = {
    "shard": ShardParallel(devices=H100),
    "pipeline": PipeshardParallel(
        devices=H100,
        num_micro_batches=2,
        layer_option=minialpa.AutoLayerOption(layer_num=2),
        stage_option=UniformStageOption(num_stages=2),
    ),
}


@pytest.mark.parametrize("method", ["shard", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_collectives_are_those_of_the_plan_and_memory_is_counted(method: str) -> None:
    case = models.build("gpt", n_layers=2, hidden=128, n_heads=4, seq_len=64, vocab_size=256, batch_size=16)
    state, batch = jax.eval_shape(case.init, jax.random.key(0)), case.make_batch(0, case.batch_size)
    step = case.train_step(minialpa.value_and_grad)
    plan = minialpa.plan(step, (state, batch), cluster=H100, method=METHODS[method])
    found = minialpa.check(plan, step, (state, batch))
    assert found.fits and len(found.stages) == len(plan.stages)
    for stage in found.stages:
        assert stage.compiled_collectives == pytest.approx(stage.planned_collectives, rel=0.02)
        assert stage.compiled_bytes >= max(one.peak_bytes for one in stage.functions)
        assert {one.times_per_step for one in stage.functions} <= {1, 2}
    assert json.loads(found.to_json())["stages"][0]["compiled_bytes"] == found.stages[0].compiled_bytes


@pytest.mark.parametrize("n_groups", [pytest.param(8, marks=pytest.mark.slow), 64])
def test_ragged_products_take_what_their_dense_products_take(n_groups: int) -> None:
    def loss(weights: Any, x: jax.Array) -> jax.Array:
        sizes = jnp.full(n_groups, x.shape[0] // n_groups, jnp.int32) + jnp.argmax(x[:n_groups, :2], axis=1)
        hidden = jax.nn.relu(jax.lax.ragged_dot(x, weights["in"], sizes))
        return jnp.mean(jax.lax.ragged_dot(hidden, weights["out"], sizes).astype(jnp.float32) ** 2)

    def step(weights: Any, x: jax.Array) -> Any:
        value, gradients = minialpa.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - g, weights, gradients), value

    d, f = 1024, 2048
    shapes = {"in": (n_groups, d, f), "out": (n_groups, f, d)}
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    arguments = weights, jax.ShapeDtypeStruct((8192, d), jnp.bfloat16)
    cluster = ClusterSpec.preset("h100", devices_per_host=1)
    plan = minialpa.plan(step, arguments, cluster=cluster)
    (found,) = plan.check(step, arguments).stages
    assert found.planned_s == pytest.approx(found.compiled_s, rel=0.2)
    assert found.planned_bytes == pytest.approx(found.compiled_bytes, rel=0.2)


@pytest.mark.slow  # the test before is the short relative
def test_what_one_program_computes_again_it_does_not_keep() -> None:
    """XLA for GPUs drops optimization barriers, and moves gradients of weights behind the last layer."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            for _ in range(4):
                x = jnp.tanh(x @ w) * jnp.sin(x)
        return jnp.mean(x**2)

    step, args = descent_step(loss, minialpa.value_and_grad), ([jnp.ones((32, 32))] * 8, jnp.ones((8192, 32)))
    method = minialpa.DataParallel(devices=H100, remat="full")
    plans = [
        minialpa.plan(step, args, cluster=H100, method=one)
        for one in (method, dataclasses.replace(method, remat="none"))
    ]
    again, kept = (minialpa.check(plan, step, args).stages[0] for plan in plans)
    assert again.planned_bytes < 0.6 * kept.planned_bytes
    assert again.compiled_bytes < 0.6 * kept.compiled_bytes
    assert again.planned_bytes == pytest.approx(again.compiled_bytes, rel=0.25)


def test_the_command_says_what_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "plan.json", tmp_path / "check.json"
    assert main(["plan", "mlp", "--cluster", "h100", "--devices-per-host", "2", "--save", str(path)]) == 0
    assert main(["check", str(path), "mlp", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["fits"]

    plan = Plan.load(path)
    needed = json.loads(out.read_text())["stages"][0]["compiled_bytes"]
    device = dataclasses.replace(plan.cluster.device, memory_bytes=needed - 1)
    dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, device=device)).save(path)
    capsys.readouterr()
    assert main(["check", str(path), "mlp"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out
