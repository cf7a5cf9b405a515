"""Uses the time that is left: prices for the bound and annealing for cheaper choices, in turn.

In: a core, the best choices and prices so far. Out: a `Bracket` after each slice of time, never worse than before.

The ascent of the bound goes on with the messages and prices that it had. When its step has become small it starts again
from the best prices, with a step that was large enough to find other directions.                  -> _Ascent
Each slice of it ends with roundings, which for large graphs find more than any search does.
Annealing on forests (forest_search.py) runs in portions, each from the best choices so far and at another first
temperature, and then in longer ones. A temperature that gained has the next portion, too.        -> _Annealing
Each slice is shared between the two by how fast they closed the gap in the slice before:          -> _share
    share of the bound = b / (b + c),   b, c = what each of them closed in a second of its own

Example: where the bound rose by 3 in a second and the cost fell by 1, the bound has three quarters of the next slice.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from minialpa.intra.solver.clock import Deadline
from minialpa.intra.solver.cost_graph import Floats, Ints
from minialpa.intra.solver.csr_graph import Core
from minialpa.intra.solver.forest_search import anneal_forests, scarce_rows
from minialpa.intra.solver.lagrange import ROUNDING, Bracket, Incumbent, Passes, PriceSteps, exceeded_rows_priced
from minialpa.intra.solver.options import PersistenceOptions, SolverOptions

#: Forests by which the rate of a core is measured.
_FIRST_FORESTS = 200


class Persistence:
    """The search of one core; a class because messages, prices and temperatures live from slice to slice."""

    def __init__(
        self, core: Core, prices: Floats, messages: Floats, choices: Ints | None, options: SolverOptions
    ) -> None:
        self.options = options
        self._incumbent = Incumbent(core)
        if choices is not None:
            self._incumbent.offer(choices)
        self._ascent = _Ascent(core, prices, messages, options)
        self._annealing = _Annealing(options.persistence)
        self._share = options.persistence.first_share

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
            messages=found.messages,
        )

    def _next_share(self, risen: float, fallen: float) -> float:
        """The formula above; as before where one of them was unknown, and a small share where both are at rest."""
        options = self.options.persistence
        by_bound, by_cost = risen / self._share, fallen / (1 - self._share)
        if not np.isfinite(by_bound + by_cost):
            return self._share
        if by_bound + by_cost <= 0:
            return options.share
        return float(np.clip(by_bound / (by_bound + by_cost), options.share, 1 - options.share))

    def shrink(self, core: Core, choices: Ints, carried: Callable[[Floats], Floats]) -> None:
        """Go on with `core`, which has fewer strategies: `choices` are the best so far in it.

        carried: gives the messages of `core` for those of the core before.
        """
        self._incumbent = Incumbent(core)
        self._incumbent.offer(choices)
        self._ascent.shrink(core, carried)


class _Ascent:
    """The ascent of the bound by the formula of lagrange.py, with new starts; `bound` is the best so far."""

    def __init__(self, core: Core, prices: Floats, messages: Floats, options: SolverOptions) -> None:
        self.options = options
        self.passes, self.best = _passes(core, prices, messages), _passes(core, prices, messages)
        self.bound, self.n_starts, self.n_pairs, self.n_rounded = -np.inf, 0, 0, 0
        self.steps = self._start()

    def _start(self) -> PriceSteps:
        """Back to the best prices, with the next first step."""
        passes, starts = self.passes, self.options.persistence.steps
        passes.prices, passes.messages[:] = self.best.prices, self.best.messages
        steps = PriceSteps(passes.core, self.options.ascent)
        steps.step = starts[self.n_starts % len(starts)]
        self.n_starts, self.n_pairs = self.n_starts + 1, 0
        return steps

    def run(self, incumbent: Incumbent, deadline: Deadline) -> None:
        """Pairs until `deadline`, at least one."""
        ascent = self.options.ascent
        while True:
            bound = max(self.passes.run(True), self.passes.run(False))
            self.steps.n_since_best += 1
            if bound > self.bound:
                self.bound, self.steps.n_since_best = bound, 0
                self.best.prices, self.best.messages[:] = self.passes.prices, self.passes.messages
            if deadline.is_over:
                return
            if (self.n_pairs + 1) % ascent.rounding_pairs == 0:
                self.passes.round(True, incumbent)

            # Messages settle under the first prices only once.
            is_first = self.n_starts == 1
            self.steps.move(self.passes, bound, self.n_pairs if is_first else ascent.unpriced_pairs + self.n_pairs)
            self.n_pairs += 1
            if self.steps.step < ascent.least_step:
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
            messages=passes.messages,
        )

    def round(self, incumbent: Incumbent) -> None:
        """Rounding and local search at the best prices, each time with other noise."""
        passes = self.best
        for forward in (False, True):
            passes.round(forward, incumbent)
        self.n_rounded += 1
        passes.improve(incumbent, self.bound, self.n_rounded, self.options.rounding)

    def shrink(self, core: Core, carried: Callable[[Floats], Floats]) -> None:
        """As that of `Persistence`."""
        self.passes = _passes(core, self.passes.prices, carried(self.passes.messages))
        self.best = _passes(core, self.best.prices, carried(self.best.messages))
        self.steps.core = core


def _passes(core: Core, prices: Floats, messages: Floats) -> Passes:
    """Passes that start from copies of `messages`, and whose work is not counted."""
    passes = Passes(core, prices, Deadline(0.0))
    passes.messages[:] = messages
    return passes


class _Annealing:
    """Portions of annealing; a class because temperature and length live from portion to portion."""

    def __init__(self, options: PersistenceOptions) -> None:
        self.options, self.portion_s = options, options.portion_s
        self.turn = self.n_portions = 0

    def run(self, prices: Floats, incumbent: Incumbent, unit: float, deadline: Deadline) -> None:
        """Portions until `deadline`; `unit` is the unit of temperatures."""
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
        # Rows that are exceeded cost more from portion to portion, and then little again.
        if incumbent.excess > 0:
            core = core._replace(cost=exceeded_rows_priced(core, 0.0 * prices, choices, self.n_portions % 10))

        hot, best = unit * options.temperatures[self.turn % len(options.temperatures)], choices.copy()
        anneal_forests(core, scarce, choices, best, n_forests, hot, hot * options.cooling, self.n_portions)
        incumbent.offer(best)
        self.n_portions += 1

    def _turn(self) -> None:
        """On to the next temperature, and after the last one to longer portions."""
        self.turn += 1
        if self.turn % len(self.options.temperatures) == 0:
            self.portion_s = min(self.options.most_s, self.portion_s * self.options.growth)


def load(core: Core) -> None:
    """Compile or load the loops that `Persistence` runs beside those of `lagrange.load`."""
    choices = np.zeros(core.n_nodes, np.int64)
    scarce = scarce_rows(core, np.zeros(len(core.room)), choices, 0.0)
    anneal_forests(core, scarce, choices, choices.copy(), 1, 0.0, 0.0, 0)
