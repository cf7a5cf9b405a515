"""Between a solution that is cheap but uses too much and one that is thrifty but dear: one on each side of a cut.

A model is a chain of layers, and a usage limit often asks for thrift in some of them. Prices on usage cannot say in
which: all layers cost the same. So the graph is cut where the distance from one of its ends passes a bound. Nodes on
one side do as in the cheap solution, the others as in the thrifty one, and what lies next to the cut is decided anew.
The cut is as far from the end as the limit allows.

In: `Core`, both solutions. Out: solutions that keep to the limit, if rounding and local search find any at the cuts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from minialpa.intra.solver.cost_graph import Bools, Ints
from minialpa.intra.solver.csr_graph import Core
from minialpa.intra.solver.local_search import improve_on_trees, round_choices, usage_of
from minialpa.intra.solver.trws import pass_messages

#: Nodes up to this distance from the cut are decided anew, after so many pairs of passes.
_BAND, _PAIRS = 6, 10
#: Cuts that are tried on each side, from the farthest that fits.
_N_CUTS = 3


def mixtures(core: Core, cheap: Ints, thrifty: Ints) -> Iterator[Ints]:
    """Solutions for the best cuts, from either end; `thrifty` keeps to the limit."""
    distance = _distances(core, int(_distances(core, 0).argmax()))
    for side in (distance, distance.max() - distance):
        for bound in _farthest(core, side, cheap, thrifty):
            mixed = np.where(side < bound, cheap, thrifty)
            yield _repaired(core, mixed, np.abs(side - bound) > _BAND)


def _distances(core: Core, source: int) -> Ints:
    """Edges between each node and `source`; as many as to the farthest where there is no way."""
    distance = np.full(core.n_nodes, -1)
    distance[source] = 0
    waiting = deque([source])
    while waiting:
        v = waiting.popleft()
        for w in core.other[core.links[v] : core.links[v + 1]].tolist():
            if distance[w] < 0:
                distance[w] = distance[v] + 1
                waiting.append(w)
    return np.where(distance < 0, distance.max(), distance)


def _farthest(core: Core, side: Ints, cheap: Ints, thrifty: Ints) -> list[int]:
    """The largest bounds on `side` for which a cut keeps to the limit."""
    low, high = 0, int(side.max()) + 1  # fits; does not, or is the whole
    while high - low > 1:
        middle = (low + high) // 2
        used = usage_of(core, np.where(side < middle, cheap, thrifty))
        low, high = (middle, high) if (used <= core.room).all() else (low, middle)
    return list(range(low, max(0, low - _N_CUTS), -1))


def _repaired(core: Core, choices: Ints, held: Bools) -> Ints:
    """`choices` with all nodes decided anew that are not `held`; then local search on all."""
    costs = core.cost.copy()
    for v in np.flatnonzero(held).tolist():
        chosen = core.at[v] + choices[v]
        cost = costs[chosen]
        costs[core.at[v] : core.at[v + 1]] += core.forbidden
        costs[chosen] = cost
    out, unused = np.zeros_like(choices), np.empty_like(core.cost)
    messages = np.zeros(int(core.message_at[-1]))
    for _ in range(_PAIRS):
        for forward in (True, False):
            pass_messages(core, costs, messages, forward, unused, out)
    round_choices(core, costs, messages, True, out)
    improve_on_trees(core, core.cost, out, core.n_nodes, 0)
    return out
