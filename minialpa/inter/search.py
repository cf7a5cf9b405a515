"""The joint search: a traced step, a cluster and what there is to choose from in, the fastest stages found out.

Stages, their submeshes and logical shapes, the number of micro-batches and rematerialisation are chosen together. The
stage DP runs on lower bounds: a piece that was not solved on a submesh costs at least what it costs on one device,
divided by the devices, and at least its share of what it costs there in a larger micro-batch, where latency and
weights weigh less. What the best pipeline under these bounds uses is solved, which raises its bounds, until the best
pipeline uses nothing but what is solved. Then no pipeline in the space is cheaper by the sums of its pieces, and few of
the thousands of costs in the space were ever computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from minialpa.cluster import ClusterSpec
from minialpa.errors import InfeasibleError, TraceError
from minialpa.inter.forward import pieces_of
from minialpa.inter.remat import rematerialise
from minialpa.inter.schedule import PipelineSize, max_live
from minialpa.inter.stage_cost import THRIFT, PieceCost, PieceCosts, interval_maxima, interval_sums
from minialpa.inter.stage_dp import StageAssignment, StageChoice, StageCostTable, choose_stages, step_seconds_of
from minialpa.inter.stage_kernels import Bools, Floats
from minialpa.inter.stage_memory import needed_bytes
from minialpa.inter.staging import stage_step
from minialpa.inter.submeshes import Candidate, may_start, skip_to, transfer_seconds
from minialpa.intra.menu import Menus
from minialpa.options import AutoShardingOption, Remat
from minialpa.trace import TracedStep

_NAMES = tuple(f.name for f in fields(PieceCost))
#: By how much of its time a stage on all devices has to be faster than one on none.
_PER_DEVICE = 1e-3
#: Costs that are solved before the search takes the best that it has.
_MOST_SOLVED = 400
#: Numbers of micro-batches that differ by this factor are looked at first.
_FAR = 4


@dataclass(frozen=True, slots=True)
class Space:
    """What to choose from: numbers of micro-batches, rematerialisation, submeshes; all devices or fewer.

    tolerance: fraction of the step time that the search may leave on the table.
    """

    micro_batches: tuple[int, ...]
    remats: tuple[Remat, ...]
    candidates: tuple[Candidate, ...]
    schedule: str
    use_all_devices: bool
    tolerance: float


@dataclass(frozen=True, slots=True)
class FoundStage:
    """Layers of a stage, its submesh, what it computes again; and its choice in the table of the search."""

    layers: tuple[int, ...]
    candidate: Candidate
    remat: Remat
    first_device: int
    choice: StageChoice


@dataclass(frozen=True, slots=True)
class Found:
    """Stages, micro-batches, and the seconds of a step by the sums of pieces."""

    stages: tuple[FoundStage, ...]
    n_micro_batches: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Column:
    candidate: int
    remat: Remat
    thrift: int


@dataclass(slots=True, eq=False)
class _Bounds:
    """Costs of the pieces for one number of micro-batches, as far as they are known: [piece, column].

    costs: by the names of `PieceCost`. solved: whether they are; others are lower bounds. exact: what whole stages
    were found to cost. found: the best pipeline under the bounds, None if they have changed since; least: a lower bound
    on the seconds of every pipeline.
    """

    costs: dict[str, Floats]
    solved: Bools
    exact: dict[StageChoice, tuple[float, float]] = field(default_factory=dict)
    misfits: list[tuple[StageChoice, int]] = field(default_factory=list)
    found: StageAssignment | None = None
    least: float = 0.0


class StageSearch:
    """The search over one space. `best` may be asked again after `learn` and `exclude`."""

    def __init__(
        self, traced: TracedStep, layer_of_group: Sequence[int], cluster: ClusterSpec, space: Space,
        option: AutoShardingOption, report: Callable[[str, int, int], None],
        known: dict[str, PieceCost] | None = None,
    ) -> None:  # fmt: skip
        """`known`: costs of pieces from other searches, to which this one adds."""
        self.known = {} if known is None else known
        self.traced, self.cluster, self.space, self.option, self.report = traced, cluster, space, option, report
        self.piece_of_group, self.layer_of_piece = pieces_of(traced, layer_of_group)
        self.n_pieces = len(self.layer_of_piece)
        self.columns = [
            _Column(m, remat, k) for m in range(len(space.candidates)) for remat in space.remats
            for k in range(len(THRIFT))
        ]  # fmt: skip
        self.place = {column: c for c, column in enumerate(self.columns)}
        devices = [space.candidates[column.candidate].device or cluster.device for column in self.columns]
        self.memory = np.array([option.limit_bytes(device) or math.inf for device in devices])
        starts = may_start(cluster, list(space.candidates))
        self.may_start = np.array([starts[column.candidate] for column in self.columns])
        self.n_devices = np.array([space.candidates[column.candidate].n_devices for column in self.columns])
        self.menus = Menus()
        self._steps: dict[Remat, TracedStep] = {}
        self._costs: dict[tuple[int, Remat], PieceCosts] = {}
        self._alone_costs: dict[tuple[int, Remat, Candidate], list[PieceCost]] = {}
        self._solved: dict[tuple[int, int, int], PieceCost] = {}
        self._anchored: set[tuple[int, int]] = set()
        self._known: set[tuple[int, Remat]] = set()
        # With one micro-batch nothing is accumulated; among several, the largest bound those of all others.
        self.anchor = min((n for n in space.micro_batches if n > 1), default=1)
        numbers = self._possible_numbers()
        self.bounds = {n: self._no_bounds() for n in numbers}
        #: Numbers of micro-batches that are looked at: some far apart, then what is near the best.
        self.open = _far_apart(numbers)
        self._raise_alone(self.anchor, space.remats[0], self.bounds, range(len(self.columns)))

    # ---- costs ----------------------------------------------------------------------------------------------------

    def costs(self, n: int, remat: Remat) -> PieceCosts:
        """Costs of pieces for `n` micro-batches. Raises TraceError if the step cannot be split into as many."""
        if (n, remat) not in self._costs:
            if remat not in self._steps:
                self._steps[remat] = rematerialise(self.traced, self.piece_of_group, (remat,) * self.n_pieces)
            staged = stage_step(self._steps[remat], n, self.piece_of_group, range(self.n_pieces))
            self._costs[n, remat] = PieceCosts(staged, self.cluster, self.option, self.menus, self.known)
        return self._costs[n, remat]

    def _possible_numbers(self) -> tuple[int, ...]:
        """The numbers of micro-batches of the space; 1 if it is among them and the step cannot be split."""
        try:
            self.costs(self.anchor, self.space.remats[0])
        except TraceError:
            if 1 not in self.space.micro_batches:
                raise
            self.anchor = 1
            return (1,)
        return self.space.micro_batches

    def _no_bounds(self) -> _Bounds:
        shape = (self.n_pieces, len(self.columns))
        return _Bounds({name: np.zeros(shape) for name in _NAMES}, np.zeros(shape, np.bool_))

    def _raise_alone(self, base: int, remat: Remat, numbers: Iterable[int], columns: Iterable[int]) -> None:
        """Raise the bounds of columns to what pieces cost on one device, sharded perfectly.

        What is computed again makes nothing faster and saves residuals only.
        """
        self._known.add((base, remat))
        for c in columns:
            choice, own = self.space.candidates[self.columns[c].candidate], self.columns[c].remat == remat
            alone = self._alone(base, remat, Candidate((1, 1), (1,), choice.device))
            for n in numbers:
                bounds, share = self.bounds[n].costs, base / n / self.n_devices[c]
                for i, cost in enumerate(alone):
                    bounds["seconds"][i, c] = max(bounds["seconds"][i, c], share * cost.seconds)
                    if own:
                        bounds["in_flight_bytes"][i, c] = share * cost.in_flight_bytes
                    for name in ("step_seconds", "fixed_bytes") if n > 1 or base == 1 else ():
                        value = getattr(cost, name) / self.n_devices[c]
                        bounds[name][i, c] = max(bounds[name][i, c], value)
                self.bounds[n].found = None

    def _alone(self, n: int, remat: Remat, choice: Candidate) -> list[PieceCost]:
        """Costs of all pieces on one device of any memory."""
        costs = self.costs(n, remat)
        if (n, remat, choice) not in self._alone_costs:
            solved = {kind: costs.cost(kind, choice, None, 0.0, limited=False) for kind in set(costs.kind)}
            self._alone_costs[n, remat, choice] = [solved[kind] for kind in costs.kind]
        return self._alone_costs[n, remat, choice]

    def _raise(self, n: int, piece: int, c: int) -> None:
        """Raise the bounds of a piece in a column, by the cheapest means that is left."""
        column = self.columns[c]
        free = self.place[_Column(column.candidate, column.remat, 0)]
        base = min(n, self.anchor)
        if (base, column.remat) not in self._known:
            columns = [i for i, other in enumerate(self.columns) if other.remat == column.remat]
            alike = [m for m in self.bounds if m == 1 or base > 1]
            self._raise_alone(base, column.remat, alike, columns)
        elif 1 < self.anchor < n and (self.costs(self.anchor, column.remat).kind[piece], free) not in self._anchored:
            anchor = self.costs(self.anchor, column.remat)
            self._anchored.add((anchor.kind[piece], free))
            cost = anchor.cost(anchor.kind[piece], self.space.candidates[column.candidate], None, 0.0, limited=False)
            self._raise_later(self.anchor, anchor.kind, piece, column, cost)
        else:
            kinds = self.costs(n, column.remat).kind
            self._raise_later(n, kinds, piece, column, self._cost(n, piece, free))
            pieces = [i for i, kind in enumerate(kinds) if kind == kinds[piece]]
            # Who looks at one thrifty sharding will look at the others.
            for thrift in range(1, len(THRIFT)) if column.thrift else (0,):
                at = self.place[_Column(column.candidate, column.remat, thrift)]
                for name in _NAMES:
                    self.bounds[n].costs[name][pieces, at] = getattr(self._cost(n, piece, at), name)
                self.bounds[n].solved[pieces, at] = True
            self.bounds[n].found = None

    def _raise_later(self, n: int, kinds: Sequence[int], piece: int, column: _Column, cost: PieceCost) -> None:
        """Raise bounds for multiples of `n` micro-batches to their share of what a piece costs for `n`."""
        pieces = [i for i, kind in enumerate(kinds) if kind == kinds[piece]]
        columns = [self.place[_Column(column.candidate, column.remat, k)] for k in range(len(THRIFT))]
        for m, bounds in self.bounds.items():
            if m % n == 0 and (n > 1 or m == 1):
                at = np.ix_(pieces, [c for c in columns if not bounds.solved[pieces[0], c]])
                seconds = bounds.costs["seconds"]
                seconds[at] = np.maximum(seconds[at], n / m * cost.seconds)
                bounds.found = None

    def _cost(self, n: int, piece: int, c: int) -> PieceCost:
        column = self.columns[c]
        costs = self.costs(n, column.remat)
        key = (n, costs.kind[piece], c)
        if key not in self._solved:
            free = self.place[_Column(column.candidate, column.remat, 0)]
            fastest = None if c == free else self._cost(n, piece, free)
            if fastest is not None and math.isinf(fastest.seconds):
                self._solved[key] = fastest
            else:
                choice, thrift = self.space.candidates[column.candidate], THRIFT[column.thrift]
                self._solved[key] = costs.cost(costs.kind[piece], choice, fastest, thrift, limited=True)
        return self._solved[key]

    # ---- the best pipeline ----------------------------------------------------------------------------------------

    def best(self) -> Found:
        """A pipeline at most `tolerance` slower than any in the space, if that is known after `_MOST_SOLVED` costs.

        Raises InfeasibleError if nothing fits.
        """
        failure: InfeasibleError | None = None
        best: tuple[float, int, StageAssignment] | None = None
        while True:
            n = min(self.open, key=lambda n: (self.bounds[n].least, n))
            bounds = self.bounds[n]
            enough = bounds.least >= (best[0] if best else math.inf) * (1 - self.space.tolerance)
            if best is not None and (enough or len(self._solved) > _MOST_SOLVED):
                near = {m for m in self.bounds if best[1] / _FAR < m < best[1] * _FAR} - self.open
                if not near or not enough:
                    return self._found(best[1], best[2])
                self.open |= near
                continue
            if math.isinf(bounds.least):
                raise failure or InfeasibleError("No pipeline fits.")
            if bounds.found is None:
                try:
                    bounds.found = self._choose(n, bounds)
                    bounds.least = max(bounds.least, bounds.found.seconds * (1 - self.space.tolerance / 4))
                except InfeasibleError as error:
                    bounds.least, failure = math.inf, error
                continue
            found, unsolved = bounds.found, self._unsolved(n, bounds.found)
            self.report("Costs of stages", len(self._solved), len(self._solved) + len(unsolved))
            for piece, c in unsolved:
                self._raise(n, piece, c)
            if not self._unsolved(n, found):
                seconds = self._seconds_of(n, bounds, found)
                if best is None or seconds < best[0]:
                    best = seconds, n, StageAssignment(found.stages, seconds)

    def learn(self, found: Found, seconds: Mapping[StageChoice, tuple[float, float]]) -> None:
        """Tell what stages cost that were solved as wholes: seconds per micro-batch, and once per step."""
        bounds = self.bounds[found.n_micro_batches]
        bounds.exact.update(seconds)
        bounds.found, bounds.least = None, 0.0

    def exclude(self, found: Found, stage: int, n_live: int) -> None:
        """Tell that a stage does not fit with `n_live` micro-batches in flight."""
        bounds = self.bounds[found.n_micro_batches]
        bounds.misfits.append((found.stages[stage].choice, n_live))
        bounds.found = None

    def _unsolved(self, n: int, found: StageAssignment) -> list[tuple[int, int]]:
        """Pieces and columns that the stages use and that are not solved: one of each kind, those that repeat first."""
        bounds = self.bounds[n]
        exact = self._exact_places(bounds)
        users: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for stage in found.stages:
            if (stage.first_layer, stage.last_layer, stage.candidate) in exact:
                continue
            kinds = self.costs(min(n, self.anchor), self.columns[stage.candidate].remat).kind
            for piece, layer in enumerate(self.layer_of_piece):
                inside = stage.first_layer <= layer <= stage.last_layer
                if inside and not bounds.solved[piece, stage.candidate]:
                    users.setdefault((kinds[piece], stage.candidate), []).append((piece, stage.candidate))
        repeated = [places[0] for places in users.values() if len(places) > 1]
        return repeated or [places[0] for places in users.values()]

    def _seconds_of(self, n: int, bounds: _Bounds, found: StageAssignment) -> float:
        """Seconds of a pipeline whose pieces are all solved; inf if it does not fit in memory."""
        table = self._table(n, bounds)
        for k, stage in enumerate(found.stages):
            at = (stage.first_layer, stage.last_layer, stage.candidate)
            live = max_live(self.space.schedule, k, PipelineSize(len(found.stages), n))
            if table.fixed_bytes[at] + live * table.in_flight_bytes[at] > self.memory[stage.candidate]:
                return math.inf
        return step_seconds_of(table, found.stages, n)

    @staticmethod
    def _exact_places(bounds: _Bounds) -> set[tuple[int, int, int]]:
        return {(choice.first_layer, choice.last_layer, choice.candidate) for choice in bounds.exact}

    def _choose(self, n: int, bounds: _Bounds) -> StageAssignment:
        return choose_stages(
            self._table(n, bounds),
            n_micro_batches=n,
            memory_bytes=self.memory,
            schedule=self.space.schedule,
            use_all_devices=self.space.use_all_devices,
            tolerance=self.space.tolerance / 4,
        )

    def _table(self, n: int, bounds: _Bounds) -> StageCostTable:
        starts = np.flatnonzero(np.diff(self.layer_of_piece, prepend=-1))

        def sums(values: Floats) -> Floats:
            return interval_sums(np.add.reduceat(values, starts, axis=0))

        cost = bounds.costs
        seconds, step_seconds, in_flight = (sums(cost[k]) for k in ("seconds", "step_seconds", "in_flight_bytes"))
        passes = interval_maxima(np.maximum.reduceat(cost["pass_temp_bytes"], starts, axis=0))
        passes += np.where(np.isfinite(seconds), sums(cost["left_bytes"]), 0.0)
        fixed = needed_bytes(sums(cost["fixed_bytes"]), np.maximum(passes, sums(cost["update_temp_bytes"])))
        for choice, (t, step) in bounds.exact.items():
            at = (choice.first_layer, choice.last_layer, choice.candidate)
            seconds[at], step_seconds[at] = t, step
        for choice, n_live in bounds.misfits:
            at = (choice.first_layer, choice.last_layer, choice.candidate)
            fixed[at] = max(fixed[at], (1 + 1e-9) * self.memory[choice.candidate] - n_live * in_flight[at] + 1)
        base = self.anchor
        crossing = np.array(self.costs(base, self.space.remats[0]).border_bytes)[starts[1:] - 1] * base / n
        transfers = transfer_seconds(self.cluster, crossing)
        seconds *= 1 + _PER_DEVICE * self.n_devices / self.cluster.n_devices
        seconds[self._needless(fixed + self._most_live(n) * in_flight <= self.memory)] = np.inf
        return StageCostTable(
            self.n_devices, self.may_start, skip_to(self.cluster), seconds, step_seconds, fixed, in_flight, transfers
        )

    def _most_live(self, n: int) -> int:
        """Micro-batches that a stage holds at most, wherever it is in a pipeline of any length."""
        n_stages = min(max(self.layer_of_piece) + 1, self.cluster.n_devices)
        return max_live(self.space.schedule, 0, PipelineSize(n_stages, n))

    def _needless(self, fits: Bools) -> Bools:
        """[i, j, column]: no need to save memory there, since what is faster always fits.

        What computes more again, or is thriftier, is never faster on the same submesh.
        """
        by_column = fits.reshape(*fits.shape[:2], -1, len(self.space.remats), len(THRIFT))
        free = by_column[..., 0]  # of thrift
        earlier = np.zeros_like(free)
        earlier[..., 1:] = np.logical_or.accumulate(free, axis=-1)[..., :-1]
        needless = np.repeat(earlier[..., None], len(THRIFT), axis=-1)
        needless[..., 1:] |= free[..., None]
        return needless.reshape(fits.shape)

    def _found(self, n: int, found: StageAssignment) -> Found:
        stages = tuple(
            FoundStage(
                tuple(range(choice.first_layer, choice.last_layer + 1)),
                self.space.candidates[self.columns[choice.candidate].candidate],
                self.columns[choice.candidate].remat,
                choice.first_device,
                choice,
            )
            for choice in found.stages
        )
        return Found(stages, n, found.seconds)


def _far_apart(numbers: Sequence[int]) -> set[int]:
    """The largest number, and smaller ones, each at most a `_FAR`-th of the one before; 1 if it is there."""
    out: list[int] = []
    for n in sorted(numbers, reverse=True):
        if not out or n * _FAR <= out[-1] or n == 1:
            out.append(n)
    return set(out)
