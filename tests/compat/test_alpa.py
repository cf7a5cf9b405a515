"""Scripts in the style of Alpa's users run under `minialpa.compat.alpa` as on one device; each name works or helps."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import minialpa
import minialpa.compat.alpa as alpa
from minialpa.compat.alpa import names, options
from minialpa.compat.alpa.global_env import GlobalConfig
from minialpa.compat.alpa.settings import Adjustable
from tests.compat.alpa_scripts import BATCH_SIZE, make_state_and_batch, step_with, train_and_compare
from tests.runtime.cluster.in_process_session import in_process_session

PAGE = (Path(__file__).parents[2] / "docs" / "alpa.md").read_text(encoding="utf-8")

#: The classes with settings.
ADJUSTABLE: tuple[type[Adjustable], ...] = (
    *(cls for cls in vars(options).values() if dataclasses.is_dataclass(cls) and cls.__module__ == options.__name__),
    GlobalConfig,
)


@pytest.fixture(autouse=True)
def _as_in_a_script() -> Iterator[None]:
    """Scripts run under jax's own dtype promotion, start and end a session, and change global settings."""
    alpa.shutdown()
    before = dataclasses.asdict(alpa.global_config)
    with jax.numpy_dtype_promotion("standard"):
        yield
    vars(alpa.global_config).update(before)
    alpa.shutdown()


# ---- scripts --------------------------------------------------------------------------------------------------------


def test_a_shard_parallel_script_trains_as_on_one_device() -> None:
    alpa.init(cluster="local")
    executable = train_and_compare(alpa.ShardParallel(num_micro_batches=2))
    assert isinstance(executable.get_hlo_text(), str) and "HloModule" in executable.get_hlo_text()


def test_the_default_method_is_shard_parallel_over_all_devices() -> None:
    alpa.init(cluster="local")
    executable = train_and_compare(None)
    (stage,) = executable.get_parallel_plan().stages
    assert stage.n_devices == 8


@pytest.mark.parametrize("make", [alpa.DataParallel, alpa.Zero2Parallel, alpa.Zero3Parallel])
def test_a_method_that_fixes_the_sharding_trains_as_on_one_device(make: Callable[[], Any]) -> None:
    alpa.init(cluster="local")
    total, all_reduce, all_gather, reduce_scatter, all_to_all = alpa.util.count_communication_primitives(
        train_and_compare(make()).get_hlo_text(), ignore_scalar_all_reduce=True
    )
    assert total == all_reduce + all_gather + reduce_scatter + all_to_all > 0
    assert (all_gather == 0) == (make is alpa.DataParallel)


def test_a_pipeline_with_manual_boundaries_trains_as_on_one_device() -> None:
    alpa.init(cluster="local", num_nodes=1, num_devices_per_node=4)
    method = alpa.PipeshardParallel(num_micro_batches=4, layer_option="manual", stage_option="uniform")
    executable = train_and_compare(method, manual=True)
    texts = executable.get_hlo_text()
    assert isinstance(texts, list) and len(texts) == len(executable.function_names)
    assert len(executable.get_parallel_plan().stages) == 2


@pytest.mark.slow  # boundaries by hand are the short relative
def test_stages_by_hand_with_rematerialised_layers_train_as_on_one_device() -> None:
    alpa.init(cluster="local")
    method = alpa.PipeshardParallel(
        num_micro_batches=2,
        layer_option=alpa.AutoLayerOption(layer_num=2, remat_mode="coarse_grained_remat"),
        stage_option=alpa.ManualStageOption(
            forward_stage_layer_ids=[[0], [1]],
            submesh_physical_shapes=[[1, 4], [1, 4]],
            submesh_logical_shapes=[[4, 1], [2, 2]],
            submesh_autosharding_option_dicts=[
                {"force_batch_dim_to_mesh_dim": 0, "allow_mixed_mesh_shape": True},
                {},
            ],
        ),
    )
    plan = train_and_compare(method).get_parallel_plan()
    assert [stage.logical_shape for stage in plan.stages] == [(4, 1), (2, 2)]
    assert plan.stages[0].option.force_batch_dim_to_mesh_dim == 0
    assert set(plan.remat) == {"full"}


def test_a_3d_method_trains_as_on_one_device() -> None:
    alpa.init(cluster="local")
    method = alpa.get_3d_parallel_method(
        num_micro_batches=2, data_parallel=-1, operator_parallel=2, pipeline_parallel=2
    )
    plan = train_and_compare(method).get_parallel_plan()
    assert [stage.logical_shape for stage in plan.stages] == [(2, 2), (2, 2)]


