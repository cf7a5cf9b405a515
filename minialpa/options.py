"""Options of planning. Fields have Alpa's names if they have Alpa's meaning."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from jax.sharding import PartitionSpec

from minialpa.cluster import DeviceSpec
from minialpa.errors import InfeasibleError, ShardingError
from minialpa.field_types import Count, NotNegative, check_fields
from minialpa.sharding import AXIS_NAMES
from minialpa.support.divisors import divisors

#: The treatment of the attentions of a step.
Attention = Literal["auto", "fused", "written"]

PlanningEffort = Literal["fast", "balanced", "proof"]
#: Steps of the training run that each effort assumes.
PLANNED_STEPS: dict[PlanningEffort, float] = {"fast": 100, "balanced": 10_000, "proof": math.inf}
#: Under "proof", the solver may take so many times its limit.
_PROOF_TIMES = 10.0


@dataclass(frozen=True, slots=True)
class AutoShardingOption:
    """How the operators of one stage may be sharded. Options that contradict each other raise ShardingError.

    Attributes:
        enable_auto_sharding: False computes everything on every device, and replicates all arguments and results but
            those in `fixed_specs`.
        allow_all_gather: whether an all-gather may reshard a value.
        allow_all_to_all: whether an all-to-all may reshard a value.
        allow_replicated_parameters: False shards every parameter that can be sharded.
        force_data_parallel: split the examples over all devices, and replicate everything else.
        force_batch_dim_to_mesh_dim: the one mesh axis that splits the examples. An axis of length 1 splits nothing.
        force_zero_stage_3: `force_data_parallel` and `prefer_reduce_scatter`, with sharded parameters.
        prefer_reduce_scatter: store the optimizer state in as many parts as there are devices, and update it part by
            part: gradients are reduce-scattered (ZeRO-2 under data parallelism). Arrays that no number of devices
            divides are replicated.
        fixed_specs: PartitionSpecs for arguments and results, as a mapping or pairs. Keys are paths, as
            `Plan.input_specs` and `Plan.output_specs` list them; `*` stands for any text. The first key that matches a
            path counts, and each key must match one. Axes have the names in `axis_names`, or else "x" and "y" (1-D:
            "x").
        axis_names: names of the axes of the logical mesh, for `fixed_specs`, for `received_axes`, and for bare
            PartitionSpecs in `jax.lax.with_sharding_constraint`. A mesh of fewer axes has the last of them. An axis
            that only other stages have splits nothing.
        received_axes: pairs of an axis and a dimension. Values from other meshes are split only along this dimension,
            over this axis, if the mesh has it and its length divides the dimension. Empty: the planner decides.
        memory_limit_bytes: bytes per device for parameters, optimizer state, gradients, activations and temporaries
            together; None for the device's memory.
        planning_effort: the time that planning may take. Under "balanced", it is in proportion to a training run of
            10,000 steps; under "fast", of 100 steps. "proof" goes on to the cheapest shardings or the limit below.
        solver_time_limit_s: most nominal seconds for the solver of one stage, ten times as many under "proof". The
            solver counts work, so a plan does not depend on how busy the machine is.
        keep_constraints: whether each `jax.lax.with_sharding_constraint` in the step fixes a sharding.
        attention: the attentions of the step that become one operation, whose memory grows linearly with the number of
            positions: "fused" for all recognised ones, "auto" for attentions with more than 128 * 128 scores per head,
            "written" for none. The whole step has one setting.
    """

    enable_auto_sharding: bool = True
    allow_all_gather: bool = True
    allow_all_to_all: bool = True
    allow_replicated_parameters: bool = True
    force_data_parallel: bool = False
    force_batch_dim_to_mesh_dim: Literal[0, 1] | None = None
    force_zero_stage_3: bool = False
    prefer_reduce_scatter: bool = False
    fixed_specs: Mapping[str, PartitionSpec] | tuple[tuple[str, PartitionSpec], ...] = ()
    memory_limit_bytes: float | None = None
    planning_effort: PlanningEffort = field(default="balanced", metadata={"may_be_missing": True})
    solver_time_limit_s: NotNegative = 20.0
    keep_constraints: bool = field(default=True, metadata={"may_be_missing": True})
    attention: Attention = field(default="auto", metadata={"may_be_missing": True})
    axis_names: tuple[str, ...] = field(default=(), metadata={"may_be_missing": True})
    received_axes: tuple[tuple[str, int], ...] = field(default=(), metadata={"may_be_missing": True})

    def __post_init__(self) -> None:
        check_fields(self)
        pairs = self.fixed_specs.items() if isinstance(self.fixed_specs, Mapping) else self.fixed_specs
        object.__setattr__(self, "fixed_specs", tuple(pairs))
        object.__setattr__(self, "axis_names", tuple(self.axis_names))
        object.__setattr__(self, "received_axes", tuple((name, dim) for name, dim in self.received_axes))
        if self.memory_limit_bytes is not None and not self.memory_limit_bytes > 0:
            raise ShardingError(f"`memory_limit_bytes` is above 0, or None; got {self.memory_limit_bytes!r}.")
        if len(set(self.axis_names)) < len(self.axis_names):
            raise ShardingError(f"`axis_names` is a tuple of different names; got {self.axis_names!r}.")
        _check_together(self)

    @property
    def data_parallel(self) -> bool:
        """Whether all devices split the examples, and no other dimension."""
        return self.force_data_parallel or self.force_zero_stage_3

    @property
    def sharded_update(self) -> bool:
        """Whether each device updates its own part of the optimizer state."""
        return self.prefer_reduce_scatter or self.force_zero_stage_3

    @property
    def set_names(self) -> tuple[str, ...]:
        """Names of the options that differ from the default."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != f.default)

    @property
    def fixed_pairs(self) -> tuple[tuple[str, PartitionSpec], ...]:
        """`fixed_specs`, as pairs."""
        assert isinstance(self.fixed_specs, tuple), self.fixed_specs
        return self.fixed_specs

    @property
    def named_axes(self) -> set[str]:
        """The names that `fixed_specs` and `received_axes` use."""
        entries = [entry for _, partition in self.fixed_pairs for entry in partition]
        in_specs = [name for entry in entries for name in (entry if isinstance(entry, tuple) else (entry,))]
        return {name for name in in_specs if isinstance(name, str)} | {name for name, _ in self.received_axes}

    def names_on(self, mesh_shape: tuple[int, ...]) -> tuple[str, ...]:
        """The name of each axis of a logical mesh. Raises InfeasibleError if there are fewer names than axes."""
        n_axes = len(mesh_shape)
        if not self.axis_names:
            return AXIS_NAMES[:n_axes]
        if n_axes > len(self.axis_names):
            raise InfeasibleError(
                f"A logical mesh of {mesh_shape} has {n_axes} axes, and the names are {self.axis_names}. Give each "
                "axis a name, or ask for a logical shape with as many axes as there are names."
            )
        return self.axis_names[len(self.axis_names) - n_axes :]

    def for_any_batch(self) -> AutoShardingOption:
        """These options without constraints on the examples."""
        return replace(self, force_data_parallel=False, force_zero_stage_3=False, force_batch_dim_to_mesh_dim=None)

    def without_constraints(self) -> AutoShardingOption:
        """These options without the `with_sharding_constraint`s of the step."""
        return replace(self, keep_constraints=False)

    @property
    def solver_limit_s(self) -> float:
        """Nominal seconds for the solver of one stage, with the effort."""
        return self.solver_time_limit_s * (_PROOF_TIMES if self.planning_effort == "proof" else 1.0)

    def limit_bytes(self, device: DeviceSpec | None) -> float | None:
        """Bytes per device that a plan may use; None without a limit."""
        return self.memory_limit_bytes or (device.memory_bytes if device else None)

    def of_method(self, name: str) -> AutoShardingOption:
        """These options under the data parallel method `name`. Raises ShardingError if they contradict it."""
        for field_name, value in DATA_PARALLEL_METHODS[name].items():
            given = getattr(self, field_name)
            if given not in (value, getattr(AutoShardingOption(), field_name)):
                raise ShardingError(
                    f"`{name}` stands for `{field_name}={value}`, and its `auto_sharding_option` has "
                    f"`{field_name}={given}`. Use `ShardParallel` with that option, or leave it out."
                )
        return replace(self, **DATA_PARALLEL_METHODS[name])

    @property
    def forbidden_collectives(self) -> tuple[str, ...]:
        """Kinds of collectives that may not reshard a value."""
        allowed = {"all-gather": self.allow_all_gather, "all-to-all": self.allow_all_to_all}
        return tuple(kind for kind, is_allowed in allowed.items() if not is_allowed)


