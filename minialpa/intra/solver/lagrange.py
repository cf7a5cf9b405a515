"""Prices on usage make the core a graph without rows: bounds from below, and good choices from above.

With prices p >= 0 on the usage rows (Lagrange multipliers), every p gives a bound, by trws.py:
    L(p) = min_s (c(s) + p . usage(s)) - p . room
Prices rise where the choices of a pass exceed the room of a row and fall where they leave some (the volume algorithm of
Barahona and Anbil, 2000, without its centre):                                                     -> _raise_bound
    p <- max(0, p + step * |L(p)| / u * g / |g|_1),   g = running average of usage(s) - room, u a unit of usage
Rounding and local search (local_search.py) turn priced graphs into choices that keep to the limit.      -> _improve
Where one price separates two very different optima, what is between is found by forcing a few
nodes to strategies that they would not take, and seeing what the messages make of it.             -> _probe
All is counted in passes and rounds, so that the outcome does not depend on the clock unless time runs out.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from minialpa.intra.solver.cost_graph import Floats, Ints
from minialpa.intra.solver.csr_graph import Core
from minialpa.intra.solver.exact import MOST_BITS
from minialpa.intra.solver.local_search import cost_of, improve_on_trees, round_choices, usage_of
from minialpa.intra.solver.mixed_solutions import mixtures
from minialpa.intra.solver.trws import pass_messages, price_usage

#: Pairs of passes at most; those before prices move; those between two roundings, and between two looks at progress.
_MAX_PAIRS, _UNPRICED_PAIRS, _ROUNDING_PAIRS, _PROGRESS_PAIRS = 1200, 30, 20, 100
#: First step; what it shrinks by when so many pairs did not raise the bound; the least one worth taking.
_STEP, _SHRINK, _PATIENCE, _LEAST_STEP = 0.1, 0.8, 15, 1e-4
#: Noise, in parts of the mean cost of a node, and pairs of passes under it.
_NOISE, _NOISY_PAIRS = 1e-3, 20
#: Weight of the newest choices in the average.
_NEWEST = 0.1
#: Progress is too slow when the gap shrinks by less than this part between two looks.
_LEAST_PROGRESS = 0.03
#: Pairs of passes at the best prices, each with two roundings; price levels for thrifty rounding.
_LAST_PAIRS, _THRIFTY = 20, 6
#: Local search: weights that the prices have in turn, rounds at most, trees of one round by node, rounds without gain.
_WEIGHTS, _MAX_ROUNDS, _IDLE_ROUNDS = (1.0, 0.5, 0.0), 60, 9
#: Probes at most, table entries that all of them together may pass over, probes without gain; nodes forced, pairs of
#: passes.
_MAX_PROBES, _PROBE_ENTRIES, _IDLE_PROBES, _FORCED, _PROBE_PAIRS = 200, 10_000_000, 40, 3, 2
#: Trees between two looks at the clock.
_TREES = 2000
#: Sums of floats are trusted to this part of the largest possible one.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Bracket:
    """The optimum is between `bound` and the cost of `choices`, which is infinite where they are not allowed.

    Of choices that are not, these have no forbidden pair if some had none, and then exceed a row least.

    reduced[at[v] + i]: a solution with strategy i at v costs at least bound + this. prices: those of the bound.
    """

    choices: Ints
    cost: float
    bound: float
    reduced: Floats
    prices: Floats


class _Incumbent:
    """The best choices so far: allowed pairs before forbidden ones, then the least excess, then the least cost."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.choices: Ints = np.zeros(core.n_nodes, np.int64)
        self.cost, self.excess = np.inf, math.inf

    def offer(self, choices: Ints) -> None:
        cost = cost_of(self.core, choices)
        excess = int(np.max(usage_of(self.core, choices) - self.core.room, initial=0))
        if (np.isinf(cost), excess, cost) < (np.isinf(self.cost), self.excess, self.cost):
            self.choices, self.cost, self.excess = choices.copy(), cost, excess

    @property
    def allowed_cost(self) -> float:
        return self.cost if self.excess == 0 else np.inf


