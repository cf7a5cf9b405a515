"""A `Core` in; a lower bound and good choices within the usage limit out.

Under prices p >= 0 on the usage rows (Lagrange multipliers), the core is a graph without rows, for which the messages
of trws.py prove a bound at every p:
    L(p) = min_s (c(s) + p . usage(s)) - p . slack
Example: 10 equal nodes, a limit of 15, two strategies: (cost 0, usage 2) and (cost 1, usage 1). At price 1, both
cost 2 with the price, so L = 10 * 2 - 15 = 5. Five nodes of each kind reach this bound.
The best prices come from a linear program over the choices x_k found so far, with excess e(x) = usage(x) - slack:
    max theta   subject to   theta <= c(x_k) + p . e(x_k) for each k,   p >= 0                            -> _Columns
theta is never below the best bound (Kelley's cutting planes, 1960; the dual of Dantzig and Wolfe's columns, 1960).
Messages under these prices prove a bound and give more choices, until the gap is small or the bound stops rising. Few
rows bind, so a few prices are enough.                                                          -> _raise_with_columns

Local search turns priced costs into choices within the limit.                                     -> _improve_choices
At the best price, one optimum may exceed the limit and another leave much of it unused. Probes find choices between
them, in which only some of many equal layers use less: they force a few nodes to random strategies.       -> _probe
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from minialpa.intra.solver.clock import NO_GAP, AllowedGap, Deadline
from minialpa.intra.solver.cost_graph import MOST_USAGE, Floats, Ints
from minialpa.intra.solver.csr_graph import Core
from minialpa.intra.solver.local_search import cost_of, improve_on_trees, round_choices, usage_of
from minialpa.intra.solver.options import SolverOptions
from minialpa.intra.solver.trws import exchange_messages, pass_messages, price_usage

#: Rounding error of float64 sums, as a part of the largest sum.
ROUNDING = 1e-12
#: Operations per linear program, about.
_OF_PROGRAM = 5e6
#: Largest price, in units of (spread of the costs) / (largest excess): prices are otherwise unbounded without choices
#: within the limit.
_HIGHEST_PRICE = 1000.0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Bracket:
    """The optimum of a core is between `bound` and `cost`.

    Attributes:
        choices: the best by the order of `Incumbent`.
        cost: infinite if `choices` exceed the limit or have a forbidden pair.
        reduced: a solution with strategy i at node v costs at least bound + reduced[at[v] + i].
        prices: of rows, which gave the bound.
    """

    choices: Ints
    cost: float
    bound: float
    reduced: Floats
    prices: Floats


def work_of_pass(core: Core) -> float:
    """Operations of one pass of messages, at most, as if no strategies cost the same."""
    return core.n_pairs + 10 * len(core.cost) + 50 * core.n_nodes


def work_of_tree(core: Core) -> float:
    """Of local search: 20 nodes with average edges and rows."""
    n_rows = int((core.end - core.start).sum())
    return 20 * (2 * core.n_pairs + n_rows) / core.n_nodes + 2000


def _without_limit(core: Core) -> Core:
    return core._replace(slack=np.full_like(core.slack, 2 * MOST_USAGE))


class Incumbent:
    """The best choices so far: without forbidden pairs first, then by least excess, then by least cost."""

    def __init__(self, core: Core, allowed: AllowedGap = NO_GAP, offset: float = 0.0) -> None:
        """allowed: for the whole graph, whose cost is the cost of the core plus `offset`."""
        self.core, self._allowed, self._offset = core, allowed, offset
        self.choices: Ints = np.zeros(core.n_nodes, np.int64)
        self.cost, self.excess = np.inf, math.inf

    def offer(self, choices: Ints) -> None:
        cost = cost_of(self.core, choices)
        excess = int(np.max(usage_of(self.core, choices) - self.core.slack, initial=0))
        if (np.isinf(cost), excess, cost) < (np.isinf(self.cost), self.excess, self.cost):
            self.choices, self.cost, self.excess = choices.copy(), cost, excess

    @property
    def value(self) -> tuple[float, float]:
        return self.cost, self.excess

    @property
    def allowed_cost(self) -> float:
        return self.cost if self.excess == 0 else np.inf

    def gap_of(self, bound: float) -> float:
        return max(ROUNDING * self.core.forbidden, self._allowed.of(self._offset + bound))

    def is_within(self, bound: float) -> bool:
        return self.allowed_cost - bound <= self.gap_of(bound)


class Passes:
    """Passes of messages under `prices`; they spend `deadline`."""

    def __init__(self, core: Core, prices: Floats, deadline: Deadline) -> None:
        self.core, self.prices, self.deadline = core, prices, deadline
        self.messages = np.zeros(int(core.message_at[-1]))
        self.priced, self.reduced = np.empty_like(core.cost), np.empty_like(core.cost)
        self.choices: Ints = np.zeros(core.n_nodes, np.int64)

    def run(self, forward: bool) -> float:
        """In or against the order of nodes; returns L(prices)."""
        self.deadline.spend(work_of_pass(self.core))
        price_usage(self.core, self.prices, self.priced)
        bound = pass_messages(self.core, self.priced, self.messages, forward, self.reduced, self.choices)
        return float(bound - self.prices @ self.core.slack)

    def round(self, forward: bool, incumbent: Incumbent) -> None:
        choices = np.zeros_like(self.choices)
        self.deadline.spend(work_of_pass(self.core))
        round_choices(self.core, self.priced, self.messages, forward, choices)
        incumbent.offer(choices)

    def improve(self, incumbent: Incumbent, bound: float, seed: int, options: SolverOptions) -> None:
        """Rounding and local search after passes over noisy costs; without noise, rounding mixes equal optima."""
        core, choices = self.core, np.zeros_like(self.choices)
        noise = np.random.default_rng(seed).random(len(core.cost))
        noisy = self.priced + options.noise * abs(bound) / core.n_nodes * noise
        messages = self.messages.copy()
        exchange_messages(core, noisy, messages, choices, options.noisy_pairs)
        self.deadline.spend(2 * options.noisy_pairs * work_of_pass(core) + 2 * core.n_nodes * work_of_tree(core))

        for forward in (True, False):
            round_choices(core, noisy, messages, forward, choices)
            improve_on_trees(core, self.priced, choices, core.n_nodes, seed)
            incumbent.offer(choices)


class _Columns:
    """The linear program over choices."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._costs: list[float] = []
        self._excess: list[Ints] = []

    def add(self, choices: Ints) -> None:
        """`choices` may exceed the limit."""
        cost = cost_of(self.core, choices)
        if np.isfinite(cost):
            self._costs.append(cost)
            self._excess.append(usage_of(self.core, choices) - self.core.slack)

    def best_prices(self) -> tuple[Floats, float]:
        """For each row, and theta, an upper bound on L(p); infinite without choices."""
        from scipy.optimize import linprog  # slow to import, and few graphs need it

        prices = np.zeros(len(self.core.slack))
        if not self._costs:
            return prices, np.inf

        # Scaled by spread and largest excess: seconds and bytes are many orders apart.
        costs, excess = np.array(self._costs), np.array(self._excess, np.float64)
        rows = np.flatnonzero((excess > 0).any(axis=0))
        least, spread = float(costs.min()), float(np.ptp(costs)) or 1.0
        unit = max(1.0, float(np.abs(excess[:, rows]).max(initial=0)))

        program = linprog(
            np.concatenate(([-1.0], np.zeros(len(rows)))),
            A_ub=np.hstack([np.ones((len(costs), 1)), -excess[:, rows] / unit]),
            b_ub=(costs - least) / spread,
            bounds=[(None, None), *[(0.0, _HIGHEST_PRICE)] * len(rows)],
            method="highs",
        )
        if program.x is None:
            return prices, np.inf
        prices[rows] = np.maximum(0.0, program.x[1:]) * spread / unit
        return prices, least - program.fun * spread