@pytest.mark.slow  # the tests below plan stages, too
def test_stages_are_searched_with_alpas_defaults() -> None:
    alpa.init(cluster="local", num_nodes=1, num_devices_per_node=2)
    method = alpa.PipeshardParallel(
        num_micro_batches=2,
        layer_option=alpa.AutoLayerOption(layer_num=2),
        stage_option=alpa.AutoStageOption(use_hlo_cost_model=True),
    )
    train_and_compare(method, n_steps=1)

    # What was found can be given by hand.
    _, *found = alpa.get_last_dp_result()
    by_hand = alpa.PipeshardParallel(
        num_micro_batches=2,
        layer_option=alpa.AutoLayerOption(layer_num=2),
        stage_option=alpa.ManualStageOption(*found),
    )
    plan = train_and_compare(by_hand, n_steps=1).get_parallel_plan()
    assert [stage.submesh for stage in plan.stages] == list(found[1])


# ---- options that change after they were made -----------------------------------------------------------------------


def test_options_may_change_until_a_step_is_planned() -> None:
    as_option = alpa.AutoShardingOption()
    method = alpa.ShardParallel(auto_sharding_option=as_option)
    as_option.force_data_parallel = True
    method.as_option.prefer_reduce_scatter = True
    expected = minialpa.AutoShardingOption(force_data_parallel=True, prefer_reduce_scatter=True)
    assert method.auto_sharding_option == method.options().sharding == expected

    layers = alpa.AutoLayerOption(layer_num=2)
    pipeline = alpa.PipeshardParallel(layer_option=layers)
    layers.layer_num, layers.remat_layer = 3, True
    assert pipeline.options().layers == minialpa.AutoLayerOption(3, remat="full")
    pipeline.as_option.allow_all_to_all = False
    assert pipeline.options().sharding == minialpa.AutoShardingOption(
        prefer_reduce_scatter=True, allow_all_to_all=False
    )


def test_a_changed_option_decides_the_plan() -> None:
    alpa.init(cluster="local")
    as_option = alpa.AutoShardingOption()
    method = alpa.ShardParallel(auto_sharding_option=as_option)
    step = alpa.parallelize(step_with(alpa.value_and_grad), method=method)
    as_option.force_zero_stage_3 = True
    (stage,) = step.plan(*make_state_and_batch()).stages
    assert stage.option.force_zero_stage_3


def test_methods_are_minialpas_and_survive_copies() -> None:
    for method in (alpa.ShardParallel(num_micro_batches=2), alpa.Zero2Parallel(), alpa.PipeshardParallel()):
        assert dataclasses.replace(method, devices=None) == method
        assert pickle.loads(pickle.dumps(method)) == method
    assert isinstance(alpa.DataParallel(), alpa.ShardParallel)
    assert isinstance(alpa.DataParallel(), minialpa.DataParallel)
    assert alpa.ShardParallel(logical_shape=(2, 4)).options().logical_shape == (2, 4)
    with pytest.raises(TypeError, match="num_microbatches"):
        alpa.ShardParallel(num_microbatches=2)
    cluster = minialpa.ClusterSpec.preset("h100")
    assert minialpa.plan(step_with(alpa.value_and_grad), make_state_and_batch(), cluster=cluster, method=method).stages


def test_an_option_that_does_not_exist_is_refused() -> None:
    with pytest.raises(AttributeError, match="`AutoShardingOption` has no option `force_data_paralel`"):
        alpa.AutoShardingOption().force_data_paralel = True
    with pytest.raises(AttributeError, match="`GlobalConfig` has no option `resharding`"):
        alpa.global_config.resharding = 1
    with pytest.raises(minialpa.ShardingError, match="`remat_mode` is one of 'none', 'coarse"):
        alpa.AutoLayerOption(2, remat_mode="all")


OTHER_VALUES = {bool: lambda x: not x, int: lambda x: x + 1, float: lambda x: 0.125}


def _other(value: Any) -> Any:
    """A value of the same kind that is not `value`."""
    return OTHER_VALUES.get(type(value), lambda x: "other")(value)


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
    other = value or _other(default)
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
    for field in dataclasses.fields(owner):  # type: ignore[arg-type]
        assert field.name in known | set(owner.SETTINGS) or f"    {field.name}:" in str(owner.__doc__), field.name


