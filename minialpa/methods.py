"""Parallel methods, under Alpa's names: the user's choices go in; options and devices for the planner come out.

For example, `ShardParallel(num_micro_batches=4).options()` is `PlanOptions(n_micro_batches=4, ...)`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, get_args, runtime_checkable

import jax

from minialpa.cluster import ClusterSpec, LogicalMesh, PresetName
from minialpa.errors import ShardingError, near_names
from minialpa.field_types import Count, MeshLengths, Within, check_fields, check_value
from minialpa.inter.schedule.schedules import schedule_names
from minialpa.inter.staging.replan import logical_mesh_of, options_of
from minialpa.options import (
    Attention,
    AutoLayerOption,
    AutoShardingOption,
    AutoStageOption,
    LayerOption,
    ManualLayerOption,
    ManualStageOption,
    PlanOptions,
    RematChoice,
    StageOption,
    UniformStageOption,
)
from minialpa.plan import Plan
from minialpa.session import Session, current_session, describe_devices
from minialpa.support.private_jax import api_boundary
from minialpa.tracing.trace import TracedStep

#: A number of micro-batches. Schedules list every pass, so the number is limited.
MicroBatches = Annotated[int, Within(1, 2**20)]

Devices = Sequence[jax.Device] | ClusterSpec | LogicalMesh | None


@dataclass(frozen=True, slots=True)
class Target:
    """The devices to plan for, and the devices that run the plan.

    Attributes:
        cluster: the hosts, devices and links to plan for.
        logical_mesh: the user's view of all devices in place of a cluster, or None.
        devices: devices of this process; None for the session's devices.
        jax_version: the jax of these devices; None for a described cluster or mesh, whose plan does not depend on the
            installation.
    """

    cluster: ClusterSpec
    logical_mesh: LogicalMesh | None = None
    devices: tuple[jax.Device, ...] | None = None
    jax_version: tuple[int, ...] | None = None


def resolve_devices(devices: Devices, session: Session | None = None) -> Target:
    """The target of a method's `devices`: None (the session's devices), jax devices, a cluster, or a logical mesh.

    A plan for a cluster or a logical mesh runs on the first devices of the session, if there are enough. Raises
    ShardingError as `_checked_devices` does.
    """
    if isinstance(devices, ClusterSpec):
        return Target(devices)
    if isinstance(devices, LogicalMesh):
        cluster = ClusterSpec.preset("cpu", devices_per_host=devices.n_devices)
        return Target(dataclasses.replace(cluster, device=devices.device or cluster.device), devices)
    if devices is None:
        session = session or current_session()
        return Target(session.cluster, devices=session.devices, jax_version=jax.__version_info__)
    chosen = _checked_devices(devices)
    return Target(describe_devices(chosen), devices=chosen, jax_version=jax.__version_info__)


def _checked_devices(devices: Any) -> Any:
    """`devices`, with jax devices as a tuple. Raises ShardingError for other values and for a repeated device."""
    if devices is None or isinstance(devices, ClusterSpec | LogicalMesh):
        return devices
    chosen = tuple(devices) if isinstance(devices, Iterable) and not isinstance(devices, str) else ()
    if not chosen or not all(isinstance(d, jax.Device) for d in chosen):
        advice = ""
        if isinstance(devices, str):
            advice = f' Write `ClusterSpec.preset("{devices}")`.' if devices in get_args(PresetName) else ""
        elif isinstance(devices, int):
            advice = f" Write `jax.devices()[:{devices}]`."
        raise ShardingError(
            f"`devices` must be a list of jax devices, a ClusterSpec, a LogicalMesh or None; got {devices!r}.{advice}"
        )
    twice = [device for device, n in Counter(chosen).items() if n > 1]
    if twice:
        raise ShardingError(f"`devices` lists {twice[0]} more than once. List each device once.")
    return chosen


def _check_method(method: Any) -> None:
    """Check the fields of a method, and its options against each other, when it is made."""
    check_fields(method, but=["devices"])
    object.__setattr__(method, "devices", _checked_devices(method.devices))
    method.options()


@dataclass(frozen=True, slots=True)
class ShardParallel:
    """No pipeline: all devices share each operator, in the shardings with the lowest cost.

    Attributes:
        devices: None for the session's devices, or a list of jax devices, a ClusterSpec or a LogicalMesh.
        num_micro_batches: number of equal parts of the batch over which gradients are accumulated; None for 1.
        auto_sharding_option: constraints on the shardings.
        logical_shape: shape of the mesh that the devices form; None for the shape of the LogicalMesh, else one axis.
        submesh: use only the first (hosts, devices per host); None for all.
        remat: what the backward pass recomputes, see `ManualLayerOption`. "auto" finds layers, and recomputes only what
            makes the step fit in memory, or is faster than shardings that save memory.
    """

    devices: Devices = None
    num_micro_batches: MicroBatches | None = None
    auto_sharding_option: AutoShardingOption | None = None
    logical_shape: MeshLengths | None = None
    submesh: tuple[Count, Count] | None = None
    remat: RematChoice = "auto"

    @api_boundary
    def __post_init__(self) -> None:
        _check_method(self)

    def options(self) -> PlanOptions:
        return _shard_options(self)


@dataclass(frozen=True, slots=True)
class DataParallel(ShardParallel):
    """All devices split the batch and replicate everything else; gradients are all-reduced."""

    def options(self) -> PlanOptions:
        return _shard_options(self, "DataParallel")


@dataclass(frozen=True, slots=True)
class Zero2Parallel(ShardParallel):
    """Data parallel with sharded gradients and optimizer state (ZeRO stage 2).

    Once per step, gradients are reduce-scattered, each device updates its shard, and new parameters are all-gathered.
    """

    def options(self) -> PlanOptions:
        return _shard_options(self, "Zero2Parallel")


@dataclass(frozen=True, slots=True)
class Zero3Parallel(ShardParallel):
    """Data parallel with sharded parameters, gradients and optimizer state (ZeRO stage 3).

    As `Zero2Parallel`, but every micro-batch all-gathers the parameters that it reads.
    """

    def options(self) -> PlanOptions:
        return _shard_options(self, "Zero3Parallel")


def _shard_options(method: ShardParallel, name: str | None = None) -> PlanOptions:
    """name: of the data parallel method; None for `ShardParallel` itself."""
    given = method.auto_sharding_option or AutoShardingOption()
    sharding = given if name is None else given.of_method(name)
    return PlanOptions(
        n_micro_batches=method.num_micro_batches or 1,
        sharding=sharding,
        logical_shape=method.logical_shape,
        submesh=method.submesh,
        remat=method.remat,
    )


@dataclass(frozen=True, slots=True)
class AutoParallel:
    """The planner chooses stages, submeshes, shardings, schedule, number of micro-batches, and rematerialisation.

    The fastest plan that fits in memory may have one or several stages, and may leave devices idle.

    Attributes:
        devices, auto_sharding_option: as in `ShardParallel`.
        num_micro_batches: number of equal parts of the batch; "auto" for the best divisor of the batch.
        layer_option: where stages may be cut, and the rematerialisation.
        stage_option: which submeshes and logical shapes the search may use.
    """

    devices: Devices = None
    num_micro_batches: MicroBatches | Literal["auto"] = "auto"
    auto_sharding_option: AutoShardingOption | None = None
    layer_option: LayerOption = field(default_factory=lambda: AutoLayerOption(remat="auto"))
    stage_option: AutoStageOption = field(default_factory=AutoStageOption)

    @api_boundary
    def __post_init__(self) -> None:
        _check_method(self)

    def options(self) -> PlanOptions:
        return PlanOptions(
            n_micro_batches=1 if self.num_micro_batches == "auto" else self.num_micro_batches,
            choose_micro_batches=self.num_micro_batches == "auto",
            choose_schedule=True,
            layers=self.layer_option,
            stages=self.stage_option,
            sharding=self.auto_sharding_option or AutoShardingOption(),
            use_all_devices=False,
        )


@dataclass(frozen=True, slots=True)
class PipeshardParallel:
    """Pipeline stages on submeshes, each sharded like `ShardParallel`.

    Attributes:
        devices: as in `ShardParallel`.
        num_micro_batches: number of equal parts of the batch that pass through the stages.
        pipeline_schedule: "1f1b", "gpipe", "inference"; "1f1b-interleaved" for stages of several runs of layers;
            "zb-h1" with gradients of weights in passes of their own, "zb-v" also with two runs of layers in a V, or
            "zb" for any of these runs in an order for the seconds and memory of the stages.
        layer_option: how the model is cut into layers; None for `AutoLayerOption(layer_num=2)`. "manual" cuts at each
            `mark_pipeline_boundary`; a model without boundaries is one stage.
        stage_option: how layers become stages: "uniform" (also None), "auto", or an option object.
        default_auto_sharding_option: constraints on the shardings of every stage.
    """

    devices: Devices = None
    num_micro_batches: MicroBatches = 1
    pipeline_schedule: str = "1f1b"
    layer_option: Literal["manual"] | LayerOption | None = None
    stage_option: Literal["uniform", "auto"] | StageOption | None = None
    default_auto_sharding_option: AutoShardingOption | None = None

    @api_boundary
    def __post_init__(self) -> None:
        _check_method(self)
        check_value("pipeline_schedule", self.pipeline_schedule, Literal[*schedule_names()])
        plain = {"1f1b-interleaved": "1f1b", "zb-v": "zb"}.get(self.pipeline_schedule)
        if plain and isinstance(self._stages(), AutoStageOption):
            raise ShardingError(
                f'`pipeline_schedule="{self.pipeline_schedule}"` does not work with `stage_option="auto"`, whose '
                f'stages have consecutive layers only. Use `pipeline_schedule="{plain}"`, or '
                "`stage_option=UniformStageOption(num_chunks=2)`."
            )

    def options(self) -> PlanOptions:
        return PlanOptions(
            n_micro_batches=self.num_micro_batches,
            schedule=self.pipeline_schedule,
            layers=self._layers(),
            stages=_with_shared(
                self._stages(),
                attention=attention_of(self),
                expert_skew=expert_skew_of(self),
                offload_optimizer=offloads_optimizer(self),
            ),
            sharding=self.default_auto_sharding_option or AutoShardingOption(),
        )

    def _layers(self) -> LayerOption:
        match self.layer_option:
            case None:
                return AutoLayerOption(layer_num=2)
            case "manual":
                return ManualLayerOption()
            case option:
                return option

    def _stages(self) -> StageOption:
        match self.stage_option:
            case "auto":
                return AutoStageOption()
            case None | "uniform":
                return UniformStageOption()
            case option:
                return option


class PlannedFunction(Protocol):
    def plan(self, *args: Any) -> Plan: ...

    def get_executable(self, *args: Any) -> Any: ...

    def get_last_executable(self) -> Any: ...

    def target(self, session: Session | None = None) -> Target: ...


def _check_planned(name: str, function: Any) -> None:
    if not hasattr(function, "get_last_executable"):
        raise ShardingError(
            f"`{name}` must be a function that `parallelize` returned; got a {type(function).__name__}."
        )


@dataclass(frozen=True, slots=True)
class CreateStateParallel:
    """For a function that makes a training state: every leaf is made on the devices where the training step reads it.

        create = parallelize(init_fn, method=CreateStateParallel(train_step, (batch,)))
        state = create(key)  # the values of jax.jit(init_fn)(key)

    A call plans and compiles `train_step` for this state. No device and no host holds the whole state.

    Attributes:
        train_step: a parallelized function whose first argument is the state.
        other_args: a tuple of its other arguments: arrays or `jax.ShapeDtypeStruct`s. A single one needs no tuple.
    """

    train_step: PlannedFunction
    other_args: Any

    @api_boundary
    def __post_init__(self) -> None:
        _check_planned("train_step", self.train_step)
        object.__setattr__(self, "other_args", _other_arguments(self.train_step, self.other_args))


def _other_arguments(train_step: Any, given: Any) -> tuple[Any, ...]:
    """The arguments after the state. `given` is a tuple of them, or the only one.

    If the step needs one other argument, a tuple of any length except one is that argument.
    """
    if type(given) not in (tuple, list):
        return (given,)
    try:
        parameters = inspect.signature(train_step).parameters.values()
    except (TypeError, ValueError):  # a builtin has no signature
        return tuple(given)
    is_plain = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    n_needed = sum(p.default is p.empty for p in parameters)
    return (given,) if is_plain and len(parameters) == n_needed == 2 and len(given) != 1 else tuple(given)


@dataclass(frozen=True, slots=True)
class FollowParallel:
    """For a function that reads the state of a training step, such as an evaluation: it runs where the state is.

    The function is planned on the meshes of the plan by which `src_func` ran last. Leaves that both read keep their
    shardings, and each equation runs on the mesh of its parameters, so calls move no state. Leaves match by type and
    path. An argument may be a part of the state under another name: `params['w']` is `state.params['w']`. So is
    `p['w']`, if no other path ends so.

    Attributes:
        src_func: a parallelized function that was called or compiled before.
        num_micro_batches: number of equal parts of the batch that pass through the stages; None for 1.
        pipeline_schedule: the order of the passes; "inference" for a function without gradients.
    """

    src_func: PlannedFunction
    num_micro_batches: MicroBatches | None = None
    pipeline_schedule: str = "inference"

    @api_boundary
    def __post_init__(self) -> None:
        check_fields(self, but=["src_func"])
        _check_planned("src_func", self.src_func)
        check_value("pipeline_schedule", self.pipeline_schedule, Literal[*schedule_names()])

    def options(self) -> PlanOptions:
        return PlanOptions(n_micro_batches=self.num_micro_batches or 1, schedule=self.pipeline_schedule)

    def source(self) -> Plan:
        """The plan to follow. Raises ShardingError before `src_func` is called or compiled."""
        executable = self.src_func.get_last_executable()
        if executable is None:
            raise ShardingError(
                "`FollowParallel` follows the plan of `src_func`, which has no plan yet. Call `src_func` first, or "
                "compile it with `src_func.get_executable(...)`."
            )
        plan: Plan = executable.get_parallel_plan()
        return plan


def options_to_follow(method: Method, n_stages: int) -> PlanOptions | None:
    """The options for planning on another plan's meshes, in `n_stages` stages.

    None if `method` asks for something that this plan may not have: devices, shardings, layers or stages of the user's
    choice; for `ShardParallel`, no pipeline; for `PipeshardParallel`, a pipeline.
    """
    match method:
        case AutoParallel(num_micro_batches=n, layer_option=layers):
            is_open = method == AutoParallel(num_micro_batches=n, layer_option=layers)
            n_micro_batches = 1 if n == "auto" else n
        case PipeshardParallel(num_micro_batches=n, pipeline_schedule=schedule):
            is_open = n_stages > 1 and method == PipeshardParallel(num_micro_batches=n, pipeline_schedule=schedule)
            n_micro_batches = n
        case _:
            # A subclass, such as `Zero3Parallel`, asks for shardings, and is equal to no `ShardParallel`.
            plain = ShardParallel(num_micro_batches=method.num_micro_batches, remat=method.remat)
            is_open = n_stages == 1 and method == plain
            n_micro_batches = method.num_micro_batches or 1
    return PlanOptions(n_micro_batches=n_micro_batches, schedule="inference") if is_open else None


@api_boundary
def plan_to_method(plan: Plan) -> ShardParallel | PipeshardParallel:
    """The method that fixes the decisions of `plan` and leaves only the shardings to the solver, under the plan's
    options.

    It fixes micro-batches, schedule, layers, rematerialisation, stages, submeshes and logical shapes.
    """
    check_value("plan", plan, Plan)
    options = options_of(plan)
    if options.layers is None:
        return ShardParallel(
            logical_mesh_of(plan) or plan.cluster,
            num_micro_batches=options.n_micro_batches,
            auto_sharding_option=options.sharding,
            logical_shape=options.logical_shape,
            submesh=options.submesh,
            remat=options.remat,
        )

    return PipeshardParallel(
        (logical_mesh_of(plan) if len(plan.stages) == 1 else None) or plan.cluster,
        num_micro_batches=options.n_micro_batches,
        pipeline_schedule=options.schedule,
        layer_option=options.layers,
        stage_option=options.stages,
        default_auto_sharding_option=options.sharding,
    )


@api_boundary
def get_3d_parallel_method(
    num_micro_batches: int,
    data_parallel: int,
    operator_parallel: int,
    pipeline_parallel: int,
    allow_degenerate_into_shard_parallel: bool = True,
    manual_layer_num: int | None = None,
    devices: Devices = None,
) -> ShardParallel | PipeshardParallel:
    """Fixed degrees of data, operator and pipeline parallelism.

    Every stage is a (data_parallel, operator_parallel) mesh whose first axis splits the batch. The product of the three
    degrees is at most the number of devices, else ShardingError is raised.

    Args:
        num_micro_batches: number of equal parts of the batch.
        data_parallel: -1 for the largest degree that the devices allow.
        allow_degenerate_into_shard_parallel: whether one stage becomes `ShardParallel` on such a mesh.
        manual_layer_num: number of layers that `mark_pipeline_boundary` marks; None to find the layers.
        devices: as in `ShardParallel`.
    """
    check_value("num_micro_batches", num_micro_batches, MicroBatches)
    check_value("data_parallel", data_parallel, Literal[-1] | Count)
    check_value("operator_parallel", operator_parallel, Count)
    check_value("pipeline_parallel", pipeline_parallel, Count)
    check_value("allow_degenerate_into_shard_parallel", allow_degenerate_into_shard_parallel, bool)
    check_value("manual_layer_num", manual_layer_num, Count | None)
    cluster = resolve_devices(devices).cluster
    rest = operator_parallel * pipeline_parallel
    if data_parallel == -1:
        data_parallel = max(1, cluster.n_devices // rest)
    needed = data_parallel * rest
    if needed > cluster.n_devices:
        raise ShardingError(
            f"`data_parallel={data_parallel}`, `operator_parallel={operator_parallel}` and "
            f"`pipeline_parallel={pipeline_parallel}` need {needed} devices together, but there are "
            f"{cluster.n_devices}. Choose smaller values."
        )

    shape = (data_parallel, operator_parallel)
    option = AutoShardingOption(force_batch_dim_to_mesh_dim=0, prefer_reduce_scatter=True)
    if pipeline_parallel == 1 and allow_degenerate_into_shard_parallel:
        first = _first_devices(devices, cluster, _submesh(shape, cluster))
        return ShardParallel(first, num_micro_batches, option, shape)

    layers: LayerOption = ManualLayerOption() if manual_layer_num else AutoLayerOption(pipeline_parallel, eps=0.1)
    stages = UniformStageOption(pipeline_parallel, _submesh(shape, cluster), shape, option)
    return PipeshardParallel(devices, num_micro_batches, layer_option=layers, stage_option=stages)


def _first_devices(devices: Devices, cluster: ClusterSpec, submesh: tuple[int, int]) -> Devices:
    """The first (hosts, devices per host) of the user's jax devices, or else of the cluster."""
    if devices is None or isinstance(devices, ClusterSpec | LogicalMesh):
        return dataclasses.replace(cluster, num_hosts=submesh[0], devices_per_host=submesh[1])
    return tuple(devices)[: submesh[0] * submesh[1]]


