"""Brute force answers for small problems: obvious, slow, and written apart from what they check."""

from __future__ import annotations

import itertools
import math

from minialpa.intra.costgraph import CostGraph


def cheapest_choices(graph: CostGraph) -> float:
    """Least cost over all combinations of strategies; infinite where none is allowed."""
    best = math.inf
    for choices in itertools.product(*(range(len(cost)) for cost in graph.node_costs)):
        cost = sum(graph.node_costs[v][i] for v, i in enumerate(choices))
        cost += sum(edge.cost[choices[edge.a], choices[edge.b]] for edge in graph.edges)
        if cost < best and _usage_fits(graph, choices):
            best = float(cost)
    return best if best < 1e18 else math.inf


def _usage_fits(graph: CostGraph, choices: tuple[int, ...]) -> bool:
    if graph.usage_limit is None:
        return True
    times = {time for interval in graph.intervals for time in interval}
    return all(
        sum(graph.usages[v][i] for v, i in enumerate(choices) if graph.intervals[v][0] <= time < graph.intervals[v][1])
        <= graph.usage_limit
        for time in times
    )
