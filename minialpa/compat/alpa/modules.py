"""Modules of Alpa from which scripts import: each has some names of this package, under Alpa's path."""

from __future__ import annotations

import sys
from types import ModuleType

_MODULES = {
    "pipeline_parallel": (),
    "pipeline_parallel.layer_construction": (
        *("AutoLayerOption", "ManualLayerOption", "automatic_layer_construction", "automatic_remat"),
        *("manual_layer_construction", "manual_remat"),
    ),
    "pipeline_parallel.primitive_def": ("mark_pipeline_boundary",),
    "pipeline_parallel.stage_construction": (
        *("AutoStageOption", "ManualStageOption", "UniformStageOption", "get_last_dp_result"),
    ),
    "shard_parallel": (),
    "shard_parallel.auto_sharding": ("AutoShardingOption", "LogicalDeviceMesh"),
    "shard_parallel.manual_sharding": ("ManualShardingOption",),
}


def add_modules(package: ModuleType) -> None:
    """Let scripts import these modules of `package`."""
    for path, names in _MODULES.items():
        module = ModuleType(f"{package.__name__}.{path}", f"Names of Alpa's `{path}`.")
        for name in names:
            setattr(module, name, getattr(package, name))
        if not names:
            module.__path__ = []
        parent, _, last = module.__name__.rpartition(".")
        setattr(sys.modules[parent], last, module)
        sys.modules[module.__name__] = module
