"""Options of planning, as the user gives them. Field names follow Alpa's where the meaning is the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jax.sharding import PartitionSpec

from minialpa.cluster import DeviceSpec
from minialpa.errors import ShardingError


@dataclass(frozen=True, slots=True)
class AutoShardingOption:
    """How the operators of one stage may be sharded.

    enable_auto_sharding: False keeps everything replicated.
    allow_all_gather, allow_all_to_all: whether a value may be resharded by that collective.
    allow_replicated_parameters: False asks for a sharded spec of every parameter that has one.
    force_data_parallel: split the examples over all devices and nothing else.
    force_batch_dim_to_mesh_dim: mesh axis that splits the examples, it and no other, wherever there are examples.
    force_zero_stage_3: with data parallelism, store parameters sharded too.
    prefer_reduce_scatter: shard the optimizer state, so that gradients are reduce-scattered (ZeRO-2 under data
        parallelism).
    fixed_specs: PartitionSpecs for arguments and results by path, as `Plan.input_specs` and `Plan.output_specs` list
        them, over the axes "x" and "y" of the logical mesh (1-D: "x"). In a key `*` stands for any text; the first key
        that matches counts. A mapping, or pairs.
    memory_limit_bytes: bytes per device for everything: parameters, optimizer state, gradients, activations and
        temporaries; None takes the device's memory.
    solver_time_limit_s: seconds for the solver of one stage.
    """

    enable_auto_sharding: bool = True
    allow_all_gather: bool = True
    allow_all_to_all: bool = True
    allow_replicated_parameters: bool = True
    force_data_parallel: bool = False
    force_batch_dim_to_mesh_dim: int | None = None
    force_zero_stage_3: bool = False
    prefer_reduce_scatter: bool = False
    fixed_specs: Mapping[str, PartitionSpec] | tuple[tuple[str, PartitionSpec], ...] = ()
    memory_limit_bytes: float | None = None
    solver_time_limit_s: float = 20.0

    def __post_init__(self) -> None:
        pairs = self.fixed_specs.items() if isinstance(self.fixed_specs, Mapping) else self.fixed_specs
        object.__setattr__(self, "fixed_specs", tuple(pairs))

    def limit_bytes(self, device: DeviceSpec | None) -> float | None:
        """Bytes per device that a plan may use; None where neither the option nor the device says."""
        return self.memory_limit_bytes or (device.memory_bytes if device else None)

    @property
    def forbidden_collectives(self) -> tuple[str, ...]:
        """Kinds of collectives that may not reshard a value."""
        allowed = {"all-gather": self.allow_all_gather, "all-to-all": self.allow_all_to_all}
        return tuple(kind for kind, is_allowed in allowed.items() if not is_allowed)


#: What the forward pass of a layer keeps for its backward pass: everything, results of matrix products and convolutions
#: (`dots`), or nothing (`full` rematerialisation); the rest is computed again.
Remat = Literal["none", "dots", "full"]


@dataclass(frozen=True, slots=True)
class ManualLayerOption:
    """Layers end at `mark_pipeline_boundary()`.

    remat: what is computed again in the backward pass of each layer, see `Remat`; True means `full`, False `none`.
        `auto` takes whichever gives the fastest step that fits in memory.
    """

    remat: Remat | Literal["auto"] | bool = False


@dataclass(frozen=True, slots=True)
class AutoLayerOption:
    """Cluster the forward equations into `layer_num` layers of about equal work with few bytes between them.

    layer_num: "auto" takes as many as the model has blocks that repeat, up to 64, or 16.
    eps: a layer may do up to (1 + eps), and where possible does (1 - eps), of its equal share of the floating point
        operations.
    remat: as in `ManualLayerOption`.
    """

    layer_num: int | Literal["auto"] = "auto"
    eps: float = 0.5
    remat: Remat | Literal["auto"] | bool = False


@dataclass(frozen=True, slots=True)
class FixedLayerOption:
    """The layers that a plan has: the layer of each forward group, what each layer computes again, and the rows of each
    block that scans over layers are cut into, see `Plan`."""

    layer_of_group: tuple[int, ...]
    remat: tuple[Remat, ...]
    row_blocks: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class AutoStageOption:
    """Search stages, submeshes and their logical shapes.

    submesh_physical_shape_space: `power_of_two` device counts within a host, and of whole hosts; or `all` counts.
    submesh_logical_shape_space: `all` factorisations of a submesh, `same_as_physical`, `data_parallel_only` (n, 1) or
        `model_parallel_only` (1, n).
    tolerance: fraction of the step time by which other stages may be faster than those that are taken.
    cached_costs: a JSON file of the costs of parts of models, by their content. It is read before a search and written
        after it; None keeps none.
    """

    submesh_physical_shape_space: Literal["power_of_two", "all"] = "power_of_two"
    submesh_logical_shape_space: Literal["all", "same_as_physical", "data_parallel_only", "model_parallel_only"] = "all"
    tolerance: float = 0.01
    cached_costs: str | None = None


@dataclass(frozen=True, slots=True)
class ManualStageOption:
    """Stages given by hand: the layers of each, its (hosts, devices per host), its logical shape, and options.

    forward_stage_layer_ids: under the schedule `1f1b-interleaved`, runs of layers go round the stages several times, as
        in [[0, 2], [1, 3]]; else each stage has neighbouring layers.
    submesh_autosharding_option_dicts: for each stage, fields of `AutoShardingOption` that differ from the default.
    """

    forward_stage_layer_ids: Sequence[Sequence[int]]
    submesh_physical_shapes: Sequence[tuple[int, int]]
    submesh_logical_shapes: Sequence[tuple[int, ...]]
    submesh_autosharding_option_dicts: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class UniformStageOption:
    """Equal stages: `num_stages` (default: one for each layer that has devices), each on the same submesh.

    num_chunks: runs of layers of each stage; more than one needs the schedule `1f1b-interleaved`.
    """

    num_stages: int | None = None
    submesh_physical_shape: tuple[int, int] | None = None
    submesh_logical_shape: tuple[int, ...] | None = None
    submesh_autosharding_option: AutoShardingOption | None = None
    num_chunks: int = 1


LayerOption = ManualLayerOption | AutoLayerOption | FixedLayerOption
StageOption = AutoStageOption | ManualStageOption | UniformStageOption


def remats(option: LayerOption, n_layers: int) -> tuple[tuple[Remat, ...], ...]:
    """What the option leaves to choose from, for each of `n_layers` layers. Raises ShardingError where it is none of
    what it may be."""
    if isinstance(option, FixedLayerOption):
        return (option.remat,)
    match option.remat:
        case "auto":
            choices: tuple[Remat, ...] = ("none", "dots", "full")
            return tuple((remat,) * n_layers for remat in choices)
        case "none" | "dots" | "full" as what:
            return ((what,) * n_layers,)
        case bool() as all_of_it:
            return (("full" if all_of_it else "none",) * n_layers,)
        case other:
            raise ShardingError(f"`remat` is `none`, `dots`, `full`, `auto`, or a bool; got {other!r}.")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Everything that a method asks of the planner.

    layers, stages: None for a step without pipeline. logical_shape: the mesh shape of such a step; None for 1-D.
    submesh: its (hosts, devices per host); None for the whole cluster.
    choose_micro_batches: a search chooses their number among the divisors of the batch.
    choose_schedule: a search may interleave the stages that it finds, where `schedule` is "1f1b".
    use_all_devices: False lets a search leave devices idle.
    """

    n_micro_batches: int = 1
    schedule: str = "1f1b"
    layers: LayerOption | None = None
    stages: StageOption | None = None
    sharding: AutoShardingOption = field(default_factory=AutoShardingOption)
    logical_shape: tuple[int, ...] | None = None
    submesh: tuple[int, int] | None = None
    choose_micro_batches: bool = False
    choose_schedule: bool = False
    use_all_devices: bool = True

    def micro_batch_choices(self, batch_size: int | None) -> tuple[int, ...]:
        """Numbers of micro-batches to choose from."""
        if not self.choose_micro_batches:
            return (self.n_micro_batches,)
        return tuple(n for n in range(1, (batch_size or 1) + 1) if (batch_size or 1) % n == 0)
