"""Uses all remaining time: prices that raise the bound and annealing that finds cheaper choices take turns.

In: a core, the best choices and prices so far. Out: a `Bracket` after each slice of time, never worse than before.

Prices rise where the choices of a pass exceed the capacity of a row, and fall where the choices leave capacity free
(the volume algorithm of Barahona and Anbil, 2000, without its centre):                      -> _Ascent, _PriceSteps
    p <- max(0, p + step * |L(p)| / u * g / |g|_1),   g = running average of usage(s) - slack,   u = a unit of usage
with L(p) the bound of lagrange.py. When the step has become small, the ascent restarts from the best prices, with a
step that is large enough to find other directions.
Each slice of the ascent ends with roundings. On large graphs, roundings find more than any search.
Annealing on forests (forest_search.py) runs in portions. Each portion starts from the best choices so far, at the next
first temperature; after the last temperature, portions become longer. A temperature that brought a gain also gets the
next portion.                                                                                            -> _Annealing
Both share each slice by how fast they closed the gap in the slice before:                               -> _share
    share of the bound = b / (b + c),   b, c = gap that each closed per second of its own time

Example: if the bound rose by 3 per second and the cost fell by 1 per second, the bound gets 3/4 of the next slice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.contest.forest_search import anneal_forests, scarce_rows
from minialpa.intra.solver.clock import Deadline
from minialpa.intra.solver.cost_graph import Floats, Ints
from minialpa.intra.solver.csr_graph import Core
from minialpa.intra.solver.lagrange import ROUNDING, Bracket, Incumbent, Passes, exceeded_rows_priced
from minialpa.intra.solver.local_search import usage_of
from minialpa.intra.solver.options import SolverOptions

#: Forests by which the rate of a core is measured.
_FIRST_FORESTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistenceOptions:
    """The numbers of the search. A *pair* is one pass of messages forward and one back.

    Attributes:
        phases: fraction of the time for the phases of minialpa's solver.
        slice: fraction of the remaining time for a slice of bound and search.
        least_slice_s: least seconds of a slice.
        shrinks: fraction of the strategies that must be ruled out before arrays are rebuilt.
        first_share: fraction of the first slice for the bound.
        share: least fraction of a slice for bound and search, and the fraction for the bound where both are at rest.
        steps: first steps of the prices, in turn, as fractions of |L(p)|.
        unpriced_pairs: pairs before prices move, so that messages settle first.
        rounding_pairs: pairs between two roundings.
        shrink: factor on the step after `patience` pairs without a better bound.
        patience: pairs without a better bound before the step shrinks.
        least_step: the ascent restarts when the step falls below this.
        newest: weight of the newest choices in the running average of the excess.
        temperatures: first temperatures of annealing, in turn, in units of the gap per node. The best one depends on
            how costs are spread.
        cooling: the last temperature of a portion, as a fraction of its first.
        portion_s: seconds of the first portions.
        growth: factor on these seconds after each turn of temperatures: slower cooling ends lower.
        most_s: most seconds of a portion.
        nearly: a row is scarce if at most this fraction of its capacity is left.
    """

    phases: float = 0.6
    slice: float = 0.2
    least_slice_s: float = 2.0
    shrinks: float = 0.02
    first_share: float = 0.5
    share: float = 0.15
    steps: tuple[float, ...] = (0.01, 0.003, 0.03)
    unpriced_pairs: int = 30
    rounding_pairs: int = 20
    shrink: float = 0.8
    patience: int = 15
    least_step: float = 1e-4
    newest: float = 0.1
    temperatures: tuple[float, ...] = (10.0, 1.0, 30.0, 0.1, 3.0, 0.0)
    cooling: float = 0.01
    portion_s: float = 0.5
    growth: float = 1.5
    most_s: float = 10.0
    nearly: float = 0.02


class Persistence:
    """The search of one core. It is a class because messages, prices and temperatures live from slice to slice."""

    def __init__(
        self, core: Core, prices: Floats, choices: Ints | None, solver: SolverOptions, options: PersistenceOptions
    ) -> None:
        self.options = options
        self._incumbent = Incumbent(core)
        if choices is not None:
            self._incumbent.offer(choices)
        self._ascent = _Ascent(core, prices, solver, options)
        self._annealing = _Annealing(options)
        self._share = options.first_share

    @property
    def choices(self) -> Ints:
        """The best so far."""
        return self._incumbent.choices

    def run(self, deadline: Deadline) -> Bracket:
        """One slice of bound and search until `deadline`."""
        incumbent, before, bound_before = self._incumbent, self._incumbent.allowed_cost, self._ascent.bound
        self._ascent.run(incumbent, deadline.part(self._share))
        found = self._ascent.proven()
        self._ascent.round(incumbent)
        middle = incumbent.allowed_cost

        gap = incumbent.cost - found.bound
        if gap > ROUNDING * incumbent.core.forbidden:
            unit = (gap if np.isfinite(gap) else abs(found.bound)) / incumbent.core.n_nodes
            self._annealing.run(found.prices, incumbent, unit, deadline)
        self._share = self._next_share(
            self._ascent.bound - bound_before + before - middle, middle - incumbent.allowed_cost
        )
        return Bracket(
            choices=incumbent.choices,
            cost=incumbent.allowed_cost,
            bound=found.bound,
            reduced=found.reduced,
            prices=found.prices,
        )

    def _next_share(self, risen: float, fallen: float) -> float:
        """The formula of the module; the last share if one rate is unknown, and a small share if both are at rest."""
        options = self.options
        by_bound, by_cost = risen / self._share, fallen / (1 - self._share)
        if not np.isfinite(by_bound + by_cost):
            return self._share
        if by_bound + by_cost <= 0:
            return options.share
        return float(np.clip(by_bound / (by_bound + by_cost), options.share, 1 - options.share))

    def shrink(self, core: Core, choices: Ints, carried: Callable[[Floats], Floats]) -> None:
        """Continue with `core`, which has fewer strategies; `choices` are its best so far.

        carried: maps the messages of the core before to messages of `core`.
        """
        self._incumbent = Incumbent(core)
        self._incumbent.offer(choices)
        self._ascent.shrink(core, carried)


class _Ascent:
    """The ascent of the bound by the formula of lagrange.py, with restarts; `bound` is the best so far."""

    def __init__(self, core: Core, prices: Floats, solver: SolverOptions, options: PersistenceOptions) -> None:
        self.options, self._solver = options, solver
        messages = np.zeros(int(core.message_at[-1]))
        self.passes, self.best = _passes(core, prices, messages), _passes(core, prices, messages)
        self.bound, self.n_starts, self.n_pairs, self.n_rounded = -np.inf, 0, 0, 0
        self.steps = self._start()

    def _start(self) -> _PriceSteps:
        """Return to the best prices, with the next first step."""
        passes, starts = self.passes, self.options.steps
        passes.prices, passes.messages[:] = self.best.prices, self.best.messages
        steps = _PriceSteps(passes.core, self.options, starts[self.n_starts % len(starts)])
        self.n_starts, self.n_pairs = self.n_starts + 1, 0
        return steps

    def run(self, incumbent: Incumbent, deadline: Deadline) -> None:
        """Run pairs until `deadline`, at least one."""
        options = self.options
        while True:
            bound = max(self.passes.run(True), self.passes.run(False))
            self.steps.n_since_best += 1
            if bound > self.bound:
                self.bound, self.steps.n_since_best = bound, 0
                self.best.prices, self.best.messages[:] = self.passes.prices, self.passes.messages
            if deadline.is_over:
                return
            if (self.n_pairs + 1) % options.rounding_pairs == 0:
                self.passes.round(True, incumbent)

            # Only the first start lets messages settle before prices move.
            is_first = self.n_starts == 1
            self.steps.move(self.passes, bound, self.n_pairs if is_first else options.unpriced_pairs + self.n_pairs)
            self.n_pairs += 1
            if self.steps.step < options.least_step:
                self.steps = self._start()

    def proven(self) -> Bracket:
        """The best bound with its reduced costs; without choices."""
        # The pass back leaves the reduced costs that belong to the bound of the pass before it.
        passes = self.best
        bound = passes.run(True) - ROUNDING * passes.core.forbidden
        passes.run(False)
        return Bracket(
            choices=passes.choices,
            cost=np.inf,
            bound=bound,
            reduced=passes.reduced,
            prices=passes.prices,
        )

    def round(self, incumbent: Incumbent) -> None:
        """Rounding and local search at the best prices, with new noise in each call."""
        passes = self.best
        for forward in (False, True):
            passes.round(forward, incumbent)
        self.n_rounded += 1
        passes.improve(incumbent, self.bound, self.n_rounded, self._solver)

    def shrink(self, core: Core, carried: Callable[[Floats], Floats]) -> None:
        """See `Persistence.shrink`."""
        self.passes = _passes(core, self.passes.prices, carried(self.passes.messages))
        self.best = _passes(core, self.best.prices, carried(self.best.messages))
        self.steps.core = core


def _passes(core: Core, prices: Floats, messages: Floats) -> Passes:
    """Passes that start from copies of `messages` and do not count their work."""
    passes = Passes(core, prices, Deadline(0.0))
    passes.messages[:] = messages
    return passes


class _PriceSteps:
    """Moves prices by the formula of the ascent. It is a class because g and the step live from move to move."""

    def __init__(self, core: Core, options: PersistenceOptions, step: float) -> None:
        self.core, self.options = core, options
        self.unit = max(float(core.slack.max(initial=0)), float(core.usage.max(initial=0)))
        self.average_excess: Floats = np.zeros(len(core.slack))
        self.step, self.n_since_best = step, 0

    def move(self, passes: Passes, bound: float, k: int) -> None:
        """Set the prices of `passes` after pair `k`, which gave `bound`."""
        excess = (usage_of(self.core, passes.choices) - self.core.slack).astype(np.float64)
        average = self.average_excess
        self.average_excess = excess if k == 0 else average + self.options.newest * (excess - average)
        if k < self.options.unpriced_pairs or self.unit == 0:
            return

        if self.n_since_best >= self.options.patience:
            self.step, self.n_since_best = self.step * self.options.shrink, 0
        passes.prices = _moved(passes.prices, self.average_excess, self.step * abs(bound) / self.unit)


def _moved(prices: Floats, slope: Floats, length: float) -> Floats:
    """`prices` moved along `slope` by `length`, which is the sum of all their changes."""
    matters = (slope > 0) | (prices > 0)
    total = float(np.abs(slope[matters]).sum())
    return np.maximum(0.0, prices + length / total * slope) if total else prices


class _Annealing:
    """Portions of annealing. It is a class because temperature and length live from portion to portion."""

    def __init__(self, options: PersistenceOptions) -> None:
        self.options, self.portion_s = options, options.portion_s
        self.turn = self.n_portions = 0

    def run(self, prices: Floats, incumbent: Incumbent, unit: float, deadline: Deadline) -> None:
        """Run portions until `deadline`; `unit` is the unit of temperatures."""
        rate = 0.0  # forests in a second
        while not deadline.is_over:
            seconds = min(self.portion_s, deadline.left_s)
            n_forests = max(_FIRST_FORESTS, int(seconds * rate))
            start, before = time.thread_time(), incumbent.value
            self._portion(prices, incumbent, unit, n_forests)
            rate = n_forests / max(1e-9, time.thread_time() - start)
            if n_forests > _FIRST_FORESTS and incumbent.value == before:
                self._turn()

    def _portion(self, prices: Floats, incumbent: Incumbent, unit: float, n_forests: int) -> None:
        core, options, choices = incumbent.core, self.options, incumbent.choices.copy()
        scarce = scarce_rows(core, prices, choices, options.nearly)
        # Exceeded rows cost more from portion to portion, and little once they fit.
        if incumbent.excess > 0:
            core = core._replace(cost=exceeded_rows_priced(core, 0.0 * prices, choices, self.n_portions % 10))

        hot, best = unit * options.temperatures[self.turn % len(options.temperatures)], choices.copy()
        anneal_forests(core, scarce, choices, best, n_forests, hot, hot * options.cooling, self.n_portions)
        incumbent.offer(best)
        self.n_portions += 1

    def _turn(self) -> None:
        """Move to the next temperature, and after the last one to longer portions."""
        self.turn += 1
        if self.turn % len(self.options.temperatures) == 0:
            self.portion_s = min(self.options.most_s, self.portion_s * self.options.growth)


def load(core: Core) -> None:
    """Compile or load the loops that `Persistence` runs in addition to the loops of minialpa's solver."""
    choices = np.zeros(core.n_nodes, np.int64)
    scarce = scarce_rows(core, np.zeros(len(core.slack)), choices, 0.0)
    anneal_forests(core, scarce, choices, choices.copy(), 1, 0.0, 0.0, 0)
