"""Alpa's parallel methods: minialpa's, with Alpa's arguments and defaults.

Alpa reads options and the global mesh when it compiles a step, so scripts may change them until then. A method keeps
the script's objects and converts them at each read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import minialpa
from minialpa.compat.alpa.device_mesh import read_devices
from minialpa.compat.alpa.manual_sharding import ManualShardingOption, with_axes, with_specs
from minialpa.compat.alpa.options import AutoShardingOption, Setting, check_setting, read_option
from minialpa.errors import ShardingError
from minialpa.session import current_session, describe_devices


class Late:
    """A field of a method that keeps a script's object and converts it at each read."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._convert = convert

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"given_{name}"

    def __set__(self, method: Any, given: Any) -> None:
        vars(method)[self._name] = given

    def __get__(self, method: Any, owner: type | None = None) -> Any:
        return self if method is None else self._convert(vars(method)[self._name])


class _Method:
    """Attributes of both methods. `SHARDING` names the field that is also `as_option`."""

    SHARDING = ""
    manual_sharding_option: ManualShardingOption | None

    @property
    def as_option(self) -> Any:
        """The sharding options, which may be changed."""
        return vars(self)[f"given_{self.SHARDING}"]

    @as_option.setter
    def as_option(self, option: Any) -> None:
        _set_attribute(self, self.SHARDING, option)

    def options(self) -> Any:
        options: Any = super().options()  # type: ignore[misc]
        manual = self.manual_sharding_option
        return options if manual is None else with_axes(self._with_shape(options, manual), manual)

    def _with_shape(self, options: Any, manual: ManualShardingOption) -> Any:
        return options

    def options_for(self, step: Any) -> Any:
        manual, options = self.manual_sharding_option, self.options()
        return options if manual is None else with_specs(options, manual, step)


def _set_attribute(method: Any, name: str, value: Any) -> None:
    """`__setattr__` of methods, which scripts change until a step is planned."""
    names = [field.name for field in dataclasses.fields(method)]
    if name not in (*names, "as_option"):
        raise AttributeError(f"`{type(method).__name__}` has no attribute `{name}`. It has {', '.join(names)}.")
    if name == "manual_sharding_option" and not isinstance(value, ManualShardingOption | None):
        raise ShardingError(f"`manual_sharding_option` is a `ManualShardingOption` or None; got {value!r}.")
    object.__setattr__(method, name, value)


@dataclass(frozen=True, init=False)
class ShardParallel(_Method, minialpa.ShardParallel):
    """`minialpa.ShardParallel` with Alpa's arguments; the options may change until a step is planned."""

    SHARDING = "auto_sharding_option"
    manual_sharding_option: ManualShardingOption | None = None

    devices = Late(read_devices)
    auto_sharding_option = Late(read_option)

    def __init__(
        self,
        devices: Any = None,
        num_micro_batches: int | None = None,
        auto_sharding_option: Any = None,
        manual_sharding_option: Any = None,
        **others: Any,
    ) -> None:
        """`others` are fields that only minialpa's method has."""
        option: Any = AutoShardingOption() if auto_sharding_option is None else auto_sharding_option
        super().__init__(devices, num_micro_batches, option, **others)
        _set_attribute(self, "manual_sharding_option", manual_sharding_option)

    def _with_shape(self, options: Any, manual: ManualShardingOption) -> Any:
        """With several axes, the logical shape of Alpa by default: (hosts, devices per host)."""
        devices = read_devices(vars(self)["given_devices"])
        has_shape = options.logical_shape is not None or isinstance(devices, minialpa.LogicalMesh)
        if has_shape or len(manual.names[0]) == 1:
            return options
        return dataclasses.replace(options, logical_shape=options.submesh or _shape_of(devices))


def _shape_of(devices: Any) -> tuple[int, int]:
    """(hosts, devices per host) of a cluster, of jax devices, or for None of the session."""
    if devices is not None and not isinstance(devices, minialpa.ClusterSpec):
        devices = describe_devices(tuple(devices))
    cluster = current_session().cluster if devices is None else devices
    return cluster.num_hosts, cluster.devices_per_host


class DataParallel(ShardParallel, minialpa.DataParallel):
    """All devices split the batch; gradients are all-reduced."""


class Zero2Parallel(ShardParallel, minialpa.Zero2Parallel):
    """Data parallel with sharded gradients and optimizer state."""


class Zero3Parallel(ShardParallel, minialpa.Zero3Parallel):
    """Data parallel with sharded parameters, gradients and optimizer state."""


_OVERLAP = Setting("Transfers overlap with compute in every schedule; this one is run as `1f1b`.")


@dataclass(frozen=True, init=False)
class PipeshardParallel(_Method, minialpa.PipeshardParallel):
    """`minialpa.PipeshardParallel` with Alpa's arguments and defaults; options may change until a step is planned."""

    SHARDING = "default_auto_sharding_option"
    manual_sharding_option: ManualShardingOption | None = None

    devices = Late(read_devices)
    default_auto_sharding_option = Late(read_option)
    layer_option = Late(read_option)
    stage_option = Late(read_option)

    def __init__(
        self,
        devices: Any = None,
        num_micro_batches: int = 1,
        default_auto_sharding_option: Any = None,
        pipeline_schedule: str = "1f1b",
        layer_option: Any = None,
        stage_option: Any = None,
        stage_input_shardings: Any = None,
        manual_sharding_option: Any = None,
        **others: Any,
    ) -> None:
        """`others` are fields that only minialpa's method has."""
        if stage_input_shardings is not None:
            raise ShardingError(
                "Instead of `stage_input_shardings`, use `AutoShardingOption(fixed_specs=...)`, which takes the "
                "PartitionSpecs of arguments and results by their paths."
            )
        if pipeline_schedule == "1f1b_overlap_friendly":
            check_setting(_OVERLAP, "pipeline_schedule", pipeline_schedule, stacklevel=2)
            pipeline_schedule = "1f1b"
        option: Any = default_auto_sharding_option
        if option is None:
            # Alpa's default, unlike minialpa's.
            option = AutoShardingOption(prefer_reduce_scatter=True)
        super().__init__(devices, num_micro_batches, pipeline_schedule, layer_option, stage_option, option, **others)
        _set_attribute(self, "manual_sharding_option", manual_sharding_option)


# A frozen dataclass defines it itself.
ShardParallel.__setattr__ = PipeshardParallel.__setattr__ = _set_attribute  # type: ignore[method-assign]


def get_3d_parallel_method(
    num_micro_batches: int,
    data_parallel: int,
    operator_parallel: int,
    pipeline_parallel: int,
    allow_degenerate_into_shard_parallel: bool = True,
    manual_layer_num: int | None = None,
    manual_sharding_option: Any = None,
) -> ShardParallel | PipeshardParallel:
    """`minialpa.get_3d_parallel_method` on the global mesh, if a script has set one."""
    method = minialpa.get_3d_parallel_method(
        num_micro_batches,
        data_parallel,
        operator_parallel,
        pipeline_parallel,
        allow_degenerate_into_shard_parallel,
        manual_layer_num,
        read_devices(None),
    )
    given = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    kind = ShardParallel if isinstance(method, minialpa.ShardParallel) else PipeshardParallel
    return kind(**given, manual_sharding_option=manual_sharding_option)
