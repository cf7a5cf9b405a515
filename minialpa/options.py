"""Options of planning: the user's choices go in and are checked; `PlanOptions` for the planner comes out of a method.

Fields with Alpa's meaning have Alpa's names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from jax.sharding import PartitionSpec

from minialpa.cluster import DeviceSpec
from minialpa.errors import InfeasibleError, ShardingError, meant
from minialpa.field_types import Count, MeshLengths, NotNegative, Positive, check_fields
from minialpa.sharding import AXIS_NAMES, axes_by_length, axes_in
from minialpa.support.divisors import divisors
from minialpa.support.private_jax import api_boundary

#: See `AutoShardingOption.attention`.
Attention = Literal["auto", "fused", "written"]

Shardings = Literal["hint", "pin", "ignore"]
PlanningEffort = Literal["fast", "balanced", "proof"]
#: Steps of the training run that each effort assumes.
PLANNED_STEPS: dict[PlanningEffort, float] = {"fast": 100, "balanced": 10_000, "proof": math.inf}
#: Multiplies the solver's time limit under "proof".
_PROOF_TIMES = 10.0


@dataclass(frozen=True, slots=True)
class AutoShardingOption:
    """How the operators of one stage may be sharded. Options that contradict each other raise ShardingError.

    Attributes:
        enable_auto_sharding: False computes everything on every device. Only leaves in `fixed_specs` are sharded.
        allow_all_gather: whether an all-gather may reshard a value.
        allow_all_to_all: whether an all-to-all may reshard a value.
        allow_replicated_parameters: False shards every parameter that can be sharded.
        force_data_parallel: split the examples over all devices, and replicate everything else.
        force_batch_dim_to_mesh_dim: the one mesh axis that splits the examples. Without effect if its length is 1.
        force_zero_stage_3: `force_data_parallel` and `prefer_reduce_scatter`, with sharded parameters.
        prefer_reduce_scatter: shard the optimizer state over all devices, and update each shard from reduce-scattered
            gradients (ZeRO-2 under data parallelism). Arrays that no number of devices divides are replicated.
        fixed_specs: PartitionSpecs by path of argument or result (see `Plan.input_specs`), as a mapping or pairs. In a
            path, `*` stands for any text. The first matching key counts, and each key must match. Axes are named by
            `axis_names`, by default "x", "y" and "z".
        axis_names: names of the axes of the logical mesh, for `fixed_specs`, `received_axes`, and bare PartitionSpecs
            in `jax.lax.with_sharding_constraint`. A mesh of fewer axes has the last names. An axis that only other
            stages have splits no value.
        received_axes: (axis, dimension) pairs. Values from other meshes are split only along this dimension over this
            axis, if the mesh has the axis and its length divides the dimension. Empty: the planner decides.
        axis_lengths: lengths of the axes in `axis_names`, which then name the axes of equal length. Meshes of other
            lengths are no choice.
        memory_limit_bytes: bytes per device for parameters, optimizer state, gradients, activations and temporaries
            together; None for the device's memory.
        planning_effort: how long planning may take: in proportion to a training run of 100 steps ("fast") or 10,000
            steps ("balanced"), or up to optimal shardings or the time limit ("proof").
        solver_time_limit_s: most nominal seconds for the solver of one stage, ten times as many under "proof". They
            count work, so a plan does not depend on the load of the machine.
        shardings: the force of shardings inside the step, from `jax.lax.with_sharding_constraint`, `reshard` and
            `out_sharding`: "pin" fixes each, "hint" prefers them among equally fast ones, "ignore" drops them.
        attention: which attentions become one operation, whose memory is linear in the number of positions: "fused" all
            recognised ones, "auto" those with more than 128 * 128 scores per head, "written" leaves the step unchanged.
            Equal for all stages.
        expert_skew: at least 1. Devices that share experts have memory, and send arrays, for this many times their mean
            number of rows; more rows take more time. Stages share one value.
        offload_optimizer: whether arrays that only the update reads and replaces, such as momenta, stay in host memory
            between steps, see docs/state.md. Write the step as for device memory. Equal for all stages.
    """

    enable_auto_sharding: bool = True
    allow_all_gather: bool = True
    allow_all_to_all: bool = True
    allow_replicated_parameters: bool = True
    force_data_parallel: bool = False
    force_batch_dim_to_mesh_dim: Literal[0, 1, 2] | None = None
    force_zero_stage_3: bool = False
    prefer_reduce_scatter: bool = False
    fixed_specs: Mapping[str, PartitionSpec] | tuple[tuple[str, PartitionSpec], ...] = ()
    memory_limit_bytes: Positive | None = None
    planning_effort: PlanningEffort = "balanced"
    solver_time_limit_s: NotNegative = 20.0
    shardings: Shardings = "hint"
    attention: Attention = "auto"
    expert_skew: Positive = 1.25
    offload_optimizer: bool = False
    axis_names: tuple[str, ...] = ()
    received_axes: tuple[tuple[str, int], ...] = ()
    axis_lengths: tuple[Count, ...] = ()

    @api_boundary
    def __post_init__(self) -> None:
        check_fields(self)
        pairs = self.fixed_specs.items() if isinstance(self.fixed_specs, Mapping) else self.fixed_specs
        object.__setattr__(self, "fixed_specs", tuple(pairs))
        object.__setattr__(self, "axis_names", tuple(self.axis_names))
        object.__setattr__(self, "axis_lengths", tuple(self.axis_lengths))
        object.__setattr__(self, "received_axes", tuple((name, dim) for name, dim in self.received_axes))
        if len(set(self.axis_names)) < len(self.axis_names):
            raise ShardingError(f"Give `axis_names` a different name for each axis; got {self.axis_names!r}.")
        if len(self.axis_lengths) not in (0, len(self.axis_names)):
            raise ShardingError(
                f"`axis_lengths` is {self.axis_lengths} for the axes {self.axis_names}. Give a length for each, or "
                "leave it out."
            )
        _check_together(self)

    @property
    def data_parallel(self) -> bool:
        return self.force_data_parallel or self.force_zero_stage_3

    @property
    def sharded_update(self) -> bool:
        """Whether each device updates its own shard of the optimizer state."""
        return self.prefer_reduce_scatter or self.force_zero_stage_3

    @property
    def set_names(self) -> tuple[str, ...]:
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != f.default)

    @property
    def fixed_pairs(self) -> tuple[tuple[str, PartitionSpec], ...]:
        assert isinstance(self.fixed_specs, tuple), self.fixed_specs
        return self.fixed_specs

    @property
    def named_axes(self) -> set[str]:
        """The axes that `fixed_specs` and `received_axes` name."""
        in_specs = {name for _, partition in self.fixed_pairs for name in axes_in(partition)}
        return in_specs | {name for name, _ in self.received_axes}

    def names_on(self, mesh_shape: tuple[int, ...]) -> tuple[str, ...]:
        """The name of each axis of a logical mesh. Raises InfeasibleError for fewer names, or other lengths."""
        n_axes = len(mesh_shape)
        if self.axis_lengths:
            return self._names_by_length(mesh_shape)
        if not self.axis_names:
            return AXIS_NAMES[:n_axes]
        if n_axes > len(self.axis_names):
            raise InfeasibleError(
                f"`axis_names` is {self.axis_names}, but the devices form a mesh of shape {mesh_shape}. Give {n_axes} "
                f"names, or set `logical_shape` to a shape of {len(self.axis_names)} axes."
            )
        return self.axis_names[len(self.axis_names) - n_axes :]

    def _names_by_length(self, mesh_shape: tuple[int, ...]) -> tuple[str, ...]:
        """An axis of length 1 has an empty name."""
        if math.prod(mesh_shape) > 1:  # lower bounds are on one device
            self.check_axes(mesh_shape)
        found = axes_by_length(self._lengths, mesh_shape) or {}
        name_of = {axis: name for name, axis in found.items()}
        return tuple(name_of.get(axis, "") for axis in range(len(mesh_shape)))

    @property
    def _lengths(self) -> dict[str, int]:
        return dict(zip(self.axis_names, self.axis_lengths, strict=False))

    def has_axes(self, mesh_shape: tuple[int, ...]) -> bool:
        """Whether a logical mesh has the `axis_lengths`, if any, in this order: then shards are on the same devices."""
        lengths, shape = ([n for n in some if n > 1] for some in (self.axis_lengths, mesh_shape))
        return not self.axis_lengths or lengths == shape

    def check_axes(self, mesh_shape: tuple[int, ...]) -> None:
        """Raise InfeasibleError unless a logical mesh has the `axis_lengths`."""
        if not self.has_axes(mesh_shape):
            raise InfeasibleError(
                f"Shardings are fixed on a mesh of {self._lengths} (`in_shardings`, `out_shardings` or "
                f"`axis_lengths`), but the devices form a mesh of shape {mesh_shape}, of at most {len(AXIS_NAMES)} "
                "axes. Use a mesh of this shape for them, or change `logical_shape`, `devices` or the number of stages."
            )

    def open_shape(self, n_devices: int) -> tuple[int, ...]:
        """The logical shape of devices whose shape is open: `axis_lengths` without 1s if they fit, else one axis."""
        shape = tuple(length for length in self.axis_lengths if length > 1)
        return shape if math.prod(shape) == n_devices and 0 < len(shape) <= len(AXIS_NAMES) else (n_devices,)

    def for_any_batch(self) -> AutoShardingOption:
        """These options without the ones that need a batch which the devices divide."""
        return replace(self, force_data_parallel=False, force_zero_stage_3=False, force_batch_dim_to_mesh_dim=None)

    @property
    def solver_limit_s(self) -> float:
        return self.solver_time_limit_s * (_PROOF_TIMES if self.planning_effort == "proof" else 1.0)

    def limit_bytes(self, device: DeviceSpec | None) -> float | None:
        """Bytes per device that a plan may use; None for no limit."""
        return self.memory_limit_bytes or (device.memory_bytes if device else None)

    def of_method(self, name: str) -> AutoShardingOption:
        """These options with the fields of the data parallel method `name`. Raises ShardingError if they contradict
        it.
        """
        for field_name, value in DATA_PARALLEL_METHODS[name].items():
            given = getattr(self, field_name)
            if given not in (value, getattr(AutoShardingOption(), field_name)):
                raise ShardingError(
                    f"`{name}` sets `{field_name}={value}`, but its `auto_sharding_option` has `{field_name}={given}`. "
                    f"Remove `{field_name}` from the option, or use `ShardParallel` with the option."
                )
        _check_data_parallel(self, name, is_sharded=DATA_PARALLEL_METHODS[name]["force_zero_stage_3"])
        return replace(self, **DATA_PARALLEL_METHODS[name])

    @property
    def forbidden_collectives(self) -> tuple[str, ...]:
        allowed = {"all-gather": self.allow_all_gather, "all-to-all": self.allow_all_to_all}
        return tuple(kind for kind, is_allowed in allowed.items() if not is_allowed)


def _check_together(option: AutoShardingOption) -> None:
    if option.expert_skew < 1:
        raise ShardingError(
            f"`expert_skew` is {option.expert_skew}, but the busiest experts have at least the mean number of rows. "
            "Give 1 or more."
        )
    if option.data_parallel:
        name = "force_zero_stage_3" if option.force_zero_stage_3 else "force_data_parallel"
        _check_data_parallel(option, name, is_sharded=option.force_zero_stage_3)

    if not option.enable_auto_sharding:
        others = {
            "prefer_reduce_scatter": option.prefer_reduce_scatter,
            "force_batch_dim_to_mesh_dim": option.force_batch_dim_to_mesh_dim is not None,
            "allow_replicated_parameters=False": not option.allow_replicated_parameters,
        }
        for other in (name for name, is_set in others.items() if is_set):
            raise _contradiction("enable_auto_sharding=False", "computes everything on every device", other)


def _check_data_parallel(option: AutoShardingOption, name: str, *, is_sharded: bool) -> None:
    """Raise ShardingError if `option` contradicts data parallelism, which the user requests by `name`.

    is_sharded: whether parameters are sharded.
    """
    if not is_sharded and not option.allow_replicated_parameters:
        raise _contradiction(name, "replicates parameters", "allow_replicated_parameters=False")
    if not option.enable_auto_sharding:
        raise _contradiction("enable_auto_sharding=False", "computes everything on every device", name)


def _contradiction(option: str, does: str, other: str) -> ShardingError:
    return ShardingError(f"`{option}` {does}, which contradicts `{other}`. Remove one of the two options.")


#: Fields of `AutoShardingOption` that each data parallel method sets.
DATA_PARALLEL_METHODS: Mapping[str, Mapping[str, Any]] = {
    "DataParallel": {"force_data_parallel": True, "prefer_reduce_scatter": False, "force_zero_stage_3": False},
    "Zero2Parallel": {"force_data_parallel": True, "prefer_reduce_scatter": True, "force_zero_stage_3": False},
    "Zero3Parallel": {"force_data_parallel": True, "prefer_reduce_scatter": True, "force_zero_stage_3": True},
}


#: What the backward pass of a layer recomputes, see `ManualLayerOption`.
Remat = Literal["none", "dots", "full", "offload", "offload_inputs"]
#: The choices that move values to the host.
MOVING: tuple[Remat, ...] = ("offload", "offload_inputs")
#: The choices of users.
RematChoice = Remat | Literal["auto"] | bool


@dataclass(frozen=True, slots=True)
class ManualLayerOption:
    """Layers end at `mark_pipeline_boundary()`.

    Attributes:
        remat: what the backward pass of each layer recomputes: no value ("none" or False), all values except results of
            matrix products and convolutions ("dots"), or all values ("full" or True). "offload" is "dots", and
            "offload_inputs" is "full", with the other values in host memory. "auto": the fastest choice that fits.
    """

    remat: RematChoice = False

    @api_boundary
    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class AutoLayerOption:
    """Cluster the forward equations into layers of about equal work with few bytes between them.

    Attributes:
        layer_num: number of layers. "auto": as many as the model has repeated blocks, at most 64; without such blocks,
            16.
        eps: a layer has at most (1 + eps) times, and where possible at least (1 - eps) times, an equal share of the
            floating point operations.
        remat: as in `ManualLayerOption`.
    """

    layer_num: Count | Literal["auto"] = "auto"
    eps: NotNegative = 0.5
    remat: RematChoice = False

    @api_boundary
    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class FixedLayerOption:
    """The layers of a plan.

    Attributes:
        layer_of_group: the layer of each forward group.
        remat: the rematerialisation of each layer.
        row_blocks: the rows of each block of a scan over layers, see `Plan`.
    """

    layer_of_group: tuple[int, ...]
    remat: tuple[Remat, ...]
    row_blocks: tuple[tuple[int, ...], ...] = ()


PhysicalSpace = Literal["power_of_two", "all"] | Sequence[tuple[Count, Count]]
LogicalSpace = Literal["all", "same_as_physical", "data_parallel_only", "model_parallel_only"]


@dataclass(frozen=True, slots=True)
class AutoStageOption:
    """Search stages, submeshes and their logical shapes. Raises ShardingError for unknown values.

    Attributes:
        submesh_physical_shape_space: a power of two of devices within a host or of whole hosts ("power_of_two"), any
            number of these ("all"), or listed pairs of (hosts, devices per host).
        submesh_logical_shape_space: "all" factorisations; "same_as_physical" for (hosts, devices per host);
            "data_parallel_only" for (n, 1), where all devices split the examples; "model_parallel_only" for (1, n),
            where they do not. The last two set `force_batch_dim_to_mesh_dim=0`.
        tolerance: the search may miss stages that are faster by this fraction of the step time.
        cached_costs: a JSON file of costs of parts of models, keyed by content, which a search reads and extends; None
            for no file.
        planned_steps: number of steps of the training run; None for the number that `planning_effort` assumes. If they
            cannot repay the time of a search, the step becomes one stage. `math.inf` always searches.
    """

    submesh_physical_shape_space: PhysicalSpace = "power_of_two"
    submesh_logical_shape_space: LogicalSpace = "all"
    tolerance: NotNegative = 0.01
    cached_costs: str | Path | None = None
    planned_steps: NotNegative | None = None

    @api_boundary
    def __post_init__(self) -> None:
        check_fields(self)
        physical = self.submesh_physical_shape_space
        if not physical:
            raise ShardingError(
                "`submesh_physical_shape_space` is empty. Give at least one pair of (hosts, devices per host), or "
                '"power_of_two" or "all".'
            )
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
    """Stages given by hand, with one entry per stage in each field.

    Attributes:
        forward_stage_layer_ids: the layers of each stage, which are neighbours. Under the schedule "1f1b-interleaved"
            or "zb", runs of layers go round the stages several times, as in [[0, 2], [1, 3]]; under "zb-v" or "zb" they
            go there and back, as in [[0, 3], [1, 2]].
        submesh_physical_shapes: (hosts, devices per host) of each stage.
        submesh_logical_shapes: the mesh shape of each stage.
        submesh_autosharding_option_dicts: fields of each stage's `AutoShardingOption` that differ from the default.
    """

    forward_stage_layer_ids: Sequence[Sequence[int]]
    submesh_physical_shapes: Sequence[tuple[Count, Count]]
    submesh_logical_shapes: Sequence[MeshLengths]
    submesh_autosharding_option_dicts: Sequence[dict[str, Any]] = ()

    @api_boundary
    def __post_init__(self) -> None:
        check_fields(self)
        dicts = self.submesh_autosharding_option_dicts
        n_stages = len(self.forward_stage_layer_ids)
        n_shapes, n_logical = len(self.submesh_physical_shapes), len(self.submesh_logical_shapes)
        n_dicts = len(dicts) or n_stages
        if not n_stages == n_shapes == n_logical == n_dicts:
            raise ShardingError(
                f"`ManualStageOption` has {n_stages} stages in `forward_stage_layer_ids`, but {n_shapes} in "
                f"`submesh_physical_shapes`, {n_logical} in `submesh_logical_shapes` and {n_dicts} in "
                f"`submesh_autosharding_option_dicts`. Give each list {n_stages} elements."
            )

        known = [field.name for field in fields(AutoShardingOption)]
        for name in (name for one in dicts for name in one if name not in known):
            raise ShardingError(
                f"`submesh_autosharding_option_dicts` has `{name}`, which is no field of `AutoShardingOption`."
                f"{meant(name, known)} Rename or remove it."
            )
        for one in dicts:
            AutoShardingOption(**one)  # raises for wrong values


@dataclass(frozen=True, slots=True)
class UniformStageOption:
    """Equal stages on equal submeshes.

    Attributes:
        num_stages: None for the largest divisor of the number of devices, up to the number of layers.
        submesh_physical_shape: (hosts, devices per host) of each stage; None for an equal share of the devices.
        submesh_logical_shape: the mesh shape of each stage; None for one axis.
        submesh_autosharding_option: constraints on the shardings; None for the method's constraints.
        num_chunks: runs of layers in each stage. More than one needs the schedule "1f1b-interleaved", "zb" or "zb-v".
    """

    num_stages: Count | None = None
    submesh_physical_shape: tuple[Count, Count] | None = None
    submesh_logical_shape: MeshLengths | None = None
    submesh_autosharding_option: AutoShardingOption | None = None
    num_chunks: Count = 1

    @api_boundary
    def __post_init__(self) -> None:
        check_fields(self)


LayerOption = ManualLayerOption | AutoLayerOption | FixedLayerOption
StageOption = AutoStageOption | ManualStageOption | UniformStageOption


def remats(option: LayerOption, n_layers: int) -> tuple[tuple[Remat, ...], ...]:
    """The choices that `option` leaves: each lists the rematerialisation of `n_layers` layers."""
    if isinstance(option, FixedLayerOption):
        return (option.remat,)
    return tuple((remat,) * n_layers for remat in remats_of(option.remat))


def remats_of(choice: RematChoice) -> tuple[Remat, ...]:
    if choice == "auto":
        return ("none", "dots", "full")
    if isinstance(choice, bool):
        return ("full" if choice else "none",)
    return (choice,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of a method for the planner.

    Attributes:
        n_micro_batches: number of micro-batches, unless `choose_micro_batches` is set.
        layers: how the step is cut into layers; None for a step without pipeline.
        stages: how layers become stages; None for a step without pipeline.
        logical_shape: the mesh shape of a step without pipeline; None for one axis.
        submesh: (hosts, devices per host) of a step without pipeline; None for the whole cluster.
        remat: the rematerialisation of a step without pipeline; "auto" uses it only if memory is short.
        choose_micro_batches: a search chooses their number among the divisors of the batch.
        choose_schedule: a search may interleave its stages, if `schedule` is "1f1b".
        use_all_devices: False lets a search leave devices idle.
        keep_activations: in a step of several loops over micro-batches, whether values that later loops read are kept
            (True) or recomputed (False); None for the faster choice that fits.
        cast_once: with several micro-batches, whether weights are cast to the types of their readers once per step
            (True) or in each pass (False); None for the faster choice that fits.
        stack_matrices: equal updates of several matrices, such as Muon's, run on stacks of a multiple of this number of
            matrices (0: one by one); None for the faster choice that fits.
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
    keep_activations: bool | None = None
    cast_once: bool | None = None
    stack_matrices: int | None = None

    def relaxed(self, relax: Callable[[AutoShardingOption], AutoShardingOption]) -> PlanOptions:
        """These options, with `relax` applied to the sharding options of method and stages."""
        stages = self.stages
        if isinstance(stages, UniformStageOption) and stages.submesh_autosharding_option is not None:
            stages = replace(stages, submesh_autosharding_option=relax(stages.submesh_autosharding_option))
        return replace(self, sharding=relax(self.sharding), stages=stages)

    @property
    def sharding_options(self) -> tuple[AutoShardingOption, ...]:
        """The sharding options of method and stages. Options of manual stages have only names of arguments and axes."""
        options = [self.sharding]
        if isinstance(self.stages, UniformStageOption) and self.stages.submesh_autosharding_option is not None:
            options.append(self.stages.submesh_autosharding_option)
        if isinstance(self.stages, ManualStageOption):
            named = ("fixed_specs", "axis_names", "axis_lengths", "received_axes")
            for given in self.stages.submesh_autosharding_option_dicts:
                options.append(AutoShardingOption(**{name: given[name] for name in named if name in given}))
        return tuple(options)

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for option in self.sharding_options for name in option.axis_names))

    def micro_batch_choices(self, batch_size: int | None) -> tuple[int, ...]:
        if not self.choose_micro_batches:
            return (self.n_micro_batches,)
        return divisors(batch_size or 1)
