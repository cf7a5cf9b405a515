"""A lower bound by message passing: tree-reweighted, sequential (TRW-S; Kolmogorov, 2006). Compiled by numba.

Chains along which the node order rises cover the graph. Node v is on n_v = max(earlier links, later links) of them and
gives each chain 1/n_v of its costs, messages included:
    theta_v[i]  = c_v[i] + sum_w m_{w->v}[i]                                                             -> _collect
    m_{v->w}[j] = min_i (theta_v[i] / n_v - m_{w->v}[i] + E_vw[i, j]) - delta                            -> _send
where delta makes the least entry 0. A pass visits the nodes in order and sends over the links ahead; the next pass goes
back. The bound of a pass is the sum of the least costs of all chains: all deltas, and min theta_v / n_v for each chain
that ends at v. It holds for any messages to start from.                                         -> pass_messages
After a pass that started with bound b, a solution with strategy i at v costs at least
    b + reduced_v[i],  reduced_v[i] = theta_v[i] - min theta_v    taken when the pass is at v
"""

from __future__ import annotations

import numpy as np

from minialpa.intra.solver.cost_graph import Floats, Ints
from minialpa.intra.solver.csr_graph import Core
from minialpa.support.loops import compiled


def exchange_messages(core: Core, priced: Floats, messages: Floats, x: Ints, n_pairs: int) -> None:
    """`n_pairs` passes forward and as many back; `messages` and `x` change as in `pass_messages`."""
    reduced = np.empty_like(core.cost)
    for _ in range(n_pairs):
        for forward in (True, False):
            pass_messages(core, priced, messages, forward, reduced, x)


@compiled
def price_usage(core: Core, prices: Floats, priced: Floats) -> None:
    """Write to `priced`, for every strategy, its cost plus prices[r] times its usage in each row r."""
    # total[r]: price of the rows before r; the price of a segment is one difference.
    total = np.zeros(len(prices) + 1)
    for r in range(len(prices)):
        total[r + 1] = total[r] + prices[r]

    for node in range(len(core.at) - 1):
        for i in range(core.at[node], core.at[node + 1]):
            priced[i] = core.cost[i]
        for segment in range(core.segments[node], core.segments[node + 1]):
            price = total[core.end[segment]] - total[core.start[segment]]
            if price > 0:
                for i in range(core.at[node + 1] - core.at[node]):
                    priced[core.at[node] + i] += price * core.usage[core.usage_at[segment] + i]


@compiled
def pass_messages(core: Core, priced: Floats, messages: Floats, forward: bool, reduced: Floats, x: Ints) -> float:
    """One pass; returns its bound. Updates `messages`; writes `reduced` and a choice for each node to `x`."""
    n_nodes = len(core.at) - 1
    theta, ahead = np.empty(core.widest), np.empty(core.widest)
    bound = 0.0
    for step in range(n_nodes):
        v = step if forward else n_nodes - 1 - step
        _collect(core, priced, messages, forward, v, x, theta, ahead)

        # The choice follows `ahead`, with the choices of visited neighbours; the reduced costs follow theta.
        size = core.at[v + 1] - core.at[v]
        x[v], least = 0, np.inf
        for i in range(size):
            least = min(least, theta[i])
            if ahead[i] < ahead[x[v]]:
                x[v] = i
        for i in range(size):
            reduced[core.at[v] + i] = theta[i] - least

        # From here on, `first` to `end` are the links ahead.
        first, middle, end = core.links[v], core.middle[v], core.links[v + 1]
        n_chains = max(middle - first, end - middle, 1)
        if forward:
            first = middle
        else:
            end = middle

        # Chains that continue take their share of `least` along, in the messages; the others end here.
        bound += least * (n_chains - (end - first)) / n_chains
        for link in range(first, end):
            bound += _send(core, messages, link, theta, size, 1.0 / n_chains, ahead)
    return bound


@compiled
def _collect(
    core: Core, priced: Floats, messages: Floats, forward: bool, v: int, x: Ints, theta: Floats, ahead: Floats
) -> None:
    """Write theta_v to `theta`; to `ahead`, with edge costs for `x` in place of messages of visited neighbours."""
    offset, size = core.at[v], core.at[v + 1] - core.at[v]
    for i in range(size):
        theta[i] = ahead[i] = priced[offset + i]

    for link in range(core.links[v], core.links[v + 1]):
        start = core.message_at[link]
        message = messages[start : start + size]
        costs = message
        if (link < core.middle[v]) == forward:
            line = core.table_at[core.back[link]] + x[core.other[link]] * size
            costs = core.table[line : line + size]
        for i in range(size):
            theta[i] += message[i]
            ahead[i] += costs[i]


@compiled
def _send(core: Core, messages: Floats, link: int, theta: Floats, size: int, share: float, out: Floats) -> float:
    """Send the message over `link`, with 1 / n_v as `share`; returns delta. `out` is room for the message."""
    w = core.other[link]
    width = core.at[w + 1] - core.at[w]
    line, message = core.table_at[link], core.message_at[link]
    for j in range(width):
        out[j] = np.inf

    # Line by line, which is the order of the table in memory. Slices, because an index that may be negative keeps the
    # compiler from vectorising.
    for i in range(size):
        own, costs = share * theta[i] - messages[message + i], core.table[line : line + width]
        for j in range(width):
            cost = own + costs[j]
            out[j] = cost if cost < out[j] else out[j]
        line += width

    delta = np.inf
    for j in range(width):
        delta = min(delta, out[j])
    message = core.message_at[core.back[link]]
    for j in range(width):
        messages[message + j] = out[j] - delta
    return delta
