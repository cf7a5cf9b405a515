"""Choose one strategy per node of a cost graph, with a proof: exact reductions first, an integer program for the rest.

In: `CostGraph` (problem and formula in costgraph.py). Out: `GraphSolution`.
    1. The graph without its usage limit, by elimination alone; where the result fits, it is optimal.  -> _unlimited
    2. Reductions that keep the optimum (elimination.py, bucket.py).
    3. The core that is left, as an integer program (core.py); where time runs out before any solution,
       a greedy one (greedy.py).
"""

from __future__ import annotations

import time
from typing import Literal

import numpy as np

from minialpa.intra.bucket import eliminate_narrow_components
from minialpa.intra.core import decide_core
from minialpa.intra.costgraph import CostGraph, Edge, GraphSolution
from minialpa.intra.elimination import Residual, reduce_graph, residual_of

__all__ = ["CostGraph", "Edge", "GraphSolution", "solve_graph"]


def solve_graph(
    graph: CostGraph, *, time_limit_s: float = 60.0, solver: Literal["highs", "cbc"] = "highs"
) -> GraphSolution:
    """The cheapest strategies; after `time_limit_s` the best ones found, with the bound that was proven by then.

    The limit holds for the solver's search. Reductions, writing the program and the greedy fallback come on top: little
    up to some thousand nodes, minutes where a core with millions of edge entries is left.
    The answer depends on the graph and the solver only, unless time runs out. Raises InfeasibleError when no choice
    satisfies edges and usage limit, or when time ran out before one was found; the message says which.
    """
    deadline = time.monotonic() + time_limit_s
    lower_bound = -np.inf
    unlimited = _unlimited(graph)
    if unlimited is not None:
        lower_bound = graph.cost_of(unlimited)
        if graph.fits(unlimited):
            return GraphSolution(unlimited, lower_bound, lower_bound, optimal=True)
    residual = _reduced(graph, with_usage=True)
    core_bound, optimal = decide_core(residual, solver=solver, deadline=deadline)
    choices = residual.choices()
    cost = graph.cost_of(choices)
    assert np.isfinite(cost) and graph.fits(choices), f"solution breaks a limit: {cost=}, {graph.peak_usage(choices)=}"
    lower_bound = cost if optimal else min(cost, max(lower_bound, core_bound))
    return GraphSolution(choices, cost, lower_bound, optimal)


def _reduced(graph: CostGraph, *, with_usage: bool) -> Residual:
    residual = residual_of(graph, with_usage=with_usage)
    reduce_graph(residual)
    eliminate_narrow_components(residual)
    return residual


def _unlimited(graph: CostGraph) -> tuple[int, ...] | None:
    """Optimal choices without the usage limit, or None where elimination alone does not find them."""
    residual = _reduced(graph, with_usage=False)
    return None if residual.alive else residual.choices()
