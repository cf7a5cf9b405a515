"""cluster_layers agrees with exhaustive search, cuts transformers between blocks, also on large graphs."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minialpa.errors import TraceError
from minialpa.inter.layers import clustering
from minialpa.inter.layers.clustering import cluster_layers
from tests.oracles import cheapest_layers, layers_objective


@st.composite
def programs(draw: st.DrawFn, *, max_equations: int = 9) -> nx.DiGraph:
    """Random programs with small integer flops and bytes, values used several times, and ties."""
    n = draw(st.integers(1, max_equations))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    high = draw(st.sampled_from([2, 10]))
    graph = nx.DiGraph()
    graph.add_nodes_from((v, {"flops": float(rng.integers(0, high))}) for v in range(n))
    sizes = rng.integers(0, high, (n, 2))
    for v in range(1, n):
        for u in rng.integers(0, v, 2).tolist():
            value = int(rng.integers(0, 2))
            graph.add_edge(u, v, bytes=float(sizes[u, value]), value=value)
    return graph


@settings(max_examples=400, deadline=None)
@given(programs(), st.integers(1, 5), st.sampled_from([0.0, 0.1, 0.5, 2.0]))
def test_layers_match_exhaustive_search(graph: nx.DiGraph, n_layers: int, tolerance: float) -> None:
    n_layers = min(n_layers, len(graph))
    found = cluster_layers(graph, n_layers, tolerance=tolerance)
    assert sorted(set(found)) == list(range(n_layers))
    assert list(found) == sorted(found)
    assert layers_objective(graph, found) == pytest.approx(cheapest_layers(graph, n_layers, tolerance))


def transformer(n_blocks: int, n_per_block: int = 12) -> nx.DiGraph:
    """Blocks of equal flops; inside a block wide values, with the residual stream beside them; one value between."""
    graph = nx.DiGraph()
    stream = None
    for block in range(n_blocks):
        first = block * n_per_block
        for v in range(first, first + n_per_block):
            graph.add_node(v, flops=100.0 if v % 3 == 0 else 1.0)
            if v > first:
                graph.add_edge(v - 1, v, bytes=4.0, value=0)
        if stream is not None:
            graph.add_edge(stream, first, bytes=2.0, value=0)
            graph.add_edge(stream, first + n_per_block - 1, bytes=2.0, value=0)
        stream = first + n_per_block - 1
    return graph


@pytest.mark.parametrize("n_layers", [2, 4, 8])
def test_transformer_is_cut_between_blocks(n_layers: int) -> None:
    expected = tuple(v // 12 * n_layers // 8 for v in range(8 * 12))
    assert cluster_layers(transformer(8), n_layers) == expected


def test_value_with_several_users_counts_once_per_border() -> None:
    """Three users of one value of 4 bytes are cheaper to cut than a chain of 5 bytes, which crosses once."""
    graph = nx.DiGraph()
    graph.add_nodes_from((v, {"flops": 1.0}) for v in range(6))
    graph.add_edges_from(((0, v) for v in (3, 4, 5)), bytes=4.0, value="shared")
    graph.add_edges_from(((1, 2), (3, 4)), bytes=5.0, value="chain")
    assert cluster_layers(graph, 2, tolerance=0.4) == (0, 0, 0, 1, 1, 1)


def test_single_large_equation_gets_its_own_layer() -> None:
    graph = nx.DiGraph()
    graph.add_nodes_from((v, {"flops": 100.0 if v == 2 else 1.0}) for v in range(5))
    assert cluster_layers(graph, 3, tolerance=0.0) == (0, 0, 1, 2, 2)


def test_no_layers_within_tolerance_relaxes_it() -> None:
    graph = nx.DiGraph()
    graph.add_nodes_from((v, {"flops": flops}) for v, flops in enumerate((3.0, 3.0, 3.0)))
    assert cluster_layers(graph, 2, tolerance=0.0) in ((0, 0, 1), (0, 1, 1))


def test_5000_equations_are_cut_between_blocks() -> None:
    assert cluster_layers(transformer(48, 104), 48) == tuple(v // 104 for v in range(48 * 104))


@pytest.mark.slow
def test_layers_around_a_heavy_equation_among_5000_are_within_tolerance() -> None:
    _check_layers_around_a_heavy_equation(n_blocks=48)


def test_layers_around_a_heavy_equation_are_within_tolerance() -> None:
    _check_layers_around_a_heavy_equation(n_blocks=16)


def _check_layers_around_a_heavy_equation(n_blocks: int) -> None:
    graph = transformer(n_blocks, 104)
    graph.nodes[n_blocks * 52]["flops"] = 1e9
    flops = np.array([graph.nodes[v]["flops"] for v in range(len(graph))])
    share = flops.sum() / n_blocks
    of_layer = np.bincount(cluster_layers(graph, n_blocks), np.minimum(flops, share))
    assert len(of_layer) == n_blocks and of_layer.max() <= 1.5 * share


def test_thinning_keeps_cuts_between_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clustering, "_MAX_WORK", 0)
    assert cluster_layers(transformer(8), 4) == tuple(v // 24 for v in range(96))


def edges(n: int, *pairs: tuple[int, int]) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(n), flops=1.0)
    graph.add_edges_from(pairs, bytes=1.0, value=0)
    return graph


@pytest.mark.parametrize(
    ("graph", "n_layers", "tolerance", "message"),
    [
        (edges(2), 3, 0.5, "2 equations cannot make 3 layers"),
        (edges(2), 0, 0.5, "cannot make 0 layers"),
        (edges(2), 1, -0.5, "`tolerance` cannot be negative"),
        (nx.relabel_nodes(edges(2), {1: 7}), 1, 0.5, r"numbered 0 to 1; got nodes \[0, 7\]"),
        (edges(3, (0, 1), (2, 1)), 1, 0.5, "2 -> 1 goes back in program order"),
        (edges(3, (0, 1), (1, 2), (2, 0)), 1, 0.5, "2 -> 0 closes a cycle"),
    ],
)
def test_wrong_input_is_refused(graph: nx.DiGraph, n_layers: int, tolerance: float, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        cluster_layers(graph, n_layers, tolerance=tolerance)