@pytest.mark.parametrize("owner", [alpa.AutoShardingOption, alpa.AutoStageOption, alpa.UniformStageOption])
def test_an_option_has_the_fields_of_minialpas(owner: type[Adjustable]) -> None:
    """A new field of minialpa's option is added to Alpa's, too."""
    ours = {field.name for field in dataclasses.fields(getattr(minialpa, owner.__name__))}
    assert ours <= {field.name for field in dataclasses.fields(owner)}  # type: ignore[arg-type]


def test_an_argument_without_an_equal_is_refused() -> None:
    with pytest.raises(minialpa.ShardingError, match=re.escape("`AutoShardingOption(fixed_specs=...)`")):
        alpa.PipeshardParallel(stage_input_shardings=[1])


def test_the_overlap_friendly_schedule_is_1f1b_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="`pipeline_schedule='1f1b_overlap_friendly'` has no equal"):
        method = alpa.PipeshardParallel(pipeline_schedule="1f1b_overlap_friendly")
    assert method.options().schedule == "1f1b"


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


def test_the_cluster_is_that_of_the_session() -> None:
    alpa.init("local", None, 2, 4)
    cluster = alpa.get_global_cluster()
    assert (cluster.num_hosts, cluster.num_devices, cluster.host_num_devices) == (2, 8, [4, 4])
    mesh = cluster.get_virtual_physical_mesh()
    assert (mesh.shape, mesh.num_devices, mesh.devices) == ((2, 4), 8, [[0, 1, 2, 3]] * 2)
    assert mesh.get_logical_mesh().shape == (2, 4)
    assert mesh.target() == minialpa.session.current_session().cluster
    assert isinstance(mesh.get_physical_mesh(), alpa.DistributedPhysicalDeviceMesh)
    with pytest.raises(minialpa.ShardingError, match="The session has 2 hosts with 4 devices each; got hosts"):
        cluster.get_virtual_physical_mesh([2])
    with pytest.raises(minialpa.MinialpaError, match="minialpa profiles nothing before it plans"):
        cluster.profile_all("p3.16")


def test_meshes_are_cut() -> None:
    alpa.init("local", None, 2, 4)
    mesh = alpa.get_global_virtual_physical_mesh()
    second = mesh.slice_1d(0, [1])
    assert (second.host_ids, second.shape) == ((1,), (1, 4))
    assert second.target() == jax.devices()[4:8]
    half = mesh.slice_1d(1, [[2, 3], [2, 3]])
    assert (half.shape, half.devices) == ((2, 2), [[2, 3], [2, 3]])
    with pytest.raises(minialpa.ShardingError, match="runs on the first hosts of a session"):
        half.target()
    assert mesh.slice_2d([0], [[1, 2]]).target() == jax.devices()[1:3]
    with pytest.raises(minialpa.ShardingError, match="Host 0 of the mesh has the devices"):
        mesh.slice_2d([0], [[7]])
    with pytest.raises(minialpa.ShardingError, match="stands for the first devices of the session"):
        second.get_logical_mesh((2, 2))


def test_a_step_runs_on_the_mesh_that_a_script_gives() -> None:
    alpa.init("local", None, 2, 4)
    second = alpa.get_global_virtual_physical_mesh().slice_1d(0, [1])
    state, batch = make_state_and_batch()
    step = alpa.parallelize(step_with(alpa.value_and_grad), method=alpa.ShardParallel(devices=second))
    new_state, _ = step(state, batch)
    used = {device for leaf in jax.tree.leaves(new_state.params) for device in leaf.devices()}
    assert used == set(jax.devices()[4:8])


def test_the_global_mesh_is_read_when_a_step_is_planned() -> None:
    alpa.init("local", None, 1, 8)
    method = alpa.PipeshardParallel(num_micro_batches=2, layer_option=alpa.AutoLayerOption(layer_num=2))
    alpa.set_global_virtual_physical_mesh(alpa.get_global_cluster().get_virtual_physical_mesh([0], 4))
    assert alpa.get_global_virtual_physical_mesh().num_devices == 4
    executable = train_and_compare(method, n_steps=1)
    assert [stage.n_devices for stage in executable.get_parallel_plan().stages] == [2, 2]

    # It ends with its session.
    alpa.shutdown()
    assert alpa.get_global_virtual_physical_mesh().num_devices == 8


