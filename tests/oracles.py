"""Brute force answers for small problems: obvious, slow, and written apart from what they check."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import networkx as nx

from minialpa.inter.stage_dp import StageCostTable
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


def fastest_pipeline(
    table: StageCostTable,
    *,
    n_devices: int,
    n_micro_batches: int,
    memory_bytes: float,
    schedule: str,
    n_stages: int | None,
    use_all_devices: bool,
) -> float:
    """Least step time over all cuts of the layers and all candidates; infinite where no pipeline is allowed."""
    best = math.inf
    for stages in _pipelines(table, 0, n_devices):
        used = sum(int(table.n_devices[m]) for _, _, m in stages)
        if (use_all_devices and used != n_devices) or n_stages not in (None, len(stages)):
            continue
        t = [float(table.seconds[stage]) for stage in stages]
        if _stages_fit(table, stages, n_micro_batches, memory_bytes, schedule):
            transfer = sum(float(table.transfer_seconds[j]) for _, j, _ in stages[:-1])
            step = max(float(table.step_seconds[stage]) for stage in stages)
            best = min(best, sum(t) + transfer + (n_micro_batches - 1) * max(t) + step)
    return best


def _pipelines(table: StageCostTable, first: int, n_devices: int) -> Iterator[list[tuple[int, int, int]]]:
    if first == table.n_layers:
        yield []
        return
    for last in range(first, table.n_layers):
        for m, n in enumerate(table.n_devices.tolist()):
            if n <= n_devices:
                for rest in _pipelines(table, last + 1, n_devices - n):
                    yield [(first, last, m), *rest]


def _stages_fit(
    table: StageCostTable, stages: list[tuple[int, int, int]], n_micro_batches: int, memory_bytes: float, schedule: str
) -> bool:
    for k, stage in enumerate(stages):
        live = {"1f1b": min(n_micro_batches, len(stages) - k), "gpipe": n_micro_batches, "inference": 1}[schedule]
        if float(table.fixed_bytes[stage] + live * table.in_flight_bytes[stage]) > memory_bytes:
            return False
    return True


def cheapest_layers(graph: nx.DiGraph, n_layers: int, tolerance: float) -> tuple[float, float]:
    """Least (bytes over all borders, sum of squared flops) of layers within the first tolerance that allows any."""
    flops = [graph.nodes[v]["flops"] for v in range(len(graph))]
    bound = (1 + tolerance) * sum(flops) / n_layers
    while True:
        found = []
        for cuts in itertools.combinations(range(1, len(flops)), n_layers - 1):
            layers = [flops[a:b] for a, b in itertools.pairwise((0, *cuts, len(flops)))]
            if all(sum(layer) <= bound * (1 + 1e-9) or len(layer) == 1 for layer in layers):
                found.append((sum(_crossing_bytes(graph, k) for k in cuts), sum(sum(layer) ** 2 for layer in layers)))
        if found:
            return min(found)
        bound *= 1.25


def _crossing_bytes(graph: nx.DiGraph, k: int) -> float:
    """Bytes of the distinct values that equations before k produce and equations from k on use."""
    crossing = {(u, data["value"]): data["bytes"] for u, v, data in graph.edges(data=True) if u < k <= v}
    return float(sum(crossing.values()))


def layers_objective(graph: nx.DiGraph, layers: tuple[int, ...]) -> tuple[float, float]:
    """The objective of `cheapest_layers` for given layers."""
    cuts = [v for v in range(1, len(layers)) if layers[v] != layers[v - 1]]
    flops = [0.0] * (max(layers) + 1)
    for v, layer in enumerate(layers):
        flops[layer] += graph.nodes[v]["flops"]
    return sum(_crossing_bytes(graph, k) for k in cuts), sum(f**2 for f in flops)
