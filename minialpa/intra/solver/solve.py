"""Choose one strategy per node of a cost graph, with a proof of optimality where there is time for one.

`solve_graph` turns a `CostGraph` (problem and formula in cost_graph.py) into a `GraphSolution`. It goes through these
phases until one of them proves the best choices:
    1. Reduce the graph; the optimum stays the same (elimination.py, bucket.py).
    2. Reduce it without usage rows; if the result keeps to the limit, it is optimal.          -> _try_without_rows
    3. Find bounds by messages and prices, and choices by rounding and local search (lagrange.py).     -> _bracket
       Drop the strategies whose reduced cost shows that no better solution has them, and reduce again.
    4. Solve what is left, if it is small enough, as an integer program (ilp_model.py).             -> _solve_rest
    5. Go on with bounds and search until the time is over (persistence.py).                           -> _persist
`solve_graph` is for one graph and a time limit, in seconds of the processor: it has all phases. `solve_repeatably` is
for many graphs, the pieces of a search: it ends with phase 4, when nothing is gained any more, and its limit is one of
counted work (clock.py), so that the same graph has the same answer on a busy machine.

Example: a model of equal layers without a memory limit is solved by 1. With a limit that does not bind, 2 shows it.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from minialpa.errors import InfeasibleError
from minialpa.intra.solver import dominance
from minialpa.intra.solver.bucket import eliminate_narrow_components
from minialpa.intra.solver.carried_messages import CarriedMessages
from minialpa.intra.solver.clock import Deadline
from minialpa.intra.solver.cost_graph import Bools, CostGraph, Edge, Floats, GraphSolution, Ints
from minialpa.intra.solver.csr_graph import excess_bits, flatten
from minialpa.intra.solver.elimination import reduce_graph
from minialpa.intra.solver.options import PhaseOptions, SolverOptions
from minialpa.intra.solver.residual import Residual, keep, residual_of, without_rows

if TYPE_CHECKING:
    from minialpa.intra.solver.csr_graph import Core
    from minialpa.intra.solver.lagrange import Bracket
    from minialpa.intra.solver.persistence import Persistence

__all__ = ["CostGraph", "Deadline", "Edge", "GraphSolution", "solve_graph", "solve_repeatably"]

#: Nodes up to which a graph is solved without waiting for compiled loops first: most never need them.
_FEW_NODES = 2000
#: A gap up to this part of the cost counts as none: what sums of float64 can tell apart.
_EQUAL = 1e-9
_DEFAULTS = SolverOptions()
#: A graph to load compiled loops with; any one will do.
_TINY = CostGraph(
    node_costs=(np.zeros(2),) * 2,
    edges=(Edge(0, 1, np.eye(2)),),
    usages=(np.ones(2),) * 2,
    intervals=((0, 1),) * 2,
    usage_limit=2.0,
)


def solve_graph(
    graph: CostGraph,
    *,
    time_limit_s: float = 60.0,
    solver: Literal["highs", "cbc"] = "highs",
    options: SolverOptions = _DEFAULTS,
    gap: float = 0.0,
) -> GraphSolution:
    """The cheapest strategies; after `time_limit_s` the best ones found, with the bound that was proven by then.

    Where they are not proven to be the cheapest, all of that time is used. Under a usage limit, strategies are taken as
    soon as they are known to cost at most the part `gap` more than the cheapest.

    Three things do not count towards the time limit: the first reductions and a first attempt, which take seconds for
    30,000 nodes and next to nothing for 1,000, and loading compiled loops, which takes half a second, and some seconds
    to compile when it is the first time after an installation.

    Seconds are those of the processor. Unless time runs out, the answer depends on the graph and the solver only.
    Raises InfeasibleError when no choice satisfies edges and usage limit, or when time ran out before one was found;
    the message says which.
    """
    return _solve_until(graph, Deadline(time_limit_s), solver, options, gap)


def solve_repeatably(graph: CostGraph, deadline: Deadline, *, gap: float = 0.0) -> GraphSolution:
    """As `solve_graph`, but ends when nothing is gained any more.

    With a deadline that counts work, the same graph gives the same answer, however busy the machine is. What the solve
    does is counted by `deadline`, so that further solves may share it.
    """
    return _solve_until(graph, deadline, "highs", _DEFAULTS, gap)


def _solve_until(
    graph: CostGraph, deadline: Deadline, solver: Literal["highs", "cbc"], options: SolverOptions, gap: float
) -> GraphSolution:
    """As `solve_graph`; a deadline in seconds of the processor is used up, one in counted work need not be."""
    if len(graph.node_costs) > _FEW_NODES:
        dominance.load()
    best = _Best(graph, gap if graph.usage_limit is not None else 0.0)
    try:
        _solve(residual_of(graph), best, deadline, solver, options)
    except InfeasibleError:
        if best.choices is None:
            raise
        best.raise_bound(best.cost)  # every cheaper solution was still in what proved infeasible
    return best.solution()


def _solve(
    residual: Residual, best: _Best, deadline: Deadline, solver: Literal["highs", "cbc"], options: SolverOptions
) -> None:
    """All phases; the results go to `best`."""
    phases = options.phases
    first = deadline.within(max(deadline.left_s, phases.reductions_s))
    prices = np.zeros(len(residual.base))
    n_entries, carried = np.inf, None

    for k in range(phases.max_rounds):
        reduce_graph(residual, first)
        eliminate_narrow_components(residual)
        if k == 0:
            _try_without_rows(residual, best, deadline, phases.small_relaxation_entries)

        n_entries, n_before = _n_entries(residual), n_entries
        is_small = not residual.alive or n_entries <= phases.small_program_entries
        if best.is_within(best.allowed_gap) or is_small or n_entries > (1 - phases.worthwhile) * n_before:
            break
        deadline.extend(_loading_s(persists=not deadline.counts_work) if k == 0 else 0.0)
        carried = _bracket(residual, best, prices, deadline, options)

    if not best.is_within(best.allowed_gap) and (
        _n_entries(residual) <= phases.small_program_entries or not best.is_within(phases.enough * best.allowed_gap)
    ):
        # Where phase 5 follows, it has the rest of the time.
        share = 1.0 if deadline.counts_work else options.persistence.program
        _solve_rest(residual, best, solver, deadline.part(share), phases)
    # There was no attempt so far, or none that keeps to the limit.
    if best.choices is None and residual.alive:
        carried = _bracket(residual, best, prices, deadline, options)
    if residual.alive and not deadline.counts_work and not deadline.is_over and not best.is_within(best.allowed_gap):
        _persist(residual, best, prices, carried, deadline, options)


class _Best:
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


def _try_without_rows(residual: Residual, best: _Best, deadline: Deadline, most_entries: int) -> None:
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


def _loading_s(*, persists: bool) -> float:
    """Load the compiled loops, with those of phase 5 where it `persists`; returns the seconds that this took.

    Answers must not depend on these.
    """
    start = time.thread_time()
    core = flatten(residual_of(_TINY), [0, 1])
    # Imported here, because most graphs of the planner are solved without these loops.
    from minialpa.intra.solver import lagrange

    lagrange.load(core)
    if persists:
        from minialpa.intra.solver import persistence

        persistence.load(core)
    return time.thread_time() - start


def _bracket(
    residual: Residual, best: _Best, prices: Floats, deadline: Deadline, options: SolverOptions
) -> CarriedMessages | None:
    """Phase 3: offer choices, raise the bound, and drop the strategies that are not in any better solution.

    The passes start from `prices`, one for each row that there was at first, and move them on. Returns the messages
    for phase 5; None where it does not follow.
    """
    from minialpa.intra.solver.lagrange import AllowedGap, bracket  # see _loading_s

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
    carried = None if deadline.counts_work else CarriedMessages(residual, nodes, core, found.messages)
    _keep_only(residual, nodes, _may_be_better(residual, best, found))
    return carried


def _may_be_better(residual: Residual, best: _Best, found: Bracket) -> Bools:
    """A mask of the strategies, by their place in the core, that a better solution than `best` may have."""
    return residual.offset + found.bound + found.reduced <= best.cost


def _keep_only(residual: Residual, nodes: list[int], stays: Bools) -> None:
    """Drop the strategies of `nodes` that are not in the mask `stays`, but never all of a node."""
    ends = np.cumsum([len(residual.costs[v]) for v in nodes])[:-1]
    for node, mask in zip(nodes, np.split(stays, ends), strict=True):
        if mask.any() and not mask.all():
            keep(residual, node, mask)


def _persist(
    residual: Residual,
    best: _Best,
    prices: Floats,
    carried: CarriedMessages | None,
    deadline: Deadline,
    options: SolverOptions,
) -> None:
    """Phase 5, in slices, after each of which strategies are dropped. Reductions would move the choices it starts from.

    Usages that were rounded prove no bound (see `_bracket`): there, only choices are looked for.
    """
    deadline.extend(_loading_s(persists=True))
    from minialpa.intra.solver.persistence import Persistence  # see _loading_s

    nodes, is_exact = list(residual.alive), not excess_bits(residual)
    core = flatten(residual, nodes)
    messages = carried.of(residual, nodes, core) if carried else np.zeros(int(core.message_at[-1]))
    search = Persistence(core, prices[residual.rows], messages, _places(residual, nodes, core, best), options)
    while not best.is_within(best.allowed_gap) and not deadline.is_over:
        found = search.run(_slice(deadline, options))
        best.offer(residual.choices(dict(zip(nodes, found.choices.tolist(), strict=True))))
        if not is_exact:
            continue

        best.raise_bound(residual.offset + found.bound)
        stays = _may_be_better(residual, best, found)
        stays[core.at[:-1] + found.choices] = True
        if stays.mean() < 1 - options.persistence.shrinks:
            core = _shrink(search, residual, nodes, core, stays)


def _shrink(search: Persistence, residual: Residual, nodes: list[int], core: Core, stays: Bools) -> Core:
    """Leave `search` only the strategies in `stays`, by their place in `core`; returns the core that it has then."""

    def carried(messages: Floats) -> Floats:
        return CarriedMessages(before, nodes, core, messages).of(residual, nodes, smaller)

    before = replace(residual, kept=list(residual.kept))
    _keep_only(residual, nodes, stays)
    smaller = flatten(residual, nodes)
    places = (np.cumsum(stays) - 1)[core.at[:-1] + search.choices] - smaller.at[:-1]
    search.shrink(smaller, places, carried)
    return smaller


def _slice(deadline: Deadline, options: SolverOptions) -> Deadline:
    """The end of the next slice of what is left until `deadline`."""
    left_s, persistence = deadline.left_s, options.persistence
    return deadline.within(min(left_s, max(persistence.least_slice_s, left_s * persistence.slice)))


def _places(residual: Residual, nodes: list[int], core: Core, best: _Best) -> Ints | None:
    """The best choices of `nodes`, by current place, or choices near them where some of these strategies are gone."""
    if best.choices is None:
        return None

    chosen = [best.choices[v] for v in nodes]
    places = [int(np.searchsorted(residual.kept[v], i)) for v, i in zip(nodes, chosen, strict=True)]
    sizes = np.diff(core.at)
    choices: Ints = np.minimum(np.array(places, np.int64), sizes - 1)
    if any(residual.kept[v][k] != i for v, i, k in zip(nodes, chosen, choices.tolist(), strict=True)):
        from minialpa.intra.solver.local_search import improve_on_trees

        improve_on_trees(core, core.cost, choices, core.n_nodes, 0)
    return choices


def _solve_rest(
    residual: Residual, best: _Best, solver: Literal["highs", "cbc"], deadline: Deadline, phases: PhaseOptions
) -> None:
    """Phase 4: the integer program, if it is small for the time that is left."""
    start = time.thread_time()
    # Imported here, because most graphs of the planner are solved without it. Answers must not depend on how long it
    # takes.
    from minialpa.intra.solver.ilp_model import solve_program

    deadline.extend(time.thread_time() - start)
    left_s = deadline.left_s
    if residual.alive and _n_entries(residual) > phases.program_entries_per_s * left_s:
        return

    # Covers may take all the time, so some is reserved for local search where nothing was found yet.
    found = solve_program(
        residual, solver=solver, deadline=deadline if best.choices else deadline.part(1 - phases.reserved)
    )
    if found.choices is not None:
        best.offer(residual.choices(found.choices))
    best.raise_bound(found.bound)
