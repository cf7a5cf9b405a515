"""The space of a joint search, and the columns of its cost tables: the ways in which a stage may use a submesh."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from minialpa.cluster import ClusterSpec
from minialpa.inter.search.stage_cost import MEMORY_PRICES
from minialpa.inter.search.stage_kernels import Bools, Floats, Ints
from minialpa.inter.search.submeshes import Candidate, may_start
from minialpa.options import AutoShardingOption, Remat


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What to choose from.

    Attributes:
        micro_batches: numbers of micro-batches.
        remats: what layers may compute again; the same in all layers of a stage.
        candidates: submeshes with their logical shapes.
        schedule: the order of passes.
        use_all_devices: whether no device may stay idle.
        tolerance: fraction of the step time by which a pipeline may be slower than the fastest.
    """

    micro_batches: tuple[int, ...]
    remats: tuple[Remat, ...]
    candidates: tuple[Candidate, ...]
    schedule: str
    use_all_devices: bool
    tolerance: float


@dataclass(frozen=True, slots=True)
class Column:
    """How a stage may use a submesh.

    Attributes:
        candidate: number of the submesh in `Space.candidates`.
        remat: what its layers compute again.
        price: number of the price of memory in `MEMORY_PRICES`.
    """

    candidate: int
    remat: Remat
    price: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """All columns of a space, by their numbers in the cost tables.

    Attributes:
        columns: the columns; prices of memory change fastest, then rematerialisation.
        number: the number of each column.
        n_devices: devices of each column.
        memory_bytes: the memory limit per device of each column; inf without one.
        may_start: [column, device]: whether the submesh may begin at that device of the cluster.
    """

    columns: tuple[Column, ...]
    number: Mapping[Column, int]
    n_devices: Ints
    memory_bytes: Floats
    may_start: Bools

    def __len__(self) -> int:
        return len(self.columns)

    def __getitem__(self, number: int) -> Column:
        return self.columns[number]

    def at_price(self, column: Column, price: int) -> int:
        """The number of `column` at another price of memory."""
        return self.number[replace(column, price=price)]


def columns_of(space: Space, cluster: ClusterSpec, option: AutoShardingOption) -> Columns:
    columns = tuple(
        Column(candidate, remat, price)
        for candidate in range(len(space.candidates))
        for remat in space.remats
        for price in range(len(MEMORY_PRICES))
    )

    # Hosts may have devices of different kinds, with different memory.
    devices = [space.candidates[column.candidate].device or cluster.device for column in columns]
    starts = may_start(cluster, list(space.candidates))
    return Columns(
        columns=columns,
        number={column: c for c, column in enumerate(columns)},
        n_devices=np.array([space.candidates[column.candidate].n_devices for column in columns]),
        memory_bytes=np.array([option.limit_bytes(device) or math.inf for device in devices]),
        may_start=np.array([starts[column.candidate] for column in columns]),
    )
