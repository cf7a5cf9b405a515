"""Lower bounds on what each stage costs on each submesh, which rise as pieces of the model are solved.

A piece that was not solved on a submesh costs at least what it costs on one device, divided by the devices, and at
least its share of what it costs there in a larger micro-batch, where latency and weights weigh less. `StageBounds`
starts with the former, and `raise_bound` takes the next better bound of a piece until it is solved. `choose` is the
best pipeline under the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from minialpa.errors import TraceError
from minialpa.inter.schedule.schedules import PipelineSize, max_live
from minialpa.inter.search.piece_solver import PieceSearch, PieceSolver
from minialpa.inter.search.space import Column, Space, columns_of
from minialpa.inter.search.stage_cost import MEMORY_PRICES, PieceCost, interval_maxima, interval_sums
from minialpa.inter.search.stage_dp import StageAssignment, StageChoice, StageCostTable, choose_stages, step_seconds_of
from minialpa.inter.search.stage_kernels import Bools, Floats
from minialpa.inter.search.stage_memory import needed_bytes
from minialpa.inter.search.submeshes import Candidate, preferred_seconds, skip_to, transfer_seconds
from minialpa.options import Remat

_NAMES = tuple(f.name for f in fields(PieceCost))

#: First layer, last layer, column.
_Place = tuple[int, int, int]


@dataclass(slots=True, eq=False)
class _Costs:
    """Costs of the pieces for one number of micro-batches, as far as they are known: [piece, column].

    Attributes:
        by_name: arrays by the names of the fields of `PieceCost`.
        solved: whether they are the costs; otherwise they are lower bounds.
        exact: seconds per micro-batch and per step that whole stages were found to cost.
        misfits: stages that do not fit with so many micro-batches in flight.
        chosen: the best pipeline when it was last looked for.
        changed: whether costs have changed since.
        table: of what is known now, once somebody has asked.
    """

    by_name: dict[str, Floats]
    solved: Bools
    exact: dict[_Place, tuple[float, float]] = field(default_factory=dict)
    misfits: list[tuple[_Place, int]] = field(default_factory=list)
    chosen: StageAssignment | None = None
    changed: bool = False
    table: StageCostTable | None = None

    def change(self) -> None:
        """Note that costs have changed."""
        self.changed, self.table = True, None


class StageBounds:
    """Lower bounds on the costs of all stages in a space, for each of its numbers of micro-batches.

    Attributes:
        columns: what the candidates of its tables are.
        pieces: solves the pieces of the step.
        numbers: the numbers of micro-batches that the step can be split into.
        anchor: the largest micro-batches among several, by their number: they bound the costs of all smaller ones.
    """

    def __init__(self, search: PieceSearch, known: dict[str, PieceCost] | None = None) -> None:
        """`known`: costs of pieces from other searches, to which this one adds."""
        self.cluster, self.space = search.cluster, search.space
        self.columns = columns_of(search.space, search.cluster, search.option)
        self.pieces = PieceSolver(search, self.columns, {} if known is None else known)
        self.numbers, self.anchor = _possible_numbers(self.pieces, search.space)

        # Bounds that were raised already, by what pieces cost alone and in the largest micro-batches.
        self._alone: set[tuple[int, Remat]] = set()
        self._anchored: set[tuple[int, int]] = set()

        shape = (self.pieces.n_pieces, len(self.columns))
        self._costs = {
            n: _Costs({name: np.zeros(shape) for name in _NAMES}, np.zeros(shape, np.bool_)) for n in self.numbers
        }
        self._raise_alone(self.anchor, search.space.remats[0], self.numbers, range(len(self.columns)))

    # ---- costs of pieces ------------------------------------------------------------------------------------------

    def is_solved(self, n: int, piece: int, c: int) -> bool:
        """Whether the cost of a piece in column `c` is no bound any more."""
        return bool(self._costs[n].solved[piece, c])

    def raise_bound(self, n: int, piece: int, c: int) -> None:
        """Raise the bounds of a piece in a column, and of those like it, by the cheapest means that is left."""
        column = self.columns[c]
        free = self.columns.at_price(column, 0)
        base = min(n, self.anchor)

        # First what pieces cost alone on one device, then in the largest micro-batch, and last what they do cost.
        if (base, column.remat) not in self._alone:
            columns = [i for i, other in enumerate(self.columns.columns) if other.remat == column.remat]
            alike = [m for m in self.numbers if m == 1 or base > 1]
            self._raise_alone(base, column.remat, alike, columns)
        elif 1 < self.anchor < n and not self._is_anchored(piece, free):
            kind = self.pieces.kinds(self.anchor, column.remat)
            self._anchored.add((kind[piece], free))
            candidate = self.space.candidates[column.candidate]
            cost = self.pieces.unlimited_cost(self.anchor, column.remat, kind[piece], candidate)
            self._raise_later(self.anchor, kind, piece, column, cost)
        else:
            self._solve(n, piece, column)

    def _is_anchored(self, piece: int, free: int) -> bool:
        """Whether the bounds of a piece in column `free` have been raised by its cost with `anchor` micro-batches."""
        return (self.pieces.kinds(self.anchor, self.columns[free].remat)[piece], free) in self._anchored

    def _raise_alone(self, base: int, remat: Remat, numbers: Iterable[int], columns: Iterable[int]) -> None:
        """Raise the bounds of columns to what pieces cost on one device of any memory, sharded perfectly.

        Rematerialisation never makes a piece faster; it only saves residuals. One micro-batch instead of `base` takes
        at least as long as one of these: it may read weights once.
        """
        self._alone.add((base, remat))
        kinds = self.pieces.kinds(base, remat)

        # One device of each kind: pieces that are alike cost the same on it.
        known: dict[Candidate, dict[int, PieceCost]] = {}
        for c in columns:
            one = Candidate((1, 1), (1,), self.space.candidates[self.columns[c].candidate].device)
            if one not in known:
                known[one] = {kind: self.pieces.unlimited_cost(base, remat, kind, one) for kind in set(kinds)}
            for n in numbers:
                self._raise_column(n, c, [known[one][kind] for kind in kinds], base, remat)

    def _raise_column(self, n: int, c: int, alone: Sequence[PieceCost], base: int, remat: Remat) -> None:
        """Raise the bounds of a column by what pieces cost on one device, with `base` micro-batches and `remat`."""
        n_devices, own = self.columns.n_devices[c], self.columns[c].remat == remat
        bounds, share = self._costs[n].by_name, min(1, base / n) / n_devices
        # What runs once per step is smaller with one micro-batch, which accumulates nothing.
        names = ("step_seconds", "fixed_bytes") if n > 1 or base == 1 else ()
        for i, cost in enumerate(alone):
            bounds["seconds"][i, c] = max(bounds["seconds"][i, c], share * cost.seconds)
            if own:
                bounds["in_flight_bytes"][i, c] = share * cost.in_flight_bytes
            for name in names:
                bounds[name][i, c] = max(bounds[name][i, c], getattr(cost, name) / n_devices)
        self._costs[n].change()

    def _raise_later(self, n: int, kinds: Sequence[int], piece: int, column: Column, cost: PieceCost) -> None:
        """Raise bounds for multiples of `n` micro-batches to their share of what a piece costs for `n`."""
        pieces = [i for i, kind in enumerate(kinds) if kind == kinds[piece]]
        columns = [self.columns.at_price(column, price) for price in range(len(MEMORY_PRICES))]
        for m, costs in self._costs.items():
            if m % n == 0 and (n > 1 or m == 1):
                at = np.ix_(pieces, [c for c in columns if not costs.solved[pieces[0], c]])
                seconds = costs.by_name["seconds"]
                seconds[at] = np.maximum(seconds[at], n / m * cost.seconds)
                costs.change()

    def _solve(self, n: int, piece: int, column: Column) -> None:
        """The costs of a piece; of all columns with a price, if one is asked for: the search asks for them all."""
        kinds, costs = self.pieces.kinds(n, column.remat), self._costs[n]
        free = self.columns.at_price(column, 0)
        self._raise_later(n, kinds, piece, column, self.pieces.cost(n, piece, free))

        pieces = [i for i, kind in enumerate(kinds) if kind == kinds[piece]]
        for price in range(1, len(MEMORY_PRICES)) if column.price else (0,):
            at = self.columns.at_price(column, price)
            cost = self.pieces.cost(n, piece, at)
            for name in _NAMES:
                costs.by_name[name][pieces, at] = getattr(cost, name)
            costs.solved[pieces, at] = True
        costs.change()

    # ---- costs of stages ------------------------------------------------------------------------------------------

    def learn(self, n: int, stage: StageChoice, seconds: float, step_seconds: float) -> None:
        """Note that a stage was found to cost so many seconds per micro-batch, and per step.

        They are taken to hold with any number of micro-batches in flight: memory that is short for more of them shows
        when such a pipeline is planned, and is learned then.
        """
        self._costs[n].exact[_place_of(stage)] = seconds, step_seconds
        self._costs[n].change()
        # It was the best while all costs were lower bounds, and this cost may be less than its bound.
        self._costs[n].chosen = None

    def exclude(self, n: int, stage: StageChoice, n_live: int) -> None:
        """Note that a stage does not fit with `n_live` micro-batches in flight."""
        self._costs[n].misfits.append((_place_of(stage), n_live))
        self._costs[n].change()

    def unsolved(self, n: int, found: StageAssignment) -> list[tuple[int, int]]:
        """Pieces and columns that stages use and that are not solved, one of each kind: the most time first."""
        costs = self._costs[n]
        users: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for stage in found.stages:
            if _place_of(stage) in costs.exact:
                continue
            kinds = self.pieces.kinds(min(n, self.anchor), self.columns[stage.candidate].remat)
            for piece, layer in enumerate(self.pieces.layer_of_piece):
                inside = stage.first_layer <= layer <= stage.last_layer
                if inside and not costs.solved[piece, stage.candidate]:
                    users.setdefault((kinds[piece], stage.candidate), []).append((piece, stage.candidate))

        # Raising the bound of what takes most time changes the best pipeline most.
        seconds = costs.by_name["seconds"]
        ordered = sorted(users.values(), key=lambda places: -len(places) * seconds[places[0]])
        return [places[0] for places in ordered]

    def seconds_of(self, n: int, found: StageAssignment) -> float:
        """Seconds of a step under the bounds; inf if a stage has no sharding, or does not fit in memory."""
        table = self.table(n)
        for k, stage in enumerate(found.stages):
            at = _place_of(stage)
            if math.isinf(table.seconds[at]):
                return math.inf
            live = max_live(self.space.schedule, k, PipelineSize(len(found.stages), n))
            if table.fixed_bytes[at] + live * table.in_flight_bytes[at] > self.columns.memory_bytes[stage.candidate]:
                return math.inf
        return step_seconds_of(table, found.stages, n)

    def choose(self, n: int) -> StageAssignment:
        """The best pipeline under the bounds, up to half of the tolerance. Raises InfeasibleError.

        `seconds` are those of the bounds under which it was found. They may have risen a little since: all others cost
        what they did at least.
        """
        costs, slack = self._costs[n], self.space.tolerance / 4
        if costs.changed and costs.chosen is not None:
            costs.changed = self.seconds_of(n, costs.chosen) > (1 + slack) * costs.chosen.seconds

        # Forgotten first: if nothing fits any more, the next call looks again.
        if costs.changed or costs.chosen is None:
            costs.chosen, costs.changed = None, False
            costs.chosen = choose_stages(
                self.table(n),
                n_micro_batches=n,
                memory_bytes=self.columns.memory_bytes,
                schedule=self.space.schedule,
                use_all_devices=self.space.use_all_devices,
                tolerance=slack,
            )
        return costs.chosen

    def table(self, n: int) -> StageCostTable:
        """The bounds as they are, for stages of any layers."""
        costs = self._costs[n]
        if costs.table is None:
            costs.table = self._table(n)
        return costs.table

    def _table(self, n: int) -> StageCostTable:
        starts = np.flatnonzero(np.diff(self.pieces.layer_of_piece, prepend=-1))

        def sums(values: Floats) -> Floats:
            return interval_sums(np.add.reduceat(values, starts, axis=0))

        # Sums over the pieces of each run of layers; of what a pass needs besides, the largest.
        costs = self._costs[n]
        cost = costs.by_name
        seconds, step_seconds, in_flight = (sums(cost[k]) for k in ("seconds", "step_seconds", "in_flight_bytes"))
        passes = interval_maxima(np.maximum.reduceat(cost["pass_temp_bytes"], starts, axis=0))
        passes += np.where(np.isfinite(seconds), sums(cost["left_bytes"]), 0.0)
        fixed = needed_bytes(sums(cost["fixed_bytes"]), np.maximum(passes, sums(cost["update_temp_bytes"])))

        # What is known of whole stages takes the place of sums.
        for at, (t, step) in costs.exact.items():
            seconds[at], step_seconds[at] = t, step
        for at, n_live in costs.misfits:
            fixed[at] = max(fixed[at], _above(self.columns.memory_bytes[at[2]]) - n_live * in_flight[at])

        # A border has as many bytes per step with any number of micro-batches.
        base = self.anchor
        crossing = np.array(self.pieces.border_bytes)[starts[1:] - 1] * base / n

        seconds = preferred_seconds(seconds, self.columns.n_devices / self.cluster.n_devices)
        seconds[self._needless(fixed + self._most_live(n) * in_flight <= self.columns.memory_bytes)] = np.inf
        return StageCostTable(
            n_devices=self.columns.n_devices,
            may_start=self.columns.may_start,
            skip_to=skip_to(self.cluster),
            seconds=seconds,
            step_seconds=step_seconds,
            fixed_bytes=fixed,
            in_flight_bytes=in_flight,
            transfer_seconds=transfer_seconds(self.cluster, crossing),
        )

    def _most_live(self, n: int) -> int:
        """Micro-batches that a stage holds at most, wherever it is in a pipeline of any length."""
        n_stages = min(max(self.pieces.layer_of_piece) + 1, self.cluster.n_devices)
        return max_live(self.space.schedule, 0, PipelineSize(n_stages, n))

    def _needless(self, fits: Bools) -> Bools:
        """[i, j, column]: no need to save memory there, since what is faster always fits.

        What computes more again, or pays more for memory, is never faster on the same submesh.
        """
        by_column = fits.reshape(*fits.shape[:2], -1, len(self.space.remats), len(MEMORY_PRICES))
        free = by_column[..., 0]  # no price of memory
        earlier = np.zeros_like(free)
        earlier[..., 1:] = np.logical_or.accumulate(free, axis=-1)[..., :-1]
        needless = np.repeat(earlier[..., None], len(MEMORY_PRICES), axis=-1)
        needless[..., 1:] |= free[..., None]
        return needless.reshape(fits.shape)


def _possible_numbers(pieces: PieceSolver, space: Space) -> tuple[tuple[int, ...], int]:
    """The numbers of micro-batches of a space and its anchor; both 1 if that is there and the step cannot be split."""
    # With one micro-batch nothing is accumulated, so it bounds no other.
    anchor = min((n for n in space.micro_batches if n > 1), default=1)
    try:
        pieces.kinds(anchor, space.remats[0])
    except TraceError:
        if 1 not in space.micro_batches:
            raise
        return (1,), 1
    return space.micro_batches, anchor


def _above(limit_bytes: float) -> float:
    """A hair more than a limit: what differences and sums with it do not round to the limit."""
    return limit_bytes + 2 * float(np.spacing(limit_bytes)) if math.isfinite(limit_bytes) else math.inf


def _place_of(stage: StageChoice) -> _Place:
    return stage.first_layer, stage.last_layer, stage.candidate
