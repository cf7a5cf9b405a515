"""The pieces of a step, staged and solved as a joint search asks for their costs.

For each number of micro-batches and rematerialisation there is one staged step, and one solver for each distinct piece
of it on each submesh. All of them together are many times the step, so only the last ones are kept. The whole step is
staged once. Later it is staged without most of its repeated pieces (`short_step`), if that gives the same problems.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from minialpa.cluster import ClusterSpec
from minialpa.errors import TraceError
from minialpa.inter.layers.forward import pieces_of
from minialpa.inter.layers.remat import rematerialise
from minialpa.inter.search.short_step import NotShortened, PiecedStep, StagedPieces, shortened, whole_step
from minialpa.inter.search.stage_cost import PieceCost, PieceCosts, border_bytes
from minialpa.inter.search.submeshes import MEMORY_PRICES, Candidate, Columns, Space
from minialpa.inter.staging.staged_step import stage_step
from minialpa.intra.graph.solve import MeshSolver
from minialpa.intra.memory.compiler import Compiler
from minialpa.intra.strategies.strategy_cache import StrategyCache
from minialpa.options import AutoShardingOption, Remat
from minialpa.support.recent import Recent
from minialpa.tracing.trace import TracedStep

#: Bytes of the staged steps, and of the solvers of pieces, that a search keeps.
_MOST_STAGED_BYTES, _MOST_SOLVER_BYTES = 2**30, 2**29


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSearch:
    """The step and the space of a search. All solvers share the `strategy_cache`."""

    traced: TracedStep
    layer_of_group: Sequence[int]
    cluster: ClusterSpec
    compiler: Compiler
    space: Space
    option: AutoShardingOption
    strategy_cache: StrategyCache = field(default_factory=StrategyCache)


class PieceSolver:
    """Solves a piece when its cost is first asked for.

    Attributes:
        layer_of_piece: the layer of each piece.
        border_bytes: see `border_bytes`, in the step as it was staged first; empty before that.
        short: the step without most of its repeated pieces, or why it is not used; None before it is asked for.
    """

    def __init__(self, search: PieceSearch, columns: Columns, known: dict[str, PieceCost]) -> None:
        """`known`: costs of pieces from other searches, to which this one adds."""
        self._search, self._columns, self._known = search, columns, known
        piece_of_group, self.layer_of_piece = pieces_of(search.traced, search.layer_of_group)
        self._whole = whole_step(search.traced, piece_of_group)
        self.border_bytes: tuple[float, ...] = ()
        self.short: PiecedStep | NotShortened | None = None

        self._first: tuple[int, Remat] | None = None  # as which the whole step was staged
        self._steps: dict[tuple[bool, Remat], TracedStep] = {}  # the short step, or the whole one
        self._kinds: dict[tuple[int, Remat], tuple[int, ...]] = {}
        self._solved: dict[tuple[int, int, int], PieceCost] = {}
        self._staged: Recent[PieceCosts] = Recent(_MOST_STAGED_BYTES, lambda costs: costs.n_bytes)
        self._solvers: Recent[MeshSolver] = Recent(_MOST_SOLVER_BYTES, lambda solver: solver.n_bytes)

    @property
    def n_pieces(self) -> int:
        return len(self.layer_of_piece)

    @property
    def n_solved(self) -> int:
        return len(self._solved)

    def kinds(self, n: int, remat: Remat) -> tuple[int, ...]:
        """For each piece, the first like it. Raises TraceError if the step cannot be split into `n` micro-batches."""
        # Remembered when the staged step is gone.
        if (n, remat) not in self._kinds:
            self._kinds[n, remat] = self._pieces(n, remat).kind
        return self._kinds[n, remat]

    def unlimited_cost(self, n: int, remat: Remat, piece: int, candidate: Candidate) -> PieceCost:
        """The least cost of a piece on a submesh of any memory. It does not count as solved."""
        return self._pieces(n, remat).cost(piece, candidate, None, 0.0, limited=False)

    def cost(self, n: int, piece: int, c: int) -> PieceCost:
        """The cost of a piece in column `c`, within the memory of its devices. Pieces that are alike share one cost."""
        column = self._columns[c]
        kind = self.kinds(n, column.remat)[piece]
        key = (n, kind, c)
        if key not in self._solved:
            free = self._columns.at_price(column, 0)
            fastest = None if c == free else self.cost(n, piece, free)

            # What does not fit at all does not fit at any price of memory.
            if fastest is not None and math.isinf(fastest.seconds):
                self._solved[key] = fastest
            else:
                candidate, price = self._search.space.candidates[column.candidate], MEMORY_PRICES[column.price]
                pieces = self._pieces(n, column.remat)
                self._solved[key] = pieces.cost(kind, candidate, fastest, price, limited=True)
        return self._solved[key]

    # ---- staged steps ---------------------------------------------------------------------------------------------

    def _pieces(self, n: int, remat: Remat) -> PieceCosts:
        return self._staged.once((n, remat), lambda: self._staged_pieces(n, remat))

    def _staged_pieces(self, n: int, remat: Remat) -> PieceCosts:
        """The pieces of the whole step at the first call and for its arguments; the pieces of the short step for all
        others.
        """
        if self._first is None:
            pieces = self._costs_of(self._whole, n, remat)
            self._first, self.border_bytes = (n, remat), tuple(border_bytes(pieces.staged))
            return pieces

        if self._first == (n, remat):
            return self._costs_of(self._whole, n, remat)
        if self.short is None:
            self.short = self._shortened(*self._first)
        if isinstance(self.short, PiecedStep):
            try:
                return self._costs_of(self.short, n, remat)
            except TraceError as error:
                # If the whole step cannot be split either, its error is the one that speaks of the user's step.
                self.short = NotShortened(str(error))
        return self._costs_of(self._whole, n, remat)

    def _shortened(self, n: int, remat: Remat) -> PiecedStep | NotShortened:
        """The short step, if it has the problems of the whole one when both are staged for `n` and `remat`."""
        pieces = self._pieces(n, remat)
        short = shortened(
            StagedPieces(whole=self._whole, staged=pieces.staged, problems=pieces.problems, kind=pieces.kind)
        )
        if isinstance(short, NotShortened):
            return short

        try:
            found = self._costs_of(short, n, remat)
        except TraceError as error:
            return NotShortened(str(error))
        for place, piece in short.kept.items():
            if found.digests[place] != pieces.digests[piece]:
                return NotShortened(f"Piece {piece} is another problem in the short step.")
        return short

    def _costs_of(self, pieced: PiecedStep, n: int, remat: Remat) -> PieceCosts:
        search, key = self._search, (pieced is self._whole, remat)
        if key not in self._steps:
            self._steps[key] = rematerialise(pieced.step, pieced.piece_of_group, (remat,) * pieced.n_pieces)
        return PieceCosts(
            stage_step(self._steps[key], n, pieced.piece_of_group, range(pieced.n_pieces)),
            place=pieced.place,
            cluster=search.cluster,
            compiler=search.compiler,
            option=search.option,
            strategy_cache=self._search.strategy_cache,
            known=self._known,
            solvers=self._solvers,
        )
