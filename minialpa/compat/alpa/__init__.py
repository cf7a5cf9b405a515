"""Alpa's names, for scripts that were written for Alpa: `import minialpa.compat.alpa as alpa`.

Each name does what it did in Alpa, or raises an error that says what to use instead; `names` has the table. Names that
only minialpa has are here, too.
"""

from typing import Any

from minialpa import (
    __version__,
    get_last_dp_result,
    grad,
    mark_pipeline_boundary,
    plan_to_method,
    prefetch,
    value_and_grad,
)
from minialpa.compat.alpa import data_loader, device_mesh, global_env, names, parallel_method, testing, timer, util
from minialpa.compat.alpa.api import (
    ParallelizedFunc,
    PlacementSpec,
    clear_executable_cache,
    init,
    parallelize,
    set_seed,
    shutdown,
)
from minialpa.compat.alpa.data_loader import DataLoader, MeshDriverDataLoader
from minialpa.compat.alpa.device_mesh import (
    DeviceCluster,
    DistributedArray,
    DistributedPhysicalDeviceMesh,
    LocalPhysicalDeviceMesh,
    PhysicalDeviceMesh,
    ReplicatedDistributedArray,
    VirtualPhysicalMesh,
    get_global_cluster,
    get_global_num_devices,
    get_global_physical_mesh,
    get_global_virtual_physical_mesh,
    set_global_physical_mesh,
    set_global_virtual_physical_mesh,
)
from minialpa.compat.alpa.global_env import global_config
from minialpa.compat.alpa.manual_sharding import ManualShardingOption
from minialpa.compat.alpa.options import (
    AutoLayerOption,
    AutoShardingOption,
    AutoStageOption,
    ManualLayerOption,
    ManualStageOption,
    UniformStageOption,
)
from minialpa.compat.alpa.parallel_method import (
    DataParallel,
    PipeshardParallel,
    ShardParallel,
    Zero2Parallel,
    Zero3Parallel,
    get_3d_parallel_method,
)
from minialpa.compat.alpa.timer import timers

__all__ = [
    "AutoLayerOption",
    "AutoShardingOption",
    "AutoStageOption",
    "DataLoader",
    "DataParallel",
    "DeviceCluster",
    "DistributedArray",
    "DistributedPhysicalDeviceMesh",
    "LocalPhysicalDeviceMesh",
    "ManualLayerOption",
    "ManualShardingOption",
    "ManualStageOption",
    "MeshDriverDataLoader",
    "ParallelizedFunc",
    "PhysicalDeviceMesh",
    "PipeshardParallel",
    "PlacementSpec",
    "ReplicatedDistributedArray",
    "ShardParallel",
    "UniformStageOption",
    "VirtualPhysicalMesh",
    "Zero2Parallel",
    "Zero3Parallel",
    "__version__",
    "clear_executable_cache",
    "data_loader",
    "device_mesh",
    "get_3d_parallel_method",
    "get_global_cluster",
    "get_global_num_devices",
    "get_global_physical_mesh",
    "get_global_virtual_physical_mesh",
    "get_last_dp_result",
    "global_config",
    "global_env",
    "grad",
    "init",
    "mark_pipeline_boundary",
    "parallel_method",
    "parallelize",
    "plan_to_method",
    "prefetch",
    "set_global_physical_mesh",
    "set_global_virtual_physical_mesh",
    "set_seed",
    "shutdown",
    "testing",
    "timer",
    "timers",
    "util",
    "value_and_grad",
]


def __getattr__(name: str) -> Any:
    return names.find(name)
