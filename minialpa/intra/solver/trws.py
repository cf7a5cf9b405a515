"""A lower bound by message passing: tree-reweighted, sequential (TRW-S, Kolmogorov 2006), compiled by numba.

The graph is covered by chains along which the node order rises. Node v lies on n_v = max(earlier links, later links)
of them and lends each 1/n_v of what it costs, messages included:
    theta_v[i]  = c_v[i] + sum_w m_{w->v}[i]
    m_{v->w}[j] = min_i (theta_v[i] / n_v - m_{w->v}[i] + E_vw[i, j]) - delta      delta makes the least entry 0
A pass visits the nodes in order and sends over the links ahead; the next pass goes back. The bound of a pass is the
sum over all chains of their least costs: its deltas, and min theta_v / n_v for each chain that ends at v. It holds
for any messages to start from. After a pass that started with bound b, a solution with strategy i at v costs at least
    b + reduced_v[i],  reduced_v[i] = theta_v[i] - min theta_v    taken when the pass is at v
"""

from __future__ import annotations

import numpy as np

from minialpa.intra.solver.cost_graph import Floats, Ints
from minialpa.intra.solver.csr_graph import Core
from minialpa.support.machine_code import compiled


@compiled
def price_usage(core: Core, prices: Floats, priced: Floats) -> None:
    """Write cost + sum_r prices[r] * usage in row r to `priced`, for every strategy."""
    total = np.zeros(len(prices) + 1)
    for r in range(len(prices)):
        total[r + 1] = total[r] + prices[r]
    for v in range(len(core.at) - 1):
        for i in range(core.at[v], core.at[v + 1]):
            priced[i] = core.cost[i]
        for s in range(core.segments[v], core.segments[v + 1]):
            price = total[core.end[s]] - total[core.start[s]]
            if price > 0:
                for i in range(core.at[v + 1] - core.at[v]):
                    priced[core.at[v] + i] += price * core.usage[core.usage_at[s] + i]


@compiled
def pass_messages(core: Core, priced: Floats, messages: Floats, forward: bool, reduced: Floats, x: Ints) -> float:
    """One pass; returns its bound. `messages` change; `reduced` and `x`, a choice for each node, are written."""
    n_nodes = len(core.at) - 1
    theta, ahead = np.empty(core.widest), np.empty(core.widest)
    bound = 0.0
    for step in range(n_nodes):
        v = step if forward else n_nodes - 1 - step
        _collect(core, priced, messages, forward, v, x, theta, ahead)
        size = core.at[v + 1] - core.at[v]
        x[v], least = 0, np.inf
        for i in range(size):
            least = min(least, theta[i])
            if ahead[i] < ahead[x[v]]:
                x[v] = i
        for i in range(size):
            reduced[core.at[v] + i] = theta[i] - least
        first, middle, end = core.links[v], core.middle[v], core.links[v + 1]
        n_chains = max(middle - first, end - middle, 1)
        if forward:
            first = middle
        else:
            end = middle
        bound += least * (n_chains - (end - first)) / n_chains
        for h in range(first, end):
            bound += _send(core, messages, h, theta, size, 1.0 / n_chains, ahead)
    return bound


@compiled
def _collect(
    core: Core, priced: Floats, messages: Floats, forward: bool, v: int, x: Ints, theta: Floats, ahead: Floats
) -> None:
    """Write theta_v, and the same with the edges to visited neighbours, as chosen, in the place of their messages."""
    a, size = core.at[v], core.at[v + 1] - core.at[v]
    for i in range(size):
        theta[i] = ahead[i] = priced[a + i]
    for h in range(core.links[v], core.links[v + 1]):
        m = core.message_at[h]
        if (h < core.middle[v]) == forward:
            t = core.table_at[core.back[h]] + x[core.other[h]] * size
            for i in range(size):
                theta[i] += messages[m + i]
                ahead[i] += core.table[t + i]
        else:
            for i in range(size):
                theta[i] += messages[m + i]
                ahead[i] += messages[m + i]


@compiled
def _send(core: Core, messages: Floats, h: int, theta: Floats, size: int, share: float, out: Floats) -> float:
    """Send the message over link h; returns delta."""
    w = core.other[h]
    width = core.at[w + 1] - core.at[w]
    t, m = core.table_at[h], core.message_at[h]
    for j in range(width):
        out[j] = np.inf
    for i in range(size):
        own = share * theta[i] - messages[m + i]
        for j in range(width):
            cost = own + core.table[t + j]
            out[j] = cost if cost < out[j] else out[j]
        t += width
    delta = np.inf
    for j in range(width):
        delta = min(delta, out[j])
    m = core.message_at[core.back[h]]
    for j in range(width):
        messages[m + j] = out[j] - delta
    return delta
