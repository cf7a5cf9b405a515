"""A `CostGraph` in; the cheapest strategy of each node out, with a lower bound on the cost.

`solve_graph` runs these phases and ends at the first proof of optimality:
    1. Simplify the graph without a change of the optimum (elimination.py, bucket.py).
    2. Simplify a copy without usage rows, the limits of memory at each time. If its optimum keeps to the limit, it is
       the answer.                                                                             -> _try_without_rows
    3. Find bounds by message passing, and choices by rounding and local search (lagrange.py).         -> _bracket
       Drop the strategies that no better solution has, and repeat from 1.
    4. Solve a small enough rest as an integer program (ilp_model.py).                              -> _solve_rest
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from minialpa.errors import InfeasibleError
from minialpa.intra.solver import dominance
from minialpa.intra.solver.bucket import eliminate_narrow_components
from minialpa.intra.solver.clock import AllowedGap, Deadline
from minialpa.intra.solver.cost_graph import Bools, CostGraph, Edge, EdgeCosts, Floats, GraphSolution
from minialpa.intra.solver.csr_graph import flatten
from minialpa.intra.solver.elimination import reduce_graph
from minialpa.intra.solver.options import SolverOptions
from minialpa.intra.solver.residual import Residual, keep, residual_of, without_rows
from minialpa.support.sizes import bytes_text

if TYPE_CHECKING:
    from minialpa.intra.solver.lagrange import Bracket

__all__ = ["Best", "CostGraph", "Deadline", "Edge", "EdgeCosts", "GraphSolution", "run_phases", "solve_graph"]

#: Larger graphs load the compiled loops first.
_FEW_NODES = 2000
#: A smaller gap, as a part of the cost, counts as zero: sums of float64 round.
_EQUAL = 1e-9
#: Nominal seconds of a solve without a deadline.
_LIMIT_S = 60.0
_DEFAULTS = SolverOptions()


def solve_graph(
    graph: CostGraph, deadline: Deadline | None = None, *, gap: float = 0.0, cost_per_s: float = 0.0,
    options: SolverOptions = _DEFAULTS,
) -> GraphSolution:  # fmt: skip
    """The cheapest choices, or the best ones found in time, with the proven lower bound.

    deadline: the first reductions and a first attempt run even without time.
    gap: part of the cost by which the choices may exceed the bound. Only a graph with a usage limit reads it.
    cost_per_s: the solve ends when further work can save less than this cost per nominal second.

    Raises InfeasibleError without choices that satisfy edges and usage limit, or without time to find any.
    """
    deadline = deadline or Deadline(_LIMIT_S)
    best = Best(graph, AllowedGap(gap if graph.usage_limit is not None else 0.0, cost_per_s, deadline))
    residual = residual_of(graph)
    run_phases(residual, best, np.zeros(len(residual.base)), deadline, options)
    return best.solution()


def run_phases(residual: Residual, best: Best, prices: Floats, deadline: Deadline, options: SolverOptions) -> None:
    """Improve `best`, and leave the undecided nodes in `residual`.

    prices: start prices of the rows that `residual` has at the call; updated in place.
    """
    if len(residual.alive) > _FEW_NODES:
        dominance.load()
    try:
        _run_phases(residual, best, prices, deadline, options)
    except InfeasibleError:
        if best.choices is None:
            raise
        best.raise_bound(best.cost)  # every better solution was in the infeasible part


def _run_phases(residual: Residual, best: Best, prices: Floats, deadline: Deadline, options: SolverOptions) -> None:
    first = deadline.within(max(deadline.left_s, options.reductions_s))
    n_entries: float = np.inf

    for k in range(options.max_rounds):
        reduce_graph(residual, first)
        eliminate_narrow_components(residual)
        if k == 0:
            _try_without_rows(residual, best, deadline, options.small_relaxation_entries)

        n_entries, n_before = _n_entries(residual), n_entries
        is_small = not residual.alive or n_entries <= options.small_program_entries
        if best.is_within() or is_small or n_entries > (1 - options.worthwhile) * n_before:
            break
        _bracket(residual, best, prices, deadline, options)

    is_near = best.has_gap(options.enough * best.allowed_gap.part)
    if not best.is_within() and (_n_entries(residual) <= options.small_program_entries or not is_near):
        _solve_rest(residual, best, deadline, options)
    # `_bracket` makes a few passes even after the deadline.
    if best.choices is None and residual.alive:
        _bracket(residual, best, prices, deadline, options)


class Best:
    """The best choices within the limit, and the best lower bound so far.

    least_usage: least peak usage of choices beyond the limit, for the error message.
    """

    def __init__(self, graph: CostGraph, allowed_gap: AllowedGap) -> None:
        self.graph, self.allowed_gap = graph, allowed_gap
        self.choices: tuple[int, ...] | None = None
        self.cost, self.bound = np.inf, -np.inf
        self.least_usage: int | None = None

    def offer(self, choices: tuple[int, ...]) -> None:
        cost = self.graph.cost_of(choices)
        if not cost < self.cost:
            return
        if self.graph.fits(choices):
            self.choices, self.cost = choices, cost
        else:
            usage = self.graph.peak_usage(choices)
            self.least_usage = usage if self.least_usage is None else min(self.least_usage, usage)

    def raise_bound(self, bound: float) -> None:
        """Each solution cheaper than `cost` costs at least `bound`."""
        self.bound = max(self.bound, min(bound, self.cost))

    @property
    def proven(self) -> bool:
        return self.has_gap(_EQUAL)

    def has_gap(self, part: float) -> bool:
        return self.choices is not None and self.cost - self.bound <= part * abs(self.cost)

    def is_within(self) -> bool:
        is_found = self.choices is not None
        return self.proven or (is_found and self.cost - self.bound <= self.allowed_gap.of(self.cost))

    def solution(self) -> GraphSolution:
        if self.choices is None:
            limit = self.graph.usage_limit
            found = self.least_usage is not None
            usage = f"{bytes_text(self.least_usage or 0)} per device, the limit is {bytes_text(limit or 0)}"
            raise InfeasibleError(
                f"The solver found no shardings in its time limit{f' (the smallest need {usage})' if found else ''}. "
                "Raise `solver_time_limit_s` or `memory_limit_bytes`."
            )
        return GraphSolution(self.choices, self.cost, self.cost if self.proven else self.bound, self.proven)


def _n_entries(residual: Residual) -> int:
    return sum(math.prod(edge.shape) for v in residual.alive for w, edge in residual.adjacent[v].items() if v < w)


def _try_without_rows(residual: Residual, best: Best, deadline: Deadline, most_entries: int) -> None:
    """Phase 2; an optimum without a limit is a lower bound."""
    if not residual.alive:
        best.offer(residual.choices())
        best.raise_bound(best.cost)
    elif len(residual.base) and _n_entries(residual) <= most_entries:
        relaxed = without_rows(residual)
        reduce_graph(relaxed, deadline)
        eliminate_narrow_components(relaxed)

        if not relaxed.alive:
            choices = relaxed.choices()
            best.offer(choices)
            best.raise_bound(best.graph.cost_of(choices))


def _bracket(residual: Residual, best: Best, prices: Floats, deadline: Deadline, options: SolverOptions) -> None:
    # Most graphs of the planner end before this phase.
    from minialpa.intra.solver.lagrange import bracket

    nodes = list(residual.alive)
    core = flatten(residual, nodes)
    found = bracket(core, prices[residual.rows], deadline, options, best.allowed_gap, residual.offset)
    prices[residual.rows] = found.prices
    best.offer(residual.choices(dict(zip(nodes, found.choices.tolist(), strict=True))))

    best.raise_bound(residual.offset + found.bound)
    keep_only(residual, nodes, may_be_better(residual, best, found))


def may_be_better(residual: Residual, best: Best, found: Bracket) -> Bools:
    """A mask of strategies of a better solution, in the order of `Core.cost`."""
    return residual.offset + found.bound + found.reduced <= best.cost


def keep_only(residual: Residual, nodes: list[int], stays: Bools) -> None:
    """stays: a mask. A node never loses all strategies."""
    ends = np.cumsum([len(residual.costs[v]) for v in nodes])[:-1]
    for node, mask in zip(nodes, np.split(stays, ends), strict=True):
        if mask.any() and not mask.all():
            keep(residual, node, mask)


def _solve_rest(residual: Residual, best: Best, deadline: Deadline, options: SolverOptions) -> None:
    """Unless the program is too large for the time left."""
    from minialpa.intra.solver.ilp_model import solve_program

    if residual.alive and _n_entries(residual) > options.program_entries_per_s * deadline.left_s:
        return

    # Covers may take all the time: without a solution, a part is reserved for local search.
    if best.choices is None:
        late, allowed = deadline.part(1 - options.reserved), best.allowed_gap.of(residual.offset)
    else:
        late = deadline.within(min(deadline.left_s, best.allowed_gap.gain_s(best.cost - best.bound)))
        allowed = best.allowed_gap.of(best.cost)
    found = solve_program(residual, late, allowed)
    if found.choices is not None:
        best.offer(residual.choices(found.choices))
    best.raise_bound(found.bound)
