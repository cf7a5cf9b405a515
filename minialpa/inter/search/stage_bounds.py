"""Costs of solved sublayers in, lower bounds on the costs of all stages and the best pipeline under them out.

An unsolved sublayer on a submesh costs at least its cost on one device, divided by the number of devices. That holds
for more micro-batches, for rematerialisation, which adds compute, and for prices and limits of memory, which add time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from minialpa.errors import TraceError
from minialpa.inter.schedule.schedules import PipelineSize, max_live
from minialpa.inter.search.stage_cost import SublayerCost
from minialpa.inter.search.stage_dp import StageAssignment, StageChoice, Start, choose_stages, step_seconds_of
from minialpa.inter.search.stage_kernels import Ints
from minialpa.inter.search.stage_tables import StageTables, place_of
from minialpa.inter.search.sublayer_solver import SublayerSearch, SublayerSolver
from minialpa.inter.search.submeshes import MEMORY_PRICES, Candidate, Column, Space, columns_of, first_views
from minialpa.options import Remat

#: Part of a solved time that bounds times with more rematerialisation. Recomputed values join other kernels, which
#: saved up to 0.001 of the time where measured.
_AS_FAST = 0.995


@dataclass(frozen=True, slots=True)
class Unsolved:
    """A sublayer in a column without a solved cost. share: of the pipeline's time, with all sublayers like it."""

    sublayer: int
    column: int
    share: float