def bracket(
    core: Core, prices: Floats, deadline: Deadline, options: SolverOptions, allowed: AllowedGap = NO_GAP,
    offset: float = 0.0,
) -> Bracket:  # fmt: skip
    """Bound and choices for `core`, from `prices` of its rows, after a few passes even without time.

    allowed, offset: see `Incumbent`.
    """
    incumbent = Incumbent(core, allowed, offset)
    half = deadline.part(0.5)
    if len(core.slack):
        passes = _raise_with_columns(core, prices, incumbent, half, options)
    else:
        passes = _settle_messages(core, prices, incumbent, half, options)

    for _ in range(options.last_pairs if not deadline.is_over else 1):
        for forward in (True, False):
            bound = passes.run(forward)
            passes.round(not forward, incumbent)
        if incumbent.is_within(bound):
            break
    if incumbent.excess > 0:
        _round_under_high_prices(core, incumbent, deadline, options.price_levels)

    # The second pass leaves the reduced costs for the bound of the first.
    rounding = ROUNDING * core.forbidden
    bound = passes.run(forward=True) - rounding
    passes.run(forward=False)

    if not incumbent.is_within(bound + rounding):
        _improve_choices(core, passes.prices, incumbent, bound + rounding, deadline, options)
        _probe(passes, incumbent, bound + rounding, deadline, options)
    return Bracket(
        choices=incumbent.choices,
        cost=incumbent.allowed_cost,
        bound=bound,
        reduced=passes.reduced,
        prices=passes.prices,
    )


