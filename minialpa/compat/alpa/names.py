"""Names of Alpa without an equal, and modules of Alpa with names of this package. docs/alpa.md lists them."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NoReturn

import minialpa
from minialpa.errors import MinialpaError

#: What to use instead of a missing name: of the package, `module.name`, or `executable.name`.
INSTEAD = {
    "LocalPipelineParallel": "Run the step under `jax.jit` to compare with one device.",
    "LogicalDeviceMesh": "Use `mesh.get_logical_mesh(shape, mesh_alpha, mesh_beta)`, or `minialpa.LogicalMesh`.",
    "ManualPipeshardParallel": "Use `PipeshardParallel(stage_option=ManualStageOption(...))`.",
    "ParallelPlan": "Use `minialpa.Plan`, which `executable.get_parallel_plan()` returns and `plan.save(path)` writes.",
    "PhysicalDeviceMeshGroup": "Use `executable.get_parallel_plan().stages`; the session manages the meshes.",
    "ProfilingResultDatabase": "Use `minialpa calibrate`, or give the figures as `devices=minialpa.ClusterSpec(...)`.",
    "ThreeDParallel": "Use `get_3d_parallel_method(...)`.",
    "automatic_layer_construction": "Use `PipeshardParallel(layer_option=AutoLayerOption(layer_num=...))`.",
    "automatic_remat": (
        'Use `PipeshardParallel(layer_option=AutoLayerOption(layer_num=..., remat_mode="coarse_grained_remat"))`, or '
        "`jax.checkpoint` around the blocks of the model."
    ),
    "executable.auto_sharding_objective": "Use `executable.get_parallel_plan().cost`, in seconds.",
    "executable.mesh_group": "Use `executable.get_parallel_plan().stages`, and `executable.sync()` to wait.",
    "executable.physical_mesh": "Use `get_global_physical_mesh()`, and `executable.sync()` to wait.",
    "executable.profile_all_executable_with_dummy_inputs": (
        "Use `executable.stage_timeline()`, which times every stage program."
    ),
    "manual_layer_construction": "Use `PipeshardParallel(layer_option=ManualLayerOption(remat_layer=...))`.",
    "manual_remat": (
        "Use `PipeshardParallel(layer_option=ManualLayerOption(remat_layer=True))`, or `jax.checkpoint` around the "
        "blocks of the model."
    ),
    "model": "Use `minialpa.models.build(name)`, or models of your own; `TrainState` is that of flax.",
    "serve": "minialpa does not serve; run the parallelized function behind a server of your choice.",
    "set_jax_env_on_driver": 'Call `init(cluster="ray")` before other functions of jax; it leaves GPUs to the workers.',
    "testing.BertLayerModel": 'Use `minialpa.models.build("bert")`.',
    "testing.MLPModel": 'Use `minialpa.models.build("mlp")`.',
    "testing.PipelineBasicTest": "Compare the step with its run under `jax.jit` by `assert_allclose`.",
    "testing.create_train_state": "Use `minialpa.models.build(name).init(key)`, or `TrainState.create` of flax.",
    "testing.get_bert_layer_train_state_and_step": 'Use `minialpa.models.build("bert")`, its `init` and `train_step`.',
    "testing.get_mlp_train_state_and_step": 'Use `minialpa.models.build("mlp")`, its `init` and `train_step`.',
    "torch": "minialpa takes JAX steps only; translate the model to JAX first.",
    "util.get_num_hosts_and_num_devices": "Use `get_global_cluster().num_hosts` and its `host_num_devices`.",
    "util.list_gpu_info": "Use `jax.devices()`, or the command `minialpa doctor`.",
    "util.profile_xla_executable": "Use `executable.profile_with_dummy_inputs()`.",
    "util.run_cmd": "Use `subprocess.run` of Python.",
}


class Instead:
    """A name of Alpa that is not here. It can be imported; its use raises MinialpaError with the alternative."""

    def __init__(self, name: str, sentence: str) -> None:
        vars(self).update(_name=name, _sentence=sentence)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise MinialpaError(f"`{self._name}` of Alpa is not here. {self._sentence}")

    __call__ = __instancecheck__ = __getitem__ = __iter__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"`{self._name}` of Alpa is not here, nor its `{name}`. {self._sentence}")

    def __repr__(self) -> str:
        return f"<not here: {self._name}. {self._sentence}>"


def find(name: str) -> Any:
    """The object for an undefined "name" of the package or "module.name". Raises AttributeError for unknown names."""
    if name in INSTEAD:
        return Instead(name, INSTEAD[name])
    if name in minialpa.__all__:
        return getattr(minialpa, name)
    raise AttributeError(
        f"`{name}` is no name of Alpa that minialpa knows. `minialpa.__all__` lists what minialpa has, and "
        "docs/alpa.md what became of Alpa's names."
    )


#: Modules of Alpa that scripts import from, with their names of this package.
_MODULES = {
    "pipeline_parallel": (),
    "pipeline_parallel.layer_construction": (
        *("AutoLayerOption", "ManualLayerOption", "automatic_layer_construction", "automatic_remat"),
        *("manual_layer_construction", "manual_remat"),
    ),
    "pipeline_parallel.primitive_def": ("mark_pipeline_boundary",),
    "pipeline_parallel.stage_construction": (
        *("AutoStageOption", "ManualStageOption", "UniformStageOption", "get_last_dp_result"),
    ),
    "shard_parallel": (),
    "shard_parallel.auto_sharding": ("AutoShardingOption", "LogicalDeviceMesh"),
    "shard_parallel.manual_sharding": ("ManualShardingOption",),
    "timer": ("timers",),
}


def add_modules(package: ModuleType) -> None:
    """Let scripts import these modules of `package`."""
    for path, names in _MODULES.items():
        module = ModuleType(f"{package.__name__}.{path}", f"Names of Alpa's `{path}`.")
        for name in names:
            setattr(module, name, getattr(package, name))
        if not names:
            module.__path__ = []
        parent, _, last = module.__name__.rpartition(".")
        setattr(sys.modules[parent], last, module)
        sys.modules[module.__name__] = module
