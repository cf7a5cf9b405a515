"""The pieces of a step, staged and solved as a joint search asks for their costs.

For each number of micro-batches and rematerialisation there is one staged step, and one solver for each distinct piece
of it on each submesh: all of them together are many times the step, so only the last ones are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minialpa.cluster import ClusterSpec
from minialpa.inter.layers.forward import pieces_of
from minialpa.inter.layers.remat import rematerialise
from minialpa.inter.search.space import Columns, Space
from minialpa.inter.search.stage_cost import MEMORY_PRICES, PieceCost, PieceCosts, PieceKinds
from minialpa.inter.search.submeshes import Candidate
from minialpa.inter.staging.staged_step import stage_step
from minialpa.intra.graph.solve import MeshSolver
from minialpa.intra.memory.compiler import Compiler
from minialpa.intra.strategies.strategy_cache import StrategyCache
from minialpa.options import AutoShardingOption, Remat
from minialpa.support.recent import Recent
from minialpa.tracing.trace import TracedStep

#: Bytes of the staged steps, and of the solvers of pieces, that a search keeps for when they are asked for again.
_MOST_STAGED_BYTES, _MOST_SOLVER_BYTES = 2**30, 2**29


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSearch:
    """What a search solves pieces of, and where.

    Attributes:
        traced: the traced step.
        layer_of_group: the layer of each forward equation.
        cluster: the cluster.
        compiler: what compiles the pieces.
        space: what to choose from.
        option: how pieces are sharded.
    """

    traced: TracedStep
    layer_of_group: Sequence[int]
    cluster: ClusterSpec
    compiler: Compiler
    space: Space
    option: AutoShardingOption


class PieceSolver:
    """Solves pieces when their costs are first asked for.

    Attributes:
        layer_of_piece: the layer of each piece.
        strategy_cache: the strategies of equations, which all solvers share.
        n_solved: the number of costs that were solved so far.
    """

    def __init__(self, search: PieceSearch, columns: Columns, known: dict[str, PieceCost]) -> None:
        """`known`: costs of pieces from other searches, to which this one adds."""
        self._search, self._columns, self._known = search, columns, known
        self._piece_of_group, self.layer_of_piece = pieces_of(search.traced, search.layer_of_group)
        self.strategy_cache = StrategyCache()

        self._steps: dict[Remat, TracedStep] = {}
        self._kinds: dict[tuple[int, Remat], PieceKinds] = {}
        self._solved: dict[tuple[int, int, int], PieceCost] = {}
        self._staged: Recent[PieceCosts] = Recent(_MOST_STAGED_BYTES, lambda costs: costs.n_bytes)
        self._solvers: Recent[MeshSolver] = Recent(_MOST_SOLVER_BYTES, lambda solver: solver.n_bytes)

    @property
    def n_pieces(self) -> int:
        return len(self.layer_of_piece)

    @property
    def n_solved(self) -> int:
        return len(self._solved)

    def kinds(self, n: int, remat: Remat) -> PieceKinds:
        """Which pieces are alike. Raises TraceError if the step cannot be split into `n` micro-batches."""
        # Remembered when the staged step is gone.
        if (n, remat) not in self._kinds:
            self._kinds[n, remat] = self._pieces(n, remat).kinds
        return self._kinds[n, remat]

    def unlimited_cost(self, n: int, remat: Remat, piece: int, candidate: Candidate) -> PieceCost:
        """The least cost of a piece on a submesh of any memory. It does not count as solved."""
        return self._pieces(n, remat).cost(piece, candidate, None, 0.0, limited=False)

    def cost(self, n: int, piece: int, c: int) -> PieceCost:
        """The cost of a piece in column `c`, within the memory of its devices; of pieces that are alike the same."""
        column = self._columns[c]
        kind = self.kinds(n, column.remat).kind[piece]
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

    def _pieces(self, n: int, remat: Remat) -> PieceCosts:
        search = self._search

        def make() -> PieceCosts:
            if remat not in self._steps:
                self._steps[remat] = rematerialise(search.traced, self._piece_of_group, (remat,) * self.n_pieces)
            staged = stage_step(self._steps[remat], n, self._piece_of_group, range(self.n_pieces))
            return PieceCosts(
                staged,
                cluster=search.cluster,
                compiler=search.compiler,
                option=search.option,
                strategy_cache=self.strategy_cache,
                known=self._known,
                solvers=self._solvers,
            )

        return self._staged.once((n, remat), make)
