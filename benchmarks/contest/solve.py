"""Solve one cost graph within a limit of CPU seconds. The search uses all of them unless a proof ends it.

    1. The phases of minialpa's solver, in a fraction of the time.                  -> intra/solver/solve.py, run_phases
    2. Slices of bound and search on the rest of the graph, until the time is over (persistence.py).        -> _go_on
       After each slice, strategies that cannot be part of a better solution are dropped.                   -> _shrink

The seconds to load compiled loops do not count.                                                              -> load
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np

from benchmarks.contest.carried_messages import CarriedMessages
from benchmarks.contest.persistence import Persistence, PersistenceOptions
from benchmarks.contest.persistence import load as load_persistence
from minialpa.intra.solver import dominance
from minialpa.intra.solver.clock import NO_GAP
from minialpa.intra.solver.cost_graph import Bools, Floats, Ints
from minialpa.intra.solver.csr_graph import Core, flatten
from minialpa.intra.solver.lagrange import bracket
from minialpa.intra.solver.local_search import improve_on_trees
from minialpa.intra.solver.options import SolverOptions
from minialpa.intra.solver.residual import Residual, residual_of
from minialpa.intra.solver.solve import (
    Best,
    CostGraph,
    Deadline,
    Edge,
    EdgeCosts,
    GraphSolution,
    keep_only,
    may_be_better,
    run_phases,
)

_DEFAULTS, _PERSISTENCE = SolverOptions(), PersistenceOptions()

#: Any graph, to load compiled loops with.
_TINY = CostGraph(
    node_costs=(np.zeros(2),) * 2,
    edges=(Edge(0, 1, EdgeCosts.of(np.eye(2))),),
    usages=tuple((v, (0, 1), np.ones(2, np.int64)) for v in range(2)),
    usage_limit=2,
)


class SecondsLeft(Deadline):
    """A deadline in CPU seconds, which ignores counted work."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(limit_s)
        self._end = time.thread_time() + limit_s

    @property
    def left_s(self) -> float:
        return self._end - time.thread_time()

    @property
    def processor_left_s(self) -> float:
        return self.left_s

    def within(self, seconds: float) -> Deadline:
        return SecondsLeft(seconds)


def solve_in_seconds(
    graph: CostGraph,
    time_limit_s: float,
    options: SolverOptions = _DEFAULTS,
    persistence: PersistenceOptions = _PERSISTENCE,
) -> GraphSolution:
    """The best strategies that the time allows, with the proven bound. Raises InfeasibleError."""
    load()
    deadline, best, residual = SecondsLeft(time_limit_s), Best(graph, NO_GAP), residual_of(graph)
    prices = np.zeros(len(residual.base))
    run_phases(residual, best, prices, deadline.part(persistence.phases), options)
    if residual.alive and not best.proven:
        _go_on(residual, best, prices, deadline, options, persistence)
    return best.solution()


def load() -> None:
    """Compile all loops, or load them."""
    dominance.load()
    core = flatten(residual_of(_TINY), [0, 1])
    bracket(core, np.zeros(len(core.slack)), Deadline(math.inf), _DEFAULTS)
    load_persistence(core)


def _go_on(
    residual: Residual,
    best: Best,
    prices: Floats,
    deadline: Deadline,
    options: SolverOptions,
    persistence: PersistenceOptions,
) -> None:
    """Run slices until `deadline`, without reductions in between, which would move the starting choices."""
    nodes = list(residual.alive)
    core = flatten(residual, nodes)
    search = Persistence(core, prices[residual.rows], _places(residual, nodes, core, best), options, persistence)
    while not best.proven and not deadline.is_over:
        left_s = deadline.left_s
        found = search.run(SecondsLeft(min(left_s, max(persistence.least_slice_s, left_s * persistence.slice))))
        best.offer(residual.choices(dict(zip(nodes, found.choices.tolist(), strict=True))))
        best.raise_bound(residual.offset + found.bound)
        stays = may_be_better(residual, best, found)
        stays[core.at[:-1] + found.choices] = True
        if stays.mean() < 1 - persistence.shrinks:
            core = _shrink(search, residual, nodes, core, stays)


def _shrink(search: Persistence, residual: Residual, nodes: list[int], core: Core, stays: Bools) -> Core:
    """Leave `search` only the strategies in `stays`, by their place in `core`; returns the smaller core."""

    def carried(messages: Floats) -> Floats:
        return CarriedMessages(before, nodes, core, messages).of(residual, nodes, smaller)

    before = replace(residual, kept=list(residual.kept))
    keep_only(residual, nodes, stays)
    smaller = flatten(residual, nodes)
    places = (np.cumsum(stays) - 1)[core.at[:-1] + search.choices] - smaller.at[:-1]
    search.shrink(smaller, places, carried)
    return smaller


def _places(residual: Residual, nodes: list[int], core: Core, best: Best) -> Ints | None:
    """The best choices of `nodes`, by present place, or choices near them where some of these strategies are gone."""
    if best.choices is None:
        return None

    chosen = [best.choices[v] for v in nodes]
    places = [int(np.searchsorted(residual.kept[v], i)) for v, i in zip(nodes, chosen, strict=True)]
    choices: Ints = np.minimum(np.array(places, np.int64), np.diff(core.at) - 1)
    if any(residual.kept[v][k] != i for v, i, k in zip(nodes, chosen, choices.tolist(), strict=True)):
        improve_on_trees(core, core.cost, choices, core.n_nodes, 0)
    return choices
