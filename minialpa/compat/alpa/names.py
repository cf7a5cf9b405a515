"""The table of Alpa's names: what each one is here, or what to use instead. docs/alpa.md is made from it."""

from __future__ import annotations

import difflib
from typing import Any, NoReturn

import minialpa
from minialpa.errors import MinialpaError

#: Names that work, and what differs from Alpa, if anything does.
WORKS = {
    "AutoLayerOption": "`fine_grained_remat` recomputes every pipeline layer, as `coarse_grained_remat` does.",
    "AutoShardingOption": "`allow_mixed_mesh_shape` is always on; `fixed_specs` takes PartitionSpecs.",
    "AutoStageOption": "Costs are computed and not profiled; `single_node_model_parallel` is taken as `all`.",
    "DataLoader": "Batches of another size than the placement specs are not placed.",
    "DataParallel": "",
    "DeviceCluster": "The hosts of the session.",
    "DistributedArray": "Arrays on workers; in one process, arrays are jax's own.",
    "DistributedPhysicalDeviceMesh": "Made by `get_physical_mesh()` of a cluster or mesh.",
    "LocalPhysicalDeviceMesh": "Starts nothing; holds jax devices.",
    "ManualLayerOption": "",
    "ManualShardingOption": (
        "The planner chooses what it leaves out. None replicates. `jax.lax.with_sharding_constraint` takes bare "
        "PartitionSpecs over its axes."
    ),
    "ManualStageOption": "",
    "MeshDriverDataLoader": "A batch has the structure that `input_iter_func` gives it.",
    "ParallelizedFunc": "Takes keyword arguments, too.",
    "PhysicalDeviceMesh": "",
    "PipeshardParallel": "",
    "PlacementSpec": "`sharding_specs` are PartitionSpecs over the mesh axes `x` and `y`, however a script names them.",
    "ReplicatedDistributedArray": "The same class as `DistributedArray`.",
    "ShardParallel": "",
    "UniformStageOption": "",
    "VirtualPhysicalMesh": "",
    "Zero2Parallel": "",
    "Zero3Parallel": "",
    "__version__": "That of minialpa.",
    "data_loader": "The module with the loaders.",
    "clear_executable_cache": "Warns: programs belong to their parallelized function.",
    "device_mesh": "The module with meshes and clusters.",
    "get_3d_parallel_method": "",
    "get_global_cluster": "Starts a session on the local devices if there is none.",
    "get_global_num_devices": "",
    "get_global_physical_mesh": "Always exists.",
    "get_global_virtual_physical_mesh": "Always exists.",
    "get_last_dp_result": "",
    "global_config": "Attributes without an equal warn or raise; see below.",
    "global_env": "The module with `global_config`.",
    "grad": "Auxiliary results are those of the full batch.",
    "init": "A second call with other arguments is an error.",
    "mark_pipeline_boundary": "",
    "parallel_method": "The module with the methods.",
    "parallelize": "The step equals the full-batch step, also where its loss is a sum.",
    "plan_to_method": "Takes `executable.get_parallel_plan()`, a `minialpa.Plan`.",
    "prefetch": "",
    "set_global_physical_mesh": "",
    "set_global_virtual_physical_mesh": "",
    "set_seed": "Warns: random numbers depend on the keys of the step alone.",
    "shutdown": "May be called twice.",
    "testing": "Has `assert_allclose`.",
    "timer": "The module with `timers`.",
    "timers": "",
    "util": "Has the functions that are listed below.",
    "value_and_grad": "Auxiliary results are those of the full batch.",
}

#: Names that are those of minialpa where it has them, and what to use where it does not.
FROM_MINIALPA = {
    "CreateStateParallel": "Make the state with `jax.jit` and pass it through `train_step.preshard_dynamic_args(...)`.",
    "FollowParallel": "Parallelize the other step by a method of its own; arguments are moved where it reads them.",
    "restore_checkpoint": "Read arrays with a library such as orbax, and pass them to the step.",
    "save_checkpoint": "Write the arrays, which NumPy functions read, with a library such as orbax.",
}

#: Names that are not here, and what to use instead.
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
    "collective": "minialpa's sessions communicate by themselves; steps may use collectives of `jax.lax`.",
    "create_state_parallel": "Take `CreateStateParallel` from the package itself.",
    "follow_parallel": "Take `FollowParallel` from the package itself.",
    "manual_layer_construction": "Use `PipeshardParallel(layer_option=ManualLayerOption(remat_layer=...))`.",
    "manual_remat": (
        "Use `PipeshardParallel(layer_option=ManualLayerOption(remat_layer=True))`, or `jax.checkpoint` around the "
        "blocks of the model."
    ),
    "mesh_executable": "Executables come from `get_executable(...)` and `get_last_executable()`.",
    "mesh_profiling": "Use `minialpa calibrate`, or give the figures as `devices=minialpa.ClusterSpec(...)`.",
    "model": "Use `minialpa.models.build(name)`, or models of your own; `TrainState` is that of flax.",
    "monkey_patch": "minialpa patches nothing: `jax.random` in a step draws as on one device.",
    "parallel_plan": "Take `plan_to_method` from the package itself, and plans from `minialpa.Plan`.",
    "pipeline_parallel": "Take layer and stage options from the package itself.",
    "serialization": "Take `save_checkpoint` and `restore_checkpoint` from the package itself.",
    "serve": "minialpa does not serve; run the parallelized function behind a server of your choice.",
    "set_jax_env_on_driver": 'Call `init(cluster="ray")` before other functions of jax; it leaves GPUs to the workers.',
    "shard_parallel": "Take `AutoShardingOption` from the package itself.",
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

#: What helps if a name is in no table.
_ASK = "`minialpa.__all__` lists what minialpa has, and docs/alpa.md what became of Alpa's names."


class Instead:
    """A name of Alpa that is not here. It can be imported; using it raises MinialpaError, which says what to use."""

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
    """The object for a name that the package or its module does not define, as "name" or "module.name".

    Raises AttributeError for a name in no table.
    """
    if name in FROM_MINIALPA:
        return getattr(minialpa, name, Instead(name, FROM_MINIALPA[name]))
    if name in INSTEAD:
        return Instead(name, INSTEAD[name])
    if name in minialpa.__all__:
        return getattr(minialpa, name)
    close = difflib.get_close_matches(name, [*WORKS, *FROM_MINIALPA, *INSTEAD], n=1)
    hint = f" Did you mean `{close[0]}`?" if close else ""
    raise AttributeError(f"`{name}` is no name of Alpa that minialpa knows.{hint} {_ASK}")