def test_a_logical_mesh_of_local_devices_shards_a_step() -> None:
    mesh = alpa.LocalPhysicalDeviceMesh(jax.local_devices()[:4])
    assert (mesh.num_hosts, mesh.num_devices, mesh.shape) == (1, 4, (1, 4))
    logical = mesh.get_logical_mesh([2, 2], [1, 1], [1, 0.1])
    assert logical == minialpa.LogicalMesh((2, 2), (1.0, 1.0), (1.0, 0.1))
    assert mesh.get_logical_mesh((2, 2)).device is not None
    option = alpa.AutoShardingOption(force_batch_dim_to_mesh_dim=0)
    (stage,) = train_and_compare(alpa.ShardParallel(logical, 2, option)).get_parallel_plan().stages
    assert stage.logical_shape == (2, 2)
    mesh.sync_workers()
    mesh.shutdown()

    with pytest.raises(minialpa.ShardingError, match="cannot be viewed as"):
        mesh.get_logical_mesh((2, 3))
    with pytest.raises(minialpa.ShardingError, match=r"and these are others: .* Use `ShardParallel\(devices="):
        alpa.LocalPhysicalDeviceMesh(jax.local_devices()[4:]).get_logical_mesh((2, 2))
    with pytest.raises(minialpa.ShardingError, match="`devices` is a list of jax devices"):
        alpa.LocalPhysicalDeviceMesh([0, 1])  # type: ignore[list-item]


@pytest.mark.slow  # tests/test_alpa_scripts.py has more scripts
def test_a_script_runs_on_workers() -> None:
    with in_process_session(2, 2):
        cluster = alpa.get_global_cluster()
        assert (cluster.num_hosts, cluster.host_num_devices) == (2, [2, 2])
        method = alpa.PipeshardParallel(num_micro_batches=2, layer_option="manual")
        state, batch = make_state_and_batch(manual=True)
        step = alpa.parallelize(step_with(alpa.value_and_grad), method=method)
        expected, expected_loss = step_with(jax.value_and_grad)(state, batch)
        actual, loss = step(state, batch)
        assert isinstance(loss, alpa.DistributedArray)
        alpa.prefetch(loss)
        alpa.testing.assert_allclose((actual.params, loss), (expected.params, expected_loss))
        runs = [run for stage in step.get_last_executable().get_stage_execution_info() for run in stage]
        assert {run.node_ids for run in runs} == {(0,), (1,)}

        # Workers run a plan on the first hosts only, and their devices are not of this process.
        mesh = alpa.get_global_virtual_physical_mesh()
        assert mesh.slice_1d(0, [0]).target().n_devices == 2
        with pytest.raises(minialpa.ShardingError, match="minialpa runs on the first hosts of a session"):
            alpa.ShardParallel(devices=mesh.slice_1d(0, [1])).devices  # noqa: B018
        with pytest.raises(minialpa.MinialpaError, match=r"wait with `executable\.sync\(\)`"):
            mesh.get_physical_mesh().sync_workers()

        alpa.set_global_virtual_physical_mesh(mesh.slice_1d(0, [0]))
        doubled = alpa.parallelize(lambda x: x * 2, batch_argnums=())(np.ones((8, 2), np.float32))
        alpa.testing.assert_allclose(doubled, np.full((8, 2), 2.0))


# ---- executables ----------------------------------------------------------------------------------------------------


def test_a_benchmark_script_times_its_steps() -> None:
    alpa.init(cluster="local")
    alpa.global_config.shard_parallel_sync_for_timer = True
    executable = train_and_compare(alpa.ShardParallel(), n_steps=3)
    assert len(executable.get_execution_time_costs()) == 3
    assert all(cost > 0 for cost in executable.get_execution_time_costs())
    assert len(executable.profile_with_dummy_inputs()) == 3
    assert executable.get_total_allocation_size() > 0


def test_times_that_nobody_measured_are_an_error() -> None:
    alpa.init(cluster="local")
    executable = train_and_compare(alpa.ShardParallel(), n_steps=1)
    with pytest.raises(minialpa.MinialpaError, match=r"Set `global_config\.shard_parallel_sync_for_timer`"):
        executable.get_execution_time_costs()
    costs = executable.profile_with_dummy_inputs()
    assert executable.get_execution_time_costs() == costs


