"""Lower bounds on what each stage costs on each submesh, which rise as pieces of the model are solved.

A piece that was not solved on a submesh costs at least what it costs on one device, divided by the number of devices.
What a piece was found to cost in one problem also bounds its costs in others: those of which every sharding is one of
the first problem, too, and costs no more there. These bounds are on the seconds of a step, n * seconds + step_seconds,
which is what solvers minimise: one of the two alone may be less in the other problem. They hold for

    more micro-batches     each is a part of a larger one, sharded in the same way: latency and weights weigh more
    finer meshes           devices of a coarser mesh that do the work of k devices each take at most k times as long
    rematerialisation      it adds to what is computed
    prices, limits         memory is saved at the cost of time

A solver prices each collective as if it started alone. In its solution a few start together, and the bounds are lowered
by what that saves. `choose` is the best pipeline under the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from minialpa.errors import TraceError
from minialpa.inter.schedule.schedules import PipelineSize, max_live
from minialpa.inter.search.piece_solver import PieceSearch, PieceSolver
from minialpa.inter.search.space import Column, Space, columns_of
from minialpa.inter.search.stage_cost import MEMORY_PRICES, PieceCost
from minialpa.inter.search.stage_dp import StageAssignment, StageChoice, Start, choose_stages, step_seconds_of
from minialpa.inter.search.stage_kernels import Ints
from minialpa.inter.search.stage_tables import StageTables, place_of
from minialpa.inter.search.submeshes import Candidate, is_coarser
from minialpa.options import Remat

#: Collectives of a piece that a solver prices with a start each, and that may start together in its solution. With too
#: few, a cost may be less than its bound; with more, all bounds are weaker. GPT and Llama of 8 layers on 16 devices
#: take 46 and 42 costs with 0 and 4, 46 and 49 with 16, for the same pipelines.
_N_COMBINED = 4
#: Columns whose pipelines lose at most this share of their time while they fill are solved before finer ones, which
#: their costs bound. With more, costs are solved that no good pipeline uses; with less, more costs of finer columns.
#: The same GPT and Llama take 46 and 42 costs at 0 and 0.05, 52 and 45 at 0.2, 79 and 78 at 1.
_SMALL_BUBBLE = 0.05


@dataclass(frozen=True, slots=True)
class Unsolved:
    """A piece in a column for which only bounds are known. share: of the pipeline's time, with all pieces like it."""

    piece: int
    column: int
    share: float


