"""solve_graph agrees with exhaustive search, keeps limits exactly, proves its bounds, and gives reasons for failure."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.iopddl import random_instance, usages_of_nodes
from minialpa.errors import InfeasibleError, ShardingError
from minialpa.intra.solver import clock, dominance, elimination, ilp_model, lagrange, solve
from minialpa.intra.solver.bucket import eliminate_narrow_components
from minialpa.intra.solver.clock import OPERATIONS_PER_S, AllowedGap, Deadline
from minialpa.intra.solver.cost_graph import CostGraph, Edge, EdgeCosts, Floats
from minialpa.intra.solver.csr_graph import flatten
from minialpa.intra.solver.dominance import undominated
from minialpa.intra.solver.elimination import reduce_graph
from minialpa.intra.solver.options import SolverOptions
from minialpa.intra.solver.residual import Residual, keep, residual_of
from minialpa.intra.solver.solve import solve_graph
from tests.oracles import cheapest_choices

#: Usages of all nodes are near these numbers, so that a relative tolerance or a float would not distinguish them.
UNITS = (0, 147_379_961_856, 2**53 - 1, 2**56)
#: Messages run on the smallest graphs, too, and after every round that removed enough.
ALWAYS_MESSAGES = SolverOptions(small_program_entries=-1)


@st.composite
def cost_graphs(draw: st.DrawFn, *, max_nodes: int = 6, max_strategies: int = 4) -> CostGraph:
    """Small graphs with ties, parallel edges, loops, forbidden entries (inf or 1e18) and perhaps a usage limit.

    Some strategies of a node share a row or column of an edge.

    The limit is the usage of some choices, or one unit less.
    """
    n_nodes = draw(st.integers(1, max_nodes))
    sizes = draw(st.lists(st.integers(1, max_strategies), min_size=n_nodes, max_size=n_nodes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    p_forbidden = draw(st.sampled_from([0.0, 0.1, 0.4]))
    scale = draw(st.sampled_from([1.0, 1e-6, 1e9]))
    forbidden = draw(st.sampled_from([np.inf, 1e18]))

    def cost(*shape: int) -> Floats:
        values = rng.integers(0, draw(st.sampled_from([3, 50])), shape) * scale
        return np.where(rng.random(shape) < p_forbidden, forbidden, values)

    def edge(a: int, b: int) -> Edge:
        rows, columns = (np.unique(rng.integers(0, n, n), return_inverse=True)[1] for n in (sizes[a], sizes[b]))
        return Edge(a, b, EdgeCosts(cost(rows.max() + 1, columns.max() + 1), rows, columns))

    node = st.integers(0, n_nodes - 1)
    pairs = draw(st.lists(st.tuples(node, node), max_size=2 * n_nodes))
    edges = tuple(edge(a, b) for a, b in pairs)
    node_costs = tuple(cost(n) for n in sizes)
    if not draw(st.booleans()):
        return CostGraph(node_costs=node_costs, edges=edges)

    usages = [draw(st.sampled_from(UNITS)) + rng.integers(0, 8, n) for n in sizes]
    starts = rng.integers(0, 6, n_nodes)
    intervals = [(int(a), int(a + n)) for a, n in zip(starts, rng.integers(0, 5, n_nodes), strict=True)]
    graph = CostGraph(node_costs=node_costs, edges=edges, usages=usages_of_nodes(usages, intervals))
    peak = graph.peak_usage(tuple(int(rng.integers(n)) for n in sizes))
    return replace(graph, usage_limit=max(0, peak - draw(st.integers(0, 1))))


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
    """Remove only forbidden strategies; the rest goes to the integer program, which small graphs rarely reach."""
    patch.setattr(elimination, "_undominated", lambda residual, v: np.ones(len(residual.costs[v]), bool))
    patch.setattr(elimination, "_can_eliminate", lambda residual, v: False)
    patch.setattr(elimination, "_merge_follower", lambda residual, v: False)
    patch.setattr(solve, "eliminate_narrow_components", lambda residual: None)


@settings(max_examples=200, deadline=None)
@given(cost_graphs())
def test_solution_matches_exhaustive_search(graph: CostGraph) -> None:
    check_against_search(graph)


@pytest.mark.parametrize("options", [SolverOptions(), ALWAYS_MESSAGES], ids=["program", "messages"])
@settings(max_examples=100, deadline=None)
@given(cost_graphs())
def test_messages_and_program_match_exhaustive_search(options: SolverOptions, graph: CostGraph) -> None:
    with pytest.MonkeyPatch.context() as patch:
        without_elimination(patch)
        check_against_search(graph, options)


def test_choices_that_exceed_a_row_by_rounding_are_cut_off() -> None:
    """An excess of 4e-7 of the limit is within the solvers' tolerance, and refused."""
    usages = usages_of_nodes([np.array([50_000_020, 10_000_000])] * 2, [(0, 1)] * 2)
    costs = (np.array([0.0, 1.0]), np.array([0.0, 1.5]))
    graph = CostGraph(node_costs=costs, edges=(), usages=usages, usage_limit=100_000_000)
    with pytest.MonkeyPatch.context() as patch:
        without_elimination(patch)
        assert solve_graph(graph).choices == (1, 0)


