"""Options, meshes, names and helpers of `minialpa.compat.alpa`: each works as in Alpa, or its error helps."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
import minialpa.compat.alpa as alpa
from minialpa.compat.alpa import names
from minialpa.compat.alpa.global_env import GlobalConfig
from minialpa.compat.alpa.options import Adjustable
from tests.compat.alpa_scripts import make_state_and_batch, step_with

PAGE = (Path(__file__).parents[2] / "docs" / "alpa.md").read_text(encoding="utf-8")

#: The classes with settings.
ADJUSTABLE = (*(cls for cls in Adjustable.__subclasses__() if cls is not GlobalConfig), GlobalConfig)


@pytest.fixture(autouse=True)
def _as_in_a_script() -> Iterator[None]:
    """Scripts run under jax's own dtype promotion, start and end a session, and change global settings."""
    alpa.shutdown()
    before = dataclasses.asdict(alpa.global_config)
    with jax.numpy_dtype_promotion("standard"):
        yield
    vars(alpa.global_config).update(before)
    alpa.shutdown()


# ---- options and methods --------------------------------------------------------------------------------------------


def test_options_may_change_until_a_step_is_planned() -> None:
    as_option = alpa.AutoShardingOption()
    method = alpa.ShardParallel(auto_sharding_option=as_option)
    as_option.force_data_parallel = True
    method.as_option.prefer_reduce_scatter = True
    expected = minialpa.AutoShardingOption(force_data_parallel=True, prefer_reduce_scatter=True)
    assert method.auto_sharding_option == method.options().sharding == expected

    layers = alpa.AutoLayerOption(layer_num=2)
    pipeline = alpa.PipeshardParallel(layer_option=layers)
    layers.layer_num, layers.remat_mode = 3, "coarse_grained_remat"
    assert pipeline.options().layers == minialpa.AutoLayerOption(3, remat="full")
    pipeline.as_option = alpa.AutoShardingOption(allow_all_to_all=False)
    assert pipeline.options().sharding == minialpa.AutoShardingOption(allow_all_to_all=False)


def test_options_have_alpas_defaults_and_forms() -> None:
    assert alpa.PipeshardParallel().options().sharding == minialpa.AutoShardingOption(prefer_reduce_scatter=True)
    layers = alpa.PipeshardParallel(layer_option=alpa.ManualLayerOption(remat_layer=True)).options().layers
    assert layers == minialpa.ManualLayerOption(remat=True)

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
    search.manually_specified_submeshes = None
    with pytest.raises(minialpa.ShardingError, match="Give pairs of"):
        search.read()


def test_methods_are_minialpas_and_survive_copies() -> None:
    for method in (alpa.ShardParallel(num_micro_batches=2), alpa.Zero2Parallel(), alpa.PipeshardParallel()):
        assert dataclasses.replace(method, devices=None) == method
        assert pickle.loads(pickle.dumps(method)) == method
    assert isinstance(alpa.DataParallel(), minialpa.DataParallel)
    assert alpa.ShardParallel(logical_shape=(2, 4)).options().logical_shape == (2, 4)
    with pytest.raises(TypeError, match="num_microbatches"):
        alpa.ShardParallel(num_microbatches=2)


def test_unknown_options_and_values_are_refused() -> None:
    with pytest.raises(AttributeError, match="`AutoShardingOption` has no option `force_data_paralel`"):
        alpa.AutoShardingOption().force_data_paralel = True
    with pytest.raises(AttributeError, match="`GlobalConfig` has no option `resharding`"):
        alpa.global_config.resharding = 1
    with pytest.raises(minialpa.ShardingError, match="`remat_mode` is one of 'none', 'coarse"):
        alpa.AutoLayerOption(2, remat_mode="all")
    with pytest.raises(AttributeError, match=r"has no attribute `device`\. It has devices, num_micro_batches"):
        alpa.ShardParallel().device = None
    with pytest.raises(minialpa.ShardingError, match=re.escape("`AutoShardingOption(fixed_specs=...)`")):
        alpa.PipeshardParallel(stage_input_shardings=[1])
    with pytest.warns(UserWarning, match="`pipeline_schedule='1f1b_overlap_friendly'` has no equal"):
        method = alpa.PipeshardParallel(pipeline_schedule="1f1b_overlap_friendly")
    assert method.options().schedule == "1f1b"