class StageBounds:
    """Lower bounds on the costs of all stages in a space, for each of its numbers of micro-batches.

    Attributes:
        columns: what the candidates of its tables are.
        pieces: solves the pieces of the step.
        numbers: the numbers of micro-batches that the step can be split into.
        tables: what is known, by the number of micro-batches.
    """

    def __init__(self, search: PieceSearch, known: dict[str, PieceCost] | None = None) -> None:
        """`known`: costs of pieces from other searches, to which this one adds."""
        self.cluster, self.space = search.cluster, search.space
        self.columns = columns_of(search.space, search.cluster, search.option)
        self.pieces = PieceSolver(search, self.columns, {} if known is None else known)
        self.numbers, self._base = _possible_numbers(self.pieces, search.space)

        # A border has as many bytes per step with any number of micro-batches.
        layer_of_piece = np.array(self.pieces.layer_of_piece)
        last_pieces = np.flatnonzero(np.diff(layer_of_piece))
        border_bytes = np.array(self.pieces.border_bytes)[last_pieces]
        self.tables = {
            n: StageTables(
                n,
                cluster=self.cluster,
                space=self.space,
                columns=self.columns,
                layer_of_piece=layer_of_piece,
                crossing_bytes=border_bytes * self._base / n,
            )
            for n in self.numbers
        }
        self._alone: set[tuple[int, Remat]] = set()
        self._combined_s = np.array([_N_COMBINED * self._start_s(column) for column in self.columns.columns])
        self._finer = self._finer_columns()
        self._coarser = [self._coarser_columns(c) for c in range(len(self.columns))]
        self._raise_alone(self._base, search.space.remats[0], self.numbers, range(len(self.columns)))

    def _start_s(self, column: Column) -> float:
        """Seconds to start a collective over all axes of a column's mesh."""
        choice = self.space.candidates[column.candidate]
        mesh = self.cluster.logical_mesh(choice.submesh, choice.logical_shape, choice.device)
        return mesh.all_reduce_s(0.0, range(len(mesh.shape)))

    def _finer_columns(self) -> list[Ints]:
        """For each column, those whose costs are bounded by its costs, in memory without end."""
        space, remats = self.space, self.space.remats
        coarser = np.array(
            [[is_coarser(self.cluster, one, other) for other in space.candidates] for one in space.candidates]
        )
        candidate = np.array([column.candidate for column in self.columns.columns])
        remat = np.array([remats.index(column.remat) for column in self.columns.columns])
        return [
            np.flatnonzero(coarser[column.candidate][candidate] & (remat >= remats.index(column.remat)))
            for column in self.columns.columns
        ]

    def _coarser_columns(self, c: int) -> list[int]:
        """Columns with the rematerialisation of `c`, without a price, whose costs bound its costs."""
        remat = self.columns[c].remat
        alike = (m for m, one in enumerate(self.columns.columns) if one.remat == remat and not one.price)
        return [m for m in alike if m != c and c in self._finer[m]]

    # ---- costs of pieces ------------------------------------------------------------------------------------------

    def is_solved(self, n: int, piece: int, c: int) -> bool:
        """Whether the cost of a piece in column `c` is no bound any more."""
        return bool(self.tables[n].solved[piece, c])

    def raise_bound(self, n: int, piece: int, c: int) -> None:
        """Raise the bounds of a piece in a column, and of those like it, by the cheapest means that is left."""
        column = self.columns[c]
        base = min(n, self._base)

        # What pieces cost on one device bounds all columns at once, so it comes before what they cost in this one.
        if (base, column.remat) not in self._alone:
            columns = [i for i, other in enumerate(self.columns.columns) if other.remat == column.remat]
            alike = [m for m in self.numbers if m == 1 or base > 1]
            self._raise_alone(base, column.remat, alike, columns)
        else:
            self._solve(n, piece, self.columns[self._coarsest(n, piece, c)])

    def _coarsest(self, n: int, piece: int, c: int) -> int:
        """The column to solve before `c`, or `c`: the coarsest whose cost bounds that of `c` and may be of use itself.

        Where micro-batches are too small for their submeshes, one cost of a small submesh shows it for all larger ones.
        """
        solved, n_devices = self.tables[n].solved[piece], self.columns.n_devices
        if solved[self.columns.at_price(self.columns[c], 0)]:
            return c
        bubble = (self.cluster.n_devices / n_devices - 1) / n  # of a pipeline of such stages
        better = [m for m in self._coarser[c] if not solved[m] and bubble[m] <= _SMALL_BUBBLE]
        return min((c, *better), key=lambda m: int(n_devices[m]))

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
        n_devices, own, tables = self.columns.n_devices[c], self.columns[c].remat == remat, self.tables[n]
        bounds, share = tables.by_name, min(1, base / n) / n_devices
        # What runs once per step is smaller with one micro-batch, which accumulates nothing.
        names = ("step_seconds", "fixed_bytes") if n > 1 or base == 1 else ()
        for i, cost in enumerate(alone):
            if tables.solved[i, c]:
                continue
            bounds["seconds"][i, c] = max(bounds["seconds"][i, c], share * cost.seconds)
            if own:
                bounds["in_flight_bytes"][i, c] = share * cost.in_flight_bytes
            for name in names:
                bounds[name][i, c] = max(bounds[name][i, c], getattr(cost, name) / n_devices)
        tables.change(np.array([c]))

    def _solve(self, n: int, piece: int, column: Column) -> None:
        """The costs of a piece, and of those like it, in a column, or in the one at the highest price before it."""
        kinds, tables = self.pieces.kinds(n, column.remat), self.tables[n]
        pieces = np.array([i for i, kind in enumerate(kinds) if kind == kinds[piece]])
        prices = [self.columns.at_price(column, price) for price in range(len(MEMORY_PRICES))]
        free, *_, highest = prices
        fastest = self.pieces.cost(n, piece, free)
        candidate = self.space.candidates[column.candidate]
        self._raise_finer(n, pieces, free, self.pieces.unlimited_cost(n, column.remat, kinds[piece], candidate))
        if column.price == 0:
            tables.solve(pieces, free, fastest)
        elif tables.solved[piece, highest]:
            tables.solve(pieces, self.columns.number[column], self.pieces.cost(n, piece, prices[column.price]))
        else:
            # The highest price shows first whether saving memory helps. What is best at it and at none is best between.
            cost = self.pieces.cost(n, piece, highest)
            for c in prices[1:] if cost == fastest else (highest,):
                tables.solve(pieces, c, cost)

    def _raise_finer(self, n: int, pieces: Ints, c: int, cost: PieceCost) -> None:
        """Raise the bounds that follow from what pieces cost in column `c` with `n` micro-batches and any memory."""
        columns = self._finer[c]
        share = self.columns.n_devices[c] / self.columns.n_devices[columns]
        whole_s = share * (n * cost.seconds + cost.step_seconds) - self._combined_s[columns]
        for m, tables in self.tables.items():
            if m % n == 0 and (n > 1 or m == 1):
                tables.raise_whole(pieces, columns, whole_s)

    # ---- costs of stages ------------------------------------------------------------------------------------------

    def learn(self, n: int, stage: StageChoice, seconds: float, step_seconds: float) -> None:
        """Note that a stage was found to cost so many seconds per micro-batch, and per step.

        They are used for any number of micro-batches in flight. Whether memory is short for more of them shows when
        such a pipeline is planned, and is learned then.
        """
        self.tables[n].learn(place_of(stage), seconds, step_seconds)

    def exclude(self, n: int, stage: StageChoice, n_live: int) -> None:
        """Note that a stage does not fit with `n_live` micro-batches in flight."""
        self.tables[n].exclude(place_of(stage), n_live)

    def unsolved(self, n: int, found: StageAssignment) -> list[Unsolved]:
        """What stages use and is not solved, one piece of each kind: the most time first."""
        tables, seconds = self.tables[n], self.tables[n].by_name["seconds"]
        users: dict[tuple[int, int], list[int]] = {}
        total_s = 0.0
        for stage in found.stages:
            kinds = self.pieces.kinds(min(n, self._base), self.columns[stage.candidate].remat)
            for piece, layer in enumerate(self.pieces.layer_of_piece):
                if not stage.first_layer <= layer <= stage.last_layer:
                    continue
                total_s += float(seconds[piece, stage.candidate])
                if not tables.solved[piece, stage.candidate] and place_of(stage) not in tables.exact:
                    users.setdefault((kinds[piece], stage.candidate), []).append(piece)

        # Raising the bound of what takes most time changes the best pipeline most.
        out = [
            Unsolved(pieces[0], c, len(pieces) * float(seconds[pieces[0], c]) / max(total_s, math.ulp(0.0)))
            for (_, c), pieces in users.items()
        ]
        return sorted(out, key=lambda one: -one.share)

    def seconds_of(self, n: int, found: StageAssignment) -> float:
        """Seconds of a step under the bounds; inf if a stage has no sharding, or does not fit in memory."""
        table = self.tables[n].table()
        for k, stage in enumerate(found.stages):
            at = place_of(stage)
            if math.isinf(table.seconds[at]):
                return math.inf
            live = max_live(self.space.schedule, k, PipelineSize(len(found.stages), n))
            if table.fixed_bytes[at] + live * table.in_flight_bytes[at] > self.columns.memory_bytes[stage.candidate]:
                return math.inf
        return step_seconds_of(table, found.stages, n)

    def choose(self, n: int) -> StageAssignment:
        """The best pipeline under the bounds, up to half of the tolerance. Raises InfeasibleError.

        Its `seconds` follow from the bounds under which it was found. These may have risen a little since; no other
        pipeline has become faster by that.
        """
        tables, slack = self.tables[n], self.space.tolerance / 4
        start: Start | None = None
        if tables.changed and tables.chosen is not None:
            seconds = self.seconds_of(n, tables.chosen)
            tables.changed = seconds > (1 + slack) * tables.chosen.seconds
            if math.isfinite(seconds):
                start = Start(tables.chosen.stages, tables.chosen.least_t)

        # Forgotten first: if nothing fits any more, the next call looks again.
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


def _possible_numbers(pieces: PieceSolver, space: Space) -> tuple[tuple[int, ...], int]:
    """The numbers of micro-batches of a space and the largest micro-batches among several, by their number.

    Both 1 if that is there and the step cannot be split.
    """
    # With one micro-batch nothing is accumulated, so it bounds no other.
    base = min((n for n in space.micro_batches if n > 1), default=1)
    try:
        pieces.kinds(base, space.remats[0])
    except TraceError:
        if 1 not in space.micro_batches:
            raise
        pieces.kinds(1, space.remats[0])  # stages the step, which says how many bytes cross its borders
        return (1,), 1
    return space.micro_batches, base
