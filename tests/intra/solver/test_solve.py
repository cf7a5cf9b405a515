"""solve_graph agrees with exhaustive search, proves what it claims, and says why when it cannot."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.iopddl import load_instance, random_instance
from minialpa.errors import InfeasibleError, ShardingError
from minialpa.intra.solver import dominance, elimination, ilp_model, lagrange, solve
from minialpa.intra.solver.bucket import eliminate_narrow_components
from minialpa.intra.solver.clock import Deadline
from minialpa.intra.solver.columns import Columns
from minialpa.intra.solver.cost_graph import CostGraph, Edge, Floats
from minialpa.intra.solver.csr_graph import flatten
from minialpa.intra.solver.dominance import undominated
from minialpa.intra.solver.elimination import reduce_graph
from minialpa.intra.solver.options import SolverOptions
from minialpa.intra.solver.residual import Residual, keep, residual_of
from minialpa.intra.solver.solve import solve_graph
from tests.oracles import cheapest_choices


@st.composite
def cost_graphs(draw: st.DrawFn, *, max_nodes: int = 6, max_strategies: int = 4) -> CostGraph:
    """Small graphs with ties, parallel edges, loops, forbidden entries (inf or 1e18) and perhaps a usage limit."""
    n_nodes = draw(st.integers(1, max_nodes))
    sizes = draw(st.lists(st.integers(1, max_strategies), min_size=n_nodes, max_size=n_nodes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    p_forbidden = draw(st.sampled_from([0.0, 0.1, 0.4]))
    scale = draw(st.sampled_from([1.0, 1e-6, 1e9]))
    forbidden = draw(st.sampled_from([np.inf, 1e18]))

    def cost(*shape: int) -> Floats:
        values = rng.integers(0, draw(st.sampled_from([3, 50])), shape) * scale
        return np.where(rng.random(shape) < p_forbidden, forbidden, values)

    node = st.integers(0, n_nodes - 1)
    pairs = draw(st.lists(st.tuples(node, node), max_size=2 * n_nodes))
    edges = tuple(Edge(a, b, cost(sizes[a], sizes[b])) for a, b in pairs)
    node_costs = tuple(cost(n) for n in sizes)
    if not draw(st.booleans()):
        return CostGraph(node_costs=node_costs, edges=edges)
    usages = tuple(rng.integers(0, 8, n).astype(np.float64) for n in sizes)
    starts = rng.integers(0, 6, n_nodes)
    intervals = tuple((int(a), int(a + n)) for a, n in zip(starts, rng.integers(0, 5, n_nodes), strict=True))
    return CostGraph(
        node_costs=node_costs,
        edges=edges,
        usages=usages,
        intervals=intervals,
        usage_limit=float(draw(st.integers(0, 20))),
    )


#: Messages run on the smallest graphs, too, and after every round that removed enough.
ALWAYS_MESSAGES = SolverOptions(small_program_entries=-1)


def check_against_search(graph: CostGraph, options: SolverOptions | None = None) -> None:
    options = options or SolverOptions()
    best = cheapest_choices(graph)
    if math.isinf(best):
        with pytest.raises(InfeasibleError):
            solve_graph(graph, options=options)
        return
    solution = solve_graph(graph, options=options)
    assert solution.cost == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert graph.cost_of(solution.choices) == solution.cost
    assert graph.fits(solution.choices)
    assert solution.optimal and solution.gap == 0


def without_elimination(patch: pytest.MonkeyPatch) -> None:
    """Forbidden strategies still go, all else is left to the integer program, which small graphs would not reach."""
    patch.setattr(elimination, "_undominated", lambda residual, v: np.ones(len(residual.costs[v]), bool))
    patch.setattr(elimination, "_can_eliminate", lambda residual, v: False)
    patch.setattr(elimination, "_merge_follower", lambda residual, v: False)
    patch.setattr(solve, "eliminate_narrow_components", lambda residual: None)


@settings(max_examples=900, deadline=None)
@given(cost_graphs())
def test_solution_matches_exhaustive_search(graph: CostGraph) -> None:
    check_against_search(graph)


@settings(max_examples=200, deadline=None)
@given(cost_graphs())
def test_messages_and_program_match_exhaustive_search(graph: CostGraph) -> None:
    with pytest.MonkeyPatch.context() as patch:
        without_elimination(patch)
        check_against_search(graph, ALWAYS_MESSAGES)


def test_a_round_without_nodes_runs_no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that leave each node one strategy leave later reductions no node; messages cannot run on none."""
    n_before: list[int] = []

    def keep_the_least_usage(residual: Residual, *_: Any) -> None:
        n_before.append(len(residual.alive))
        for v in residual.alive:
            used = sum(residual.terms[v].values(), np.zeros(len(residual.costs[v]), np.int64))
            keep(residual, v, np.arange(len(used)) == used.argmin())

    monkeypatch.setattr(solve, "_bracket", keep_the_least_usage)
    graph = grid(6, 4, limit=6.0)
    solution = solve_graph(graph, options=ALWAYS_MESSAGES)
    assert graph.fits(solution.choices)
    assert len(n_before) == 1 and n_before[0] > 0


