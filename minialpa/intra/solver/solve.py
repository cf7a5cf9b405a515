"""Choose one strategy per node of a cost graph, with a proof where there is time for one.

In: `CostGraph` (problem and formula in cost_graph.py). Out: `GraphSolution`. One after the other, until one suffices:
    1. Reductions that keep the optimum (elimination.py, bucket.py).
    2. The same without usage rows; where the result fits, it is optimal.                      -> _try_without_rows
    3. Bounds from messages and prices, choices from rounding and local search (lagrange.py).  -> _bracket
       A strategy that every solution with it pays more for than the best choices goes, and 1 again.
    4. The core that is left, if it is small enough, as an integer program (ilp_model.py).       -> _solve_rest
"""

from __future__ import annotations

import time
from typing import Literal

import numpy as np

from minialpa.errors import InfeasibleError
from minialpa.intra.solver import dominance
from minialpa.intra.solver.bucket import eliminate_narrow_components
from minialpa.intra.solver.cost_graph import CostGraph, Edge, Floats, GraphSolution
from minialpa.intra.solver.csr_graph import excess_bits, flatten
from minialpa.intra.solver.elimination import reduce_graph
from minialpa.intra.solver.ilp_model import solve_program
from minialpa.intra.solver.residual import Residual, keep, residual_of, without_rows

__all__ = ["CostGraph", "Edge", "GraphSolution", "solve_graph"]

#: Edge entries up to which the integer program is as quick as messages, and up to which the relaxation of 2 is tried.
_SMALL_PROGRAM, _SMALL_RELAXATION = 2_000, 500_000
#: Edge entries for each second left up to which the integer program is written: a few seconds of a minute go to PuLP.
_ENTRIES_PER_S = 2_000
#: Rounds of 3 and 1, and the part of the edge entries that a round has to remove for another one.
_MAX_ROUNDS, _WORTHWHILE = 4, 0.7
#: Part of the time that the program leaves to local search where nothing was found yet.
_RESERVED = 0.25
#: Reductions have this long whatever the time limit: without them, hardly an attempt avoids all forbidden pairs.
_REDUCTIONS_S = 10.0
#: A gap up to this part of the cost counts as none: what sums of floats can tell apart.
_EQUAL = 1e-9
#: Any graph will do for loading compiled loops.
_TINY = CostGraph(
    node_costs=(np.zeros(2),) * 2,
    edges=(Edge(0, 1, np.eye(2)),),
    usages=(np.ones(2),) * 2,
    intervals=((0, 1),) * 2,
    usage_limit=2.0,
)


def solve_graph(
    graph: CostGraph, *, time_limit_s: float = 60.0, solver: Literal["highs", "cbc"] = "highs"
) -> GraphSolution:
    """The cheapest strategies; after `time_limit_s` the best ones found, with the bound that was proven by then.

    The limit holds for everything but three things: a first attempt and the reductions before it, which take seconds
    where there are 30,000 nodes and next to nothing where there are 1,000, and loading compiled loops, which takes half
    a second, and the first time after an installation some seconds to compile.
    The answer depends on the graph and the solver only, unless time runs out. Raises InfeasibleError when no choice
    satisfies edges and usage limit, or when time ran out before one was found; the message says which.
    """
    dominance.load()
    best = _Best(graph)
    try:
        _solve(residual_of(graph), best, time_limit_s, solver)
    except InfeasibleError:
        if best.choices is None:
            raise
        best.raise_bound(best.cost)  # what was left held every solution that is cheaper
    return best.solution()


def _solve(residual: Residual, best: _Best, time_limit_s: float, solver: Literal["highs", "cbc"]) -> None:
    start = time.monotonic()
    deadline = start + time_limit_s
    prices = np.zeros(len(residual.base))
    n_entries = np.inf
    for k in range(_MAX_ROUNDS):
        reduce_graph(residual, max(deadline, start + _REDUCTIONS_S))
        eliminate_narrow_components(residual)
        if k == 0:
            _try_without_rows(residual, best, deadline)
        n_entries, before = _n_entries(residual), n_entries
        if best.proven or n_entries <= _SMALL_PROGRAM or n_entries > (1 - _WORTHWHILE) * before:
            break
        deadline += _loading_s() if k == 0 else 0.0
        _bracket(residual, best, prices, deadline)
    if not best.proven:
        _solve_rest(residual, best, solver, deadline)
    if best.choices is None and residual.alive:  # no attempt so far, or none that fits
        _bracket(residual, best, prices, deadline)