def _submesh(shape: tuple[int, int], cluster: ClusterSpec) -> tuple[int, int]:
    """(hosts, devices per host) of the product of `shape` devices."""
    n = shape[0] * shape[1]
    return (1, n) if n <= cluster.devices_per_host else (n // cluster.devices_per_host, cluster.devices_per_host)


def attention_of(method: Method | FollowingMethod | Plan) -> Attention:
    """How a method treats attentions. A saved plan is for the step as its method treated it."""
    return "written" if isinstance(method, CreateStateParallel) else _option_of(method).attention


def expert_skew_of(method: Method | FollowingMethod | Plan) -> float:
    return _option_of(method).expert_skew


def offloads_optimizer(method: Method | FollowingMethod | Plan) -> bool:
    return not isinstance(method, CreateStateParallel) and _option_of(method).offload_optimizer


def _option_of(method: Method | FollowingMethod | Plan) -> AutoShardingOption:
    """Of its first stage, if stages differ."""
    match method:
        case Plan():
            return method.stages[0].option
        case FollowParallel():
            return method.source().stages[0].option
        case CreateStateParallel():
            option = None
        case PipeshardParallel():
            option = method.default_auto_sharding_option
        case _:
            option = method.auto_sharding_option
    return AutoShardingOption() if option is None else option


def _with_shared(stages: StageOption, **shared: Any) -> StageOption:
    """`stages` with these fields of the method's option. Raises ShardingError for a stage that asks for others."""
    default = {name: getattr(AutoShardingOption(), name) for name in shared}
    match stages:
        case UniformStageOption(submesh_autosharding_option=AutoShardingOption() as option):
            own = [{name: getattr(option, name) for name in shared}]
            new: StageOption = dataclasses.replace(
                stages, submesh_autosharding_option=dataclasses.replace(option, **shared)
            )
        case ManualStageOption(submesh_autosharding_option_dicts=dicts) if dicts:
            own = [{name: fields.get(name, default[name]) for name in shared} for fields in dicts]
            changed = tuple({**fields, **shared} for fields in dicts)
            new = dataclasses.replace(stages, submesh_autosharding_option_dicts=changed)
        case _:
            return stages
    for name, asked in (item for fields in own for item in fields.items()):
        if asked not in (default[name], shared[name]):
            raise ShardingError(
                f"The option of a stage has `{name}={asked!r}`, but the method has `{name}={shared[name]!r}`, and "
                f"all stages share one value. Set `default_auto_sharding_option=AutoShardingOption({name}={asked!r})`."
            )
    return stages if all(fields == shared for fields in own) else new


Method = ShardParallel | PipeshardParallel | AutoParallel
#: Methods that follow the plan of another function.
FollowingMethod = CreateStateParallel | FollowParallel


def _refuse_change(method: Any, name: str, value: Any) -> None:
    raise dataclasses.FrozenInstanceError(
        f"`{name}` of a `{type(method).__name__}` cannot be changed. Make another method with "
        f"`dataclasses.replace(method, {name}=...)`, and pass it to `parallelize`."
    )


for _kind in (*get_args(Method), DataParallel, Zero2Parallel, Zero3Parallel, *get_args(FollowingMethod)):
    _kind.__setattr__ = _refuse_change


@runtime_checkable
class StepMethod(Protocol):
    """A method whose options depend on the step, such as PartitionSpecs in a pytree of its arguments."""

    def options_for(self, step: TracedStep) -> PlanOptions: ...


def options_for(method: Method, step: TracedStep) -> PlanOptions:
    return method.options_for(step) if isinstance(method, StepMethod) else method.options()


def axis_names_of(method: Method | FollowingMethod | Plan) -> tuple[str, ...]:
    """The names of mesh axes that bare PartitionSpecs in a step may use."""
    match method:
        case CreateStateParallel():
            return ()
        case FollowParallel() | Plan():
            plan = method if isinstance(method, Plan) else method.source()
            return tuple(dict.fromkeys(name for stage in plan.stages for name in stage.option.axis_names))
        case _:
            return method.options().axis_names


def check_method(method: Any) -> None:
    """Raise ShardingError, with the correction, unless `method` is a parallel method or a plan."""
    if isinstance(method, Method | FollowingMethod | Plan):
        return
    if isinstance(method, type) and issubclass(method, Method | FollowingMethod):
        raise ShardingError(f"`method` is the class `{method.__name__}`. Make an object of it: `{method.__name__}()`.")

    # Other libraries take names, such as `method="pipeshard"`.
    if isinstance(method, str):
        classes = (AutoParallel, DataParallel, PipeshardParallel, ShardParallel, Zero2Parallel, Zero3Parallel)
        names = [c.__name__ for c in classes]
        plain = method.lower().replace("_", "").replace("-", "").removesuffix("parallel")
        raise ShardingError(
            "`method` must be an object, not a name; got "
            f"{method!r}. Use {' or '.join(f'`{name}()`' for name in near_names(plain, names) or names)}."
        )
    raise ShardingError(f"`method` must be a parallel method such as `ShardParallel()`, or a `Plan`; got {method!r}.")
