"""Options, meshes, names and helpers of `minialpa.compat.alpa`: each works as in Alpa, or its error helps."""

from __future__ import annotations

import dataclasses
import importlib
import re
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
import minialpa.compat.alpa as alpa
from minialpa.compat.alpa import names
from minialpa.compat.alpa.options import Adjustable
from tests.compat.alpa_scripts import make_state_and_batch, step_with

PAGE = (Path(__file__).parents[2] / "docs" / "alpa.md").read_text(encoding="utf-8")


# ---- options and methods --------------------------------------------------------------------------------------------


def test_options_and_methods_may_change_until_the_step_is_parallelized() -> None:
    as_option = alpa.AutoShardingOption()
    method = alpa.ShardParallel(auto_sharding_option=as_option)
    as_option.force_data_parallel = True
    method.as_option.prefer_reduce_scatter = True
    method.devices = alpa.LocalPhysicalDeviceMesh(jax.devices()[:2])
    option = minialpa.AutoShardingOption(force_data_parallel=True, prefer_reduce_scatter=True)
    step = alpa.parallelize(lambda x: x, method=method)
    assert step.method == minialpa.ShardParallel(jax.devices()[:2], auto_sharding_option=option)

    pipeline = alpa.PipeshardParallel(num_micro_batches=4)
    pipeline.layer_option = layers = alpa.AutoLayerOption(layer_num=2)
    layers.layer_num, layers.remat_mode = 3, "coarse_grained_remat"
    assert pipeline.read() == minialpa.PipeshardParallel(
        num_micro_batches=4,
        layer_option=minialpa.AutoLayerOption(3, remat="full"),
        default_auto_sharding_option=minialpa.AutoShardingOption(prefer_reduce_scatter=True),
    )


def test_options_have_the_forms_of_alpa() -> None:
    assert alpa.ManualLayerOption(remat_layer=True).read() == minialpa.ManualLayerOption(remat=True)
    assert alpa.PipeshardParallel(pipeline_schedule="1f1b_overlap_friendly").read().pipeline_schedule == "1f1b"
    assert alpa.Zero2Parallel(num_micro_batches=2).read().options().sharding.prefer_reduce_scatter

    fields = {"force_batch_dim_to_mesh_dim": 0, "allow_mixed_mesh_shape": True}
    stages = alpa.ManualStageOption([[0], [1]], [[1, 4], [1, 4]], [[4, 1], [2, 2]], [fields, {}]).read()
    submeshes, shapes = [(1, 4), (1, 4)], [(4, 1), (2, 2)]
    dicts = [{"force_batch_dim_to_mesh_dim": 0}, {}]
    assert stages == minialpa.ManualStageOption([[0], [1]], submeshes, shapes, dicts)

    uniform = alpa.UniformStageOption(2, [1, 2], [2, 1], {"prefer_reduce_scatter": True}).read()
    option = minialpa.AutoShardingOption(prefer_reduce_scatter=True)
    assert uniform == minialpa.UniformStageOption(2, (1, 2), (2, 1), option)

    search = alpa.AutoStageOption("manual", [(1, 2)], "model_parallel_only")
    assert search.read() == minialpa.AutoStageOption([(1, 2)], "model_parallel_only")
    assert alpa.AutoStageOption("small_power_of_two").read() == minialpa.AutoStageOption()
    search.manually_specified_submeshes = None
    with pytest.raises(minialpa.ShardingError, match=r"is empty. Give at least one pair of"):
        search.read()


def test_unknown_options_and_values_are_refused() -> None:
    with pytest.raises(AttributeError, match="`AutoShardingOption` has no option `force_data_paralel`"):
        alpa.AutoShardingOption().force_data_paralel = True
    with pytest.raises(AttributeError, match="`GlobalConfig` has no option `resharding`"):
        alpa.global_config.resharding = 1
    with pytest.raises(AttributeError, match="'ShardParallel' object has no attribute 'device'"):
        alpa.ShardParallel().device = None
    with pytest.raises(minialpa.ShardingError, match=r"`remat` must be .*got 'all'"):
        alpa.AutoLayerOption(2, remat_mode="all").read()
    with pytest.raises(minialpa.ShardingError, match=re.escape("`minialpa.AutoShardingOption(fixed_specs=...)`")):
        alpa.PipeshardParallel(stage_input_shardings=[1])


