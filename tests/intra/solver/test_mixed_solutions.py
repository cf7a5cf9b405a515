"""Half of a chain may have low cost and the rest must have low usage: a cut finds where to change over."""

from __future__ import annotations

import numpy as np
import pytest

from minialpa.intra.solver.cost_graph import CostGraph, Edge
from minialpa.intra.solver.csr_graph import flatten
from minialpa.intra.solver.local_search import cost_of, usage_of
from minialpa.intra.solver.mixed_solutions import mixtures
from minialpa.intra.solver.options import SolverOptions
from minialpa.intra.solver.residual import residual_of

#: Changing over costs as much as low usage at three nodes.
CHANGE = 3.0


def chain(n: int, limit: float) -> CostGraph:
    """Each node has low cost (cost 0, usage 2) or low usage (cost 1, usage 1), all of the time."""
    edges = tuple(Edge(v, v + 1, CHANGE * (1 - np.eye(2))) for v in range(n - 1))
    return CostGraph(
        node_costs=(np.array([0.0, 1.0]),) * n,
        edges=edges,
        usages=(np.array([2.0, 1.0]),) * n,
        intervals=((0, 1),) * n,
        usage_limit=limit,
    )


@pytest.mark.parametrize("n_low_usage", [5, 20, 30])
def test_the_cut_is_as_far_as_the_limit_allows(n_low_usage: int) -> None:
    n = 40
    core = flatten(residual_of(chain(n, 2 * n - n_low_usage)), list(range(n)))
    found = list(mixtures(core, np.zeros(n, np.int64), np.ones(n, np.int64), SolverOptions()))
    fitting = [choices for choices in found if (usage_of(core, choices) <= core.room).all()]
    assert min(cost_of(core, choices) for choices in fitting) == n_low_usage + CHANGE
