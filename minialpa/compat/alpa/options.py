"""Alpa's options and `global_config`: Alpa's fields go in, in Alpa's order; `read` returns minialpa's option.

Scripts may change options before `read`. Methods take minialpa's own options, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, make_dataclass
from typing import Any, ClassVar, Literal

import minialpa
from minialpa.errors import ShardingError


class Adjustable:
    """Base of options that a script may change.

    Attributes:
        IGNORED: fields without effect. Another value than the default gets a warning.
        REFUSED: fields that minialpa lacks, with their replacements. Another value than the default gets an error.
    """

    IGNORED: ClassVar[Collection[str]] = ()
    REFUSED: ClassVar[Mapping[str, str]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        defaults = {field.name: field.default for field in fields(self)}  # type: ignore[arg-type]
        if name not in defaults:
            raise AttributeError(f"`{type(self).__name__}` has no option `{name}`. It has {', '.join(defaults)}.")
        if value != defaults[name] and name in self.REFUSED:
            raise ShardingError(f"minialpa has no `{name}={value!r}`. Use {self.REFUSED[name]}.")
        if value != defaults[name] and name in self.IGNORED:
            # A generated `__init__` adds a frame between this one and the script.
            stacklevel = 2 if name in vars(self) else 3
            text = f"`{name}={value!r}` has no effect: minialpa decides this itself, see docs/alpa.md."
            warnings.warn(text, stacklevel=stacklevel)
        object.__setattr__(self, name, value)


_OURS = {field.name for field in fields(minialpa.AutoShardingOption)}


@dataclass
class AutoShardingOption(Adjustable):
    """See `minialpa.AutoShardingOption`. `allow_mixed_mesh_shape` is always on."""

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

    IGNORED = ("force_zero_stage_3_all_gather_threshold", "allow_recompute_heavy_op", "all_reduce_threshold")
    REFUSED = {"force_simple_heuristic": "`DataParallel`, `Zero2Parallel` or `Zero3Parallel`"}  # noqa: RUF012

    def read(self) -> minialpa.AutoShardingOption:
        return minialpa.AutoShardingOption(**{name: value for name, value in vars(self).items() if name in _OURS})


@dataclass
class ManualLayerOption(Adjustable):
    """Layers end at `mark_pipeline_boundary()`. With `remat_layer`, the backward pass recomputes each layer."""

    remat_layer: bool = False
    static_argnums: Sequence[int] = ()

    def read(self) -> minialpa.ManualLayerOption:
        return minialpa.ManualLayerOption(remat=self.remat_layer)


@dataclass
class AutoLayerOption(Adjustable):
    """See `minialpa.AutoLayerOption`. The backward pass recomputes each layer with `remat_layer`, or if `remat_mode` is
    "coarse_grained_remat" or "fine_grained_remat".
    """

    layer_num: int | Literal["auto"]
    remat_mode: str = "none"
    fine_grained_remat_layer_num: int | None = None
    static_argnums: Sequence[int] = ()
    eps: float = 0.5
    cost_criteria: str = "flops"
    layer_eps: float = 0.0
    remat_layer: bool = False

    IGNORED = ("fine_grained_remat_layer_num", "cost_criteria", "layer_eps")

    def read(self) -> minialpa.AutoLayerOption:
        mode: Any = self.remat_mode
        if self.remat_layer or mode in ("coarse_grained_remat", "fine_grained_remat"):
            mode = "full"
        return minialpa.AutoLayerOption(self.layer_num, self.eps, mode)


@dataclass
class AutoStageOption(Adjustable):
    """Search for stages, submeshes and their logical shapes. All costs are computed, not profiled.

    Attributes:
        submesh_physical_shape_space: "power_of_two", "all" or "manual"; "small_power_of_two" is "power_of_two" here.
        manually_specified_submeshes: for "manual", pairs of (hosts, devices per host).
        submesh_logical_shape_space: as in `minialpa.AutoStageOption`; "single_node_model_parallel" is "all" here.
    """

    submesh_physical_shape_space: str = "power_of_two"
    manually_specified_submeshes: Sequence[tuple[int, int]] | None = None
    submesh_logical_shape_space: str = "single_node_model_parallel"
    layer_profile_mode: str = "composition"
    stage_imbalance_tolerance: float = float("inf")
    use_hlo_cost_model: bool = False
    profiling_database_filename: str | None = None
    cached_profile_result: str | None = None

    IGNORED = (
        *("layer_profile_mode", "stage_imbalance_tolerance", "profiling_database_filename"),
        "cached_profile_result",
    )

    def read(self) -> minialpa.AutoStageOption:
        # minialpa's spaces contain Alpa's spaces.
        wider = {"small_power_of_two": "power_of_two", "single_node_model_parallel": "all"}
        physical: Any = self.submesh_physical_shape_space
        logical: Any = self.submesh_logical_shape_space
        submeshes: Any = self.manually_specified_submeshes or ()
        return minialpa.AutoStageOption(
            submeshes if physical == "manual" else wider.get(physical, physical), wider.get(logical, logical)
        )


@dataclass
class ManualStageOption(Adjustable):
    """See `minialpa.ManualStageOption`. The dicts have fields of `AutoShardingOption`."""

    forward_stage_layer_ids: Sequence[Sequence[int]]
    submesh_physical_shapes: Sequence[Sequence[int]]
    submesh_logical_shapes: Sequence[Sequence[int]]
    submesh_autosharding_option_dicts: Sequence[Mapping[str, Any]]

    def read(self) -> minialpa.ManualStageOption:
        return minialpa.ManualStageOption(
            self.forward_stage_layer_ids,
            [(hosts, devices) for hosts, devices in self.submesh_physical_shapes],
            [tuple(shape) for shape in self.submesh_logical_shapes],
            [_fields(given) for given in self.submesh_autosharding_option_dicts],
        )


def _fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that only Alpa has get their warning or error."""
    AutoShardingOption(**{name: value for name, value in given.items() if name not in _OURS})
    return {name: value for name, value in given.items() if name in _OURS}