def test_a_setting_that_minialpa_does_not_have_warns_or_is_refused() -> None:
    option = alpa.AutoLayerOption(2)

    def change() -> None:
        alpa.global_config.resharding_mode = "broadcast"
        option.cost_criteria = "flops"
        option.cost_criteria = "count"
        alpa.AutoShardingOption(all_reduce_threshold=1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        change()
    assert [str(warning.message).partition(":")[0] for warning in caught] == [
        "`resharding_mode='broadcast'` has no effect",
        "`cost_criteria='count'` has no effect",
        "`all_reduce_threshold=1` has no effect",
    ]
    assert {warning.filename for warning in caught} == {__file__}

    with pytest.raises(minialpa.ShardingError, match=r"no `backend='tpu'`. Use the environment variable JAX_PLATFORMS"):
        alpa.global_config.backend = "tpu"
    with pytest.raises(minialpa.ShardingError, match="Use `DataParallel`"):
        alpa.AutoShardingOption(force_simple_heuristic="largest")


def test_init_has_alpas_arguments_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(minialpa, "init", lambda *args, **kwargs: calls.append((args, kwargs)))
    alpa.init()
    alpa.init("ray", "auto", 2, 4, "mine", worker_timeout_s=5.0)
    expected: dict[str, Any] = {"address": None, "num_hosts": None, "devices_per_host": None}
    assert calls[0] == (("ray",), expected | {"namespace": "alpa_default_space"})
    given = {"address": "auto", "num_hosts": 2, "devices_per_host": 4, "namespace": "mine"}
    assert calls[1] == (("ray",), given | {"worker_timeout_s": 5.0})


# ---- clusters and meshes --------------------------------------------------------------------------------------------


def test_clusters_and_meshes_are_views_of_the_session() -> None:
    alpa.init("local", None, 2, 4)
    cluster = alpa.get_global_cluster()
    assert (cluster.num_hosts, cluster.num_devices, cluster.host_num_devices) == (2, 8, [4, 4])
    mesh = cluster.get_physical_mesh()
    assert (mesh.shape, mesh.num_devices) == ((2, 4), 8)
    assert mesh.get_logical_mesh().shape == (2, 4)
    assert mesh.method_devices == minialpa.session.current_session().cluster

    second = cluster.get_virtual_physical_mesh([1])
    assert (second.shape, second.method_devices) == ((1, 4), jax.devices()[4:8])
    assert cluster.get_virtual_physical_mesh([0], 2).method_devices == jax.devices()[:2]
    with pytest.raises(minialpa.ShardingError, match="stands for the first devices of the session"):
        second.get_logical_mesh((2, 2))
    for hosts, per_host in (([0, 1], 2), ([1, 0], 4), ([2], 4), ([0], 5)):
        with pytest.raises(minialpa.ShardingError, match="The session has 2 hosts with 4 devices each"):
            cluster.get_virtual_physical_mesh(hosts, per_host)
    with pytest.raises(names.NotHereError, match=re.escape(names.INSTEAD["profile_all"])):
        cluster.profile_all("p3.16")


def test_a_method_plans_for_its_mesh_or_for_the_global_one() -> None:
    alpa.init("local", None, 2, 4)
    own, shared = alpa.ShardParallel(num_micro_batches=2), alpa.Zero2Parallel()
    own.devices = alpa.get_global_cluster().get_virtual_physical_mesh([1])
    alpa.set_global_virtual_physical_mesh(alpa.get_global_cluster().get_virtual_physical_mesh([0], 2))
    plans = [
        alpa.parallelize(step_with(alpa.value_and_grad), method=method).plan(*make_state_and_batch())
        for method in (own, shared)
    ]
    assert [(plan.cluster.n_devices, plan.n_micro_batches) for plan in plans] == [(4, 2), (2, 1)]

    # The global mesh ends with its session.
    alpa.shutdown()
    assert alpa.get_global_virtual_physical_mesh().num_devices == 8


def test_local_devices_are_a_mesh_and_have_logical_meshes() -> None:
    assert alpa.get_global_physical_mesh(create_if_not_exist=True).num_devices == alpa.get_global_num_devices() == 8
    mesh = alpa.LocalPhysicalDeviceMesh(jax.local_devices()[:4])
    assert (mesh.num_hosts, mesh.num_devices, mesh.shape) == (1, 4, (1, 4))
    assert mesh.get_logical_mesh([2, 2], [1, 1], [1, 0.1]) == minialpa.LogicalMesh((2, 2), (1.0, 1.0), (1.0, 0.1))
    assert mesh.get_logical_mesh((2, 2)).device is not None
    mesh.sync_workers()
    mesh.shutdown()

    alpa.set_global_physical_mesh(alpa.LocalPhysicalDeviceMesh(jax.devices()[6:]))
    y = alpa.parallelize(lambda x: x * 2, batch_argnums=())(np.ones((32, 2), np.float32))
    assert y.devices() == set(jax.devices()[6:])
    with pytest.raises(minialpa.ShardingError, match=r"\(2, 3\) has 6 devices, but .* 1 x 4 devices has 4"):
        mesh.get_logical_mesh((2, 3))


# ---- util and timers ------------------------------------------------------------------------------------------------


def test_benchmark_func_returns_seconds_per_call() -> None:
    calls: list[str] = []
    costs = alpa.util.benchmark_func(
        lambda: calls.append("run"), lambda: calls.append("sync"), warmup=2, repeat=3, number=4
    )
    assert costs.shape == (3,) and (costs >= 0).all()
    assert calls == ["run"] * 2 + (["sync"] + ["run"] * 4 + ["sync"]) * 3


def test_helpers_count_map_and_write(tmp_path: Path) -> None:
    tree = {"w": np.ones((2, 3), np.float32), "n": jax.ShapeDtypeStruct((4,), jnp.bfloat16)}
    assert (alpa.util.compute_param_number(tree), alpa.util.compute_bytes(tree)) == (10, 24 + 8)
    assert alpa.util.map_to_shape(tree) == {"w": (2, 3), "n": (4,)}
    assert alpa.util.map_to_nparray({"x": jnp.ones(2), "i": 1})["i"] == 1

    # Six operations per parameter and token, as the sequence is short: 12 h^2 parameters per layer, and V h of the
    # output embedding (Kaplan et al., 2020).
    h, n_layers, vocabulary = 4096, 24, 50_000
    parameters = n_layers * 12 * h**2 + vocabulary * h
    tflops = alpa.util.compute_gpt_tflops(8, 1, n_layers, h, vocabulary, num_gpus=1, latency=2.0)
    assert tflops == pytest.approx(6 * parameters * 8 / 2.0 / 1e12, rel=1e-3)

    hlo = "%a = f32[] all-reduce(%x)\n%b = f32[8] all-gather-start(%y)\n%c = f32[8] all-reduce(%z)"
    assert alpa.util.count_communication_primitives(hlo) == (3, 2, 1, 0, 0)
    assert alpa.util.count_communication_primitives(hlo, ignore_scalar_all_reduce=True) == (2, 1, 1, 0, 0)

    for batch_size in (8, 16):
        alpa.util.write_tsv(["batch", "time"], [batch_size, 0.5], str(tmp_path / "results.tsv"))
    assert (tmp_path / "results.tsv").read_text() == "8\t0.5\n16\t0.5\n"


def test_timers_measure_intervals() -> None:
    timer = alpa.timers("step")
    assert "step" in alpa.timers and alpa.timers("step") is timer
    synced: list[int] = []
    for _ in range(2):
        timer.start(lambda: synced.append(1))
        timer.stop(lambda: synced.append(2))
    assert len(timer.costs) == 2 and synced == [1, 2, 1, 2]
    assert timer.elapsed("sum") == pytest.approx(2 * timer.elapsed())
    timer.reset()
    assert timer.elapsed() == 0.0


# ---- names ----------------------------------------------------------------------------------------------------------


def test_the_page_has_every_name_setting_and_sentence() -> None:
    public = re.findall(r" as (\w+)$", Path(str(alpa.__file__)).read_text(encoding="utf-8"), re.MULTILINE)
    listed = [*(name for name in public if name[0] != "_"), *re.findall(r"^def (\w+)", _source("util"), re.MULTILINE)]
    assert [name for name in listed if f"`{name}`" not in PAGE and name[0] != "_"] == []
    assert [name for name, sentence in names.INSTEAD.items() if f"| `{name}` | {sentence} |" not in PAGE] == []
    for owner in Adjustable.__subclasses__():
        assert {*owner.IGNORED, *owner.REFUSED} <= {field.name for field in dataclasses.fields(owner)}  # type: ignore[arg-type]
        assert [name for name in owner.IGNORED if f"`{name}`" not in PAGE] == []
        assert [name for name, instead in owner.REFUSED.items() if f"| `{name}` | {instead} |" not in PAGE] == []


def _source(module: str) -> str:
    return Path(str(getattr(alpa, module).__file__)).read_text(encoding="utf-8")


def test_the_example_of_the_page_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(example, "docs/alpa.md", "exec"), found)
    assert np.isfinite(float(found["loss"]))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("", "automatic_remat"),
        ("model.model_util", "TrainState"),
        ("pipeline_parallel.local_pipeline", "LocalPipelineParallel"),
        ("testing", "PipelineBasicTest"),
        ("util", "run_cmd"),
    ],
)
def test_the_import_of_a_name_that_is_not_here_says_what_to_use(module: str, name: str) -> None:
    path = f"minialpa.compat.alpa.{module}".rstrip(".")
    with pytest.raises(ImportError, match=re.escape(names.INSTEAD[name])):
        exec(f"from {path} import {name}")