@settings(max_examples=60, deadline=None)
@given(cost_graphs())
def test_integer_program_matches_exhaustive_search(graph: CostGraph) -> None:
    with pytest.MonkeyPatch.context() as patch:
        without_elimination(patch)
        check_against_search(graph)


def relabelled(graph: CostGraph, seed: int) -> CostGraph:
    """The same problem: nodes, strategies and edges in another order, edges the other way round."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(graph.n_nodes).tolist()
    place = {v: at for at, v in enumerate(order)}
    strategies = [rng.permutation(len(costs)) for costs in graph.node_costs]
    edges = [graph.edges[e] for e in rng.permutation(len(graph.edges))]
    return CostGraph(
        node_costs=tuple(graph.node_costs[v][strategies[v]] for v in order),
        edges=tuple(Edge(place[e.b], place[e.a], e.cost[np.ix_(strategies[e.a], strategies[e.b])].T) for e in edges),
        usages=tuple(graph.usages[v][strategies[v]] for v in order) if graph.usages else (),
        intervals=tuple(graph.intervals[v] for v in order) if graph.intervals else (),
        usage_limit=graph.usage_limit,
    )


@pytest.mark.slow  # the test after the next one is the short relative
def test_relabelling_a_large_graph_keeps_the_quality() -> None:
    graph = random_instance(0, n_nodes=300)
    graphs = [graph, *(relabelled(graph, seed) for seed in (1, 2))]
    costs = [solve_graph(graph, Deadline(2.0)).cost for graph in graphs]
    assert max(costs) <= 1.01 * min(costs)


@settings(max_examples=100, deadline=None)
@given(cost_graphs(max_nodes=8), st.integers(0, 2**32 - 1))
def test_relabelling_keeps_the_cost(graph: CostGraph, seed: int) -> None:
    moved = relabelled(graph, seed)
    try:
        cost = solve_graph(graph).cost
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            solve_graph(moved)
        return
    assert solve_graph(moved).cost == pytest.approx(cost, rel=1e-9, abs=1e-12)


@settings(max_examples=150, deadline=None)
@given(cost_graphs(), st.sampled_from([0.0, 0.05]))
def test_bounds_are_honest_however_little_time_there_is(graph: CostGraph, time_limit_s: float) -> None:
    best = cheapest_choices(graph)
    with pytest.MonkeyPatch.context() as patch:
        without_elimination(patch)
        options = SolverOptions(small_program_entries=-1, program_entries_per_s=0)
        try:
            solution = solve_graph(graph, Deadline(time_limit_s), options=options)
        except InfeasibleError:
            return
    tolerance = 1e-9 * abs(best)
    assert solution.lower_bound - tolerance <= best <= solution.cost + tolerance
    assert graph.fits(solution.choices) and graph.cost_of(solution.choices) == solution.cost
    assert solution.gap >= 0 and (not solution.optimal or solution.cost == pytest.approx(best))


def check_reduced_costs(graph: CostGraph, core: Any, found: lagrange.Bracket) -> None:
    """The bound, with the reduced cost of a strategy, is below all solutions that have the strategy."""
    for v, costs in enumerate(graph.node_costs):
        for i in range(len(costs)):
            only = np.where(np.arange(len(costs)) == i, costs, np.inf)
            held = replace(graph, node_costs=(*graph.node_costs[:v], only, *graph.node_costs[v + 1 :]))
            bound = found.bound + found.reduced[core.at[v] + i]
            assert bound <= cheapest_choices(held) + 1e-9 * abs(found.bound)


@settings(max_examples=100, deadline=None)
@given(cost_graphs(max_nodes=4))
def test_reduced_costs_bound_every_strategy(graph: CostGraph) -> None:
    try:
        residual = residual_of(graph)
    except InfeasibleError:
        return
    core = flatten(residual, list(residual.alive))
    found = lagrange.bracket(core, np.zeros(len(residual.base)), Deadline(math.inf), SolverOptions())
    check_reduced_costs(graph, core, found)


@settings(max_examples=60, deadline=None)
@given(cost_graphs(max_nodes=4), st.sampled_from([1e-3, 0.3]))
def test_bounds_with_an_allowed_gap_hold_for_every_strategy(graph: CostGraph, part: float) -> None:
    try:
        residual = residual_of(graph)
    except InfeasibleError:
        return
    core = flatten(residual, list(residual.alive))
    allowed = lagrange.AllowedGap(part, 0.0)
    found = lagrange.bracket(core, np.zeros(len(residual.base)), Deadline(math.inf), SolverOptions(), allowed)
    best = cheapest_choices(graph)
    assert found.bound <= best + 1e-9 * abs(found.bound)
    assert found.cost >= best or found.cost == pytest.approx(best)
    check_reduced_costs(graph, core, found)


@settings(max_examples=150, deadline=None)
@given(cost_graphs(), st.sampled_from([1e-3, 0.05, 0.5]))
def test_an_allowed_gap_is_kept_and_the_limit_exactly(graph: CostGraph, gap: float) -> None:
    best = cheapest_choices(graph)
    options = SolverOptions(small_program_entries=-1, enough=1.0)
    with pytest.MonkeyPatch.context() as patch:
        without_elimination(patch)
        if math.isinf(best):
            with pytest.raises(InfeasibleError):
                solve_graph(graph, options=options, gap=gap)
            return
        solution = solve_graph(graph, options=options, gap=gap)
    tolerance = 1e-9 * abs(best)
    assert graph.fits(solution.choices) and graph.cost_of(solution.choices) == solution.cost
    assert solution.lower_bound - tolerance <= best <= solution.cost + tolerance
    assert solution.cost - best <= gap * abs(solution.cost) + tolerance
    assert not solution.optimal or solution.cost == pytest.approx(best)
    # A gap is for limits that bind.
    assert graph.usage_limit is not None or solution.cost == pytest.approx(best)


def test_prices_of_a_linear_program_are_those_at_which_its_choices_cost_the_same() -> None:
    graph = CostGraph(
        node_costs=(np.array([0.0, 1.0]),) * 10,
        edges=(),
        usages=(np.array([2.0, 1.0]),) * 10,
        intervals=((0, 1),) * 10,
        usage_limit=15.0,
    )
    residual = residual_of(graph)
    columns = Columns(flatten(residual, list(residual.alive)))
    assert columns.best_prices()[1] == math.inf
    columns.add(np.zeros(10, np.int64))
    columns.add(np.ones(10, np.int64))
    prices, theta = columns.best_prices()
    assert prices == pytest.approx([1.0]) and theta == pytest.approx(5.0)
    # What is dearer under these prices changes nothing.
    columns.add(np.arange(10) % 2)
    assert columns.best_prices()[1] == pytest.approx(5.0)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_limit_that_binds_is_met_within_the_gap_of_what_is_proven_without_one(seed: int) -> None:
    graph = grid(5, 4, limit=7.0, seed=seed)
    exact, near = solve_graph(graph), solve_graph(graph, options=ALWAYS_MESSAGES, gap=0.02)
    assert exact.optimal and graph.fits(near.choices)
    assert near.lower_bound <= exact.cost + 1e-9 and exact.cost - 1e-9 <= near.cost
    assert near.gap <= 20 * 0.02


def grid(side: int, n_strategies: int, *, limit: float | None = None, seed: int = 0) -> CostGraph:
    """A square grid of nodes with random costs: wide enough that elimination cannot take it all."""
    rng = np.random.default_rng(seed)
    n = side * side
    pairs = [(v, v + 1) for v in range(n) if (v + 1) % side] + [(v, v + side) for v in range(n - side)]
    edges = tuple(Edge(a, b, rng.random((n_strategies, n_strategies))) for a, b in pairs)
    costs = tuple(rng.random(n_strategies) for _ in range(n))
    usages = tuple(rng.random(n_strategies) for _ in range(n))
    return CostGraph(
        node_costs=costs,
        edges=edges,
        usages=usages,
        intervals=tuple((v, v + n // 2) for v in range(n)),
        usage_limit=limit,
    )


def transformer(n_blocks: int, *, limit: float | None) -> CostGraph:
    """12 nodes per block in a chain, a parameter at every second one, and residual skips; cheap strategies use more."""
    rng = np.random.default_rng(0)
    n_strategies, costs, usages = 10, list[Floats](), list[Floats]()
    intervals, edges = list[tuple[int, int]](), list[Edge]()
    time_end = 12 * n_blocks

    def add(start: int, end: int) -> int:
        cost = np.sort(rng.integers(0, 100, n_strategies)).astype(np.float64)
        costs.append(cost)
        usages.append(np.sort(rng.integers(1, 64, n_strategies))[::-1].astype(np.float64))
        intervals.append((start, end))
        return len(costs) - 1

    def join(a: int, b: int) -> None:
        edges.append(Edge(a, b, rng.integers(1, 60, (n_strategies, n_strategies)) * (1.0 - np.eye(n_strategies))))

    previous = skip = add(0, 1)
    for t in range(1, time_end):
        node = add(t, min(time_end, t + 3))
        join(previous, node)
        if t % 2:
            join(add(0, time_end), node)
        if t % 6 == 0:
            join(skip, node)
            skip = node
        previous = node
    return CostGraph(
        node_costs=tuple(costs), edges=tuple(edges), usages=tuple(usages), intervals=tuple(intervals), usage_limit=limit
    )


def test_elimination_alone_solves_a_deep_transformer() -> None:
    graph = transformer(170, limit=None)
    assert graph.n_nodes > 3000
    residual = residual_of(graph)
    reduce_graph(residual)
    assert not residual.alive
    assert solve_graph(graph).optimal


def test_binding_usage_limit_on_a_transformer_is_solved() -> None:
    graph = transformer(6, limit=None)
    free = solve_graph(graph)
    unlimited = CostGraph(
        node_costs=graph.node_costs, edges=graph.edges, usages=graph.usages, intervals=graph.intervals, usage_limit=1e9
    )
    limited = CostGraph(
        node_costs=graph.node_costs,
        edges=graph.edges,
        usages=graph.usages,
        intervals=graph.intervals,
        usage_limit=0.7 * unlimited.peak_usage(free.choices),
    )
    solution = solve_graph(limited)
    assert solution.optimal and limited.fits(solution.choices)
    assert solution.cost > free.cost


def test_bucket_elimination_takes_what_pairwise_elimination_leaves() -> None:
    graph = grid(5, 4)
    residual = residual_of(graph)
    reduce_graph(residual)
    assert len(residual.alive) > 4
    eliminate_narrow_components(residual)
    assert not residual.alive
    with pytest.MonkeyPatch.context() as patch:
        without_elimination(patch)
        expected = solve_graph(graph).cost
    assert graph.cost_of(residual.choices()) == pytest.approx(expected)


def test_contest_file_is_read(tmp_path: Path) -> None:
    problem = {
        "nodes": {"intervals": [[0, 2], [1, 3]], "costs": [[1, 9], [3]], "usages": [[8, 2], [4]]},
        "edges": {"nodes": [[0, 1]], "costs": [[5, 7]]},
        "usage_limit": 10,
    }
    path = tmp_path / "tiny.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"problem": problem}).encode()))
    solution = solve_graph(load_instance(path))
    assert (solution.choices, solution.cost) == ((1, 0), 19.0)


def test_same_answer_every_time() -> None:
    graph = grid(4, 5, limit=4.0)
    assert solve_graph(graph) == solve_graph(graph)


def test_equal_strategies_give_the_first() -> None:
    graph = CostGraph(node_costs=(np.ones(3), np.ones(2)), edges=(Edge(0, 1, np.zeros((3, 2))),))
    assert solve_graph(graph).choices == (0, 0)


def test_usage_limit_moves_a_node_to_the_strategy_that_uses_less() -> None:
    costs = (np.array([1.0, 5.0]), np.array([1.0, 4.0]))
    usages = (np.array([10.0, 2.0]), np.array([10.0, 2.0]))
    together = CostGraph(node_costs=costs, edges=(), usages=usages, intervals=((0, 2), (1, 3)), usage_limit=12.0)
    apart = CostGraph(node_costs=costs, edges=(), usages=usages, intervals=((0, 2), (2, 4)), usage_limit=12.0)
    assert solve_graph(together).choices == (0, 1)
    assert solve_graph(apart).choices == (0, 0)


def test_no_time_gives_a_feasible_solution_with_a_gap() -> None:
    graph = grid(12, 6, limit=30.0)
    solution = solve_graph(graph, Deadline(0.0))
    assert not solution.optimal and 0 < solution.gap < np.inf
    assert solution.lower_bound < solution.cost == graph.cost_of(solution.choices)
    assert graph.fits(solution.choices)


def test_little_time_gives_a_bound_below_the_cost() -> None:
    graph = grid(14, 8, limit=40.0)
    solution = solve_graph(graph, Deadline(2.0))
    assert -np.inf < solution.lower_bound <= solution.cost
    assert graph.fits(solution.choices)


def test_choices_that_exceed_a_row_by_rounding_are_cut_off() -> None:
    """4e-7 of the limit is within the solvers' tolerance and still too much."""
    usages = (np.array([0.5 + 2e-7, 0.1]), np.array([0.5 + 2e-7, 0.1]))
    graph = CostGraph(
        node_costs=(np.array([0.0, 1.0]), np.array([0.0, 1.5])),
        edges=(),
        usages=usages,
        intervals=((0, 1), (0, 1)),
        usage_limit=1.0,
    )
    with pytest.MonkeyPatch.context() as patch:
        without_elimination(patch)
        assert solve_graph(graph).choices == (1, 0)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (CostGraph(node_costs=(np.full(2, np.inf),), edges=()), "No strategy of node 0 is left"),
        (
            CostGraph(node_costs=(np.zeros(1), np.zeros(1)), edges=(Edge(0, 1, np.full((1, 1), 1e18)),)),
            "No strategy of node",
        ),
        (
            CostGraph(
                node_costs=(np.zeros(2),),
                edges=(),
                usages=(np.array([3.0, 4.0]),),
                intervals=((0, 1),),
                usage_limit=2.0,
            ),
            "need a usage of 3 .* limit is 2",
        ),
    ],
    ids=["node", "edge", "usage"],
)
def test_infeasible_graph_says_why(graph: CostGraph, message: str) -> None:
    with pytest.raises(InfeasibleError, match=message):
        solve_graph(graph)


