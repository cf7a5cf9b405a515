"""The methods under which each script trains."""

from __future__ import annotations

import minialpa

METHODS = {
    "auto": None,
    "shard": minialpa.ShardParallel(),
    "zero3": minialpa.Zero3Parallel(),
    "micro": minialpa.ShardParallel(num_micro_batches=2),
    "stages": minialpa.PipeshardParallel(
        num_micro_batches=2,
        layer_option=minialpa.AutoLayerOption(layer_num=2),
        stage_option=minialpa.UniformStageOption(num_stages=2),
    ),
}