def _check_together(option: AutoShardingOption) -> None:
    """Raise ShardingError for two options that cannot both hold."""
    named = {"force_zero_stage_3": option.force_zero_stage_3, "force_data_parallel": option.force_data_parallel}
    forced = next((name for name, is_set in named.items() if is_set), None)
    if forced and not option.allow_replicated_parameters and not option.force_zero_stage_3:
        raise _contradiction(forced, "replicates parameters", "allow_replicated_parameters=False")

    if not option.enable_auto_sharding:
        others = {
            **named,
            "prefer_reduce_scatter": option.prefer_reduce_scatter,
            "force_batch_dim_to_mesh_dim": option.force_batch_dim_to_mesh_dim is not None,
            "allow_replicated_parameters=False": not option.allow_replicated_parameters,
        }
        for other in (name for name, is_set in others.items() if is_set):
            raise _contradiction("enable_auto_sharding=False", "computes everything on every device", other)


def _contradiction(option: str, does: str, other: str) -> ShardingError:
    return ShardingError(f"`{option}` {does}, and `{other}` asks for something else. Leave one of them out.")


#: The fields of `AutoShardingOption` that each data parallel method by name stands for.
DATA_PARALLEL_METHODS: Mapping[str, Mapping[str, Any]] = {
    "DataParallel": {"force_data_parallel": True, "prefer_reduce_scatter": False, "force_zero_stage_3": False},
    "Zero2Parallel": {"force_data_parallel": True, "prefer_reduce_scatter": True, "force_zero_stage_3": False},
    "Zero3Parallel": {"force_data_parallel": True, "prefer_reduce_scatter": True, "force_zero_stage_3": True},
}