class _Passes:
    """Messages with their prices and the bound that they prove; a class because messages live from pass to pass."""

    def __init__(self, core: Core, prices: Floats) -> None:
        self.core, self.prices = core, prices
        self.messages = np.zeros(int(core.message_at[-1]))
        self.priced, self.reduced = np.empty_like(core.cost), np.empty_like(core.cost)
        self.choices: Ints = np.zeros(core.n_nodes, np.int64)

    def run(self, forward: bool) -> float:
        price_usage(self.core, self.prices, self.priced)
        bound = pass_messages(self.core, self.priced, self.messages, forward, self.reduced, self.choices)
        return float(bound - self.prices @ self.core.room)

    def round(self, forward: bool, incumbent: _Incumbent) -> None:
        choices = np.zeros_like(self.choices)
        round_choices(self.core, self.priced, self.messages, forward, choices)
        incumbent.offer(choices)

    def improve(self, incumbent: _Incumbent, bound: float, seed: int) -> None:
        """Rounding and local search after passes over slightly changed costs.

        Where several optima cost the same, rounding takes a bit of each. Noise leaves one of them the cheapest.
        """
        core, choices = self.core, np.zeros_like(self.choices)
        noise = np.random.default_rng(seed).random(len(core.cost))
        noisy, messages = self.priced + _NOISE * abs(bound) / core.n_nodes * noise, self.messages.copy()
        unused = np.empty_like(self.reduced)
        for _ in range(_NOISY_PAIRS):
            for forward in (True, False):
                pass_messages(core, noisy, messages, forward, unused, choices)
        for forward in (True, False):
            round_choices(core, noisy, messages, forward, choices)
            improve_on_trees(core, self.priced, choices, core.n_nodes, seed)
            incumbent.offer(choices)


def load(core: Core) -> None:
    """Compile all loops that `bracket` runs, or load them: on any `core`, for all others."""
    passes = _Passes(core, np.zeros(len(core.room)))
    passes.run(True)
    passes.improve(_Incumbent(core), 0.0, seed=0)


def bracket(core: Core, prices: Floats, deadline: float) -> Bracket:
    """Bounds and choices for `core`, starting from `prices`. However late it is, a few passes are made."""
    incumbent = _Incumbent(core)
    now = time.monotonic()
    passes = _raise_bound(core, prices, incumbent, now + (deadline - now) / 2)
    for _ in range(_LAST_PAIRS if time.monotonic() < deadline else 1):
        for forward in (True, False):
            bound = passes.run(forward)
            passes.round(not forward, incumbent)
        if incumbent.allowed_cost - bound <= _ROUNDING * core.forbidden:
            break
    if incumbent.excess > 0:
        _round_thriftily(core, incumbent)
    bound = passes.run(True) - _ROUNDING * core.forbidden
    passes.run(False)
    if incumbent.allowed_cost - bound > 2 * _ROUNDING * core.forbidden:
        if len(core.room) and incumbent.excess == 0:
            for choices in mixtures(core, _cheapest(core), incumbent.choices):
                incumbent.offer(choices)
        _improve(core, passes.prices, incumbent, deadline)
        _probe(passes, incumbent, deadline)
    return Bracket(incumbent.choices, incumbent.allowed_cost, bound, passes.reduced, passes.prices)


def _raise_bound(core: Core, prices: Floats, incumbent: _Incumbent, deadline: float) -> _Passes:
    """Passes under moving prices; returns those that proved the best bound."""
    passes, best = _Passes(core, prices), _Passes(core, prices)
    equal = _ROUNDING * core.forbidden
    scale = max(float(core.room.max(initial=0)), float(core.usage.max(initial=0)))
    best_bound, bound_before, last_gap = -np.inf, -np.inf, np.inf
    step, since_best = _STEP, 0
    slope = np.zeros(len(core.room))
    for k in range(_MAX_PAIRS):
        bound = max(passes.run(True), passes.run(False))
        since_best += 1
        if bound > best_bound:
            best_bound, since_best = bound, 0
            best.prices, best.messages[:] = passes.prices, passes.messages
        if k % _ROUNDING_PAIRS == _ROUNDING_PAIRS - 1:
            passes.round(True, incumbent)
            if incumbent.allowed_cost - best_bound <= equal:
                break
            if not len(core.room) and best_bound - bound_before <= equal:  # without prices nothing moves it any more
                passes.improve(incumbent, bound, seed=k)
                break
            bound_before = best_bound
        if k % _PROGRESS_PAIRS == _PROGRESS_PAIRS - 1:
            passes.improve(incumbent, bound, seed=k)
            gap = incumbent.allowed_cost - best_bound
            if gap > (1 - _LEAST_PROGRESS) * last_gap or gap <= equal:
                break
            last_gap = gap
        if time.monotonic() > deadline or step < _LEAST_STEP:
            break
        excess = (usage_of(core, passes.choices) - core.room).astype(np.float64)
        slope = excess if k == 0 else slope + _NEWEST * (excess - slope)
        if k >= _UNPRICED_PAIRS and scale > 0:
            if since_best >= _PATIENCE:
                step, since_best = step * _SHRINK, 0
            passes.prices = _moved(passes.prices, slope, step * abs(bound) / scale)
    return best


