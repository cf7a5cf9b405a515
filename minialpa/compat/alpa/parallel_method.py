"""Alpa's parallel methods: minialpa's, with Alpa's arguments and defaults.

Alpa reads options and the global mesh when it compiles a step, so scripts may change them until then. A method here
keeps what the script gave and reads it whenever the planner asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import minialpa
from minialpa.compat.alpa.device_mesh import read_devices
from minialpa.compat.alpa.names import INSTEAD
from minialpa.compat.alpa.options import AutoShardingOption, read_option
from minialpa.compat.alpa.settings import Setting, check_setting
from minialpa.errors import ShardingError


class Late:
    """A field of a method that keeps what a script gave, and converts it each time that it is read."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._convert = convert

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"given_{name}"

    def __set__(self, method: Any, given: Any) -> None:
        vars(method)[self._name] = given

    def __get__(self, method: Any, owner: type | None = None) -> Any:
        return self if method is None else self._convert(vars(method)[self._name])


class ShardParallel(minialpa.ShardParallel):
    """`minialpa.ShardParallel` with Alpa's arguments; the options may change until a step is planned."""

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
        _refuse_manual_sharding(manual_sharding_option)
        option: Any = AutoShardingOption() if auto_sharding_option is None else auto_sharding_option
        super().__init__(devices, num_micro_batches, option, **others)

    @property
    def as_option(self) -> Any:
        """The sharding options, which may be changed."""
        return vars(self)["given_auto_sharding_option"]


class DataParallel(ShardParallel, minialpa.DataParallel):
    """All devices split the batch; gradients are all-reduced."""


class Zero2Parallel(ShardParallel, minialpa.Zero2Parallel):
    """Data parallel with sharded gradients and optimizer state."""


class Zero3Parallel(ShardParallel, minialpa.Zero3Parallel):
    """Data parallel with sharded parameters, gradients and optimizer state."""


def _refuse_manual_sharding(given: Any) -> None:
    if given is not None:
        raise ShardingError(f"`manual_sharding_option` has no equal in minialpa. {INSTEAD['ManualShardingOption']}")


_OVERLAP = Setting("Transfers overlap with compute in every schedule; this one is run as `1f1b`.")


class PipeshardParallel(minialpa.PipeshardParallel):
    """`minialpa.PipeshardParallel` with Alpa's arguments and defaults; options may change until a step is planned."""

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
        _refuse_manual_sharding(manual_sharding_option)
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

    @property
    def as_option(self) -> Any:
        """The sharding options of all stages, which may be changed."""
        return vars(self)["given_default_auto_sharding_option"]


def get_3d_parallel_method(
    num_micro_batches: int,
    data_parallel: int,
    operator_parallel: int,
    pipeline_parallel: int,
    allow_degenerate_into_shard_parallel: bool = True,
    manual_layer_num: int | None = None,
    manual_sharding_option: Any = None,
) -> minialpa.ShardParallel | minialpa.PipeshardParallel:
    """`minialpa.get_3d_parallel_method` on the global mesh, if a script has set one."""
    _refuse_manual_sharding(manual_sharding_option)
    return minialpa.get_3d_parallel_method(
        num_micro_batches,
        data_parallel,
        operator_parallel,
        pipeline_parallel,
        allow_degenerate_into_shard_parallel,
        manual_layer_num,
        read_devices(None),
    )
