"""Parts of arrays along a factor, and what they give together."""

from __future__ import annotations

import numpy as np
import pytest

from minialpa.rules.factors import Factors
from minialpa.rules.parts import Part, cut, wholes

#: [2, (1 6)] -> [(1 6)], a sum over the first dimension.
SUM = Factors(sizes=(2, 1, 6), operands=(((0,), (1, 2)),), results=(((1, 2),),), reductions={0: "sum"})
X = np.arange(12).reshape(2, 6)


@pytest.mark.parametrize("n", [2, 3, 6])
def test_parts_along_a_factor_of_the_result_are_joined(n: int) -> None:
    parts = [cut(X, SUM.operands[0], Part(2, i, n)) for i in range(n)]
    (whole,) = wholes([part.sum(0) for part in parts], SUM, 2, 0)
    np.testing.assert_array_equal(whole, X.sum(0))


def test_partial_results_are_combined() -> None:
    parts = [cut(X, SUM.operands[0], Part(0, i, 2)) for i in range(2)]
    (whole,) = wholes([part.sum(0) for part in parts], SUM, 0, 0)
    np.testing.assert_array_equal(whole, X.sum(0))


def test_each_part_that_should_be_the_whole_has_its_say() -> None:
    unaffected = Factors(
        sizes=SUM.sizes,
        operands=SUM.operands,
        results=SUM.results,
        reductions=SUM.reductions,
        unaffected=frozenset({(0, 0)}),
    )
    right, wrong = X.sum(0), X[0]
    for parts in ([right, wrong], [wrong, right]):
        found = wholes(parts, unaffected, 0, 0)
        assert not all(np.array_equal(whole, right) for whole in found)


def test_an_array_without_the_factor_is_not_cut() -> None:
    np.testing.assert_array_equal(cut(X[0], SUM.results[0], Part(0, 1, 2)), X[0])