class _Best:
    """The best choices so far and the best bound. least_usage: the least peak of choices that exceed the limit."""

    def __init__(self, graph: CostGraph) -> None:
        self.graph = graph
        self.choices: tuple[int, ...] | None = None
        self.cost, self.bound, self.least_usage = np.inf, -np.inf, np.inf

    def offer(self, choices: tuple[int, ...]) -> None:
        """Take `choices` if they are allowed, keep to the limit and cost less: the one way into a solution."""
        cost = self.graph.cost_of(choices)
        if not cost < self.cost:
            return
        if self.graph.fits(choices):
            self.choices, self.cost = choices, cost
        else:
            self.least_usage = min(self.least_usage, self.graph.peak_usage(choices))

    def raise_bound(self, bound: float) -> None:
        """`bound` holds for the solutions that are cheaper than `cost`."""
        self.bound = max(self.bound, min(bound, self.cost))

    @property
    def proven(self) -> bool:
        return self.choices is not None and self.cost - self.bound <= _EQUAL * abs(self.cost)

    def solution(self) -> GraphSolution:
        if self.choices is None:
            limit = self.graph.usage_limit
            found = not np.isinf(self.least_usage)
            usage = f" The least usage found is {self.least_usage:,}, the limit {limit:,}." if found else ""
            raise InfeasibleError(
                f"Time ran out before any solution was found for {self.graph.n_nodes} nodes.{usage} "
                "Raise `time_limit_s`, or loosen `usage_limit`."
            )
        return GraphSolution(self.choices, self.cost, self.cost if self.proven else self.bound, self.proven)


def _n_entries(residual: Residual) -> int:
    """Entries of all edges that are left."""
    return sum(edge.size for v in residual.alive for w, edge in residual.adjacent[v].items() if v < w)


def _try_without_rows(residual: Residual, best: _Best, deadline: float) -> None:
    """Where the optimum without usage limit is found by reductions alone, it is a bound, and perhaps the answer."""
    if not residual.alive:
        best.offer(residual.choices())
        best.raise_bound(best.cost)
    elif len(residual.base) and _n_entries(residual) <= _SMALL_RELAXATION:
        relaxed = without_rows(residual)
        reduce_graph(relaxed, deadline)
        eliminate_narrow_components(relaxed)
        if not relaxed.alive:
            choices = relaxed.choices()
            best.offer(choices)
            best.raise_bound(best.graph.cost_of(choices))


def _loading_s() -> float:
    """Seconds to load what is compiled, or to compile it: not the graph's fault, and not to depend on."""
    start = time.monotonic()
    # Here, because most graphs of the planner are solved without.
    from minialpa.intra.solver import lagrange

    lagrange.load(flatten(residual_of(_TINY), [0, 1]))
    return time.monotonic() - start


def _bracket(residual: Residual, best: _Best, prices: Floats, deadline: float) -> None:
    """Offer choices, raise the bound, and drop the strategies that are not in any better solution.

    `prices`, one for each row that there was at first, are where the passes start, and are moved on.
    """
    from minialpa.intra.solver.lagrange import bracket  # see _loading_s

    nodes = list(residual.alive)
    core = flatten(residual, nodes)
    found = bracket(core, prices[residual.rows], deadline)
    prices[residual.rows] = found.prices
    best.offer(residual.choices(dict(zip(nodes, found.choices.tolist(), strict=True))))
    if excess_bits(residual):
        found = bracket(flatten(residual, nodes, loose=True), prices[residual.rows], deadline)
        best.offer(residual.choices(dict(zip(nodes, found.choices.tolist(), strict=True))))
    best.raise_bound(residual.offset + found.bound)
    stays = residual.offset + found.bound + found.reduced <= best.cost
    for v, low, high in zip(nodes, core.at[:-1], core.at[1:], strict=True):
        if not stays[low:high].all() and stays[low:high].any():
            keep(residual, v, stays[low:high])


def _solve_rest(residual: Residual, best: _Best, solver: Literal["highs", "cbc"], deadline: float) -> None:
    """The integer program, if it is small for the time that is left."""
    left_s = deadline - time.monotonic()
    if residual.alive and _n_entries(residual) > _ENTRIES_PER_S * left_s:
        return
    # Rows that solvers keep to nearly may take all the time; then local search is to have some.
    deadline -= 0.0 if best.choices else _RESERVED * left_s
    found = solve_program(residual, solver=solver, deadline=deadline)
    if found.choices is not None:
        best.offer(residual.choices(found.choices))
    best.raise_bound(found.bound)