def _settle_messages(
    core: Core, prices: Floats, incumbent: Incumbent, deadline: Deadline, options: SolverOptions
) -> Passes:
    """Without rows. Returns the messages of the best bound."""
    passes, best = Passes(core, prices, deadline), Passes(core, prices, deadline)
    equal = ROUNDING * core.forbidden
    best_bound, bound_before, gap_before = -np.inf, -np.inf, np.inf

    for k in range(options.max_pairs):
        bound = max(passes.run(forward=True), passes.run(forward=False))
        if bound > best_bound:
            best_bound = bound
            best.messages[:] = passes.messages

        if (k + 1) % options.rounding_pairs == 0:
            passes.round(forward=True, incumbent=incumbent)
            if incumbent.is_within(best_bound):
                break
            if best_bound - bound_before <= equal:
                passes.improve(incumbent, bound, k, options)
                break
            bound_before = best_bound

        if (k + 1) % options.progress_pairs == 0:
            passes.improve(incumbent, bound, k, options)
            gap = incumbent.allowed_cost - best_bound
            if gap > (1 - options.least_progress) * gap_before or incumbent.is_within(best_bound):
                break
            gap_before = gap

        if deadline.is_over:
            break
    return best


def _raise_with_columns(
    core: Core, prices: Floats, incumbent: Incumbent, deadline: Deadline, options: SolverOptions
) -> Passes:
    """Under the prices of `_Columns`; returns the passes of the best bound."""
    passes, best = Passes(core, prices, deadline), Passes(core, prices, deadline)
    columns = _Columns(core)
    equal = ROUNDING * core.forbidden
    best_bound, best_cost, n_idle = -np.inf, np.inf, 0

    for k in range(options.max_prices):
        bound = _settled_bound(passes, options, options.little * equal)
        gains = bound > best_bound + options.little * equal
        if bound > best_bound:
            best_bound = bound
            best.prices, best.messages[:] = passes.prices, passes.messages
            equal = incumbent.gap_of(bound)

        _offer_columns(passes, columns, incumbent, k, options)
        deadline.spend(options.searched_part * core.n_nodes * work_of_tree(core) + _OF_PROGRAM)
        if n_idle:
            _offer_noisy_columns(passes, columns, incumbent, best_bound, k, options)
            deadline.spend(40 * work_of_pass(core) + 2 * core.n_nodes * work_of_tree(core))
        gains |= incumbent.allowed_cost < best_cost - options.little * equal
        best_cost = min(best_cost, incumbent.allowed_cost)
        n_idle = 0 if gains else n_idle + 1
        following, most = columns.best_prices()
        is_settled = n_idle >= options.idle_prices or most - best_bound <= options.little * equal
        if incumbent.is_within(best_bound) or is_settled or deadline.is_over:
            break
        near = options.nearness if k else 0.0
        passes.prices = near * best.prices + (1 - near) * following
    return best


def _settled_bound(passes: Passes, options: SolverOptions, little: float) -> float:
    """Under unchanged prices, once it rises by at most `little`."""
    best = -np.inf
    for k in range(options.most_price_pairs):
        bound = max(passes.run(forward=True), passes.run(forward=False))
        rises = bound - best > little
        best = max(best, bound)
        if k + 1 >= options.least_price_pairs and not rises:
            break
    return best


def _offer_columns(passes: Passes, columns: _Columns, incumbent: Incumbent, k: int, options: SolverOptions) -> None:
    """Rounded with and without the limit."""
    core, n_trees = passes.core, int(options.searched_part * passes.core.n_nodes) + 1
    free = _without_limit(core)
    for forward in (True, False):
        choices = np.zeros_like(passes.choices)
        round_choices(free, passes.priced, passes.messages, forward, choices)
        columns.add(choices)
        incumbent.offer(choices)
        if k % options.prices_per_search == 0:
            improve_on_trees(free, passes.priced, choices, n_trees, k)
            columns.add(choices)
            incumbent.offer(choices)
        passes.round(forward, incumbent)

    # From the best choices, under prices, then without.
    if k % options.prices_per_search == 1 % options.prices_per_search:
        choices = incumbent.choices.copy()
        for costs in (passes.priced, core.cost):
            improve_on_trees(core, costs, choices, n_trees, k)
            columns.add(choices)
            incumbent.offer(choices)
    columns.add(incumbent.choices)


