"""Mixes two solutions of a core: a low-cost one that exceeds the limit, and a low-usage one that keeps to it.

A model is a chain of equal layers, and often only some of them need to use less. Prices on usage cannot say which:
they make all layers choose alike. So the graph is cut at a distance from one of its ends. The nodes on one side
choose as in the low-cost solution, the nodes on the other side as in the low-usage one, and the nodes near the cut are
decided anew.
The cut is as far from the end as the limit allows, by bisection.                               -> mixtures, _farthest

Example: of 40 layers in a chain, each uses 2 for nothing or 1 for a cost of 1, and the limit is 60. The mixture has 20
low-cost layers, then 20 low-usage ones, and pays once for the change between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from minialpa.intra.solver.cost_graph import Bools, Ints
from minialpa.intra.solver.csr_graph import Core
from minialpa.intra.solver.local_search import improve_on_trees, round_choices, usage_of
from minialpa.intra.solver.options import SolverOptions
from minialpa.intra.solver.trws import exchange_messages


def mixtures(core: Core, low_cost: Ints, low_usage: Ints, options: SolverOptions) -> Iterator[Ints]:
    """Choices for the best cuts from either end. `low_usage` keeps to the limit; the mixtures may not, after repair."""
    distance = _distances(core, int(_distances(core, 0).argmax()))
    for side in (distance, distance.max() - distance):
        farthest = _farthest(core, side, low_cost, low_usage)
        for bound in range(farthest, max(0, farthest - options.n_cuts), -1):
            mixed = np.where(side < bound, low_cost, low_usage)
            yield _repaired(core, mixed, np.abs(side - bound) > options.band, options.band_pairs)


def _distances(core: Core, source: int) -> Ints:
    """Edges between each node and `source`; for nodes that cannot be reached, as many as to the farthest."""
    distance = np.full(core.n_nodes, -1)
    distance[source] = 0
    waiting = deque([source])
    while waiting:
        node = waiting.popleft()
        for neighbour in core.other[core.links[node] : core.links[node + 1]].tolist():
            if distance[neighbour] < 0:
                distance[neighbour] = distance[node] + 1
                waiting.append(neighbour)
    return np.where(distance < 0, distance.max(), distance)


def _farthest(core: Core, side: Ints, low_cost: Ints, low_usage: Ints) -> int:
    """The largest bound on `side` for which a cut keeps to the limit, by bisection."""
    # At `low` the cut keeps to the limit. At `high` it does not, or all nodes are on the low-cost side.
    low, high = 0, int(side.max()) + 1
    while high - low > 1:
        middle = (low + high) // 2
        used = usage_of(core, np.where(side < middle, low_cost, low_usage))
        low, high = (middle, high) if (used <= core.room).all() else (low, middle)
    return low


def _repaired(core: Core, choices: Ints, held: Bools, n_pairs: int) -> Ints:
    """`choices` with all nodes decided anew that are not `held`; then local search on all."""
    # A held node has all strategies but one forbidden.
    costs = core.cost.copy()
    for node in np.flatnonzero(held).tolist():
        chosen = core.at[node] + choices[node]
        cost = costs[chosen]
        costs[core.at[node] : core.at[node + 1]] += core.forbidden
        costs[chosen] = cost

    repaired = np.zeros_like(choices)
    messages = np.zeros(int(core.message_at[-1]))
    exchange_messages(core, costs, messages, repaired, n_pairs)
    round_choices(core, costs, messages, True, repaired)
    improve_on_trees(core, core.cost, repaired, core.n_nodes, 0)
    return repaired
