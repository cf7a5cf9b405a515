"""Prices of communication: a collective (kind, bytes, mesh axes) and a logical mesh in, seconds out.

For example, `Collective("all-reduce", 1e6, (0,)).seconds(mesh)` is the time to sum 1 MB over axis 0 of `mesh`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from minialpa.cluster import DeviceSpec, LogicalMesh

CollectiveKind = Literal["all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"]
#: Most bytes that XLA for GPUs writes with one combined collective, by default.
GPU_COMBINED_BYTES = 30 * 2**20


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective.

    Attributes:
        n_bytes: of the operand on each device; for an all-gather, of the gathered result.
        axes: the mesh axes whose devices take part.
    """

    kind: CollectiveKind
    n_bytes: float
    axes: tuple[int, ...]

    def result_bytes(self, mesh: LogicalMesh) -> float:
        n_parts = math.prod(mesh.shape[axis] for axis in self.axes) if self.kind == "reduce-scatter" else 1
        return self.n_bytes / n_parts

    def seconds(self, mesh: LogicalMesh) -> float:
        match self.kind:
            case "all-gather":
                return mesh.all_gather_s(self.n_bytes, self.axes)
            case "all-reduce":
                return mesh.all_reduce_s(self.n_bytes, self.axes)
            case "reduce-scatter":
                return mesh.reduce_scatter_s(self.n_bytes, self.axes)
            case "all-to-all":
                return mesh.all_to_all_s(self.n_bytes, self.axes)
            case "collective-permute":
                return mesh.permute_s(self.n_bytes, self.axes)


def combined_kinds(mesh: LogicalMesh) -> tuple[CollectiveKind, ...]:
    """Kinds of collectives that XLA combines: independent ones along the same axes start as one.

    XLA combines all-reduces, and on GPUs also all-gathers and reduce-scatters.
    """
    return ("all-gather", "all-reduce", "reduce-scatter") if is_gpu(mesh.device) else ("all-reduce",)


def is_gpu(device: DeviceSpec | None) -> bool:
    """Whether the device is known and not a CPU."""
    return device is not None and device.name != "cpu"


def adding_s(accumulator_bytes: float, mesh: LogicalMesh) -> float:
    """Seconds of adding values to accumulators of so many bytes per device: two reads and a write of each byte."""
    return 3 * accumulator_bytes / mesh.device.memory_bandwidth if mesh.device is not None else 0.0


def as_one_of(n_together: int, mesh: LogicalMesh) -> LogicalMesh:
    """`mesh` with alpha / n_together: the prices for one of `n_together` collectives that start as one."""
    return replace(mesh, alpha=tuple(alpha / n_together for alpha in mesh.alpha))
