"""Collectives as values: what is communicated, by how much, over which mesh axes; and its price on a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minialpa.cluster import LogicalMesh

CollectiveKind = Literal["all-gather", "all-reduce", "reduce-scatter", "all-to-all"]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a plan.

    n_bytes: for all-gather the gathered result, for the others the buffer that each device puts in.
    """

    kind: CollectiveKind
    n_bytes: float
    axes: tuple[int, ...]

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