def test_a_round_without_nodes_runs_no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """If messages leave one strategy per node, later reductions have no nodes, and messages need at least one."""
    n_before: list[int] = []

    def keep_the_least_usage(residual: Residual, *_: Any) -> None:
        n_before.append(len(residual.alive))
        for v in residual.alive:
            used = sum(residual.terms[v].values(), np.zeros(len(residual.costs[v]), np.int64))
            keep(residual, v, np.arange(len(used)) == used.argmin())

    monkeypatch.setattr(solve, "_bracket", keep_the_least_usage)
    graph = grid(6, 4, limit=600)
    assert graph.fits(solve_graph(graph, options=ALWAYS_MESSAGES).choices)
    assert len(n_before) == 1 and n_before[0] > 0


# ---- bounds ---------------------------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(cost_graphs(), st.sampled_from([0.0, 0.05, 60.0]), st.sampled_from([0.0, 1e-3, 0.05, 0.5]), st.booleans())
def test_bounds_hold_for_any_time_and_an_allowed_gap_is_kept(
    graph: CostGraph, limit_s: float, gap: float, by_program: bool
) -> None:
    best, is_cut_short = cheapest_choices(graph), limit_s < 1
    options = SolverOptions(small_program_entries=-1, enough=1.0)
    if not by_program:
        options = replace(options, program_entries_per_s=0)
    with pytest.MonkeyPatch.context() as patch:
        without_elimination(patch)
        try:
            solution = solve_graph(graph, Deadline(limit_s), options=options, gap=gap)
        except InfeasibleError:
            assert math.isinf(best) or is_cut_short or not by_program
            return

    tolerance = 1e-9 * abs(best)
    assert graph.fits(solution.choices) and graph.cost_of(solution.choices) == solution.cost
    assert solution.lower_bound - tolerance <= best <= solution.cost + tolerance
    assert solution.gap >= 0 and (not solution.optimal or solution.cost == pytest.approx(best))
    if by_program and not is_cut_short:
        assert solution.cost - best <= gap * abs(solution.cost) + tolerance
        # A gap is for limits that bind.
        assert graph.usage_limit is not None or solution.cost == pytest.approx(best)


@settings(max_examples=60, deadline=None)
@given(cost_graphs(), st.sampled_from([1e-3, 1.0, 1e3, 1e6]))
def test_bounds_hold_and_solutions_are_allowed_if_work_has_to_save_its_price(
    graph: CostGraph, cost_per_s: float
) -> None:
    best = cheapest_choices(graph)
    with pytest.MonkeyPatch.context() as patch:
        without_elimination(patch)
        patch.setattr(clock, "FREE_S", 0.0)
        try:
            solution = solve_graph(graph, options=ALWAYS_MESSAGES, cost_per_s=cost_per_s)
        except InfeasibleError:
            return

    tolerance = 1e-9 * abs(best)
    assert graph.fits(solution.choices) and graph.cost_of(solution.choices) == solution.cost
    assert solution.lower_bound - tolerance <= best <= solution.cost + tolerance


def test_a_solve_ends_when_its_gap_is_worth_less_than_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "FREE_S", 0.0)
    graph = grid(8, 6, limit=1800)
    works = []
    for cost_per_s in (0.0, 1e9):
        deadline = Deadline(1.0)
        solution = solve_graph(graph, deadline, options=ALWAYS_MESSAGES, cost_per_s=cost_per_s)
        assert graph.fits(solution.choices)
        works.append(deadline.spent_s)
    assert works[1] < works[0]


@settings(max_examples=60, deadline=None)
@given(cost_graphs(max_nodes=4), st.sampled_from([0.0, 1e-3, 0.3]))
def test_the_bound_with_the_reduced_cost_of_a_strategy_is_below_all_solutions_with_it(
    graph: CostGraph, part: float
) -> None:
    try:
        residual = residual_of(graph)
    except InfeasibleError:
        return
    core, allowed = flatten(residual, list(residual.alive)), AllowedGap(part)
    found = lagrange.bracket(core, np.zeros(len(residual.base)), Deadline(math.inf), SolverOptions(), allowed)
    best = cheapest_choices(graph)
    assert found.cost >= best or found.cost == pytest.approx(best)
    for v, costs in enumerate(graph.node_costs):
        for i in range(len(costs)):
            only = np.where(np.arange(len(costs)) == i, costs, np.inf)
            held = replace(graph, node_costs=(*graph.node_costs[:v], only, *graph.node_costs[v + 1 :]))
            bound = found.bound + found.reduced[core.at[v] + i]
            assert bound <= cheapest_choices(held) + 1e-9 * abs(found.bound)