@pytest.mark.slow  # a script times its steps in the test above
def test_the_execution_of_stages_is_measured() -> None:
    alpa.init(cluster="local", num_nodes=1, num_devices_per_node=4)
    method = alpa.PipeshardParallel(num_micro_batches=2, layer_option="manual")
    executable = train_and_compare(method, manual=True, n_steps=1)
    info = executable.get_stage_execution_info()
    # A forward pass, a backward pass and an update for each stage, as in Alpa.
    assert len(info) == len(executable.function_names) == 6
    runs = [run for stage in info for run in stage]
    assert {tuple(devices) for _, _, _, devices in runs} == {(0, 1), (2, 3)}
    # A program that was done when its turn came takes no time.
    assert all(0 <= start <= stop and nodes == (0,) for start, stop, nodes, _ in runs)
    assert any(start < stop for start, stop, *_ in runs)
    # Each pass runs once for each micro-batch.
    assert list(map(len, info)) == [2, 2, 2, 2, 1, 1]


def test_a_placement_spec_has_alpas_arguments_and_is_minialpas() -> None:
    spec = alpa.PlacementSpec(jax.core.ShapedArray((4, 2), jnp.float32), (0, 1), (PartitionSpec("x"), PartitionSpec()))
    assert isinstance(spec, minialpa.PlacementSpec)
    assert (spec.shape, spec.dtype, spec.mesh_ids) == ((4, 2), "float32", (0, 1))
    assert spec.sharding_specs == spec.partition_specs == (PartitionSpec("x"), PartitionSpec())


# ---- util and timers ------------------------------------------------------------------------------------------------


def test_benchmark_func_returns_seconds_per_call() -> None:
    calls: list[str] = []
    costs = alpa.util.benchmark_func(
        lambda: calls.append("run"), lambda: calls.append("sync"), warmup=2, repeat=3, number=4
    )
    assert costs.shape == (3,) and (costs >= 0).all()
    assert calls == ["run"] * 2 + (["sync"] + ["run"] * 4 + ["sync"]) * 3
    assert alpa.util.benchmark_func(lambda: None, repeat=1, min_repeat_second=0.001).shape == (1,)


def test_print_used_time_prints_the_seconds_since_the_last_call(capsys: pytest.CaptureFixture[str]) -> None:
    alpa.util.print_used_time(None)
    alpa.util.print_used_time("Compile")
    assert re.fullmatch(r" - Compile: \d\.\d\d s\n", capsys.readouterr().out)


def test_write_tsv_appends_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.tsv"
    for batch_size in (8, 16):
        alpa.util.write_tsv(["batch", "time"], [batch_size, 0.5], str(file))
    assert file.read_text() == "8\t0.5\n16\t0.5\n"
    assert capsys.readouterr().out.splitlines()[0] == "batch: 8  time: 0.5  "
    with pytest.raises(minialpa.MinialpaError, match="1 heads and 2 values"):
        alpa.util.write_tsv(["batch"], [1, 2], str(file))


def test_sizes_of_trees() -> None:
    tree = {"w": np.ones((2, 3), np.float32), "n": jax.ShapeDtypeStruct((4,), jnp.bfloat16), "name": "mlp"}
    assert alpa.util.compute_param_number(tree) == 10
    assert alpa.util.compute_bytes(tree) == 24 + 8
    assert alpa.util.map_to_shape(tree) == {"w": (2, 3), "n": (4,), "name": None}
    assert alpa.util.map_to_nparray({"x": jnp.ones(2), "i": 1})["i"] == 1
    assert alpa.util.to_str_round([1.5, (2, "a"), {"x": 0.25}], 2) == "[1.50, [2, a], {'x': '0.25'}]"


def test_tflops_of_a_gpt_are_six_operations_per_parameter_and_token() -> None:
    """As the sequence is short: 12 h^2 parameters per layer, and V h of the output embedding (Kaplan et al., 2020)."""
    h, n_layers, vocabulary = 4096, 24, 50_000
    parameters = n_layers * 12 * h**2 + vocabulary * h
    tflops = alpa.util.compute_gpt_tflops(8, 1, n_layers, h, vocabulary, num_gpus=1, latency=2.0)
    assert tflops == pytest.approx(6 * parameters * 8 / 2.0 / 1e12, rel=1e-3)


def test_timers_measure_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    timer = alpa.timers("step")
    assert "step" in alpa.timers and alpa.timers("step") is timer
    synced: list[int] = []
    for _ in range(2):
        timer.start(lambda: synced.append(1))
        timer.suspend()
        timer.start()
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
        assert sentence.endswith(".") and not re.search(r"[a-z`)]\. [A-Z]", sentence), sentence
    for owner in ADJUSTABLE:
        for name, setting in owner.SETTINGS.items():
            kind = "error" if setting.is_refused else "warning"
            assert f"| `{owner.__name__}.{name}` | {kind} | {setting.sentence} |" in PAGE


