"""A step in sublayers and a space in, the cost of each sublayer out, solved when the joint search needs it.

For each number of micro-batches and rematerialisation there is one staged step, with one solver for each distinct
sublayer on each submesh. They take much memory, so only the last ones are kept. The first staging is of the whole step,
later ones of the short step (`short_step`) if it has the same problems. A step with experts has one staged step for
each number of devices, too, which share its rows (`routing`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from minialpa.cluster import ClusterSpec
from minialpa.errors import TraceError
from minialpa.inter.layers.forward import sublayers_of
from minialpa.inter.layers.offload import with_choices
from minialpa.inter.search.short_step import NotShortened, StagedSublayers, SublayeredStep, shortened, whole_step
from minialpa.inter.search.stage_cost import SublayerCost, SublayerCosts, border_bytes
from minialpa.inter.search.submeshes import MEMORY_PRICES, Candidate, Columns, Space
from minialpa.inter.staging.staged_step import stage_step
from minialpa.intra.graph.solve import MeshSolver
from minialpa.intra.memory.compiler import Compiler
from minialpa.intra.strategies.strategy_cache import StrategyCache
from minialpa.options import AutoShardingOption, Remat
from minialpa.routing.rows import Proofs, RowSharing, has_grouped_products, with_rows_in_slots
from minialpa.support.recent import Recent
from minialpa.tracing.trace import TracedStep

#: Bytes of staged steps, and of solvers of sublayers, that a search keeps.
_MOST_STAGED_BYTES, _MOST_SOLVER_BYTES = 2**30, 2**29


@dataclass(frozen=True, slots=True, kw_only=True)
class SublayerSearch:
    traced: TracedStep
    layer_of_group: Sequence[int]
    cluster: ClusterSpec
    compiler: Compiler
    space: Space
    option: AutoShardingOption
    strategy_cache: StrategyCache = field(default_factory=StrategyCache)
    proofs: Proofs = field(default_factory=dict)


class SublayerSolver:
    """Solves a sublayer at the first request for its cost.

    Attributes:
        border_bytes: of all micro-batches, see `stage_cost.border_bytes`; empty before the first staging.
        short: the short step, or why it is not used; `None` before the second staging.
    """

    def __init__(self, search: SublayerSearch, columns: Columns, known: dict[str, SublayerCost]) -> None:
        self._search, self._columns, self._known = search, columns, known
        sublayer_of_group, self.layer_of_sublayer = sublayers_of(search.traced, search.layer_of_group)
        self._whole = whole_step(search.traced, sublayer_of_group)
        self.border_bytes: tuple[float, ...] = ()
        self.short: SublayeredStep | NotShortened | None = None

        self._is_routed = has_grouped_products(search.traced)
        self._first_staging: _Staging | None = None
        self._steps: dict[tuple[bool, Remat, RowSharing | None], TracedStep] = {}  # by whether the step is whole
        self._kinds: dict[tuple[int, Remat], tuple[int, ...]] = {}
        self._solved: dict[tuple[int, int, int], SublayerCost] = {}
        self._staged: Recent[SublayerCosts] = Recent(_MOST_STAGED_BYTES, lambda costs: costs.n_bytes)
        self._solvers: Recent[MeshSolver] = Recent(_MOST_SOLVER_BYTES, lambda solver: solver.n_bytes)

    @property
    def n_sublayers(self) -> int:
        return len(self.layer_of_sublayer)

    @property
    def n_solved(self) -> int:
        return len(self._solved)

    def kinds(self, n: int, remat: Remat) -> tuple[int, ...]:
        """For each sublayer, the first one like it. Raises TraceError if the step has no `n` micro-batches."""
        if (n, remat) not in self._kinds:
            self._kinds[n, remat] = self._sublayer_costs(n, remat, 1).kind
        return self._kinds[n, remat]

    def unlimited_cost(self, n: int, remat: Remat, sublayer: int, candidate: Candidate) -> SublayerCost:
        """With unlimited memory. It does not count in `n_solved`."""
        sublayers = self._sublayer_costs(n, remat, candidate.n_devices)
        return sublayers.cost(sublayer, candidate, None, 0.0, limited=False)

    def cost(self, n: int, sublayer: int, c: int) -> SublayerCost:
        """In column `c`, within the memory of its devices."""
        column = self._columns[c]
        kind = self.kinds(n, column.remat)[sublayer]
        key = (n, kind, c)
        if key not in self._solved:
            free = self._columns.at_price(column, 0)
            fastest = None if c == free else self.cost(n, sublayer, free)

            # A sublayer that does not fit without a price fits at no price.
            if fastest is not None and math.isinf(fastest.seconds):
                self._solved[key] = fastest
            else:
                candidate, price = self._search.space.candidates[column.candidate], MEMORY_PRICES[column.price]
                sublayers = self._sublayer_costs(n, column.remat, candidate.n_devices)
                self._solved[key] = sublayers.cost(kind, candidate, fastest, price, limited=True)
        return self._solved[key]

    # ---- staged steps ---------------------------------------------------------------------------------------------

    def _staging(self, n: int, remat: Remat, n_devices: int) -> _Staging:
        sharing = RowSharing(n, n_devices, self._search.option.expert_skew) if self._is_routed else None
        return _Staging(n, remat, sharing)

    def _sublayer_costs(self, n: int, remat: Remat, n_devices: int) -> SublayerCosts:
        staging = self._staging(n, remat, n_devices)
        return self._staged.get_or_make(staging, lambda: self._new_sublayer_costs(staging))

    def _new_sublayer_costs(self, staging: _Staging) -> SublayerCosts:
        """The whole step for the first staging, else the short step."""
        if self._first_staging is None:
            # The short step has equations of the whole step, in which rows are not in slots.
            first = replace(staging, n=1, sharing=None) if self._is_routed else staging
            sublayers = self._costs_of(self._whole, first)
            self._first_staging = first
            self.border_bytes = tuple(first.n * n_bytes for n_bytes in border_bytes(sublayers.staged))
            if first == staging:
                return sublayers
            self.short = self._short_step(sublayers)

        if self._first_staging == staging:
            return self._costs_of(self._whole, staging)
        if self.short is None:
            first = self._first_staging
            self.short = self._short_step(self._staged.get_or_make(first, lambda: self._costs_of(self._whole, first)))
        if isinstance(self.short, SublayeredStep):
            try:
                return self._costs_of(self.short, staging)
            except TraceError as error:
                # If the whole step cannot be split either, its error names values of the user's step.
                self.short = NotShortened(str(error))
        return self._costs_of(self._whole, staging)

    def _short_step(self, sublayers: SublayerCosts) -> SublayeredStep | NotShortened:
        """`NotShortened` unless it has the problems of the whole step in the first staging. sublayers: of that."""
        assert self._first_staging is not None
        short = shortened(
            StagedSublayers(
                whole=self._whole, staged=sublayers.staged, problems=sublayers.problems, kind=sublayers.kind
            )
        )
        if isinstance(short, NotShortened):
            return short

        try:
            found = self._costs_of(short, self._first_staging)
        except TraceError as error:
            return NotShortened(str(error))
        for place, sublayer in short.kept.items():
            if found.digests[place] != sublayers.digests[sublayer]:
                return NotShortened(f"Sublayer {sublayer} is another problem in the short step.")
        return short

    def _costs_of(self, sublayered: SublayeredStep, staging: _Staging) -> SublayerCosts:
        search, remat, sharing = self._search, staging.remat, staging.sharing
        key = sublayered is self._whole, remat, sharing
        if key not in self._steps:
            step = sublayered.step if sharing is None else with_rows_in_slots(sublayered.step, sharing, search.proofs)
            self._steps[key] = with_choices(step, sublayered.sublayer_of_group, (remat,) * sublayered.n_sublayers, ())
        return SublayerCosts(
            stage_step(self._steps[key], staging.n, sublayered.sublayer_of_group, range(sublayered.n_sublayers)),
            place=sublayered.place,
            cluster=search.cluster,
            compiler=search.compiler,
            option=search.option,
            strategy_cache=self._search.strategy_cache,
            known=self._known,
            solvers=self._solvers,
        )


@dataclass(frozen=True, slots=True)
class _Staging:
    """sharing: `None` with rows as the step has them."""

    n: int
    remat: Remat
    sharing: RowSharing | None
