"""Matrix products whose tiles leave processors idle."""

from __future__ import annotations

import pytest

from minialpa.intra.strategies.tiles import waste


def test_whole_rounds_waste_nothing() -> None:
    # 128 x 256 tiles: 11 rows of 12 tiles are one round of 132 processors.
    assert waste(1, 11 * 128, 12 * 256, 4096, 132) == 1.0
    assert waste(1, 11 * 128, 24 * 256, 4096, 132) == 1.0


def test_one_tile_more_is_another_round() -> None:
    """Without a sum that is long enough to be split, and without a better kind of tile."""
    found = waste(1, 128 * 133, 256, 128, 132)
    assert 1.0 < found <= 2 * 132 / 133


def test_small_products_with_long_sums_are_split() -> None:
    assert waste(1, 768, 768, 32768, 108) < waste(1, 768, 768, 128, 108)


@pytest.mark.parametrize("n_processors", [80, 108, 132, 148])
def test_waste_fades_with_size(n_processors: int) -> None:
    sizes = [waste(1, 2**k, 2**k, 512, n_processors) for k in (8, 10, 12, 14)]
    assert min(sizes) >= 1.0
    assert sizes[-1] < 1.05 < sizes[0]
