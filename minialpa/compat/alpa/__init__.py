"""A script for Alpa with `import minialpa.compat.alpa as alpa` goes in, and runs on minialpa.

A missing name of Alpa raises an error with its replacement. minialpa's own names are here, too.
"""

import sys
from typing import Any

from minialpa import __version__ as __version__
from minialpa.compat.alpa import data_loader as data_loader
from minialpa.compat.alpa import device_mesh as device_mesh
from minialpa.compat.alpa import names as _names
from minialpa.compat.alpa import parallel_method as parallel_method
from minialpa.compat.alpa import util as util
from minialpa.compat.alpa.api import HloStatus as HloStatus
from minialpa.compat.alpa.api import ParallelizedFunc as ParallelizedFunc
from minialpa.compat.alpa.api import PlacementSpec as PlacementSpec
from minialpa.compat.alpa.api import clear_executable_cache as clear_executable_cache
from minialpa.compat.alpa.api import init as init
from minialpa.compat.alpa.api import parallelize as parallelize
from minialpa.compat.alpa.api import restore_checkpoint as restore_checkpoint
from minialpa.compat.alpa.api import save_checkpoint as save_checkpoint
from minialpa.compat.alpa.api import set_seed as set_seed
from minialpa.compat.alpa.api import shutdown as shutdown
from minialpa.compat.alpa.data_loader import DataLoader as DataLoader
from minialpa.compat.alpa.data_loader import MeshDriverDataLoader as MeshDriverDataLoader
from minialpa.compat.alpa.device_mesh import DeviceCluster as DeviceCluster
from minialpa.compat.alpa.device_mesh import DistributedArray as DistributedArray
from minialpa.compat.alpa.device_mesh import DistributedPhysicalDeviceMesh as DistributedPhysicalDeviceMesh
from minialpa.compat.alpa.device_mesh import LocalPhysicalDeviceMesh as LocalPhysicalDeviceMesh
from minialpa.compat.alpa.device_mesh import PhysicalDeviceMesh as PhysicalDeviceMesh
from minialpa.compat.alpa.device_mesh import ReplicatedDistributedArray as ReplicatedDistributedArray
from minialpa.compat.alpa.device_mesh import VirtualPhysicalMesh as VirtualPhysicalMesh
from minialpa.compat.alpa.device_mesh import get_global_cluster as get_global_cluster
from minialpa.compat.alpa.device_mesh import get_global_num_devices as get_global_num_devices
from minialpa.compat.alpa.device_mesh import get_global_physical_mesh as get_global_physical_mesh
from minialpa.compat.alpa.device_mesh import get_global_virtual_physical_mesh as get_global_virtual_physical_mesh
from minialpa.compat.alpa.device_mesh import set_global_physical_mesh as set_global_physical_mesh
from minialpa.compat.alpa.device_mesh import set_global_virtual_physical_mesh as set_global_virtual_physical_mesh
from minialpa.compat.alpa.manual_sharding import ManualShardingOption as ManualShardingOption
from minialpa.compat.alpa.options import AutoLayerOption as AutoLayerOption
from minialpa.compat.alpa.options import AutoShardingOption as AutoShardingOption
from minialpa.compat.alpa.options import AutoStageOption as AutoStageOption
from minialpa.compat.alpa.options import ManualLayerOption as ManualLayerOption
from minialpa.compat.alpa.options import ManualStageOption as ManualStageOption
from minialpa.compat.alpa.options import UniformStageOption as UniformStageOption
from minialpa.compat.alpa.options import global_config as global_config
from minialpa.compat.alpa.parallel_method import DataParallel as DataParallel
from minialpa.compat.alpa.parallel_method import PipeshardParallel as PipeshardParallel
from minialpa.compat.alpa.parallel_method import ShardParallel as ShardParallel
from minialpa.compat.alpa.parallel_method import Zero2Parallel as Zero2Parallel
from minialpa.compat.alpa.parallel_method import Zero3Parallel as Zero3Parallel
from minialpa.compat.alpa.parallel_method import get_3d_parallel_method as get_3d_parallel_method
from minialpa.compat.alpa.util import timers as timers
from minialpa.testing import assert_allclose as assert_allclose


def __getattr__(name: str) -> Any:
    return _names.find(name)


_names.add_modules(sys.modules[__name__])
