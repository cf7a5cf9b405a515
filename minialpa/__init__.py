"""minialpa: automatic intra- and inter-operator parallelism for JAX training steps."""

from minialpa import testing, util
from minialpa.api.functions import check, explain, get_last_dp_result, parallelize, phases, plan, replan
from minialpa.api.parallelized import ParallelizedFunc
from minialpa.arrays import prefetch
from minialpa.checkpoints.manager import Checkpoint, CheckpointManager, restore_checkpoint, save_checkpoint
from minialpa.cluster import ClusterSpec, DeviceSpec, LinkSpec, LogicalMesh
from minialpa.data import DataLoader, MeshDriverDataLoader
from minialpa.errors import (
    CheckpointError,
    DeletedArrayError,
    InfeasibleError,
    MinialpaError,
    ShardingError,
    TraceError,
    VerifyError,
    WorkerError,
)
from minialpa.inter.schedule.simulate import simulate
from minialpa.inter.schedule.timeline import Timeline
from minialpa.kernels import check_sharding_rule, register_sharding_rule
from minialpa.methods import (
    AutoParallel,
    CreateStateParallel,
    DataParallel,
    FollowParallel,
    PipeshardParallel,
    ShardParallel,
    Zero2Parallel,
    Zero3Parallel,
    get_3d_parallel_method,
    plan_to_method,
)
from minialpa.options import (
    AutoLayerOption,
    AutoShardingOption,
    AutoStageOption,
    ManualLayerOption,
    ManualStageOption,
    UniformStageOption,
)
from minialpa.plan import PlacementSpec, Plan
from minialpa.session import available_hosts, init, restart, shutdown
from minialpa.tracing.gradients import grad, mark_pipeline_boundary, per_micro_batch, value_and_grad
from minialpa.training import StepReport, TrainingEvent, TrainingResult, train

__version__ = "0.1.0"

__all__ = [
    "AutoLayerOption",
    "AutoParallel",
    "AutoShardingOption",
    "AutoStageOption",
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "ClusterSpec",
    "CreateStateParallel",
    "DataLoader",
    "DataParallel",
    "DeletedArrayError",
    "DeviceSpec",
    "FollowParallel",
    "InfeasibleError",
    "LinkSpec",
    "LogicalMesh",
    "ManualLayerOption",
    "ManualStageOption",
    "MeshDriverDataLoader",
    "MinialpaError",
    "ParallelizedFunc",
    "PipeshardParallel",
    "PlacementSpec",
    "Plan",
    "ShardParallel",
    "ShardingError",
    "StepReport",
    "Timeline",
    "TraceError",
    "TrainingEvent",
    "TrainingResult",
    "UniformStageOption",
    "VerifyError",
    "WorkerError",
    "Zero2Parallel",
    "Zero3Parallel",
    "__version__",
    "available_hosts",
    "check",
    "check_sharding_rule",
    "explain",
    "get_3d_parallel_method",
    "get_last_dp_result",
    "grad",
    "init",
    "mark_pipeline_boundary",
    "parallelize",
    "per_micro_batch",
    "phases",
    "plan",
    "plan_to_method",
    "prefetch",
    "register_sharding_rule",
    "replan",
    "restart",
    "restore_checkpoint",
    "save_checkpoint",
    "shutdown",
    "simulate",
    "testing",
    "train",
    "util",
    "value_and_grad",
]
