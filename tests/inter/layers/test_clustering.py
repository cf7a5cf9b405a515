"""cluster_layers agrees with exhaustive search and cuts transformers between blocks, also large ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minialpa.inter.layers import clustering
from minialpa.inter.layers.clustering import cluster_layers
from tests.oracles import ForwardProgram, cheapest_layers, layers_objective


@st.composite
def programs(draw: st.DrawFn) -> ForwardProgram:
    """Random programs with small integer flops and bytes, values used several times, and ties."""
    n = draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    high = draw(st.sampled_from([2, 10]))
    last_user: dict[tuple[int, int], int] = {}
    for v in range(1, n):
        for u in rng.integers(0, v, 2).tolist():
            last_user[u, int(rng.integers(0, 2))] = v
    sizes = rng.integers(0, high, (n, 2))
    values = [(u, v, float(sizes[u, value])) for (u, value), v in last_user.items()]
    return ForwardProgram(rng.integers(0, high, n).astype(float).tolist(), values)


@settings(max_examples=400, deadline=None)
@given(programs(), st.integers(1, 5), st.sampled_from([0.0, 0.1, 0.5, 2.0]))
def test_layers_match_exhaustive_search(program: ForwardProgram, n_layers: int, tolerance: float) -> None:
    n_layers = min(n_layers, len(program.flops))
    found = cluster_layers(program.flops, program.values, n_layers, tolerance=tolerance)
    assert sorted(set(found)) == list(range(n_layers))
    assert list(found) == sorted(found)
    assert layers_objective(program, found) == pytest.approx(cheapest_layers(program, n_layers, tolerance))


def transformer(n_blocks: int, n_per_block: int = 12) -> ForwardProgram:
    """Blocks of equal flops. Inside a block are wide values and the residual stream; between blocks is one value."""
    n = n_blocks * n_per_block
    flops = [100.0 if v % n_per_block % 3 == 0 else 1.0 for v in range(n)]
    values = [(v - 1, v, 4.0) for v in range(n) if v % n_per_block]
    values += [(end, end + n_per_block, 2.0) for end in range(n_per_block - 1, n - n_per_block, n_per_block)]
    return ForwardProgram(flops, values)


@pytest.mark.parametrize("n_layers", [2, 8])
def test_transformer_is_cut_between_blocks(n_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program, expected = transformer(8), tuple(v // 12 * n_layers // 8 for v in range(8 * 12))
    assert cluster_layers(program.flops, program.values, n_layers) == expected
    monkeypatch.setattr(clustering, "_MAX_WORK", 0)  # thinned borders
    assert cluster_layers(program.flops, program.values, n_layers) == expected


def test_layers_around_an_expensive_equation_are_within_tolerance() -> None:
    assert cluster_layers([1.0, 1.0, 100.0, 1.0, 1.0], [], 3, tolerance=0.0) == (0, 0, 1, 2, 2)
    program, n_blocks = transformer(16, 104), 16
    flops = np.array(program.flops)
    flops[n_blocks * 52] = 1e9
    share = flops.sum() / n_blocks
    of_layer = np.bincount(cluster_layers(flops.tolist(), program.values, n_blocks), np.minimum(flops, share))
    assert len(of_layer) == n_blocks and of_layer.max() <= 1.5 * share