#: Rematerialisation: a layer keeps all values for its backward pass (`none`), only the results of matrix products and
#: convolutions (`dots`), or no values (`full`). The backward pass recomputes the rest.
Remat = Literal["none", "dots", "full"]
#: The options of users: True means `full`, False `none`, and with `auto` the planner chooses.
RematChoice = Remat | Literal["auto"] | bool


@dataclass(frozen=True, slots=True)
class ManualLayerOption:
    """Layers end at `mark_pipeline_boundary()`.

    Attributes:
        remat: the rematerialisation of each layer, see `Remat`; True means `full`, False `none`. `auto` takes the
            fastest choice that fits in memory.
    """

    remat: RematChoice = False

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class AutoLayerOption:
    """Cluster the forward equations into `layer_num` layers of about equal work with few bytes between them.

    Attributes:
        layer_num: number of layers. "auto" takes as many as the model has blocks that repeat, up to 64; without such
            blocks, 16.
        eps: a layer has at most (1 + eps), and where possible at least (1 - eps), of an equal share of the floating
            point operations.
        remat: as in `ManualLayerOption`.
    """

    layer_num: Count | Literal["auto"] = "auto"
    eps: NotNegative = 0.5
    remat: RematChoice = False

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class FixedLayerOption:
    """The layers that a plan has.

    Attributes:
        layer_of_group: the layer of each forward group.
        remat: the rematerialisation of each layer.
        row_blocks: the rows of each block into which scans over layers are cut, see `Plan`.
    """

    layer_of_group: tuple[int, ...]
    remat: tuple[Remat, ...]
    row_blocks: tuple[tuple[int, ...], ...] = ()


PhysicalSpace = Literal["power_of_two", "all"] | Sequence[tuple[Count, Count]]
LogicalSpace = Literal["all", "same_as_physical", "data_parallel_only", "model_parallel_only"]


