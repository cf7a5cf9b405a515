"""Alpa's options, which scripts may change until a step is planned; `read` returns minialpa's option.

Each class has Alpa's fields in Alpa's order, then fields that only minialpa has. A setting without an equal gets a
warning if it is harmless, and otherwise an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import minialpa
from minialpa.errors import ShardingError


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting without an equal: why it is not needed or what to use instead; refused by an error or warned of."""

    sentence: str
    is_refused: bool = False


def check_setting(setting: Setting, name: str, value: Any, *, stacklevel: int) -> None:
    """Warn, or raise ShardingError, that `name` has no equal. stacklevel: of `warnings.warn`, from the caller."""
    if setting.is_refused:
        raise ShardingError(f"`{name}={value!r}` has no equal in minialpa. {setting.sentence}")
    warnings.warn(f"`{name}={value!r}` has no equal in minialpa. {setting.sentence}", stacklevel=stacklevel + 1)


class Adjustable:
    """Base of options that a script may change until a step is planned, as in Alpa.

    Attributes:
        SETTINGS: fields without an equal; as `field=value`, single values of a field.
        CHOICES: the possible values of a field.
    """

    SETTINGS: ClassVar[Mapping[str, Setting]] = {}
    CHOICES: ClassVar[Mapping[str, Sequence[str]]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        defaults = {field.name: field.default for field in fields(self)}  # type: ignore[arg-type]
        if name not in defaults:
            raise AttributeError(f"`{type(self).__name__}` has no option `{name}`. It has {', '.join(defaults)}.")
        if value not in self.CHOICES.get(name, (value,)):
            raise ShardingError(f"`{name}` is one of {', '.join(map(repr, self.CHOICES[name]))}; got {value!r}.")

        setting = self.SETTINGS.get(name) or self.SETTINGS.get(f"{name}={value}")
        if setting is not None and value != defaults[name]:
            # The generated `__init__` is one more frame between here and the script.
            is_made = name in vars(self)
            check_setting(setting, name, value, stacklevel=2 if is_made else 3)
        object.__setattr__(self, name, value)


@dataclass
class AutoShardingOption(Adjustable):
    """Constraints on shardings; other fields are in `minialpa.AutoShardingOption` or in `SETTINGS`.

    Attributes:
        allow_mixed_mesh_shape: accepted; minialpa always considers splitting one dimension over both mesh axes.
    """

    enable_auto_sharding: bool = True
    allow_all_gather: bool = True
    allow_all_to_all: bool = True
    allow_replicated_parameters: bool = True
    force_data_parallel: bool = False
    force_batch_dim_to_mesh_dim: int | None = None
    force_zero_stage_3: bool = False
    force_zero_stage_3_all_gather_threshold: int = 1 << 25
    prefer_reduce_scatter: bool = False
    allow_mixed_mesh_shape: bool = False
    allow_recompute_heavy_op: bool = False
    force_simple_heuristic: str = ""
    all_reduce_threshold: int = 1 << 60
    fixed_specs: Any = ()
    memory_limit_bytes: float | None = None
    solver_time_limit_s: float = 20.0
    keep_constraints: bool = True
    attention: Literal["auto", "fused", "written"] = "auto"
    axis_names: Sequence[str] = ()
    received_axes: Sequence[tuple[str, int]] = ()

    SETTINGS = {  # noqa: RUF012
        "force_zero_stage_3_all_gather_threshold": Setting("The planner prices every all-gather by its bytes."),
        "allow_recompute_heavy_op": Setting(
            "The planner prices computing on every device like every other choice, and needs no permission."
        ),
        "force_simple_heuristic": Setting(
            "Use `DataParallel`, `Zero2Parallel` or `Zero3Parallel`, or fix shardings with `fixed_specs`.",
            is_refused=True,
        ),
        "all_reduce_threshold": Setting("XLA combines all-reduces up to a size of its own."),
    }

    def read(self) -> minialpa.AutoShardingOption:
        names = [field.name for field in fields(minialpa.AutoShardingOption)]
        return minialpa.AutoShardingOption(**{name: getattr(self, name) for name in names})


@dataclass
class ManualLayerOption(Adjustable):
    """Layers end at `mark_pipeline_boundary()`.

    Attributes:
        remat_layer: whether the backward pass recomputes each layer.
        static_argnums: accepted; tracing finds static values.
    """

    remat_layer: bool = False
    static_argnums: Sequence[int] = ()

    def read(self) -> minialpa.ManualLayerOption:
        return minialpa.ManualLayerOption(remat=self.remat_layer)


_REMAT_MODES: dict[str, Literal["none", "full"]] = {
    "none": "none",
    "coarse_grained_remat": "full",
    "fine_grained_remat": "full",
}
_WHOLE_LAYERS = Setting(
    "The backward pass recomputes one pipeline layer at a time; raise `layer_num` for finer layers."
)


@dataclass
class AutoLayerOption(Adjustable):
    """Layers of about equal work.

    Attributes:
        layer_num: number of layers, or "auto".
        remat_mode: "none", or "coarse_grained_remat" or "fine_grained_remat": the backward pass recomputes each layer.
        static_argnums: accepted; tracing finds static values.
        eps: how far the work of a layer may differ from an equal share.
        remat_layer: the older spelling of `remat_mode="coarse_grained_remat"`.
    """

    layer_num: int | Literal["auto"]
    remat_mode: str = "none"
    fine_grained_remat_layer_num: int | None = None
    static_argnums: Sequence[int] = ()
    eps: float = 0.5
    cost_criteria: str = "flops"
    layer_eps: float = 0.0
    remat_layer: bool = False

    CHOICES = {"remat_mode": tuple(_REMAT_MODES)}  # noqa: RUF012
    SETTINGS = {  # noqa: RUF012
        "remat_mode=fine_grained_remat": _WHOLE_LAYERS,
        "fine_grained_remat_layer_num": _WHOLE_LAYERS,
        "cost_criteria": Setting("Layers are balanced by floating point operations."),
        "layer_eps": Setting('`layer_num="auto"` takes as many layers as the model has blocks that repeat.'),
    }

    def read(self) -> minialpa.AutoLayerOption:
        remat = "full" if self.remat_layer else _REMAT_MODES[self.remat_mode]
        return minialpa.AutoLayerOption(layer_num=self.layer_num, eps=self.eps, remat=remat)


#: Spaces of Alpa that minialpa's space contains.
_WIDER_SPACES = {"small_power_of_two": "power_of_two", "single_node_model_parallel": "all"}


@dataclass
class AutoStageOption(Adjustable):
    """Search for stages, submeshes and their logical shapes. Costs are computed, not profiled.

    Attributes:
        submesh_physical_shape_space: "power_of_two", "all" or "manual"; "small_power_of_two" is "power_of_two" here.
        manually_specified_submeshes: for "manual" only, pairs of (hosts, devices per host).
        submesh_logical_shape_space: as in `minialpa.AutoStageOption`; "single_node_model_parallel" is "all" here, with
            the price of links between hosts.
        use_hlo_cost_model: accepted; minialpa always uses a cost model.
    """

    submesh_physical_shape_space: str = "power_of_two"
    manually_specified_submeshes: Sequence[tuple[int, int]] | None = None
    submesh_logical_shape_space: str = "single_node_model_parallel"
    layer_profile_mode: str = "composition"
    stage_imbalance_tolerance: float = float("inf")
    use_hlo_cost_model: bool = False
    profiling_database_filename: str | None = None
    cached_profile_result: str | None = None
    tolerance: float = 0.01
    cached_costs: str | None = None
    planned_steps: float = 10_000

    SETTINGS = {  # noqa: RUF012
        "submesh_physical_shape_space=small_power_of_two": Setting("The search takes any power of two of hosts."),
        "layer_profile_mode": Setting("Stages are costed by a model and not profiled."),
        "stage_imbalance_tolerance": Setting("The search prunes by proven bounds and not by imbalance."),
        "profiling_database_filename": Setting(
            "The figures of devices and links are those of `devices=minialpa.ClusterSpec(...)`."
        ),
        "cached_profile_result": Setting("`cached_costs` is the path of a file with minialpa's own costs."),
    }

    def read(self) -> minialpa.AutoStageOption:
        physical, logical = self.submesh_physical_shape_space, self.submesh_logical_shape_space
        submeshes = self.manually_specified_submeshes
        if physical == "manual" and not submeshes:
            raise ShardingError(
                '`submesh_physical_shape_space="manual"` searches the submeshes of `manually_specified_submeshes`. '
                "Give pairs of (hosts, devices per host), such as [(1, 2), (1, 4)]."
            )
        return minialpa.AutoStageOption(
            submeshes if physical == "manual" else _WIDER_SPACES.get(physical, physical),  # type: ignore[arg-type]
            _WIDER_SPACES.get(logical, logical),  # type: ignore[arg-type]
            tolerance=self.tolerance,
            cached_costs=self.cached_costs,
            planned_steps=self.planned_steps,
        )


@dataclass
class ManualStageOption(Adjustable):
    """Stages given by hand, with the fields of `minialpa.ManualStageOption`; its dicts may have Alpa's fields."""

    forward_stage_layer_ids: Sequence[Sequence[int]]
    submesh_physical_shapes: Sequence[Sequence[int]]
    submesh_logical_shapes: Sequence[Sequence[int]]
    submesh_autosharding_option_dicts: Sequence[Mapping[str, Any]]

    def read(self) -> minialpa.ManualStageOption:
        return minialpa.ManualStageOption(
            self.forward_stage_layer_ids,
            [(hosts, devices) for hosts, devices in self.submesh_physical_shapes],
            [tuple(shape) for shape in self.submesh_logical_shapes],
            [_set_fields(given) for given in self.submesh_autosharding_option_dicts],
        )


def _set_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    option = AutoShardingOption(**given).read()
    return {name: getattr(option, name) for name in option.set_names}


@dataclass
class UniformStageOption(Adjustable):
    """Equal stages on equal submeshes, with the fields of `minialpa.UniformStageOption`.

    Attributes:
        submesh_autosharding_option: an `AutoShardingOption`, or a dict of its fields.
    """

    num_stages: int | None = None
    submesh_physical_shape: Sequence[int] | None = None
    submesh_logical_shape: Sequence[int] | None = None
    submesh_autosharding_option: Any = None
    num_chunks: int = 1

    def read(self) -> minialpa.UniformStageOption:
        option = self.submesh_autosharding_option
        physical, logical = self.submesh_physical_shape, self.submesh_logical_shape
        return minialpa.UniformStageOption(
            self.num_stages,
            (physical[0], physical[1]) if physical else None,
            tuple(logical) if logical else None,
            AutoShardingOption(**option).read() if isinstance(option, Mapping) else read_option(option),
            self.num_chunks,
        )


def read_option(given: Any) -> Any:
    """minialpa's option for an option of Alpa; the same object for any other value."""
    return given.read() if isinstance(given, Adjustable) else given  # type: ignore[attr-defined]
