"""A name of Alpa goes in; minialpa's object, or an error with the replacement, comes out. docs/alpa.md lists all
names.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import minialpa
from minialpa.errors import MinialpaError

_MODEL = "Use `minialpa.models.build(name)`, or a flax model of your own."
_JIT = "Run the step under `jax.jit` to compare with one device."
_LAYERS = "Use `AutoLayerOption` or `ManualLayerOption` as `layer_option` of `PipeshardParallel`."
_FIGURES = "Use `minialpa calibrate`, or give the figures of devices and links by `minialpa.ClusterSpec`."
_TIMES = "Use `executable.stage_timeline()`, which times every stage program."

#: Replacements of names of a module or of an executable.
INSTEAD = {
    "BertConfig": _MODEL,
    "BertLayerModel": _MODEL,
    "DynamicScale": "Use `flax.training.dynamic_scale.DynamicScale`.",
    "LocalPipelineParallel": _JIT,
    "LogicalDeviceMesh": "Use `mesh.get_logical_mesh(shape, alpha, beta)`, or `minialpa.LogicalMesh`.",
    "MLPModel": _MODEL,
    "ManualPipeshardParallel": "Use `PipeshardParallel(stage_option=ManualStageOption(...))`.",
    "ParallelPlan": "Use `minialpa.Plan`, which `executable.get_parallel_plan()` returns.",
    "PhysicalDeviceMeshGroup": "Use `executable.get_parallel_plan().stages`.",
    "PipelineBasicTest": _JIT,
    "ProfilingResultDatabase": _FIGURES,
    "ThreeDParallel": "Use `get_3d_parallel_method(...)`.",
    "TrainState": "Use `flax.training.train_state.TrainState`.",
    "auto_sharding_objective": "Use `executable.get_parallel_plan().cost`, in seconds.",
    "automatic_layer_construction": _LAYERS,
    "automatic_remat": _LAYERS,
    "create_train_state": "Use `TrainState.create` of flax.",
    "get_bert_layer_train_state_and_step": _MODEL,
    "get_metrics": "Use `jax.tree.map(lambda *values: np.stack(values), *metrics)`.",
    "get_mlp_train_state_and_step": _MODEL,
    "get_num_hosts_and_num_devices": "Use `get_global_cluster().num_hosts` and its `num_devices`.",
    "get_shard_args_time_costs": "minialpa does not time this.",
    "get_stage_execution_info": _TIMES,
    "list_gpu_info": "Use `jax.devices()`, or the command `minialpa doctor`.",
    "manual_layer_construction": _LAYERS,
    "manual_remat": _LAYERS,
    "mesh_group": "Use `executable.get_parallel_plan().stages`, and `executable.sync()` to wait.",
    "physical_mesh": "Use `get_global_physical_mesh()`, and `executable.sync()` to wait.",
    "print_used_time": "Use `time.perf_counter()`.",
    "profile_all": _FIGURES,
    "profile_all_executable_with_dummy_inputs": _TIMES,
    "profile_xla_executable": "Use `executable.profile_with_dummy_inputs()`.",
    "run_cmd": "Use `subprocess.run` of Python.",
    "serve": "minialpa has no server.",
    "to_str_round": "Use format strings of Python.",
    "torch": "minialpa takes JAX steps only.",
}


class NotHereError(MinialpaError, ImportError):
    """A missing name of Alpa. An ImportError too, so that `from ... import name` raises it unchanged."""


def not_here(name: str) -> str:
    return f"`{name}` of Alpa is not here. {INSTEAD[name]}"


def find(name: str) -> Any:
    """The object for a name that a module does not define.

    Raises NotHereError for a missing name of Alpa, else AttributeError.
    """
    if name in INSTEAD:
        raise NotHereError(not_here(name))
    if name in minialpa.__all__:
        return getattr(minialpa, name)
    raise AttributeError(
        f"minialpa has no `{name}`, under Alpa's names or its own. `minialpa.__all__` lists its own names, and "
        "docs/alpa.md Alpa's."
    )


#: Modules of Alpa from which scripts import the names of this package.
_MODULES = (
    *("global_env", "mesh_profiling", "model", "model.bert_model", "model.gpt_model", "model.model_util"),
    *("parallel_plan", "pipeline_parallel", "pipeline_parallel.layer_construction"),
    *("pipeline_parallel.local_pipeline", "pipeline_parallel.primitive_def", "pipeline_parallel.stage_construction"),
    *("serialization", "shard_parallel", "shard_parallel.auto_sharding", "shard_parallel.manual_sharding"),
    *("testing", "timer"),
)


def add_modules(package: ModuleType) -> None:
    """Scripts import modules of Alpa, each with all names of `package`."""

    def of_package(name: str) -> Any:
        # Python asks modules for names such as `__path__`.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(package, name)

    for path in _MODULES:
        module = ModuleType(f"{package.__name__}.{path}", f"Names of Alpa's `{path}`.")
        vars(module).update(__path__=[], __getattr__=of_package)
        sys.modules[module.__name__] = module
        parent, _, last = module.__name__.rpartition(".")
        setattr(sys.modules[parent], last, module)