@dataclass(frozen=True, slots=True)
class AutoStageOption:
    """Search stages, submeshes and their logical shapes. Raises ShardingError for values that it does not know.

    Attributes:
        submesh_physical_shape_space: `power_of_two` devices within a host, or `power_of_two` whole hosts; `all`
            numbers of them; or only these submeshes, as pairs of (hosts, devices per host).
        submesh_logical_shape_space: `all` factorisations of a submesh; `same_as_physical`, its hosts and their devices;
            `data_parallel_only`, all devices split the examples; `model_parallel_only`, none does. The last two stand
            for (n, 1) and (1, n) with `force_batch_dim_to_mesh_dim=0`.
        tolerance: the search may miss stages that are faster than its answer by this fraction of the step time.
        cached_costs: path of a JSON file with costs of parts of models, keyed by their content. A search reads it and
            adds new costs; None for no file.
        planned_steps: the number of steps of the training run; None for the number that `planning_effort` assumes. A
            step becomes one stage without a search if so many steps cannot repay the time of a search. `math.inf`
            always searches.
    """

    submesh_physical_shape_space: PhysicalSpace = "power_of_two"
    submesh_logical_shape_space: LogicalSpace = "all"
    tolerance: NotNegative = 0.01
    cached_costs: str | Path | None = None
    planned_steps: NotNegative | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        physical = self.submesh_physical_shape_space
        if not physical:
            raise ShardingError("`submesh_physical_shape_space` names at least one submesh; got none.")
        if not isinstance(physical, str):
            object.__setattr__(self, "submesh_physical_shape_space", tuple((h, d) for h, d in physical))

    def sharding(self, option: AutoShardingOption) -> AutoShardingOption:
        """`option` for the stages of this space. Raises ShardingError if the two contradict each other."""
        space = self.submesh_logical_shape_space
        if space not in ("data_parallel_only", "model_parallel_only"):
            return option

        axis = option.force_batch_dim_to_mesh_dim
        other = (
            "force_batch_dim_to_mesh_dim" if axis not in (None, 0)
            else "force_data_parallel" if option.force_data_parallel and space == "model_parallel_only"
            else "force_zero_stage_3" if option.force_zero_stage_3 and space == "model_parallel_only"
            else "enable_auto_sharding=False" if not option.enable_auto_sharding
            else None
        )  # fmt: skip
        if other is not None:
            does = "splits the examples over axis 0 of its meshes"
            raise _contradiction(f"submesh_logical_shape_space={space!r}", does, other)
        return replace(option, force_batch_dim_to_mesh_dim=0)


@dataclass(frozen=True, slots=True)
class ManualStageOption:
    """Stages given by hand.

    Attributes:
        forward_stage_layer_ids: the layers of each stage. They are neighbours, except under the schedule
            `1f1b-interleaved`, where runs of layers go round the stages several times, as in [[0, 2], [1, 3]].
        submesh_physical_shapes: (hosts, devices per host) of each stage.
        submesh_logical_shapes: the mesh shape of each stage.
        submesh_autosharding_option_dicts: for each stage, fields of `AutoShardingOption` that differ from the default.
    """

    forward_stage_layer_ids: Sequence[Sequence[int]]
    submesh_physical_shapes: Sequence[tuple[Count, Count]]
    submesh_logical_shapes: Sequence[tuple[Count, ...]]
    submesh_autosharding_option_dicts: Sequence[dict[str, Any]] = ()

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class UniformStageOption:
    """Equal stages on equal submeshes.

    Attributes:
        num_stages: None for the largest number up to that of the layers which divides the devices.
        submesh_physical_shape: (hosts, devices per host) of each stage; None for an equal share of the devices.
        submesh_logical_shape: the mesh shape of each stage; None for one axis.
        submesh_autosharding_option: constraints on the shardings of each stage; None for those of the method.
        num_chunks: runs of layers in each stage; more than one needs the schedule `1f1b-interleaved`.
    """

    num_stages: Count | None = None
    submesh_physical_shape: tuple[Count, Count] | None = None
    submesh_logical_shape: tuple[Count, ...] | None = None
    submesh_autosharding_option: AutoShardingOption | None = None
    num_chunks: Count = 1

    def __post_init__(self) -> None:
        check_fields(self)