def test_infeasible_core_says_so() -> None:
    differ = np.where(np.eye(2, dtype=bool), np.inf, 0.0)
    odd_cycle = CostGraph(
        node_costs=(np.zeros(2),) * 3, edges=(Edge(0, 1, differ), Edge(1, 2, differ), Edge(0, 2, differ))
    )
    with pytest.raises(InfeasibleError):
        solve_graph(odd_cycle)
    residual = residual_of(odd_cycle)
    with pytest.raises(InfeasibleError, match="both the forbidden pairs and the usage limit"):
        ilp_model.solve_program(residual, Deadline(10.0))


def test_highs_prints_nothing() -> None:
    """In a process of its own, as HiGHS prints its version once in each."""
    script = """
import pulp
from minialpa.intra.solver.clock import Deadline
from minialpa.intra.solver.ilp_model import _run_highs
problem = pulp.LpProblem("p")
x = [pulp.LpVariable(f"x{i}", cat="Binary") for i in range(2)]
problem += 2 * x[0] + 3 * x[1]
problem += x[0] + x[1] >= 1
assert _run_highs(problem, Deadline(10.0)) == 2.0
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


ONE = (np.zeros(1),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"node_costs": ONE, "edges": (Edge(0, 1, np.zeros((1, 1))),)}, "Edge 0 joins nodes 0 and 1; nodes are 0 to 0"),
        (
            {"node_costs": ONE * 2, "edges": (Edge(0, 1, np.zeros((1, 2))),)},
            r"with 1 and 1 strategies; its cost has shape \(1, 2\)",
        ),
        ({"node_costs": (np.zeros(0),)}, "Node 0 has no strategies"),
        ({"node_costs": (np.array([np.nan]),)}, "NaN or -inf"),
        ({"node_costs": (np.zeros((1, 1)),)}, "needs 1 dimension"),
        ({"node_costs": ONE, "usage_limit": 1.0}, "got 0 usages and 0 intervals for 1 nodes"),
        (
            {"node_costs": ONE, "usages": (np.array([-1.0]),), "intervals": ((0, 1),), "usage_limit": 1.0},
            r"`usages\[0\]` needs 1 finite values of zero or more",
        ),
        ({"node_costs": ONE, "usages": ONE, "intervals": ((0, 1),), "usage_limit": -1.0}, "cannot be negative"),
    ],
    ids=["nodes", "edge shape", "empty", "nan", "ndim", "no usages", "negative usage", "negative limit"],
)
def test_wrong_input_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        CostGraph(**{"edges": (), **arguments})  # type: ignore[arg-type]


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=200)
def test_arrays_and_loops_drop_the_same_strategies(seed: int) -> None:
    """To the last bit, also where sums are rounded, and where edges forbid pairs."""
    rng = np.random.default_rng(seed)
    n, widths = int(rng.integers(1, 9)), rng.integers(1, 6, int(rng.integers(0, 4)))
    exact = bool(rng.integers(2))

    def costs(*shape: int) -> Any:
        return rng.integers(0, 3, shape) / 8 if exact else np.round(rng.random(shape), 1)

    cost, edges = costs(n), costs(n, int(widths.sum()))
    edges[rng.random(edges.shape) < 0.2] = np.inf
    usage, ends = rng.integers(0, 3, (int(rng.integers(0, 3)), n)), np.cumsum([0, *widths])
    with np.errstate(invalid="ignore"):
        in_arrays = dominance._in_arrays(cost, usage, edges, ends)
    assert in_arrays.tolist() == dominance._in_loops(cost, usage, edges, ends).tolist()


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=100)
def test_what_dominates_costs_no_more_whatever_the_neighbours_choose(seed: int) -> None:
    """Each strategy that goes has one that stays, uses no more, and never costs more; those that stay have none."""
    rng = np.random.default_rng(seed)
    n, widths = int(rng.integers(1, 7)), rng.integers(1, 5, int(rng.integers(0, 3)))
    cost, usage = rng.integers(0, 4, n) / 8, rng.integers(0, 3, (int(rng.integers(0, 3)), n))
    edges = [rng.integers(0, 4, (n, width)) / 8 for width in widths]
    ends = np.cumsum([0, *widths])
    joined = np.concatenate([np.zeros((n, 0)), *edges], axis=1)
    stays = undominated(cost, usage, joined, ends)

    def excess(b: int, a: int) -> float:
        return float(cost[b] - cost[a] + sum((edge[b] - edge[a]).max() for edge in edges))

    dominates = [[bool(excess(b, a) <= 0 and (usage[:, b] <= usage[:, a]).all()) for a in range(n)] for b in range(n)]
    for a in range(n):
        others = [b for b in range(n) if b != a and stays[b] and dominates[b][a]]
        assert bool(others) != bool(stays[a])
