"""Limits are exact: whatever the solver returns keeps to every row in the numbers that came in."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minialpa.errors import InfeasibleError, ShardingError
from minialpa.intra.solver.cost_graph import CostGraph, Edge
from minialpa.intra.solver.options import SolverOptions
from minialpa.intra.solver.solve import solve_graph
from tests.intra.solver.test_solve import ALWAYS_MESSAGES, without_elimination

#: Limits near which a relative tolerance, a float or an int64 would tell nothing apart.
SCALES = (1, 147_379_961_856, 2**53 - 1, 2**62, 10**25)

Choices = tuple[int, ...]


def exact_usage(graph: CostGraph, choices: Choices) -> Fraction:
    """The most usage at any time, by fractions of the numbers that came in."""
    peak = Fraction(0)
    for time in {start for start, _ in graph.intervals}:
        live = [v for v, (start, end) in enumerate(graph.intervals) if start <= time < end]
        peak = max(peak, sum((Fraction(item(graph.usages[v][choices[v]])) for v in live), Fraction(0)))
    return peak


def item(x: Any) -> Any:
    return x.item() if isinstance(x, np.generic) else x


def cheapest(graph: CostGraph) -> float:
    """Least cost of all allowed choices that keep to the limit exactly; inf where there are none."""
    assert graph.usage_limit is not None
    limit = Fraction(item(graph.usage_limit))
    best = np.inf
    for choices in itertools.product(*(range(len(cost)) for cost in graph.node_costs)):
        parts = [float(cost[i]) for cost, i in zip(graph.node_costs, choices, strict=True)]
        parts += [float(edge.cost[choices[edge.a], choices[edge.b]]) for edge in graph.edges]
        if max(parts) < 1e18 and sum(parts) < best and exact_usage(graph, choices) <= limit:
            best = sum(parts)
    return best


def near(rng: np.random.Generator, scale: int, n: int) -> list[Any]:
    """Usages about `scale` whose sums differ by next to nothing: integers, floats or both."""
    integers = (
        [scale + int(d) for d in rng.integers(-2, 3, n)] if scale > 2 else [int(d) for d in rng.integers(0, 5, n)]
    )
    match int(rng.integers(0, 3)):
        case 0:
            return integers
        case 1:
            return [float(x) for x in integers]
        case _:
            return [float(x) * 0.1 for x in integers]


@st.composite
def tight_graphs(draw: st.DrawFn) -> CostGraph:
    """Up to five nodes whose choices use almost the same; the limit is what some of them use, or a hair less."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from(SCALES))
    n_nodes = draw(st.integers(2, 5))
    sizes = rng.integers(1, 4, n_nodes)
    costs = tuple(np.where(rng.random(n) < 0.1, np.inf, rng.integers(0, 9, n)) for n in sizes)
    pairs = [(a, b) for a in range(n_nodes) for b in range(a) if rng.random() < 0.5]
    edges = []
    for a, b in pairs:
        table = rng.integers(0, 9, (sizes[a], sizes[b]))
        edges.append(Edge(a, b, np.where(rng.random(table.shape) < 0.2, 1e18, table)))
    usages = tuple(np.array(near(rng, scale, n), object if scale > 2**53 else None) for n in sizes)
    intervals = tuple(
        (int(a), int(a) + int(n)) for a, n in zip(rng.integers(0, 3, n_nodes), rng.integers(0, 4, n_nodes), strict=True)
    )
    graph = CostGraph(node_costs=costs, edges=tuple(edges), usages=usages, intervals=intervals, usage_limit=10**40)
    some = exact_usage(graph, tuple(int(rng.integers(n)) for n in sizes))
    limit: Any = int(some) if some.denominator == 1 else float(some)
    if draw(st.booleans()) and limit:
        limit = limit - 1 if isinstance(limit, int) else float(np.nextafter(limit, 0.0))
    return CostGraph(node_costs=costs, edges=tuple(edges), usages=usages, intervals=intervals, usage_limit=limit)


def check(graph: CostGraph, options: SolverOptions | None = None) -> None:
    options = options or SolverOptions()
    best = cheapest(graph)
    if np.isinf(best):
        with pytest.raises(InfeasibleError):
            solve_graph(graph, options=options)
        return
    solution = solve_graph(graph, options=options)
    assert exact_usage(graph, solution.choices) <= Fraction(item(graph.usage_limit))
    assert solution.cost == best == graph.cost_of(solution.choices)


@settings(max_examples=300, deadline=None)
@given(tight_graphs())
def test_what_comes_back_keeps_to_the_limit_to_the_last_bit(graph: CostGraph) -> None:
    check(graph)