class StageBounds:
    """`tables[n]` has the bounds for n micro-batches, for all `numbers` n into which the step can be split."""

    def __init__(self, search: SublayerSearch, known: dict[str, SublayerCost] | None = None) -> None:
        """known: costs from other searches, to which this search adds."""
        self.cluster, self.space = search.cluster, search.space
        self.columns = columns_of(search.space, search.cluster, search.option)
        self.sublayers = SublayerSolver(search, self.columns, {} if known is None else known)
        self.numbers, self._base = _possible_numbers(self.sublayers, search.space)

        # The bytes that cross a border per step do not depend on the number of micro-batches.
        layer_of_sublayer = np.array(self.sublayers.layer_of_sublayer)
        last_sublayers = np.flatnonzero(np.diff(layer_of_sublayer))
        border_bytes = np.array(self.sublayers.border_bytes)[last_sublayers]
        self.tables = {
            n: StageTables(
                n,
                cluster=self.cluster,
                space=self.space,
                columns=self.columns,
                layer_of_sublayer=layer_of_sublayer,
                crossing_bytes=border_bytes / n,
                is_open=first_views(
                    search.space.candidates, self.cluster.devices_per_host, (search.traced.batch_size or 1) // n
                ),
            )
            for n in self.numbers
        }
        # (number of micro-batches, remat) of the costs on one device that have raised bounds.
        self._costed_on_one_device: set[tuple[int, Remat]] = set()
        self._raise_to_one_device(self._base, search.space.remats[0], self.numbers, range(len(self.columns)))

    # ---- costs of sublayers ---------------------------------------------------------------------------------------

    def raise_bound(self, n: int, sublayer: int, c: int) -> None:
        """Raise the bounds of a sublayer in column `c`, and of sublayers like it, by the cheapest means left."""
        column = self.columns[c]
        base = min(n, self._base)

        # Costs on one device come first, as they bound all columns at once.
        if (base, column.remat) not in self._costed_on_one_device:
            columns = [i for i, other in enumerate(self.columns.columns) if other.remat == column.remat]
            alike = [m for m in self.numbers if m == 1 or base > 1]
            self._raise_to_one_device(base, column.remat, alike, columns)
        else:
            self._solve(n, sublayer, column)

    def _raise_to_one_device(self, base: int, remat: Remat, numbers: Iterable[int], columns: Iterable[int]) -> None:
        """Raise the bounds of columns to costs on one device of unlimited memory, divided by the number of devices.

        A single micro-batch takes at least as long as one of `base`.
        """
        self._costed_on_one_device.add((base, remat))
        kinds = self.sublayers.kinds(base, remat)

        # Sublayers of one kind cost the same on one kind of device.
        known: dict[Candidate, dict[int, SublayerCost]] = {}
        for c in columns:
            one = Candidate((1, 1), (1,), self.space.candidates[self.columns[c].candidate].device)
            if one not in known:
                known[one] = {kind: self.sublayers.unlimited_cost(base, remat, kind, one) for kind in set(kinds)}
            for n in numbers:
                self._raise_column(n, c, [known[one][kind] for kind in kinds], base, remat)

    def _raise_column(self, n: int, c: int, alone: Sequence[SublayerCost], base: int, remat: Remat) -> None:
        """alone: cost of each sublayer on one device, with `base` micro-batches and `remat`."""
        n_devices, tables = self.columns.n_devices[c], self.tables[n]
        has_remat = self.columns[c].remat == remat
        bounds, share = tables.by_name, min(1, base / n) / n_devices
        # A single micro-batch does less work once per step.
        names = ("step_seconds", "fixed_bytes") if n > 1 or base == 1 else ()
        for i, cost in enumerate(alone):
            if tables.solved[i, c]:
                continue
            # Each pass adds to whole accumulators, for any size of micro-batch.
            work_s = cost.seconds - cost.adding_seconds
            adding_s = cost.adding_seconds if n > 1 or base == 1 else 0.0
            seconds = share * work_s + adding_s / n_devices
            bounds["seconds"][i, c] = max(bounds["seconds"][i, c], seconds)
            if has_remat:
                bounds["in_flight_bytes"][i, c] = share * cost.in_flight_bytes
            for name in names:
                bounds[name][i, c] = max(bounds[name][i, c], getattr(cost, name) / n_devices)
        tables.change(np.array([c]))

    def _solve(self, n: int, sublayer: int, column: Column) -> None:
        """Solve a sublayer, and sublayers like it, in `column`, or first in the column of the highest price."""
        kinds, tables = self.sublayers.kinds(n, column.remat), self.tables[n]
        sublayers = np.array([i for i, kind in enumerate(kinds) if kind == kinds[sublayer]])
        prices = [self.columns.at_price(column, price) for price in range(len(MEMORY_PRICES))]
        free, *_, highest = prices
        fastest = self.sublayers.cost(n, sublayer, free)
        if column.price == 0:
            tables.solve(sublayers, free, fastest)
            self._raise_to_fastest(n, sublayers, column, fastest)
        elif tables.solved[sublayer, highest]:
            tables.solve(sublayers, self.columns.number[column], self.sublayers.cost(n, sublayer, prices[column.price]))
        else:
            # If the highest price has no effect, lower prices have no effect.
            cost = self.sublayers.cost(n, sublayer, highest)
            for c in prices[1:] if cost == fastest else (highest,):
                tables.solve(sublayers, c, cost)

    def _raise_to_fastest(self, n: int, sublayers: Ints, column: Column, fastest: SublayerCost) -> None:
        """Raise the bounds of columns that cannot be faster than `fastest`, the cost in `column` without a price.

        They have as much rematerialisation or more, on the same candidate without a price, for `n` or more
        micro-batches. A price may save time of micro-batches at the cost of time per step.
        """
        if math.isinf(fastest.seconds):
            return
        remats = self.space.remats
        later = [replace(column, remat=remat) for remat in remats[remats.index(column.remat) :]]
        columns = [self.columns.number[one] for one in later]
        for m in self.numbers:
            if m >= n:
                seconds = n / m * (fastest.seconds - fastest.adding_seconds) + fastest.adding_seconds * (n > 1)
                self.tables[m].raise_seconds(sublayers, columns, _AS_FAST * seconds)

    # ---- logical shapes -------------------------------------------------------------------------------------------

    def open_near_views(self, n: int, found: StageAssignment) -> bool:
        """Open shapes with half or twice as many devices on axis 0 as in `found`; whether any is new."""
        candidates = self.space.candidates
        near = np.zeros(len(candidates), np.bool_)
        for used in {self.columns[stage.candidate].candidate for stage in found.stages}:
            one = candidates[used]
            for m, other in enumerate(candidates):
                if (other.submesh, other.device) == (one.submesh, one.device):
                    near[m] |= _are_near_shapes(other.logical_shape, one.logical_shape)
        return self.tables[n].open(near)

    def open_all_views(self, n: int) -> bool:
        return self.tables[n].open(np.ones(len(self.space.candidates), np.bool_))

    # ---- costs of stages ------------------------------------------------------------------------------------------

    def unsolved(self, n: int, found: StageAssignment) -> list[Unsolved]:
        """One sublayer of each kind, the largest share first."""
        tables, seconds = self.tables[n], self.tables[n].by_name["seconds"]
        users: dict[tuple[int, int], list[int]] = {}
        total_s = 0.0
        for stage in found.stages:
            kinds = self.sublayers.kinds(min(n, self._base), self.columns[stage.candidate].remat)
            for sublayer, layer in enumerate(self.sublayers.layer_of_sublayer):
                if not stage.first_layer <= layer <= stage.last_layer:
                    continue
                total_s += float(seconds[sublayer, stage.candidate])
                if not tables.solved[sublayer, stage.candidate] and place_of(stage) not in tables.exact:
                    users.setdefault((kinds[sublayer], stage.candidate), []).append(sublayer)

        out = [
            Unsolved(sublayers[0], c, len(sublayers) * float(seconds[sublayers[0], c]) / max(total_s, math.ulp(0.0)))
            for (_, c), sublayers in users.items()
        ]
        return sorted(out, key=lambda one: -one.share)

    def seconds_of(self, n: int, found: StageAssignment) -> float:
        """Under the bounds; inf if a stage has no sharding or does not fit in memory."""
        table = self.tables[n].table()
        for k, stage in enumerate(found.stages):
            at = place_of(stage)
            if math.isinf(table.seconds[at]):
                return math.inf
            live = max_live(self.space.schedule, k, PipelineSize(len(found.stages), n))
            if table.fixed_bytes[at] + live * table.in_flight_bytes[at] > self.columns.memory_bytes[stage.candidate]:
                return math.inf
        return step_seconds_of(table, found.stages, n)

    def on_same_submeshes(self, n: int, found: StageAssignment) -> StageAssignment | None:
        """Each stage in the fastest column of its submesh; `None` if a stage does not fit."""
        table = self.tables[n].table()
        stages: list[StageChoice] = []
        for k, stage in enumerate(found.stages):
            live = max_live(self.space.schedule, k, PipelineSize(len(found.stages), n))
            at = stage.first_layer, stage.last_layer, self.columns.on_same_submesh(stage.candidate)
            fits = table.fixed_bytes[at] + live * table.in_flight_bytes[at] <= self.columns.memory_bytes[at[2]]
            seconds = np.where(fits, n * table.seconds[at] + table.step_seconds[at], np.inf)
            least = int(np.argmin(seconds))
            if math.isinf(seconds[least]):
                return None
            stages.append(replace(stage, candidate=int(at[2][least])))
        return StageAssignment(tuple(stages), step_seconds_of(table, tuple(stages), n))

    def choose(self, n: int) -> StageAssignment:
        """The best pipeline under the bounds, within half of `Space.tolerance`. Raises InfeasibleError.

        The last result stays while its bounds rise by at most a quarter of the tolerance. Its `seconds` still bound all
        pipelines.
        """
        tables, slack = self.tables[n], self.space.tolerance / 4
        start: Start | None = None
        if tables.changed and tables.chosen is not None:
            seconds = self.seconds_of(n, tables.chosen)
            tables.changed = seconds > (1 + slack) * tables.chosen.seconds
            if math.isfinite(seconds):
                start = Start(tables.chosen.stages, tables.chosen.least_t)

        # Reset before `choose_stages` may raise: the next call searches, too.
        if tables.changed or tables.chosen is None:
            tables.chosen, tables.changed = None, False
            tables.chosen = choose_stages(
                tables.table(),
                n_micro_batches=n,
                memory_bytes=self.columns.memory_bytes,
                schedule=self.space.schedule,
                use_all_devices=self.space.use_all_devices,
                tolerance=slack,
                start=start,
            )
        return tables.chosen


def _are_near_shapes(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether axis 0 differs by at most a factor of 2. A 1-D shape (n,) is (n, 1) or (1, n)."""
    ends = [(1, view[0]) if len(view) == 1 else (view[0],) for view in (shape, other)]
    return any(max(a, b) <= 2 * min(a, b) for a, b in itertools.product(*ends))


def _possible_numbers(sublayers: SublayerSolver, space: Space) -> tuple[tuple[int, ...], int]:
    """The numbers of micro-batches of the space, and the least above 1, whose costs bound the others.

    Raises TraceError if the step cannot be split, unless the space has 1: then both are 1.
    """
    # A single micro-batch needs no accumulation, so its cost is no bound.
    base = min((n for n in space.micro_batches if n > 1), default=1)
    try:
        sublayers.kinds(base, space.remats[0])
    except TraceError:
        if 1 not in space.micro_batches:
            raise
        sublayers.kinds(1, space.remats[0])  # stages the step, for the bytes that cross its borders
        return (1,), 1
    return space.micro_batches, base
