"""Brute force answers for small problems: simple, slow, and independent of minialpa's algorithms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from minialpa.inter.search.stage_dp import StageCostTable
from minialpa.intra.solver.cost_graph import CostGraph


def cheapest_choices(graph: CostGraph) -> float:
    """Least cost over all combinations of strategies; infinite if every one is forbidden."""
    best = math.inf
    for choices in itertools.product(*(range(len(cost)) for cost in graph.node_costs)):
        cost = sum(graph.node_costs[v][i] for v, i in enumerate(choices))
        cost += sum(edge.cost.at(choices[edge.a], choices[edge.b]) for edge in graph.edges)
        if cost < best and _usage_fits(graph, choices):
            best = float(cost)
    return best if best < 1e18 else math.inf


def _usage_fits(graph: CostGraph, choices: tuple[int, ...]) -> bool:
    if graph.usage_limit is None:
        return True
    times = {start for _, (start, _), _ in graph.usages}
    return all(
        sum(int(usage[choices[v]]) for v, (start, end), usage in graph.usages if start <= time < end)
        <= graph.usage_limit
        for time in times
    )


def fastest_pipeline(
    table: StageCostTable,
    *,
    n_micro_batches: int,
    memory_bytes: float,
    schedule: str,
    use_all_devices: bool,
) -> float:
    """Least step time over all cuts of the layers and all candidates; infinite where no pipeline is allowed."""
    best = math.inf
    for stages in _pipelines(table, 0, 0, idle=not use_all_devices):
        t = [float(table.seconds[stage[:3]]) for stage in stages]
        if _stages_fit(table, [stage[:3] for stage in stages], n_micro_batches, memory_bytes, schedule):
            transfer = sum(float(table.transfer_seconds[first - 1, p]) for first, _, _, p in stages[1:])
            step = max(float(table.step_seconds[stage[:3]]) for stage in stages)
            best = min(best, sum(t) + transfer + (n_micro_batches - 1) * max(t) + step)
    return best


def _pipelines(table: StageCostTable, first: int, p: int, *, idle: bool) -> Iterator[list[tuple[int, int, int, int]]]:
    """Stages (first layer, last layer, candidate, first device) for the layers from `first` on, from device `p` on."""
    n_devices = table.may_start.shape[1]
    if first == table.n_layers:
        if idle or p == n_devices:
            yield []
        return
    starts = [p] if p < n_devices else []
    while idle and starts and table.skip_to[starts[-1]] < n_devices:
        starts.append(int(table.skip_to[starts[-1]]))
    for start in starts:
        for last in range(first, table.n_layers):
            for m, n in enumerate(table.n_devices.tolist()):
                if start + n <= n_devices and table.may_start[m, start]:
                    for rest in _pipelines(table, last + 1, start + n, idle=idle):
                        yield [(first, last, m, start), *rest]


def _stages_fit(
    table: StageCostTable, stages: list[tuple[int, int, int]], n_micro_batches: int, memory_bytes: float, schedule: str
) -> bool:
    for k, stage in enumerate(stages):
        live = {"1f1b": min(n_micro_batches, len(stages) - k), "gpipe": n_micro_batches, "inference": 1}[schedule]
        if float(table.fixed_bytes[stage] + live * table.in_flight_bytes[stage]) > memory_bytes:
            return False
    return True


@dataclass(frozen=True)
class ForwardProgram:
    """Flops of each equation; values as (equation that makes it, last user, bytes)."""

    flops: list[float]
    values: list[tuple[int, int, float]]

    def at_most_a_share(self, n_layers: int) -> list[float]:
        return [min(f, sum(self.flops) / n_layers) for f in self.flops]

    def crossing_bytes(self, k: int) -> float:
        """Bytes of the values that equations before k make and equations from k on use."""
        return sum(n_bytes for u, v, n_bytes in self.values if u < k <= v)


def cheapest_layers(program: ForwardProgram, n_layers: int, tolerance: float) -> tuple[float, float]:
    """Least (bytes over all borders, sum of squared flops) of layers within the first tolerance that allows any."""
    flops = program.at_most_a_share(n_layers)
    bound = (1 + tolerance) * sum(flops) / n_layers
    least = max(0.0, 1 - tolerance) * sum(flops) / n_layers
    while True:
        found: list[tuple[float, tuple[float, float]]] = []
        for cuts in itertools.combinations(range(1, len(flops)), n_layers - 1):
            layers = [flops[a:b] for a, b in itertools.pairwise((0, *cuts, len(flops)))]
            if all(sum(layer) <= bound * (1 + 1e-9) for layer in layers):
                cost = (sum(map(program.crossing_bytes, cuts)), sum(sum(layer) ** 2 for layer in layers))
                found.append((min(map(sum, layers)), cost))
        for factor in (1.0, 0.5, 0.25, 0.0) if found else ():
            if large := [cost for smallest, cost in found if smallest >= factor * least - 1e-9]:
                return min(large)
        bound *= 1.25


def layers_objective(program: ForwardProgram, layers: tuple[int, ...]) -> tuple[float, float]:
    """The objective of `cheapest_layers` for given layers."""
    cuts = [v for v in range(1, len(layers)) if layers[v] != layers[v - 1]]
    flops = [0.0] * (max(layers) + 1)
    for weight, layer in zip(program.at_most_a_share(len(flops)), layers, strict=True):
        flops[layer] += weight
    return sum(map(program.crossing_bytes, cuts)), sum(f**2 for f in flops)
