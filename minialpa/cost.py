"""Collectives as values: their kind, their bytes and their mesh axes, and the seconds that one takes on a mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from minialpa.cluster import DeviceSpec, LogicalMesh

CollectiveKind = Literal["all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"]
#: What collectives that XLA for GPUs combines may write together: its default.
GPU_COMBINED_BYTES = 30 * 2**20


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a plan.

    Attributes:
        kind: what the devices do.
        n_bytes: for an all-gather the bytes of the gathered result, for the others those that each device puts in.
        axes: the mesh axes whose devices take part.
    """

    kind: CollectiveKind
    n_bytes: float
    axes: tuple[int, ...]

    def result_bytes(self, mesh: LogicalMesh) -> float:
        """Bytes that each device of `mesh` gets."""
        n_parts = math.prod(mesh.shape[axis] for axis in self.axes) if self.kind == "reduce-scatter" else 1
        return self.n_bytes / n_parts

    def seconds(self, mesh: LogicalMesh) -> float:
        """Seconds on `mesh`, by its bandwidths and latencies."""
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
    """Kinds of which compilers make one collective of those along the same axes that need not wait for each other.

    XLA does so with all-reduces, and for GPUs with all-gathers and reduce-scatters, too.
    """
    return ("all-gather", "all-reduce", "reduce-scatter") if is_gpu(mesh.device) else ("all-reduce",)


def is_gpu(device: DeviceSpec | None) -> bool:
    """Whether a device is a GPU: of a kind other than "cpu"."""
    return device is not None and device.name != "cpu"


def adding_s(accumulator_bytes: float, mesh: LogicalMesh) -> float:
    """Seconds of adding to totals of so many bytes per device: two reads and a write of each."""
    return 3 * accumulator_bytes / mesh.device.memory_bandwidth if mesh.device is not None else 0.0


def as_one_of(n_together: int, mesh: LogicalMesh) -> LogicalMesh:
    """`mesh` as one of `n_together` collectives sees it that start as one: with its part of the time to start."""
    return replace(mesh, alpha=tuple(alpha / n_together for alpha in mesh.alpha))
