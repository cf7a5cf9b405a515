"""The plans that Alpa's authors stored for their models on p3.16xlarge hosts, as data.

Source: alpa-projects/alpa, benchmark/alpa/suite_auto_gpt.py, suite_auto_moe.py and suite_wresnet.py, `perf_test_suite`
and `perf_test_auto_suite`. Alpa found all plans with reduce-scattered gradients and with every layer recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minialpa import AutoLayerOption, AutoShardingOption, ManualStageOption, PipeshardParallel


@dataclass(frozen=True, slots=True)
class StoredStage:
    """`n_layers` layers on a submesh of (hosts, devices).

    splits_batch: whether mesh axis 0, and no other axis, splits the examples.
    """

    n_layers: int
    submesh: tuple[int, int]
    logical_shape: tuple[int, int]
    splits_batch: bool = False


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """The plan of `model`, a name that `models.build` takes, on `n_devices` devices."""

    model: str
    n_devices: int
    batch_size: int
    n_micro_batches: int
    stages: tuple[StoredStage, ...]

    def method(self, memory_limit_bytes: float | None = None) -> PipeshardParallel:
        """The method that forces these decisions. memory_limit_bytes: per device; None for the cluster's memory."""
        ends = [sum(stage.n_layers for stage in self.stages[: k + 1]) for k in range(len(self.stages))]
        forced: dict[str, Any] = {"force_batch_dim_to_mesh_dim": 0}
        stages = ManualStageOption(
            [tuple(range(end - stage.n_layers, end)) for end, stage in zip(ends, self.stages, strict=True)],
            [stage.submesh for stage in self.stages],
            [stage.logical_shape for stage in self.stages],
            [forced if stage.splits_batch else {} for stage in self.stages],
        )
        return PipeshardParallel(
            num_micro_batches=self.n_micro_batches,
            layer_option=AutoLayerOption(ends[-1], remat=True),
            stage_option=stages,
            default_auto_sharding_option=AutoShardingOption(
                prefer_reduce_scatter=True, memory_limit_bytes=memory_limit_bytes
            ),
        )


def _stage(n_layers: int, n_devices: int, logical_shape: tuple[int, int], splits_batch: bool = False) -> StoredStage:
    return StoredStage(n_layers, (1, n_devices), logical_shape, splits_batch)


def _resnet_13b() -> tuple[StoredStage, ...]:
    """Alternate stages with eight devices on axis 0, and with eight on axis 1 and a whole batch."""
    n_layers = (4, 4, 4, 4, 4, 4, 5, 4)
    outer, inner = ((8, 1), False), ((1, 8), True)
    kinds = (outer, inner, outer, inner, outer, outer, inner, outer)
    return tuple(_stage(n, 8, *kind) for n, kind in zip(n_layers, kinds, strict=True))


STORED = (
    StoredPlan("gpt-350m", 1, 1024, 512, (_stage(1, 1, (1, 1)),)),
    StoredPlan("gpt-760m", 2, 1024, 128, (_stage(3, 1, (1, 1), True),) * 2),
    StoredPlan("gpt-1.3b", 4, 1024, 128, (_stage(3, 2, (2, 1), True),) * 2),
    StoredPlan("gpt-2.6b", 8, 1024, 128, (_stage(2, 2, (2, 1), True), _stage(2, 2, (2, 1)), _stage(4, 4, (4, 1)))),
    StoredPlan("gpt-6.7b", 16, 1024, 64, (_stage(4, 8, (2, 4), True),) * 2),
    StoredPlan("gpt-15b", 32, 1024, 128, (_stage(4, 8, (2, 4), True),) * 4),
    StoredPlan("gpt-39b", 64, 1024, 1024, (_stage(1, 4, (1, 4), True),) * 16),
    StoredPlan("moe-380m", 1, 1024, 512, (_stage(1, 1, (1, 1)),)),
    StoredPlan("moe-690m", 2, 1024, 32, (_stage(8, 2, (2, 1), True),)),
    StoredPlan("moe-1.3b", 4, 1024, 32, (_stage(4, 2, (2, 1), True),) * 2),
    StoredPlan("moe-2.4b", 8, 1024, 32, (_stage(4, 4, (4, 1), True),) * 2),
    StoredPlan("moe-10b", 16, 1024, 16, (_stage(4, 8, (8, 1)),) * 2),
    StoredPlan("moe-27b", 32, 1024, 128, (_stage(1, 4, (4, 1)),) * 8),
    StoredPlan("moe-70b", 64, 1024, 64, (_stage(1, 8, (8, 1)),) * 8),
    StoredPlan("wresnet-250m", 1, 1536, 24, (_stage(16, 1, (1, 1)),)),
    StoredPlan("wresnet-500m", 2, 1536, 24, (_stage(16, 2, (1, 2)),)),
    StoredPlan("wresnet-1b", 4, 1536, 24, (_stage(16, 4, (1, 4)),)),
    StoredPlan("wresnet-2b", 8, 1536, 24, (_stage(8, 4, (4, 1)), _stage(8, 4, (1, 4), True))),
    StoredPlan(
        "wresnet-4b", 16, 1536, 32, (_stage(5, 4, (4, 1), True), _stage(4, 4, (4, 1), True), _stage(7, 8, (8, 1)))
    ),
    StoredPlan(
        "wresnet-6.8b", 32, 1536, 32,
        (_stage(5, 8, (8, 1), True), _stage(4, 8, (8, 1)), _stage(4, 8, (8, 1)), _stage(3, 8, (8, 1))),
    ),
    StoredPlan("wresnet-13b", 64, 1520, 38, _resnet_13b()),
)  # fmt: skip

#: A plan for tests, in place of a stored one.
TINY = StoredPlan("gpt", 2, 16, 4, (_stage(1, 1, (1, 1), True),) * 2)
