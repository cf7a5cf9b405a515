"""A `Core` and messages in; better messages and a lower bound on the cost of all choices out.

Tree-reweighted message passing, sequential (TRW-S; Kolmogorov, 2006). Chains along which the node order rises cover the
graph. Node v is on n_v = max(earlier links, later links) chains and gives each 1/n_v of its costs, with messages:
    theta_v[i]  = c_v[i] + sum_w m_{w->v}[i]                                                             -> _collect
    m_{v->w}[j] = min_i (theta_v[i] / n_v - m_{w->v}[i] + E_vw[i, j]) - delta                            -> _send
where delta makes the least entry 0. A pass visits the nodes in order and sends over the links ahead; the next pass goes
back. From any messages, a pass proves a bound: the sum of all deltas, and of min theta_v / n_v for each chain that ends
at v. After a pass that started with bound b, a solution with strategy i at v costs at least
    b + reduced_v[i],  reduced_v[i] = theta_v[i] - min theta_v    when the pass is at v

These functions are compiled by numba.
"""

from __future__ import annotations

import numpy as np

from minialpa.intra.solver.cost_graph import Floats, Ints
from minialpa.intra.solver.csr_graph import Core, line_of
from minialpa.support.loops import compiled


def exchange_messages(core: Core, priced: Floats, messages: Floats, x: Ints, n_pairs: int) -> None:
    """Changes `messages` and `x`. A pair is a pass forward and one back."""
    reduced = np.empty_like(core.cost)
    for _ in range(n_pairs):
        for forward in (True, False):
            pass_messages(core, priced, messages, forward, reduced, x)


@compiled
def price_usage(core: Core, prices: Floats, priced: Floats) -> None:
    """For each strategy: cost + sum_r prices[r] * usage[r]."""
    # total[r]: price of the rows before r.
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
    """One pass; returns its bound, updates `messages`, and writes `reduced` and a choice for each node to `x`.

    priced: by `price_usage`.
    """
    n_nodes = len(core.at) - 1
    theta, ahead, least_of_kind = np.empty(core.widest), np.empty(core.widest), np.empty(core.widest)
    bound = 0.0
    for step in range(n_nodes):
        v = step if forward else n_nodes - 1 - step
        _collect(core, priced, messages, forward, v, x, theta, ahead)

        # Choices come from `ahead`, reduced costs from theta.
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

        # The chains over the links first, ..., end - 1 carry their share of `least` in the messages.
        bound += least * (n_chains - (end - first)) / n_chains
        for link in range(first, end):
            bound += _send(core, messages, link, theta, 1.0 / n_chains, least_of_kind, ahead)
    return bound


@compiled
def _collect(
    core: Core, priced: Floats, messages: Floats, forward: bool, v: int, x: Ints, theta: Floats, ahead: Floats
) -> None:
    """Write `theta`; `ahead` has edge costs to `x` in place of messages of visited neighbours."""
    offset, size = core.at[v], core.at[v + 1] - core.at[v]
    for i in range(size):
        theta[i] = ahead[i] = priced[offset + i]

    for link in range(core.links[v], core.links[v + 1]):
        start = core.message_at[link]
        message, kind = messages[start : start + size], core.kind[start : start + size]
        is_visited = (link < core.middle[v]) == forward
        line = line_of(core, core.back[link], x[core.other[link]]) if is_visited else 0
        for i in range(size):
            theta[i] += message[i]
            ahead[i] += core.table[line + kind[i]] if is_visited else message[i]


@compiled
def _send(core: Core, messages: Floats, link: int, theta: Floats, share: float, own: Floats, out: Floats) -> float:
    """Returns delta. share: 1 / n_v. own, out: buffers, with an entry for each kind here and there."""
    back = core.back[link]
    n_here, n_there = core.n_kinds[link], core.n_kinds[back]
    own[:n_here], out[:n_there] = np.inf, np.inf

    start = core.message_at[link]
    for i in range(core.message_at[link + 1] - start):
        kind = core.kind[start + i]
        own[kind] = min(own[kind], share * theta[i] - messages[start + i])

    # In the order of the table in memory. Slices: numba does not vectorise indices that may be negative.
    line = core.table_at[link]
    for kind in range(n_here):
        least, costs = own[kind], core.table[line : line + n_there]
        for there in range(n_there):
            cost = least + costs[there]
            out[there] = cost if cost < out[there] else out[there]
        line += n_there

    delta = float(out[:n_there].min())
    for entry in range(core.message_at[back], core.message_at[back + 1]):
        messages[entry] = out[core.kind[entry]] - delta
    return delta