@dataclass
class UniformStageOption(Adjustable):
    """See `minialpa.UniformStageOption`."""

    num_stages: int | None = None
    submesh_physical_shape: Sequence[int] | None = None
    submesh_logical_shape: Sequence[int] | None = None
    submesh_autosharding_option: Any = None

    def read(self) -> minialpa.UniformStageOption:
        physical: Any = self.submesh_physical_shape and tuple(self.submesh_physical_shape)
        logical: Any = self.submesh_logical_shape and tuple(self.submesh_logical_shape)
        given = self.submesh_autosharding_option
        option = AutoShardingOption(**given) if isinstance(given, Mapping) and given else given or None
        return minialpa.UniformStageOption(self.num_stages, physical, logical, read_option(option))


def read_option(given: Any) -> Any:
    """Returns other values than Alpa's options unchanged."""
    return given.read() if isinstance(given, Adjustable) else given  # type: ignore[attr-defined]


#: Settings of `global_config` without effect, with Alpa's defaults.
_IGNORED = {
    "always_donate_micro_batch_vars": True,
    "collect_trace": False,
    "delete_remote_arrays_threshold": 50,
    "eagerly_create_communicators": True,
    "enable_overlapping": False,
    "loadbalance_order_algo": "greedy",
    "nccl_mode": "cupy",
    "pipeline_check_alive": True,
    "pipeline_distributed_compile": True,
    "pipeline_sync_for_timer": False,
    "pipeline_use_signal_send_recv": False,
    "print_compilation_time": False,
    "resharding_loadbalance_mode": "normal",
    "resharding_mode": "send_recv",
    "shard_parallel_sync_for_timer": False,
    "use_dummy_value_for_benchmarking": False,
    "use_local_allgather": True,
}
#: Settings that minialpa refuses, with Alpa's defaults and the replacements.
_REFUSED: dict[str, tuple[Any, str]] = {
    "backend": ("gpu", "the environment variable JAX_PLATFORMS"),
    "debug_with_pipeshard_runtime": (False, "`minialpa.plan(step, args, cluster=...)`, which needs no device"),
    "flax_always_use_fp16_embedding": (False, "`flax.linen.Embed(..., dtype=jnp.float16)` in the model"),
    "use_aws_efa": (False, "the environment variables of EFA and NCCL"),
    "xla_client_mem_fraction": (0.9, "the environment variable XLA_PYTHON_CLIENT_MEM_FRACTION"),
}

_SETTINGS = {**_IGNORED, **{name: default for name, (default, _) in _REFUSED.items()}}

GlobalConfig = make_dataclass(
    "GlobalConfig",
    [(name, Any, default) for name, default in _SETTINGS.items()],
    bases=(Adjustable,),
    namespace={
        "IGNORED": tuple(_IGNORED),
        "REFUSED": {name: instead for name, (_, instead) in _REFUSED.items()},
        "__doc__": "Alpa's settings. None of them has an effect.",
    },
)
global_config: Any = GlobalConfig()