def low_cost_or_low_usage(n: int, limit: int, edges: tuple[Edge, ...] = ()) -> CostGraph:
    """Each node has a low-cost strategy (cost 0, usage 2) and a low-usage one (cost 1, usage 1), all of the time."""
    usages = usages_of_nodes([np.array([2, 1])] * n, [(0, 1)] * n)
    return CostGraph(node_costs=(np.array([0.0, 1.0]),) * n, edges=edges, usages=usages, usage_limit=limit)


def test_choices_cost_the_same_at_the_prices_of_their_linear_program() -> None:
    residual = residual_of(low_cost_or_low_usage(10, 15))
    columns = lagrange._Columns(flatten(residual, list(residual.alive)))
    assert columns.best_prices()[1] == math.inf
    columns.add(np.zeros(10, np.int64))
    columns.add(np.ones(10, np.int64))
    prices, theta = columns.best_prices()
    assert prices == pytest.approx([1.0]) and theta == pytest.approx(5.0)
    # Choices that cost more under these prices have no effect.
    columns.add(np.arange(10) % 2)
    assert columns.best_prices()[1] == pytest.approx(5.0)


def test_only_some_of_many_equal_layers_save_memory() -> None:
    """Without an integer program: prices make all layers choose alike, and the layers pay once for one change."""
    n, change = 40, 3.0
    edges = tuple(Edge(v, v + 1, EdgeCosts.of(change * (1 - np.eye(2)))) for v in range(n - 1))
    graph = low_cost_or_low_usage(n, 2 * n - 20, edges)
    options = SolverOptions(small_program_entries=-1, program_entries_per_s=0)
    assert solve_graph(graph, options=options).cost == 20 + change


# ---- larger graphs --------------------------------------------------------------------------------------------------


