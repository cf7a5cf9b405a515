"""Bounds on the costs of sublayers for one number of micro-batches in, the table of stages for the DP out.

The search raises few bounds between two tables, so only sums of changed candidates are recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from minialpa.cluster import ClusterSpec
from minialpa.inter.schedule.schedules import PipelineSize, max_live
from minialpa.inter.search.stage_cost import SublayerCost
from minialpa.inter.search.stage_dp import StageAssignment, StageChoice, StageCostTable
from minialpa.inter.search.stage_kernels import Bools, Floats, Ints, of_runs
from minialpa.inter.search.stage_memory import needed_bytes
from minialpa.inter.search.submeshes import MEMORY_PRICES, Columns, Space, preferred_seconds, skip_to, transfer_seconds

NAMES = tuple(field.name for field in fields(SublayerCost))

#: First layer, last layer, column.
Place = tuple[int, int, int]


class StageTables:
    """Costs of sublayers for `n` micro-batches, and the table of stages.

    Attributes:
        by_name: [sublayer, column] for each field of `SublayerCost`; lower bounds unless `solved`.
        exact: (seconds per micro-batch, seconds once per step) of stages that were solved as wholes.
        misfits: stages, each with a number of micro-batches in flight with which it does not fit in memory. A stage
            with more layers on the same submesh does not fit either, unless it has more rematerialisation.
        changed: since `chosen`.
    """

    def __init__(
        self, n: int, *, cluster: ClusterSpec, space: Space, columns: Columns, layer_of_sublayer: Ints,
        crossing_bytes: Floats, is_open: Bools,
    ) -> None:  # fmt: skip
        """crossing_bytes: of one micro-batch over the border after each layer except the last."""
        self.n, self.cluster, self.space, self.columns = n, cluster, space, columns
        self.exact: dict[Place, tuple[float, float]] = {}
        self.misfits: list[tuple[Place, int]] = []
        self.is_open = is_open
        self.chosen: StageAssignment | None = None
        self.changed = False

        sublayers = (len(layer_of_sublayer), len(columns))
        self.by_name = {name: np.zeros(sublayers) for name in NAMES}
        self.solved = np.zeros(sublayers, np.bool_)

        # [column, i, j] each, for the layers i to j. `_is_stale`: [candidate], whether its cubes are out of date.
        self._first_sublayers = np.flatnonzero(np.diff(layer_of_sublayer, prepend=-1))
        n_layers = len(self._first_sublayers)
        names = ("seconds", "step_seconds", "fixed_bytes", "in_flight_bytes")
        self._cubes = {name: np.zeros((len(columns), n_layers, n_layers)) for name in names}
        self._is_stale: Bools = np.ones(len(space.candidates), np.bool_)
        self._transfer_s, self._skip_to = transfer_seconds(cluster, crossing_bytes), skip_to(cluster)

        # Most live micro-batches of any stage in a pipeline of any length.
        most_stages = min(n_layers, cluster.n_devices)
        self._most_live = max_live(space.schedule, 0, PipelineSize(most_stages, n))

    @property
    def _columns_per_candidate(self) -> int:
        return len(self.columns) // len(self.space.candidates)

    def change(self, columns: Ints) -> None:
        self.changed = self.changed or len(columns) > 0
        self._is_stale[columns // self._columns_per_candidate] = True

    def open(self, candidates: Bools) -> bool:
        """Let stages use these candidates; whether any is new."""
        new = candidates & ~self.is_open
        if new.any():
            self.is_open, self._is_stale = self.is_open | new, self._is_stale | new
            self.changed, self.chosen = True, None  # a new candidate may be better
        return bool(new.any())

    def solve(self, sublayers: Ints, column: int, cost: SublayerCost) -> None:
        for name in NAMES:
            self.by_name[name][sublayers, column] = getattr(cost, name)
        self.solved[sublayers, column] = True
        self.change(np.array([column]))

    def raise_seconds(self, sublayers: Ints, columns: Sequence[int], seconds: float) -> None:
        """Of costs that are not solved."""
        at = np.ix_(sublayers, np.array(columns))
        bounds, lower = self.by_name["seconds"], ~self.solved[at]
        bounds[at] = np.where(lower, np.maximum(bounds[at], seconds), bounds[at])
        self.change(np.array(columns))

    def learn(self, place: Place, seconds: float, step_seconds: float) -> None:
        self.exact[place] = seconds, step_seconds
        self.change(np.array([place[2]]))
        # The bound may be higher, so another pipeline may be better.
        self.chosen = None

    def exclude(self, place: Place, n_live: int) -> None:
        self.misfits.append((place, n_live))
        self.change(np.array([place[2]]))

    # ---- stages ---------------------------------------------------------------------------------------------------

    def table(self) -> StageCostTable:
        """Bounds of all stages, as views of arrays that later changes overwrite."""
        if self._is_stale.any():
            width = self._columns_per_candidate
            self._refresh(np.flatnonzero(np.repeat(self._is_stale, width)))
            self._is_stale[:] = False

        views = {name: np.moveaxis(cube, 0, -1) for name, cube in self._cubes.items()}
        for view in views.values():
            view.flags.writeable = False
        return StageCostTable(
            n_devices=self.columns.n_devices,
            may_start=self.columns.may_start,
            skip_to=self._skip_to,
            transfer_seconds=self._transfer_s,
            **views,
        )

    def _refresh(self, columns: Ints) -> None:
        """columns: all columns of some candidates."""
        cost = {name: values[:, columns] for name, values in self.by_name.items()}

        def sums(values: Floats) -> Floats:
            return of_runs(np.add.reduceat(values, self._first_sublayers, axis=0), True)

        # Sums over the sublayers of each run of layers; of `pass_temp_bytes` the maximum.
        seconds, step_seconds, in_flight = (sums(cost[k]) for k in ("seconds", "step_seconds", "in_flight_bytes"))
        passes = of_runs(np.maximum.reduceat(cost["pass_temp_bytes"], self._first_sublayers, axis=0), False)
        passes += np.where(np.isfinite(seconds), sums(cost["left_bytes"]), 0.0)
        fixed = needed_bytes(sums(cost["fixed_bytes"]), np.maximum(passes, sums(cost["update_temp_bytes"])))

        row = {int(c): k for k, c in enumerate(columns)}
        memory_bytes = self.columns.memory_bytes[columns]
        for (i, j, c), (t, step) in self.exact.items():
            if c in row:
                at = row[c], i, j
                seconds[at], step_seconds[at] = t, step
        for (i, j, c), n_live in self.misfits:
            if c in row:
                # The columns of a candidate are adjacent, by rising rematerialisation.
                first = row[c] - c % self._columns_per_candidate
                last = row[c] - c % len(MEMORY_PRICES) + len(MEMORY_PRICES)
                larger = slice(first, last), slice(i + 1), slice(j, None)
                least = _just_above(memory_bytes[row[c]]) - n_live * in_flight[larger]
                fixed[larger] = np.maximum(fixed[larger], least)

        # Of nearly equal stages, the one on fewer devices wins.
        share = (self.columns.n_devices[columns] / self.cluster.n_devices)[:, None, None]
        preferred = preferred_seconds(seconds, share)
        preferred[self._is_needless(fixed + self._most_live * in_flight <= memory_bytes[:, None, None])] = np.inf
        preferred[~self.columns.is_of(self.is_open)[columns]] = np.inf

        made = (preferred, step_seconds, fixed, in_flight)
        for cube, values in zip(self._cubes.values(), made, strict=True):
            cube[columns] = values

    def _is_needless(self, fits: Bools) -> Bools:
        """[column, i, j]: whether a column of the candidate that saves less memory always fits.

        That column is as fast or faster: more rematerialisation and a higher price of memory never save time.
        """
        by_column = fits.reshape(-1, len(self.space.remats), len(MEMORY_PRICES), *fits.shape[1:])
        free = by_column[:, :, 0]  # no price of memory
        earlier = np.zeros_like(free)
        earlier[:, 1:] = np.logical_or.accumulate(free, axis=1)[:, :-1]
        needless = np.repeat(earlier[:, :, None], len(MEMORY_PRICES), axis=2)
        needless[:, :, 1:] |= free[:, :, None]
        return needless.reshape(fits.shape)


def place_of(stage: StageChoice) -> Place:
    return stage.first_layer, stage.last_layer, stage.candidate


def _just_above(limit_bytes: float) -> float:
    """A little more than a limit, in spite of rounding in sums and differences."""
    return limit_bytes + 2 * float(np.spacing(limit_bytes)) if math.isfinite(limit_bytes) else math.inf
