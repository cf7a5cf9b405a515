"""Solve instances of the intra-operator parallelism contest (google/iopddl) and print cost, gap and seconds.

    python -m benchmarks.iopddl asplos-2025-iopddl-G.json.gz ... [--solver highs] [--time-limit-s 120]
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path

import numpy as np

from minialpa.intra.ilp import CostGraph, Edge, solve_graph


def load_instance(path: Path) -> CostGraph:
    """The problem in a `.json` or `.json.gz` file of the contest."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    problem = json.loads(raw)["problem"]
    nodes, edges = problem["nodes"], problem["edges"]
    costs = tuple(np.array(cost, np.float64) for cost in nodes["costs"])
    return CostGraph(
        costs,
        tuple(
            Edge(a, b, np.array(cost, np.float64).reshape(len(costs[a]), len(costs[b])))
            for (a, b), cost in zip(edges["nodes"], edges["costs"], strict=True)
        ),
        tuple(np.array(usage, np.float64) for usage in nodes["usages"]),
        tuple((start, end) for start, end in nodes["intervals"]),
        problem.get("usage_limit"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--solver", choices=("highs", "cbc"), default="highs")
    parser.add_argument("--time-limit-s", type=float, default=120.0)
    arguments = parser.parse_args()
    for path in arguments.paths:
        graph = load_instance(path)
        start = time.perf_counter()
        solution = solve_graph(graph, time_limit_s=arguments.time_limit_s, solver=arguments.solver)
        seconds = time.perf_counter() - start
        print(f"{path.name}: cost {solution.cost:.0f}, gap {solution.gap:.2%}, {seconds:.1f} s")


if __name__ == "__main__":
    main()