OTHER_VALUES = {bool: lambda x: not x, int: lambda x: x + 1, float: lambda x: 0.125}


@pytest.mark.parametrize(
    ("owner", "name"),
    [(owner, name) for owner in ADJUSTABLE for name in owner.SETTINGS],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_setting_without_an_equal_warns_once_or_is_refused(owner: type[Adjustable], name: str) -> None:
    setting = owner.SETTINGS[name]
    name, _, value = name.partition("=")
    arguments: dict[str, Any] = {"layer_num": 2} if owner is alpa.AutoLayerOption else {}
    option = owner(**arguments)
    default = getattr(option, name)
    setattr(option, name, default)
    other = value or OTHER_VALUES.get(type(default), lambda x: "other")(default)
    if setting.is_refused:
        with pytest.raises(minialpa.ShardingError, match=re.escape(setting.sentence)):
            setattr(option, name, other)
        return
    for make in (lambda: setattr(option, name, other), lambda: owner(**arguments, **{name: other})):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make()
        assert [setting.sentence in str(warning.message) for warning in caught] == [True]
        assert caught[0].filename == __file__


@pytest.mark.parametrize("owner", ADJUSTABLE[:-1], ids=lambda owner: owner.__name__)
def test_each_field_has_a_meaning_here_or_a_sentence(owner: type[Adjustable]) -> None:
    """A field is one of minialpa's, has an entry in SETTINGS, or a line of its own in the docstring."""
    ours = getattr(minialpa, owner.__name__, None)
    known = {field.name for field in dataclasses.fields(ours)} if ours else set()
    fields = {field.name for field in dataclasses.fields(owner)}  # type: ignore[arg-type]
    if owner in (alpa.AutoShardingOption, alpa.AutoStageOption, alpa.UniformStageOption):
        assert known <= fields, "a new field of minialpa's option is added to Alpa's, too"
    for name in fields:
        assert name in known | set(owner.SETTINGS) or f"    {name}:" in str(owner.__doc__), name


def test_init_has_alpas_arguments_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(minialpa, "init", lambda *args, **kwargs: calls.append((args, kwargs)))
    alpa.init()
    alpa.init("ray", "auto", 2, 4, "mine", worker_timeout_s=5.0)
    expected: dict[str, Any] = {"cluster_address": None, "num_nodes": None, "num_devices_per_node": None}
    assert calls[0] == (("ray",), expected | {"namespace": "alpa_default_space"})
    given = {"cluster_address": "auto", "num_nodes": 2, "num_devices_per_node": 4, "namespace": "mine"}
    assert calls[1] == (("ray",), given | {"worker_timeout_s": 5.0})


# ---- clusters and meshes --------------------------------------------------------------------------------------------


def test_clusters_and_meshes_are_views_of_the_session() -> None:
    alpa.init("local", None, 2, 4)
    cluster = alpa.get_global_cluster()
    assert (cluster.num_hosts, cluster.num_devices, cluster.host_num_devices) == (2, 8, [4, 4])
    mesh = cluster.get_virtual_physical_mesh()
    assert (mesh.shape, mesh.num_devices, mesh.devices) == ((2, 4), 8, [[0, 1, 2, 3]] * 2)
    assert mesh.get_logical_mesh().shape == (2, 4)
    assert mesh.target() == minialpa.session.current_session().cluster
    assert isinstance(mesh.get_physical_mesh(), alpa.DistributedPhysicalDeviceMesh)

    second = cluster.get_virtual_physical_mesh([1])
    assert (second.shape, second.target()) == ((1, 4), jax.devices()[4:8])
    assert cluster.get_virtual_physical_mesh([0], 2).target() == jax.devices()[:2]
    with pytest.raises(minialpa.ShardingError, match="runs on the first hosts of a session"):
        cluster.get_virtual_physical_mesh([0, 1], 2).target()
    with pytest.raises(minialpa.ShardingError, match="stands for the first devices of the session"):
        second.get_logical_mesh((2, 2))
    with pytest.raises(minialpa.ShardingError, match="The session has 2 hosts with 4 devices each; got hosts"):
        cluster.get_virtual_physical_mesh([2])
    with pytest.raises(minialpa.MinialpaError, match="minialpa profiles nothing before it plans"):
        cluster.profile_all("p3.16")


def test_a_method_plans_for_its_mesh_or_for_the_global_one() -> None:
    alpa.init("local", None, 2, 4)
    own, shared = alpa.PipeshardParallel(layer_option=alpa.AutoLayerOption(layer_num=2)), alpa.Zero2Parallel()
    own.devices = alpa.get_global_cluster().get_virtual_physical_mesh([1])
    own.num_micro_batches = 2
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
    assert isinstance(alpa.get_global_physical_mesh(), alpa.LocalPhysicalDeviceMesh)
    y = alpa.parallelize(lambda x: x * 2, batch_argnums=())(np.ones((32, 2), np.float32))
    assert y.devices() == set(jax.devices()[6:])

    with pytest.raises(minialpa.ShardingError, match="cannot be viewed as"):
        mesh.get_logical_mesh((2, 3))
    with pytest.raises(minialpa.ShardingError, match=r"and these are others: .* Use `ShardParallel\(devices="):
        alpa.LocalPhysicalDeviceMesh(jax.local_devices()[4:]).get_logical_mesh((2, 2))
    with pytest.raises(minialpa.ShardingError, match="`devices` is a list of jax devices"):
        alpa.LocalPhysicalDeviceMesh([0, 1])  # type: ignore[list-item]


# ---- util and timers ------------------------------------------------------------------------------------------------


def test_benchmark_func_returns_seconds_per_call() -> None:
    calls: list[str] = []
    costs = alpa.util.benchmark_func(
        lambda: calls.append("run"), lambda: calls.append("sync"), warmup=2, repeat=3, number=4
    )
    assert costs.shape == (3,) and (costs >= 0).all()
    assert calls == ["run"] * 2 + (["sync"] + ["run"] * 4 + ["sync"]) * 3
    assert alpa.util.benchmark_func(lambda: None, repeat=1, min_repeat_second=0.001).shape == (1,)


def test_helpers_print_and_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alpa.util.print_used_time(None)
    alpa.util.print_used_time("Compile")
    assert re.fullmatch(r" - Compile: \d\.\d\d s\n", capsys.readouterr().out)

    file = tmp_path / "results.tsv"
    for batch_size in (8, 16):
        alpa.util.write_tsv(["batch", "time"], [batch_size, 0.5], str(file))
    assert file.read_text() == "8\t0.5\n16\t0.5\n"
    assert capsys.readouterr().out.splitlines()[0] == "batch: 8  time: 0.5  "
    with pytest.raises(minialpa.MinialpaError, match="1 heads and 2 values"):
        alpa.util.write_tsv(["batch"], [1, 2], str(file))


def test_helpers_count_and_map() -> None:
    tree = {"w": np.ones((2, 3), np.float32), "n": jax.ShapeDtypeStruct((4,), jnp.bfloat16), "name": "mlp"}
    assert alpa.util.compute_param_number(tree) == 10
    assert alpa.util.compute_bytes(tree) == 24 + 8
    assert alpa.util.map_to_shape(tree) == {"w": (2, 3), "n": (4,), "name": None}
    assert alpa.util.map_to_nparray({"x": jnp.ones(2), "i": 1})["i"] == 1
    assert alpa.util.to_str_round([1.5, (2, "a"), {"x": 0.25}], 2) == "[1.50, [2, a], {'x': '0.25'}]"

    # Six operations per parameter and token, as the sequence is short: 12 h^2 parameters per layer, and V h of the
    # output embedding (Kaplan et al., 2020).
    h, n_layers, vocabulary = 4096, 24, 50_000
    parameters = n_layers * 12 * h**2 + vocabulary * h
    tflops = alpa.util.compute_gpt_tflops(8, 1, n_layers, h, vocabulary, num_gpus=1, latency=2.0)
    assert tflops == pytest.approx(6 * parameters * 8 / 2.0 / 1e12, rel=1e-3)


def test_timers_measure_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    timer = alpa.timers("step")
    assert "step" in alpa.timers and alpa.timers("step") is alpa.timer.timers("step") is timer
    synced: list[int] = []
    for _ in range(2):
        timer.start(lambda: synced.append(1))
        timer.stop(lambda: synced.append(2))
    assert len(timer.costs) == 2 and synced == [1, 2, 1, 2]
    assert timer.elapsed("sum") == pytest.approx(2 * timer.elapsed())
    alpa.timers.log(["step"])
    timer.log()
    assert re.fullmatch(r"(time \(ms\) \| step: \d+\.\d\d\n){2}", capsys.readouterr().out)
    with pytest.raises(minialpa.MinialpaError, match="does not run"):
        timer.stop()
    timer.reset()
    assert timer.elapsed() == 0.0


# ---- names ----------------------------------------------------------------------------------------------------------

#: Names that work, by the page.
WORKS = re.findall(r"^\| `(\w+)` \|", PAGE.partition("## Names that work")[2].partition("\n## ")[0], re.MULTILINE)


def test_the_page_has_every_name_setting_and_sentence() -> None:
    assert len(WORKS) > 50
    for name in WORKS:
        assert not isinstance(getattr(alpa, name), names.Instead), name
    public = {name for name in vars(alpa) if f" as {name}\n" in Path(str(alpa.__file__)).read_text(encoding="utf-8")}
    assert {name for name in public if name[0] != "_"} <= set(WORKS)
    for name, sentence in names.INSTEAD.items():
        assert f"| `{name}` | {sentence} |" in PAGE
    for owner in ADJUSTABLE:
        for name, setting in owner.SETTINGS.items():
            kind = "error" if setting.is_refused else "warning"
            assert f"| `{owner.__name__}.{name}` | {kind} | {setting.sentence} |" in PAGE


def test_the_example_of_the_page_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(example, "docs/alpa.md", "exec"), found)
    assert np.isfinite(float(found["loss"]))


