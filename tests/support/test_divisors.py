from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minialpa.options import PlanOptions
from minialpa.support.divisors import divisors


@given(st.integers(1, 3000))
def test_they_are_the_numbers_that_divide(n: int) -> None:
    assert list(divisors(n)) == [d for d in range(1, n + 1) if n % d == 0]


def test_a_batch_of_billions_of_rows_has_its_numbers_of_micro_batches_at_once() -> None:
    options = PlanOptions(choose_micro_batches=True)
    assert options.micro_batch_choices(2**40) == tuple(2**k for k in range(41))