def test_the_example_of_the_page_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(example, "docs/alpa.md", "exec"), found)
    assert np.isfinite(float(found["loss"]))


@pytest.mark.parametrize("name", sorted(names.INSTEAD))
def test_a_name_that_is_not_here_says_what_to_use(name: str) -> None:
    """It can be imported; to call it, to ask for its type and to take an attribute raise the sentence."""
    sentence = re.escape(names.INSTEAD[name])
    module, _, attribute = f"minialpa.compat.alpa.{name}".rpartition(".")
    if ".executable" in module:
        executable = alpa.parallelize(lambda x: x * 2, batch_argnums=()).get_executable(np.ones(8, np.float32))
        with pytest.raises(AttributeError, match=sentence):
            getattr(executable, attribute)
        return
    found = getattr(importlib.import_module(module), attribute)
    with pytest.raises(minialpa.MinialpaError, match=sentence):
        found(lambda x: x)
    with pytest.raises(minialpa.MinialpaError, match=sentence):
        isinstance(1, found)
    with pytest.raises(AttributeError, match=sentence):
        found.anything  # noqa: B018


@pytest.mark.parametrize(
    "path, name",
    [
        ("pipeline_parallel.layer_construction", "ManualLayerOption"),
        ("pipeline_parallel.primitive_def", "mark_pipeline_boundary"),
        ("pipeline_parallel.stage_construction", "get_last_dp_result"),
        ("shard_parallel.auto_sharding", "AutoShardingOption"),
        ("shard_parallel.manual_sharding", "ManualShardingOption"),
    ],
)
def test_a_script_may_import_from_the_modules_of_alpa(path: str, name: str) -> None:
    assert getattr(importlib.import_module(f"minialpa.compat.alpa.{path}"), name) is getattr(alpa, name)


def test_an_unknown_name_says_where_to_look() -> None:
    with pytest.raises(AttributeError, match=r"`paralelize` is no name of Alpa that minialpa knows"):
        alpa.paralelize  # noqa: B018
    with pytest.raises(AttributeError, match=r"`util.xyzzy` is no name of Alpa"):
        alpa.util.xyzzy  # noqa: B018


def test_names_that_need_no_equal_of_their_own_are_minialpas() -> None:
    assert alpa.ClusterSpec is minialpa.ClusterSpec and alpa.save_checkpoint is minialpa.save_checkpoint
    assert alpa.__version__ == minialpa.__version__ and alpa.ReplicatedDistributedArray is alpa.DistributedArray
    assert isinstance(alpa.parallelize(abs), alpa.ParallelizedFunc)
    assert float(alpa.grad(lambda x: x**2)(3.0)) == 6.0
    layers = alpa.PipeshardParallel(layer_option=alpa.ManualLayerOption(remat_layer=True)).options().layers
    assert layers == minialpa.ManualLayerOption(remat=True)
    stages = alpa.UniformStageOption(2, [1, 2], [2, 1], {"prefer_reduce_scatter": True}).read()
    option = minialpa.AutoShardingOption(prefer_reduce_scatter=True)
    assert stages == minialpa.UniformStageOption(2, (1, 2), (2, 1), option)


def test_what_has_no_effect_warns() -> None:
    with pytest.warns(UserWarning, match="Delete the function"):
        alpa.clear_executable_cache()
    with pytest.warns(UserWarning, match="keys to the step"):
        alpa.set_seed(3)


def test_a_plan_is_a_method() -> None:
    step, args = step_with(alpa.value_and_grad), make_state_and_batch()
    plan = alpa.parallelize(step, method=alpa.get_3d_parallel_method(2, 2, 1, 2)).plan(*args)
    again = alpa.parallelize(step, method=alpa.plan_to_method(plan)).plan(*args)
    assert [stage.layers for stage in again.stages] == [stage.layers for stage in plan.stages]


def test_a_step_runs_on_a_global_physical_mesh() -> None:
    assert alpa.get_global_physical_mesh(create_if_not_exist=True).num_devices == alpa.get_global_num_devices() == 8
    alpa.set_global_physical_mesh(alpa.LocalPhysicalDeviceMesh(jax.devices()[6:]))
    assert isinstance(alpa.get_global_physical_mesh(), alpa.LocalPhysicalDeviceMesh)
    y = alpa.parallelize(lambda x: x * 2, batch_argnums=())(np.ones((BATCH_SIZE, 2), np.float32))
    assert y.devices() == set(jax.devices()[6:])