@pytest.mark.parametrize("name", sorted(name for name in names.INSTEAD if not name.startswith("executable.")))
def test_a_name_that_is_not_here_says_what_to_use(name: str) -> None:
    """It can be imported; to call it, to ask for its type and to take an attribute raise the sentence."""
    sentence = re.escape(names.INSTEAD[name])
    module, _, attribute = f"minialpa.compat.alpa.{name}".rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    with pytest.raises(minialpa.MinialpaError, match=sentence):
        found(lambda x: x)
    with pytest.raises(minialpa.MinialpaError, match=sentence):
        isinstance(1, found)
    with pytest.raises(AttributeError, match=sentence):
        found.anything  # noqa: B018


def test_names_come_from_their_modules_or_from_minialpa() -> None:
    for path, name in (
        ("pipeline_parallel.layer_construction", "ManualLayerOption"),
        ("pipeline_parallel.primitive_def", "mark_pipeline_boundary"),
        ("pipeline_parallel.stage_construction", "get_last_dp_result"),
        ("shard_parallel.auto_sharding", "AutoShardingOption"),
        ("shard_parallel.manual_sharding", "ManualShardingOption"),
    ):
        assert getattr(importlib.import_module(f"minialpa.compat.alpa.{path}"), name) is getattr(alpa, name)
    assert alpa.ClusterSpec is minialpa.ClusterSpec and alpa.save_checkpoint is minialpa.save_checkpoint
    assert alpa.__version__ == minialpa.__version__ and alpa.ReplicatedDistributedArray is alpa.DistributedArray
    assert float(alpa.grad(lambda x: x**2)(3.0)) == 6.0
    with pytest.raises(AttributeError, match=r"`paralelize` is no name of Alpa that minialpa knows"):
        alpa.paralelize  # noqa: B018
    with pytest.raises(AttributeError, match=r"`util.xyzzy` is no name of Alpa"):
        alpa.util.xyzzy  # noqa: B018


def test_functions_without_effect_warn() -> None:
    with pytest.warns(UserWarning, match="Delete the function"):
        alpa.clear_executable_cache()
    with pytest.warns(UserWarning, match="keys to the step"):
        alpa.set_seed(3)


def test_a_plan_is_a_method() -> None:
    step, args = step_with(alpa.value_and_grad), make_state_and_batch()
    plan = alpa.parallelize(step, method=alpa.get_3d_parallel_method(2, 2, 1, 2)).plan(*args)
    same = alpa.parallelize(step, method=alpa.plan_to_method(plan)).plan(*args)
    assert [stage.layers for stage in same.stages] == [stage.layers for stage in plan.stages]
    assert [stage.logical_shape for stage in plan.stages] == [(2, 1), (2, 1)]
