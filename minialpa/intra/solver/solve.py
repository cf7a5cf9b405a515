"""Choose one strategy per node of a cost graph, with a proof of optimality where there is time for one.

`solve_graph` turns a `CostGraph` (problem and formula in cost_graph.py) into a `GraphSolution`. It goes through these
phases until one of them proves the best choices:
    1. Reduce the graph; the optimum stays the same (elimination.py, bucket.py).
    2. Reduce it without usage rows; if the result keeps to the limit, it is optimal.          -> _try_without_rows
    3. Find bounds by messages and prices, and choices by rounding and local search (lagrange.py).     -> _bracket
       Drop the strategies whose reduced cost shows that no better solution has them, and reduce again.
    4. Solve what is left, if it is small enough, as an integer program (ilp_model.py).             -> _solve_rest
It ends when nothing is gained any more. Its limit is one of counted work (clock.py), so that the same graph has the
same answer on a busy machine. `run_phases` and `Best` serve searches that go on from there.

Example: a model of equal layers without a memory limit is solved by 1. With a limit that does not bind, 2 shows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minialpa.errors import InfeasibleError
from minialpa.intra.solver import dominance
from minialpa.intra.solver.bucket import eliminate_narrow_components
from minialpa.intra.solver.clock import Deadline
from minialpa.intra.solver.cost_graph import Bools, CostGraph, Edge, Floats, GraphSolution
from minialpa.intra.solver.csr_graph import excess_bits, flatten
from minialpa.intra.solver.elimination import reduce_graph
from minialpa.intra.solver.options import SolverOptions
from minialpa.intra.solver.residual import Residual, keep, residual_of, without_rows

if TYPE_CHECKING:
    from minialpa.intra.solver.lagrange import Bracket

__all__ = ["Best", "CostGraph", "Deadline", "Edge", "GraphSolution", "run_phases", "solve_graph"]

#: Nodes up to which a graph is solved without waiting for compiled loops first: most never need them.
_FEW_NODES = 2000
#: A gap up to this part of the cost counts as none: what sums of float64 can tell apart.
_EQUAL = 1e-9
#: Nominal seconds of a solve without a deadline.
_LIMIT_S = 60.0
_DEFAULTS = SolverOptions()


def solve_graph(
    graph: CostGraph, deadline: Deadline | None = None, *, gap: float = 0.0, options: SolverOptions = _DEFAULTS
) -> GraphSolution:
    """The cheapest strategies, or the best ones found, with the bound that was proven.

    Under a usage limit, strategies are taken as soon as they are known to cost at most the part `gap` more than the
    cheapest. What the solve does is counted by `deadline`, so that further solves may share it; the first reductions
    and a first attempt are made in any case.

    Raises InfeasibleError when no choice satisfies edges and usage limit, or when time ran out before one was found;
    the message says which.
    """
    deadline = deadline or Deadline(_LIMIT_S)
    best = Best(graph, gap if graph.usage_limit is not None else 0.0)
    residual = residual_of(graph)
    run_phases(residual, best, np.zeros(len(residual.base)), deadline, options)
    return best.solution()


def run_phases(residual: Residual, best: Best, prices: Floats, deadline: Deadline, options: SolverOptions) -> None:
    """All phases; the results go to `best`. What they leave undecided is in `residual`.

    prices: one for each row that there is at first; the passes start from them and move them on.
    """
    if len(residual.alive) > _FEW_NODES:
        dominance.load()
    try:
        _run_phases(residual, best, prices, deadline, options)
    except InfeasibleError:
        if best.choices is None:
            raise
        best.raise_bound(best.cost)  # every cheaper solution was still in what proved infeasible


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
        if best.is_within(best.allowed_gap) or is_small or n_entries > (1 - options.worthwhile) * n_before:
            break
        _bracket(residual, best, prices, deadline, options)

    if not best.is_within(best.allowed_gap) and (
        _n_entries(residual) <= options.small_program_entries or not best.is_within(options.enough * best.allowed_gap)
    ):
        _solve_rest(residual, best, deadline, options)
    # There was no attempt so far, or none that keeps to the limit.
    if best.choices is None and residual.alive:
        _bracket(residual, best, prices, deadline, options)


class Best:
    """The best choices so far, and the best bound.

    Attributes:
        graph: the graph that they are choices for.
        allowed_gap: choices that cost at most this part more than the bound are taken.
        choices: the cheapest allowed choices so far; None if there are none.
        cost: their cost; infinite if there are none.
        bound: no solution costs less.
        least_usage: the least peak usage among choices that exceed the limit, for the message.
    """

    def __init__(self, graph: CostGraph, allowed_gap: float) -> None:
        self.graph, self.allowed_gap = graph, allowed_gap
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
        """Take note that no solution cheaper than `cost` costs less than `bound`."""
        self.bound = max(self.bound, min(bound, self.cost))

    @property
    def proven(self) -> bool:
        return self.is_within(_EQUAL)

    def is_within(self, gap: float) -> bool:
        """Whether there are choices that cost at most the part `gap` more than the bound."""
        return self.choices is not None and self.cost - self.bound <= max(_EQUAL, gap) * abs(self.cost)

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


def _try_without_rows(residual: Residual, best: Best, deadline: Deadline, most_entries: int) -> None:
    """Phase 2: if reductions alone find the optimum without usage limit, it is a bound, and perhaps the answer."""
    if not residual.alive:
        best.offer(residual.choices())
        best.raise_bound(best.cost)
    elif len(residual.base) and _n_entries(residual) <= most_entries:
        relaxed = without_rows(residual)
        reduce_graph(relaxed, deadline)
        eliminate_narrow_components(relaxed)

        # The optimum without a limit costs no more than one with it.
        if not relaxed.alive:
            choices = relaxed.choices()
            best.offer(choices)
            best.raise_bound(best.graph.cost_of(choices))


def _bracket(residual: Residual, best: Best, prices: Floats, deadline: Deadline, options: SolverOptions) -> None:
    """Phase 3: offer choices, raise the bound, and drop the strategies that are not in any better solution."""
    # Imported here, because most graphs of the planner are solved without these loops.
    from minialpa.intra.solver.lagrange import AllowedGap, bracket

    nodes = list(residual.alive)
    core = flatten(residual, nodes)
    allowed = AllowedGap(best.allowed_gap, residual.offset)
    found = bracket(core, prices[residual.rows], deadline, options, allowed)
    prices[residual.rows] = found.prices
    best.offer(residual.choices(dict(zip(nodes, found.choices.tolist(), strict=True))))

    # Usages that were rounded up give choices that fit; for a bound that holds, they have to be rounded down.
    if excess_bits(residual):
        loose = flatten(residual, nodes, loose=True)
        found = bracket(loose, prices[residual.rows], deadline, options, allowed)
        best.offer(residual.choices(dict(zip(nodes, found.choices.tolist(), strict=True))))

    best.raise_bound(residual.offset + found.bound)
    keep_only(residual, nodes, may_be_better(residual, best, found))


def may_be_better(residual: Residual, best: Best, found: Bracket) -> Bools:
    """A mask of the strategies, by their place in the core, that a better solution than `best` may have."""
    return residual.offset + found.bound + found.reduced <= best.cost


def keep_only(residual: Residual, nodes: list[int], stays: Bools) -> None:
    """Drop the strategies of `nodes` that are not in the mask `stays`, but never all of a node."""
    ends = np.cumsum([len(residual.costs[v]) for v in nodes])[:-1]
    for node, mask in zip(nodes, np.split(stays, ends), strict=True):
        if mask.any() and not mask.all():
            keep(residual, node, mask)


def _solve_rest(residual: Residual, best: Best, deadline: Deadline, options: SolverOptions) -> None:
    """Phase 4: the integer program, if it is small for the time that is left."""
    # Imported here, because most graphs of the planner are solved without it.
    from minialpa.intra.solver.ilp_model import solve_program

    if residual.alive and _n_entries(residual) > options.program_entries_per_s * deadline.left_s:
        return

    # Covers may take all the time, so some is reserved for local search where nothing was found yet.
    found = solve_program(residual, deadline if best.choices else deadline.part(1 - options.reserved))
    if found.choices is not None:
        best.offer(residual.choices(found.choices))
    best.raise_bound(found.bound)