def _round_thriftily(core: Core, incumbent: _Incumbent) -> None:
    """Where nothing keeps to the limit yet: rounding under the same price on all rows, higher and higher."""
    passes = _Passes(core, np.zeros(len(core.room)))
    for k in range(_THRIFTY):
        unit = float(core.usage.max(initial=0)) * len(core.room) or 1.0
        passes.prices = np.full(len(core.room), core.forbidden / unit * 10.0 ** (k - _THRIFTY // 2))
        for forward in (True, False):
            passes.run(forward)
            passes.round(not forward, incumbent)
        if incumbent.excess == 0:
            return


def _cheapest(core: Core) -> Ints:
    """Choices that cost least as if there were no limit."""
    free = core._replace(room=np.full_like(core.room, 2 ** (MOST_BITS + 1)))
    incumbent = _Incumbent(free)
    passes = _Passes(free, np.zeros(len(core.room)))
    for _ in range(_UNPRICED_PAIRS):
        bound = max(passes.run(True), passes.run(False))
    passes.improve(incumbent, bound, seed=0)
    return incumbent.choices


def _moved(prices: Floats, slope: Floats, length: float) -> Floats:
    """Prices that went by `length`, all together, along `slope`."""
    matters = (slope > 0) | (prices > 0)
    total = float(np.abs(slope[matters]).sum())
    return np.maximum(0.0, prices + length / total * slope) if total else prices


def _improve(core: Core, prices: Floats, incumbent: _Incumbent, deadline: float) -> None:
    """Rounds of local search under full, half and no prices in turn; exceeded rows have a price that grows."""
    choices = incumbent.choices.copy()
    priced = np.empty_like(core.cost)
    idle = 0
    for k in range(_MAX_ROUNDS):
        before = incumbent.cost, incumbent.excess
        used = usage_of(core, choices)
        penalty = core.forbidden / (float(core.usage.max(initial=0)) or 1.0) * 4.0 ** (k - 5)
        price_usage(core, _WEIGHTS[k % len(_WEIGHTS)] * prices + penalty * (used > core.room), priced)
        for first in range(0, core.n_nodes, _TREES):
            if time.monotonic() > deadline:
                return
            improve_on_trees(core, priced, choices, min(_TREES, core.n_nodes - first), k * core.n_nodes + first)
        incumbent.offer(choices)
        idle = 0 if (incumbent.cost, incumbent.excess) != before else idle + 1
        if idle >= _IDLE_ROUNDS:
            return


def _probe(passes: _Passes, incumbent: _Incumbent, deadline: float) -> None:
    """Rounding and local search after a few passes in which random nodes are held at random strategies."""
    core, priced = passes.core, np.empty_like(passes.core.cost)
    messages, choices = np.empty_like(passes.messages), np.zeros_like(passes.choices)
    unused = np.empty_like(passes.reduced)
    rng = np.random.default_rng(0)
    idle = 0
    for k in range(min(_MAX_PROBES, _PROBE_ENTRIES // max(1, len(core.table)))):
        if time.monotonic() > deadline or idle >= _IDLE_PROBES:
            return
        before = incumbent.cost, incumbent.excess
        price_usage(core, passes.prices, priced)
        forced = priced.copy()
        for v in rng.integers(0, core.n_nodes, _FORCED):
            i = rng.integers(core.at[v], core.at[v + 1])
            forced[core.at[v] : core.at[v + 1]] += core.forbidden
            forced[i] -= core.forbidden
        messages[:] = passes.messages
        for _ in range(_PROBE_PAIRS):
            for forward in (True, False):
                pass_messages(core, forced, messages, forward, unused, choices)
        round_choices(core, forced, messages, True, choices)
        for costs in (priced, core.cost):
            improve_on_trees(core, costs, choices, core.n_nodes // 2 + 1, k)
            incumbent.offer(choices)
        idle = 0 if (incumbent.cost, incumbent.excess) != before else idle + 1