def grid(side: int, n_strategies: int, *, limit: int | None = None) -> CostGraph:
    """A square grid of nodes with random costs: wide enough that elimination cannot take it all."""
    rng = np.random.default_rng(0)
    n = side * side
    pairs = [(v, v + 1) for v in range(n) if (v + 1) % side] + [(v, v + side) for v in range(n - side)]
    edges = tuple(Edge(a, b, EdgeCosts.of(rng.random((n_strategies, n_strategies)))) for a, b in pairs)
    costs = tuple(rng.random(n_strategies) for _ in range(n))
    usages = usages_of_nodes(
        [rng.integers(0, 100, n_strategies) for _ in range(n)], [(v, v + n // 2) for v in range(n)]
    )
    return CostGraph(node_costs=costs, edges=edges, usages=usages, usage_limit=limit)


def test_elimination_alone_solves_a_deep_chain_with_parameters_and_skips() -> None:
    rng, n, n_strategies = np.random.default_rng(0), 800, 6
    pairs = [(v, v + 1) for v in range(n - 1)] + [(v, n + v) for v in range(n)]
    pairs += [(v, v + 6) for v in range(0, n - 6, 6)]
    graph = CostGraph(
        node_costs=tuple(rng.random(n_strategies) for _ in range(2 * n)),
        edges=tuple(Edge(a, b, EdgeCosts.of(rng.random((n_strategies, n_strategies)))) for a, b in pairs),
    )
    residual = residual_of(graph)
    reduce_graph(residual)
    assert not residual.alive


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


def test_counted_work_ends_where_it_ended_before() -> None:
    """For any speed of the processor: answers and count are equal, also if the limit cuts the work short."""
    graph = random_instance(2, n_nodes=60)
    deadlines = [Deadline(0.1) for _ in range(2)]
    first, second = [solve_graph(graph, deadline) for deadline in deadlines]
    assert first == second and deadlines[0].left_s == deadlines[1].left_s

    bounds = []
    for _ in range(2):
        residual, deadline = residual_of(random_instance(3, n_nodes=40)), Deadline(0.1)
        bounds.append((ilp_model.solve_program(residual, deadline), deadline.left_s))
        assert deadline.is_over
    assert bounds[0] == bounds[1]


def test_a_part_of_a_deadline_counts_the_same_work() -> None:
    whole = Deadline(10.0)
    whole.spend(2 * OPERATIONS_PER_S)
    part = whole.part(0.5)
    assert (whole.left_s, part.left_s) == (8.0, 4.0)
    part.spend(4 * OPERATIONS_PER_S)
    assert part.is_over and not whole.is_over and whole.left_s == 4.0


# ---- input and errors -----------------------------------------------------------------------------------------------


def test_forbidden_is_each_cost_and_not_their_sum() -> None:
    """Allowed costs may add up to more than a forbidden one; no gain makes up for a forbidden cost."""
    assert solve_graph(CostGraph(node_costs=(np.full(1, 9e17),) * 2, edges=())).cost == 1.8e18
    with pytest.raises(InfeasibleError, match="No sharding satisfies all options and constraints"):
        solve_graph(CostGraph(node_costs=(np.full(1, 1e18), np.full(1, -9e17)), edges=()))


def test_a_limit_below_the_least_usage_is_refused() -> None:
    graph = CostGraph(node_costs=(np.zeros(2),), edges=(), usages=((0, (0, 1), np.array([3, 4])),), usage_limit=2)
    with pytest.raises(InfeasibleError, match=r"need 3 B .*1 B above the limit of 2 B.*`memory_limit_bytes`"):
        solve_graph(graph)


def test_an_infeasible_core_is_refused() -> None:
    differ = EdgeCosts.of(np.where(np.eye(2, dtype=bool), np.inf, 0.0))
    odd_cycle = CostGraph(
        node_costs=(np.zeros(2),) * 3, edges=(Edge(0, 1, differ), Edge(1, 2, differ), Edge(0, 2, differ))
    )
    with pytest.raises(InfeasibleError):
        solve_graph(odd_cycle)
    with pytest.raises(InfeasibleError, match="both the memory limit and the options"):
        ilp_model.solve_program(residual_of(odd_cycle), Deadline(10.0))


def test_highs_prints_nothing() -> None:
    """In a separate process, because HiGHS prints its version once in each."""
    script = """
import pulp
from minialpa.intra.solver.clock import Deadline
from minialpa.intra.solver.ilp_model import _run_highs
problem = pulp.LpProblem("p")
x = [pulp.LpVariable(f"x{i}", cat="Binary") for i in range(2)]
problem += 2 * x[0] + 3 * x[1]
problem += x[0] + x[1] >= 1
assert _run_highs(problem, Deadline(10.0), 0.0) == 2.0
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


ONE = (np.zeros(1),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"node_costs": ONE, "edges": (Edge(0, 1, EdgeCosts.of(np.zeros((1, 1)))),)},
            "the nodes 0 and 1. Use nodes from 0 to 0",
        ),
        (
            {"node_costs": ONE * 2, "edges": (Edge(0, 1, EdgeCosts.of(np.zeros((1, 2)))),)},
            r"shape \(1, 2\). Give .* \(1, 1\)",
        ),
        ({"node_costs": (np.zeros(0),)}, r"`node_costs\[0\]` is empty"),
        ({"node_costs": (np.array([np.nan]),)}, "NaN or -inf"),
        ({"node_costs": ONE, "usages": ((0, (0, 1), [0.5]),)}, r"\[0.5\] for node 0. Give 1 integers of 0 or"),
        ({"node_costs": ONE, "usages": ((0, (0, 1), [2**60]),)}, "add up to 1.15e.18.*in a larger unit"),
        ({"node_costs": ONE, "usage_limit": -1}, "`usage_limit` must be 0 or more; got -1"),
    ],
)
def test_wrong_input_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        CostGraph(**{"edges": (), **arguments})  # type: ignore[arg-type]


# ---- dominance ------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=100)
def test_strategies_go_exactly_if_one_that_stays_dominates_them(seed: int) -> None:
    """It uses no more, and costs no more for any choices of the neighbours. Arrays and loops agree to the last bit."""
    rng = np.random.default_rng(seed)
    n, widths = int(rng.integers(1, 9)), rng.integers(1, 6, int(rng.integers(0, 4)))
    is_exact = bool(rng.integers(2))

    def costs(*shape: int) -> Any:
        return rng.integers(0, 3, shape) / 8 if is_exact else np.round(rng.random(shape), 1)

    cost, edges = costs(n), [costs(n, width) for width in widths]
    usage, ends = rng.integers(0, 3, (int(rng.integers(0, 3)), n)), np.cumsum([0, *widths])
    joined = np.concatenate([np.zeros((n, 0)), *edges], axis=1)
    stays = undominated(cost, usage, joined, ends)

    def dominates(b: int, a: int) -> bool:
        excess = cost[b] - cost[a] + sum((edge[b] - edge[a]).max() for edge in edges)
        return bool(excess <= 0 and (usage[:, b] <= usage[:, a]).all())

    if is_exact:
        for a in range(n):
            assert any(b != a and stays[b] and dominates(b, a) for b in range(n)) != bool(stays[a])

    joined[rng.random(joined.shape) < 0.2] = np.inf
    with np.errstate(invalid="ignore"):
        in_arrays = dominance._in_arrays(cost, usage, joined, ends)
    assert in_arrays.tolist() == dominance._in_loops(cost, usage, joined, ends).tolist()