def _offer_noisy_columns(
    passes: Passes, columns: _Columns, incumbent: Incumbent, bound: float, k: int, options: SolverOptions
) -> None:
    """See `Passes.improve`."""
    core, choices, messages = passes.core, np.zeros_like(passes.choices), passes.messages.copy()
    noise = np.random.default_rng(k).random(len(core.cost))
    noisy = passes.priced + options.noise * abs(bound) / core.n_nodes * noise
    exchange_messages(core, noisy, messages, choices, options.noisy_pairs)

    free = _without_limit(core)
    for forward in (True, False):
        for limited in (free, core):
            round_choices(limited, noisy, messages, forward, choices)
            improve_on_trees(limited, passes.priced, choices, core.n_nodes // 2 + 1, k)
            columns.add(choices)
            incumbent.offer(choices)


def _round_under_high_prices(core: Core, incumbent: Incumbent, deadline: Deadline, n_levels: int) -> None:
    """Equal prices for all rows, until the choices keep to the limit."""
    passes = Passes(core, np.zeros(len(core.slack)), deadline)
    for k in range(n_levels):
        unit = float(core.usage.max(initial=0)) * len(core.slack) or 1.0
        passes.prices = np.full(len(core.slack), core.forbidden / unit * 10.0 ** (k - n_levels // 2))
        for forward in (True, False):
            passes.run(forward)
            passes.round(not forward, incumbent)
        if incumbent.excess == 0:
            return


def _improve_choices(
    core: Core, prices: Floats, incumbent: Incumbent, bound: float, deadline: Deadline, options: SolverOptions
) -> None:
    """Each round raises the price on exceeded rows."""
    choices = incumbent.choices.copy()
    n_idle = 0
    for k in range(options.max_searches):
        before = incumbent.value
        weight = options.price_weights[k % len(options.price_weights)]
        priced = exceeded_rows_priced(core, weight * prices, choices, k)

        # In portions: compiled loops do not check the deadline.
        for first in range(0, core.n_nodes, options.trees_per_look):
            if deadline.is_over:
                return
            n_trees = min(options.trees_per_look, core.n_nodes - first)
            deadline.spend(n_trees * work_of_tree(core))
            improve_on_trees(core, priced, choices, n_trees, k * core.n_nodes + first)

        incumbent.offer(choices)
        n_idle = 0 if incumbent.value != before else n_idle + 1
        if n_idle >= options.idle_searches or incumbent.is_within(bound):
            return


def exceeded_rows_priced(core: Core, prices: Floats, choices: Ints, k: int) -> Floats:
    """Costs under `prices` and a price on exceeded rows, proportional to 4 ** k."""
    priced = np.empty_like(core.cost)
    penalty = core.forbidden / (float(core.usage.max(initial=0)) or 1.0) * 4.0 ** (k - 5)
    price_usage(core, prices + penalty * (usage_of(core, choices) > core.slack), priced)
    return priced


def _probe(passes: Passes, incumbent: Incumbent, bound: float, deadline: Deadline, options: SolverOptions) -> None:
    """A few random nodes are forced to random strategies."""
    core, priced = passes.core, np.empty_like(passes.core.cost)
    messages, choices = np.empty_like(passes.messages), np.zeros_like(passes.choices)
    rng = np.random.default_rng(0)
    n_idle = 0
    for k in range(min(options.max_probes, options.max_probe_entries // max(1, core.n_pairs))):
        if deadline.is_over or n_idle >= options.idle_probes or incumbent.is_within(bound):
            return
        before = incumbent.value
        deadline.spend(2 * options.probe_pairs * work_of_pass(core) + core.n_nodes * work_of_tree(core))

        price_usage(core, passes.prices, priced)
        forced = _with_forced_nodes(core, priced, options.forced, rng)
        messages[:] = passes.messages
        exchange_messages(core, forced, messages, choices, options.probe_pairs)
        round_choices(core, forced, messages, True, choices)

        # Without the force, so that forced nodes may go back.
        for costs in (priced, core.cost):
            improve_on_trees(core, costs, choices, core.n_nodes // 2 + 1, k)
            incumbent.offer(choices)
        n_idle = 0 if incumbent.value != before else n_idle + 1


def _with_forced_nodes(core: Core, priced: Floats, n_forced: int, rng: np.random.Generator) -> Floats:
    forced = priced.copy()
    for node in rng.integers(0, core.n_nodes, n_forced):
        chosen = rng.integers(core.at[node], core.at[node + 1])
        forced[core.at[node] : core.at[node + 1]] += core.forbidden
        forced[chosen] -= core.forbidden
    return forced