LayerOption = ManualLayerOption | AutoLayerOption | FixedLayerOption
StageOption = AutoStageOption | ManualStageOption | UniformStageOption


def remats(option: LayerOption, n_layers: int) -> tuple[tuple[Remat, ...], ...]:
    """The choices that the option leaves: each is the rematerialisation of `n_layers` layers."""
    if isinstance(option, FixedLayerOption):
        return (option.remat,)
    return tuple((remat,) * n_layers for remat in remats_of(option.remat))


def remats_of(choice: RematChoice) -> tuple[Remat, ...]:
    """The values that a choice allows."""
    if choice == "auto":
        return ("none", "dots", "full")
    if isinstance(choice, bool):
        return ("full" if choice else "none",)
    return (choice,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of a method for the planner.

    Attributes:
        n_micro_batches: number of micro-batches, unless `choose_micro_batches` leaves it open.
        schedule: name of the pipeline schedule.
        layers: how the step is cut into layers; None for a step without pipeline.
        stages: how layers become stages; None for a step without pipeline.
        sharding: constraints on the shardings.
        logical_shape: the mesh shape of a step without pipeline; None for one axis.
        submesh: (hosts, devices per host) of a step without pipeline; None for the whole cluster.
        remat: the rematerialisation of a step without pipeline; `auto` uses it only if memory is short.
        choose_micro_batches: a search chooses their number among the divisors of the batch.
        choose_schedule: a search may interleave the stages that it finds, if `schedule` is "1f1b".
        use_all_devices: False lets a search leave devices idle.
        keep_rows: in a step of several loops over the micro-batches, whether rows that later loops read are kept (True)
            or computed again (False); None for whichever is faster and fits.
        cast_once: with several micro-batches, whether weights are cast to the types that passes read them in once per
            step (True) or in each pass (False); None for whichever is faster and fits.
    """

    n_micro_batches: int = 1
    schedule: str = "1f1b"
    layers: LayerOption | None = None
    stages: StageOption | None = None
    sharding: AutoShardingOption = field(default_factory=AutoShardingOption)
    logical_shape: tuple[int, ...] | None = None
    submesh: tuple[int, int] | None = None
    remat: RematChoice = "auto"
    choose_micro_batches: bool = False
    choose_schedule: bool = False
    use_all_devices: bool = True
    keep_rows: bool | None = None
    cast_once: bool | None = None

    def relaxed(self, relax: Callable[[AutoShardingOption], AutoShardingOption]) -> PlanOptions:
        """These options with relaxed sharding options."""
        stages = self.stages
        if isinstance(stages, UniformStageOption) and stages.submesh_autosharding_option is not None:
            stages = replace(stages, submesh_autosharding_option=relax(stages.submesh_autosharding_option))
        return replace(self, sharding=relax(self.sharding), stages=stages)

    @property
    def sharding_options(self) -> tuple[AutoShardingOption, ...]:
        """The sharding options of the method and of stages; for stages by hand, only names of arguments and axes."""
        options = [self.sharding]
        if isinstance(self.stages, UniformStageOption) and self.stages.submesh_autosharding_option is not None:
            options.append(self.stages.submesh_autosharding_option)
        if isinstance(self.stages, ManualStageOption):
            named = ("fixed_specs", "axis_names", "received_axes")
            for given in self.stages.submesh_autosharding_option_dicts:
                options.append(AutoShardingOption(**{name: given[name] for name in named if name in given}))
        return tuple(options)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of mesh axes in any stage."""
        return tuple(dict.fromkeys(name for option in self.sharding_options for name in option.axis_names))

    def micro_batch_choices(self, batch_size: int | None) -> tuple[int, ...]:
        """Numbers of micro-batches to choose from."""
        if not self.choose_micro_batches:
            return (self.n_micro_batches,)
        return divisors(batch_size or 1)
