"""Plans beside programs that XLA compiles for GPUs: real compilations, in separate processes."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import minialpa
from minialpa import ClusterSpec, Plan, models
from minialpa.cli import main
from minialpa.xla_gpu.compile import GpuCompileError, compile_for_gpus
from minialpa.xla_gpu.targets import TARGETS
from tests.xla_gpu.gpu_requests import request

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra `gpu-compile`")


def test_donated_arrays_count_once_and_a_folder_keeps_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [jax.ShapeDtypeStruct((64, 256), jnp.float32)] * 2
    requests = [request(jnp.add, shapes, n_devices=4, donated=donated) for donated in ((), (0,), (0,))]
    # A GPU without tables of kernels.
    requests.append(dataclasses.replace(requests[0], target=TARGETS["a100-80gb"]))
    made = compile_for_gpus(requests, cache=tmp_path)
    kept, donated, same, without_tables = made
    shard = 64 * 256 * 4 // 4
    assert kept.argument_bytes == 2 * shard and kept.peak_bytes == 3 * shard
    assert donated.peak_bytes == 2 * shard
    assert same == donated and len(list(tmp_path.iterdir())) == 3
    assert without_tables.argument_bytes == 2 * shard

    # Half of a file causes a new compilation.
    file, *_ = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert compile_for_gpus(requests, cache=tmp_path) == made
    with monkeypatch.context() as patch:
        patch.setattr("minialpa.xla_gpu.compile._Process", None)  # no compilation
        assert compile_for_gpus(requests, cache=tmp_path) == made


def test_gpus_that_xla_cannot_compile_for_are_refused_and_the_processes_end() -> None:
    one = request(jnp.sin, [jax.ShapeDtypeStruct((8, 8), jnp.float32)])
    with pytest.raises(GpuCompileError, match="gpu-compile-cuda12"):
        compile_for_gpus([dataclasses.replace(one, target=TARGETS["v100"])])

    before = threading.active_count()
    with pytest.raises(GpuCompileError, match="`f`"):
        compile_for_gpus([dataclasses.replace(one, target=dataclasses.replace(one.target, name='"'))])
    assert threading.active_count() == before


def test_ragged_products_take_what_their_loops_over_tiles_take() -> None:
    n_groups = 64

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


def tiny_gpt() -> Any:
    case = models.build("gpt", n_layers=1, hidden=128, n_heads=4, seq_len=64, vocab_size=256, batch_size=16)
    state = jax.eval_shape(case.init, jax.random.key(0))
    return case.train_step(minialpa.value_and_grad), state, case.make_batch(0, case.batch_size)


def test_the_command_compares_collectives_and_memory_and_says_what_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out, model = tmp_path / "plan.json", tmp_path / "check.json", f"{__name__}:tiny_gpt"
    options = ["--cluster", "h100", "--devices-per-host", "4", "--method", "ShardParallel"]
    assert main(["plan", model, *options, "--save", str(path)]) == 0
    check = ["check", str(path), model, "--cache", str(tmp_path / "programs")]
    assert main([*check, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    (stage,) = found["stages"]
    assert found["fits"]
    assert stage["planned_collectives"] and stage["compiled_collectives"] == pytest.approx(
        stage["planned_collectives"], rel=0.02
    )
    assert stage["compiled_bytes"] >= max(one["peak_bytes"] for one in stage["functions"])

    plan = Plan.load(path)
    device = dataclasses.replace(plan.cluster.device, memory_bytes=stage["compiled_bytes"] - 1)
    dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, device=device)).save(path)
    capsys.readouterr()
    assert main(check) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out
