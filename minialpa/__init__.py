"""minialpa: automatic intra- and inter-operator parallelism for JAX training steps.

`import minialpa` imports neither jax nor another module of minialpa. The first use of a name imports its module.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

# `typing` is a slow import. Type checkers read this as the constant of `typing`.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from minialpa import testing as testing
    from minialpa import util as util
    from minialpa.api.functions import check as check
    from minialpa.api.functions import explain as explain
    from minialpa.api.functions import get_last_dp_result as get_last_dp_result
    from minialpa.api.functions import parallelize as parallelize
    from minialpa.api.functions import phases as phases
    from minialpa.api.functions import plan as plan
    from minialpa.api.functions import replan as replan
    from minialpa.api.parallelized import ParallelizedFunc as ParallelizedFunc
    from minialpa.arrays import prefetch as prefetch
    from minialpa.checkpoints.manager import Checkpoint as Checkpoint
    from minialpa.checkpoints.manager import CheckpointManager as CheckpointManager
    from minialpa.checkpoints.manager import restore_checkpoint as restore_checkpoint
    from minialpa.checkpoints.manager import save_checkpoint as save_checkpoint
    from minialpa.cluster import ClusterSpec as ClusterSpec
    from minialpa.cluster import DeviceSpec as DeviceSpec
    from minialpa.cluster import LinkSpec as LinkSpec
    from minialpa.cluster import LogicalMesh as LogicalMesh
    from minialpa.data import DataLoader as DataLoader
    from minialpa.data import MeshDriverDataLoader as MeshDriverDataLoader
    from minialpa.errors import CheckpointError as CheckpointError
    from minialpa.errors import DeletedArrayError as DeletedArrayError
    from minialpa.errors import InfeasibleError as InfeasibleError
    from minialpa.errors import MinialpaError as MinialpaError
    from minialpa.errors import ShardingError as ShardingError
    from minialpa.errors import TraceError as TraceError
    from minialpa.errors import VerifyError as VerifyError
    from minialpa.errors import WorkerError as WorkerError
    from minialpa.inter.schedule.simulate import simulate as simulate
    from minialpa.inter.schedule.timeline import Timeline as Timeline
    from minialpa.kernels import check_sharding_rule as check_sharding_rule
    from minialpa.kernels import register_sharding_rule as register_sharding_rule
    from minialpa.methods import AutoParallel as AutoParallel
    from minialpa.methods import CreateStateParallel as CreateStateParallel
    from minialpa.methods import DataParallel as DataParallel
    from minialpa.methods import FollowParallel as FollowParallel
    from minialpa.methods import PipeshardParallel as PipeshardParallel
    from minialpa.methods import ShardParallel as ShardParallel
    from minialpa.methods import Zero2Parallel as Zero2Parallel
    from minialpa.methods import Zero3Parallel as Zero3Parallel
    from minialpa.methods import get_3d_parallel_method as get_3d_parallel_method
    from minialpa.methods import plan_to_method as plan_to_method
    from minialpa.options import AutoLayerOption as AutoLayerOption
    from minialpa.options import AutoShardingOption as AutoShardingOption
    from minialpa.options import AutoStageOption as AutoStageOption
    from minialpa.options import ManualLayerOption as ManualLayerOption
    from minialpa.options import ManualStageOption as ManualStageOption
    from minialpa.options import UniformStageOption as UniformStageOption
    from minialpa.plan import PlacementSpec as PlacementSpec
    from minialpa.plan import Plan as Plan
    from minialpa.report.visualize import visualize as visualize
    from minialpa.session import available_hosts as available_hosts
    from minialpa.session import init as init
    from minialpa.session import restart as restart
    from minialpa.session import shutdown as shutdown
    from minialpa.tracing.gradients import grad as grad
    from minialpa.tracing.gradients import mark_pipeline_boundary as mark_pipeline_boundary
    from minialpa.tracing.gradients import per_micro_batch as per_micro_batch
    from minialpa.tracing.gradients import value_and_grad as value_and_grad
    from minialpa.training import StepReport as StepReport
    from minialpa.training import TrainingEvent as TrainingEvent
    from minialpa.training import TrainingResult as TrainingResult
    from minialpa.training import train as train

__version__ = "0.1.0"

#: The public names of each module.
_NAMES = {
    "api.functions": "check explain get_last_dp_result parallelize phases plan replan",
    "api.parallelized": "ParallelizedFunc",
    "arrays": "prefetch",
    "checkpoints.manager": "Checkpoint CheckpointManager restore_checkpoint save_checkpoint",
    "cluster": "ClusterSpec DeviceSpec LinkSpec LogicalMesh",
    "data": "DataLoader MeshDriverDataLoader",
    "errors": "CheckpointError DeletedArrayError InfeasibleError MinialpaError ShardingError TraceError VerifyError "
    "WorkerError",
    "inter.schedule.simulate": "simulate",
    "inter.schedule.timeline": "Timeline",
    "kernels": "check_sharding_rule register_sharding_rule",
    "methods": "AutoParallel CreateStateParallel DataParallel FollowParallel PipeshardParallel ShardParallel "
    "Zero2Parallel Zero3Parallel get_3d_parallel_method plan_to_method",
    "options": "AutoLayerOption AutoShardingOption AutoStageOption ManualLayerOption ManualStageOption "
    "UniformStageOption",
    "plan": "PlacementSpec Plan",
    "report.visualize": "visualize",
    "session": "available_hosts init restart shutdown",
    "tracing.gradients": "grad mark_pipeline_boundary per_micro_batch value_and_grad",
    "training": "StepReport TrainingEvent TrainingResult train",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted([*_MODULE_OF, "__version__", "testing", "util"])


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        from importlib.util import find_spec

        if name in _MODULE_OF:
            value = getattr(importlib.import_module(f"minialpa.{_MODULE_OF[name]}"), name)
        elif not name.startswith("_") and find_spec(f"minialpa.{name}") is not None:
            value = importlib.import_module(f"minialpa.{name}")
        else:
            from minialpa.errors import meant

            raise AttributeError(f"module 'minialpa' has no attribute '{name}'.{meant(name, __all__)}", name=name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Python would replace the function `plan` when it imports the package `minialpa.plan`.
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