@settings(max_examples=60, deadline=None)
@given(tight_graphs())
def test_solvers_that_exceed_rows_a_little_are_kept_to_them(graph: CostGraph) -> None:
    with pytest.MonkeyPatch.context() as patch:
        without_elimination(patch)
        check(graph)


@settings(max_examples=60, deadline=None)
@given(tight_graphs())
def test_messages_and_local_search_keep_to_the_limit(graph: CostGraph) -> None:
    with pytest.MonkeyPatch.context() as patch:
        without_elimination(patch)
        check(graph, ALWAYS_MESSAGES)


def test_bounds_hold_where_no_int64_holds_the_usages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best choices use all of the limit: rounded up, they would exceed it, and others look like the best."""
    without_elimination(monkeypatch)
    usages = (np.array([2**62, 2**62 - 1, 2**62 + 2]), np.array([2**62 - 1, 2**62 + 1]))
    costs = (np.array([8.0, 5.0, 2.0]), np.array([5.0, 3.0]))
    check(
        CostGraph(node_costs=costs, edges=(), usages=usages, intervals=((1, 3), (1, 2)), usage_limit=2**63 + 1),
        ALWAYS_MESSAGES,
    )


def test_one_unit_in_a_hundred_billion_is_too_much() -> None:
    """A relative tolerance of 1e-9, which rounding of floats may seem to need, would let 146 units pass."""
    limit = 147_379_961_856
    usages = (np.array([limit - 1000, 0]), np.array([1000, 1001, 1146]))
    graph = CostGraph(
        node_costs=(np.array([0.0, 9.0]), np.array([2.0, 1.0, 0.0])),
        edges=(),
        usages=usages,
        intervals=((0, 2), (1, 3)),
        usage_limit=limit,
    )
    assert solve_graph(graph).choices == (0, 0)
    assert not graph.fits((0, 1)) and not graph.fits((0, 2))


def test_integers_that_no_float_holds_are_told_apart() -> None:
    usages = (np.array([2**53 + 1, 2**53]), np.array([2**53 + 1, 2**53]))
    costs = (np.array([0.0, 1.0]),) * 2
    for limit, cost in ((2**54 + 2, 0.0), (2**54 + 1, 1.0), (2**54, 2.0)):
        assert (
            solve_graph(
                CostGraph(node_costs=costs, edges=(), usages=usages, intervals=((0, 1), (0, 1)), usage_limit=limit)
            ).cost
            == cost
        )
    with pytest.raises(InfeasibleError, match=r"18,014,398,509,481,984 at .* limit is 18,014,398,509,481,983"):
        solve_graph(
            CostGraph(node_costs=costs, edges=(), usages=usages, intervals=((0, 1), (0, 1)), usage_limit=2**54 - 1)
        )


def test_sums_of_floats_are_those_of_the_numbers_they_are() -> None:
    """Of 0.1, 0.2 and 0.3 as floats, the first two add up to a little more than the third."""
    graph = CostGraph(
        node_costs=(np.zeros(1),) * 2,
        edges=(),
        usages=(np.array([0.1]), np.array([0.2])),
        intervals=((0, 1), (0, 1)),
        usage_limit=0.3,
    )
    with pytest.raises(InfeasibleError, match=r"limit is 0\.3"):
        solve_graph(graph)


def test_forbidden_is_each_cost_and_not_their_sum() -> None:
    """Allowed costs may add up to what would be forbidden by itself; no gain makes up for what is forbidden."""
    expensive = CostGraph(node_costs=(np.full(1, 9e17),) * 2, edges=())
    assert solve_graph(expensive).cost == 1.8e18
    with pytest.raises(InfeasibleError):
        solve_graph(CostGraph(node_costs=(np.full(1, 1e18), np.full(1, -9e17)), edges=()))


def test_a_limit_of_infinity_is_none() -> None:
    graph = CostGraph(
        node_costs=(np.array([0.0, 1.0]),),
        edges=(),
        usages=(np.array([10**30, 0], object),),
        intervals=((0, 1),),
        usage_limit=np.inf,
    )
    assert solve_graph(graph).choices == (0,)


@pytest.mark.parametrize("usage", [[-1], [-1.0], [np.nan], [np.inf], [[1]], [1, 2]])
def test_usages_that_are_none_are_refused(usage: Any) -> None:
    with pytest.raises(ShardingError, match="finite values of zero or more"):
        CostGraph(node_costs=(np.zeros(1),), edges=(), usages=(usage,), intervals=((0, 1),), usage_limit=1)
