"""The search of the contest: forests trade room, the time is used, and bounds hold, by exhaustive search."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.contest.carried_messages import CarriedMessages
from benchmarks.contest.forest_search import anneal_forests, scarce_rows
from benchmarks.contest.persistence import Persistence, PersistenceOptions
from benchmarks.contest.solve import SecondsLeft, solve_in_seconds
from benchmarks.iopddl import random_instance
from minialpa.intra.solver.clock import Deadline
from minialpa.intra.solver.cost_graph import CostGraph
from minialpa.intra.solver.csr_graph import Core, flatten
from minialpa.intra.solver.lagrange import Passes
from minialpa.intra.solver.local_search import cost_of, usage_of
from minialpa.intra.solver.options import SolverOptions
from minialpa.intra.solver.residual import keep, residual_of
from minialpa.intra.solver.solve import solve_graph
from tests.oracles import cheapest_choices

#: The contest is a benchmark, and its loops compile for a minute. Tests of the solver in minialpa always run.
pytestmark = pytest.mark.slow

#: No integer program, so that what search and bounds do is seen.
NO_PROGRAM = SolverOptions(small_program_entries=-1, program_entries_per_s=0)
#: A bad solution to start from costs nothing to find: each node takes what uses least.
SHORT = PersistenceOptions(portion_s=0.02)


def core_of(graph: CostGraph) -> Core:
    residual = residual_of(graph)
    return flatten(residual, list(residual.alive))


def leanest(graph: CostGraph) -> np.ndarray:
    return np.array([int(np.argmin(usage)) for _, _, usage in graph.usages])


def test_a_forest_trades_the_room_of_a_full_row() -> None:
    """The nodes have no edge: only a forest of two trees holds both."""
    graph = CostGraph(
        node_costs=(np.array([0.0, 1.0]), np.array([0.0, 5.0])),
        edges=(),
        usages=tuple((v, (0, 1), np.array([2, 1])) for v in range(2)),
        usage_limit=3,
    )
    core, choices = core_of(graph), np.array([0, 1])
    best = choices.copy()
    saved = anneal_forests(core, scarce_rows(core, np.zeros(1), choices, 0.0), choices, best, 50, 0.0, 0.0, 0)
    assert saved == 4.0 and best.tolist() == [1, 0] and usage_of(core, best).tolist() == [1]


@pytest.mark.parametrize("hot", [0.0, 20.0])
@pytest.mark.parametrize("seed", range(4))
def test_forests_find_the_best_choices_of_small_graphs_within_the_limit(seed: int, hot: float) -> None:
    graph = random_instance(seed, n_nodes=6)
    core, choices = core_of(graph), leanest(graph)
    best, first = choices.copy(), cost_of(core, choices)
    scarce = scarce_rows(core, np.zeros(len(core.room)), choices, 1.0)
    saved = anneal_forests(core, scarce, choices, best, 5000, hot, hot / 100, seed)
    assert (usage_of(core, best) <= core.room).all()
    assert cost_of(core, best) == pytest.approx(first - saved)
    assert graph.fits(tuple(best.tolist()))
    slack = 0.0 if hot else 0.05 * abs(first)  # without temperature, it may end in a local optimum
    assert (
        cheapest_choices(graph) - 1e-9 <= graph.cost_of(tuple(best.tolist())) <= cheapest_choices(graph) + slack + 1e-9
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_bounds_of_slices_hold_for_every_strategy(seed: int) -> None:
    graph = random_instance(seed, n_nodes=5)
    core = core_of(graph)
    search = Persistence(core, np.zeros(len(core.room)), leanest(graph), NO_PROGRAM, SHORT)
    for _ in range(2):
        found = search.run(SecondsLeft(0.05))
        for v, costs in enumerate(graph.node_costs):
            for i in range(len(costs)):
                only = np.where(np.arange(len(costs)) == i, costs, np.inf)
                held = replace(graph, node_costs=(*graph.node_costs[:v], only, *graph.node_costs[v + 1 :]))
                bound = found.bound + found.reduced[core.at[v] + i]
                assert bound <= cheapest_choices(held) + 1e-9 * abs(found.bound)


def test_the_time_that_is_given_is_used_and_what_it_finds_keeps_the_limit() -> None:
    graph = random_instance(1, n_nodes=300)
    start = time.thread_time()
    long = solve_in_seconds(graph, 0.8, NO_PROGRAM)
    assert long.optimal or time.thread_time() - start >= 0.8
    assert graph.fits(long.choices) and long.lower_bound <= long.cost == graph.cost_of(long.choices)
    assert long.cost <= solve_graph(graph, Deadline(1.0)).cost * 1.02


def test_messages_are_carried_to_the_strategies_that_are_left() -> None:
    """The pass over the smaller core then gives at least the bound that the messages gave before."""
    residual = residual_of(random_instance(0, n_nodes=6))
    nodes = list(residual.alive)
    core = flatten(residual, nodes)
    passes = Passes(core, np.zeros(len(core.room)), Deadline(math.inf))
    bound = max(passes.run(forward) for forward in (True, False, True, False))
    carried = CarriedMessages(residual, nodes, core, passes.messages)
    keep(residual, nodes[2], np.arange(len(residual.costs[nodes[2]])) > 0)
    smaller = flatten(residual, nodes)
    after = Passes(smaller, np.zeros(len(smaller.room)), Deadline(math.inf))
    after.messages[:] = carried.of(residual, nodes, smaller)
    assert after.run(True) >= bound - 1e-9 * abs(bound)


_LOADED = """
from benchmarks.contest import solve
from benchmarks.iopddl import random_instance
from minialpa.intra.solver import dominance, local_search, trws
from minialpa.support.loops import _Loop

def loaded():
    found = [f for module in (dominance, local_search, trws) for f in vars(module).values() if isinstance(f, _Loop)]
    return [(f.py_func.__name__, tuple(f.signatures)) for f in found]

solve.load()
before = loaded()
solve.solve_in_seconds(random_instance(0, n_nodes=300), 2.0)
assert loaded() == before, [name for name, _ in set(loaded()) - set(before)]
"""


def test_nothing_is_compiled_while_the_clock_runs() -> None:
    """In a process of its own, as compiled loops stay."""
    subprocess.run([sys.executable, "-c", _LOADED], check=True, timeout=300)
