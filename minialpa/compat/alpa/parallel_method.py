"""Alpa's parallel methods: Alpa's arguments go in, and `read` returns minialpa's method. Scripts may change attributes.

Attributes have Alpa's names, such as `as_option` for `auto_sharding_option`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import minialpa
from minialpa.compat.alpa.device_mesh import read_devices
from minialpa.compat.alpa.manual_sharding import ManualShardingOption, with_axes, with_specs
from minialpa.compat.alpa.options import AutoShardingOption, read_option
from minialpa.errors import ShardingError


class ShardParallel:
    """`minialpa.ShardParallel` with Alpa's arguments."""

    __slots__ = ("as_option", "devices", "ms_option", "num_micro_batches")
    KIND: ClassVar[type[minialpa.ShardParallel]] = minialpa.ShardParallel

    def __init__(
        self,
        devices: Any = None,
        num_micro_batches: int | None = None,
        auto_sharding_option: Any = None,
        manual_sharding_option: ManualShardingOption | None = None,
    ) -> None:
        self.devices, self.num_micro_batches = devices, num_micro_batches
        self.as_option = AutoShardingOption() if auto_sharding_option is None else auto_sharding_option
        self.ms_option = manual_sharding_option

    def read(self) -> Any:
        method = self.KIND(read_devices(self.devices), self.num_micro_batches, read_option(self.as_option))
        return _by_hand(method, self.ms_option)


class DataParallel(ShardParallel):
    __slots__ = ()
    KIND = minialpa.DataParallel


class Zero2Parallel(ShardParallel):
    __slots__ = ()
    KIND = minialpa.Zero2Parallel


class Zero3Parallel(ShardParallel):
    __slots__ = ()
    KIND = minialpa.Zero3Parallel


class PipeshardParallel:
    """`minialpa.PipeshardParallel` with Alpa's arguments and defaults. "1f1b_overlap_friendly" is "1f1b" here."""

    __slots__ = (
        *("as_option", "devices", "layer_option", "ms_option", "num_micro_batches", "pipeline_schedule"),
        "stage_option",
    )

    def __init__(
        self,
        devices: Any = None,
        num_micro_batches: int = 1,
        default_auto_sharding_option: Any = None,
        pipeline_schedule: str = "1f1b",
        layer_option: Any = None,
        stage_option: Any = None,
        stage_input_shardings: Any = None,
        manual_sharding_option: ManualShardingOption | None = None,
    ) -> None:
        if stage_input_shardings is not None:
            raise ShardingError(
                "minialpa has no `stage_input_shardings`. Use `minialpa.AutoShardingOption(fixed_specs=...)`, which "
                "takes PartitionSpecs of arguments and results."
            )
        self.devices, self.num_micro_batches = devices, num_micro_batches
        # Alpa's default, unlike minialpa's.
        self.as_option = default_auto_sharding_option or AutoShardingOption(prefer_reduce_scatter=True)
        self.pipeline_schedule = pipeline_schedule
        self.layer_option, self.stage_option = layer_option, stage_option
        self.ms_option = manual_sharding_option

    def read(self) -> Any:
        method = minialpa.PipeshardParallel(
            devices=read_devices(self.devices),
            num_micro_batches=self.num_micro_batches,
            pipeline_schedule=self.pipeline_schedule.removesuffix("_overlap_friendly"),
            layer_option=read_option(self.layer_option),
            stage_option=read_option(self.stage_option),
            default_auto_sharding_option=read_option(self.as_option),
        )
        return _by_hand(method, self.ms_option)


def get_3d_parallel_method(
    num_micro_batches: int,
    data_parallel: int,
    operator_parallel: int,
    pipeline_parallel: int,
    allow_degenerate_into_shard_parallel: bool = True,
    manual_layer_num: int | None = None,
    manual_sharding_option: ManualShardingOption | None = None,
) -> Any:
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
    return _by_hand(method, manual_sharding_option)


def read_method(method: Any) -> Any:
    """minialpa's method for a method of Alpa, by default `ShardParallel()`. Returns other values unchanged."""
    given = ShardParallel() if method is None else method
    return given.read() if isinstance(given, ShardParallel | PipeshardParallel) else given


# ---- shardings by hand ----------------------------------------------------------------------------------------------


class _ByHand:
    """A method with a `ManualShardingOption`, which depends on the step's arguments."""

    manual: ManualShardingOption

    def options(self) -> Any:
        return with_axes(super().options(), self.manual)  # type: ignore[misc]

    def options_for(self, step: Any) -> Any:
        return with_specs(self.options(), self.manual, step)


@dataclass(frozen=True, kw_only=True)
class _ShardByHand(_ByHand, minialpa.ShardParallel):
    manual: ManualShardingOption


@dataclass(frozen=True, kw_only=True)
class _PipeshardByHand(_ByHand, minialpa.PipeshardParallel):
    manual: ManualShardingOption


def _by_hand(method: Any, manual: ManualShardingOption | None) -> Any:
    if manual is None:
        return method
    kinds: dict[Any, Any] = {minialpa.ShardParallel: _ShardByHand, minialpa.PipeshardParallel: _PipeshardByHand}
    if not isinstance(manual, ManualShardingOption) or type(method) not in kinds:
        raise ShardingError(
            "Pass a `ManualShardingOption` as `manual_sharding_option` of `ShardParallel` or `PipeshardParallel`; got "
            f"{manual!r} for `{type(method).__name__}`."
        )
    given = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    return kinds[type(method)](**given, manual=manual)
