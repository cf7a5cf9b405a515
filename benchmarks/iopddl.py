"""Instances of the intra-operator parallelism contest (google/iopddl): cost, bound and proven gap at the deadline.

    python -m benchmarks.iopddl asplos-2025-iopddl-G.json.gz ... [--time-limit-s 120]

`slack` is the fraction of the usage limit above the peak. `cpu_s` and the limit are CPU seconds.
[iopddl.md](iopddl.md) has results.

The registered benchmark solves a random instance, so it needs no download. `IOPDDL_INSTANCES`, paths separated by `:`,
names the contest's instances for the full size.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contest.solve import solve_in_seconds
from benchmarks.registry import Rows, Size, benchmark
from benchmarks.run import table
from minialpa.intra.solver.cost_graph import NodeUsage
from minialpa.intra.solver.solve import CostGraph, Edge, EdgeCosts


@benchmark("iopddl")
def iopddl(size: Size) -> Rows:
    """Choosing strategies: cost, proven gap and seconds, on random instances or the contest's instances."""
    if size == "tiny":
        return [_row("random", random_instance(0, n_nodes=12), 10.0)]
    paths = [Path(path) for path in os.environ.get("IOPDDL_INSTANCES", "").split(os.pathsep) if path]
    if not paths:
        return [_row("random", random_instance(0, n_nodes=2000), 60.0)]
    return [_row(path.name, load_instance(path), 120.0) for path in paths]


def random_instance(seed: int, n_nodes: int) -> CostGraph:
    """A chain with shortcuts; nodes have 2 to 8 strategies. Cheap ones use much, and about half fit under the limit."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 9, n_nodes)
    costs = tuple(rng.integers(0, 100, n).astype(np.float64) for n in sizes)
    pairs = [(v, v + 1) for v in range(n_nodes - 1)]
    pairs += [(v, int(rng.integers(v + 2, min(v + 10, n_nodes)))) for v in range(0, n_nodes - 2, 5)]
    edges = tuple(
        Edge(a, b, EdgeCosts.of(rng.integers(0, 50, (sizes[a], sizes[b])).astype(np.float64))) for a, b in pairs
    )
    usages = [(100 - cost).astype(np.int64) for cost in costs]
    intervals = [(v, min(v + int(rng.integers(1, 12)), n_nodes)) for v in range(n_nodes)]
    live = np.zeros(n_nodes)
    for usage, (start, end) in zip(usages, intervals, strict=True):
        live[start:end] += (usage.min() + usage.max()) / 2
    return CostGraph(
        node_costs=costs, edges=edges, usages=usages_of_nodes(usages, intervals), usage_limit=int(live.max())
    )


def usages_of_nodes(usages: Sequence[Any], intervals: Sequence[tuple[int, int]]) -> tuple[NodeUsage, ...]:
    """A usage for each node in turn."""
    return tuple(zip(range(len(usages)), intervals, usages, strict=True))


def load_instance(path: Path) -> CostGraph:
    """The problem in a `.json` or `.json.gz` file of the contest."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    problem = json.loads(raw)["problem"]
    nodes, edges = problem["nodes"], problem["edges"]
    costs = tuple(np.array(cost, np.float64) for cost in nodes["costs"])
    return CostGraph(
        node_costs=costs,
        edges=tuple(
            Edge(a, b, EdgeCosts.of(np.array(cost, np.float64).reshape(len(costs[a]), len(costs[b]))))
            for (a, b), cost in zip(edges["nodes"], edges["costs"], strict=True)
        ),
        usages=usages_of_nodes(nodes["usages"], [(start, end) for start, end in nodes["intervals"]]),
        usage_limit=problem.get("usage_limit"),
    )


def _row(name: str, graph: CostGraph, time_limit_s: float) -> dict[str, Any]:
    start, start_wall_s = time.process_time(), time.perf_counter()
    solution = solve_in_seconds(graph, time_limit_s)
    return {
        "instance": name,
        "nodes": len(graph.node_costs),
        "edges": len(graph.edges),
        "cost": f"{solution.cost:.10g}",
        "bound": f"{solution.lower_bound:.10g}",
        "gap": solution.gap,
        "slack": None if graph.usage_limit is None else 1 - graph.peak_usage(solution.choices) / graph.usage_limit,
        "fits": graph.fits(solution.choices),
        "cpu_s": time.process_time() - start,
        "solve_s": time.perf_counter() - start_wall_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.iopddl", description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--time-limit-s", type=float, default=120.0)
    args = parser.parse_args()
    for path in args.paths:
        print(table([_row(path.name, load_instance(path), args.time_limit_s)]), flush=True)


if __name__ == "__main__":
    main()