def test_names_come_from_their_modules_or_from_minialpa() -> None:
    for path, name in (
        ("global_env", "global_config"),
        ("pipeline_parallel.layer_construction", "ManualLayerOption"),
        ("pipeline_parallel.primitive_def", "mark_pipeline_boundary"),
        ("pipeline_parallel.stage_construction", "get_last_dp_result"),
        ("shard_parallel.auto_sharding", "AutoShardingOption"),
        ("testing", "assert_allclose"),
        ("timer", "timers"),
    ):
        assert getattr(importlib.import_module(f"minialpa.compat.alpa.{path}"), name) is getattr(alpa, name)
    assert alpa.ClusterSpec is minialpa.ClusterSpec and alpa.__version__ == minialpa.__version__
    assert float(alpa.grad(lambda x: x**2)(3.0)) == 6.0
    for module in (alpa, alpa.util, alpa.testing):
        with pytest.raises(AttributeError, match=r"minialpa has no `paralelize`, .* and docs/alpa.md Alpa's"):
            module.paralelize  # noqa: B018


def test_functions_without_effect_warn() -> None:
    with pytest.warns(UserWarning, match="delete a parallelized function"):
        alpa.clear_executable_cache()
    with pytest.warns(UserWarning, match="keys to the step"):
        alpa.set_seed(3)
