"""Reductions of every dtype, computed in parts, equal `jax.jit`; docs/reductions.md has the table."""

from __future__ import annotations

import pytest

from tests.reductions import REDUCTIONS, Case, taken, verdicts
from tests.reductions_doc import PATH, doubles, make_method, page

#: One of each way to combine parts, and two that run on all rows.
SHORT = ("prod of its dtype", "bitwise and", "bitwise or", "bitwise xor", "max", "min", "segment_sum", "at multiply")
FAST = ("micro-batches", "devices")


@pytest.mark.parametrize("method", FAST)
def test_parts_of_narrow_dtypes_are_combined_as_in_one_reduction(method: str) -> None:
    with doubles():
        cases = [Case(name, dtype) for dtype in ("int8", "uint4", "float32") for name in SHORT]
        cases += [Case("max", "bfloat16"), Case("einsum", "bool"), Case("prod of its dtype", "int8", axis=None)]
        cases = taken(cases)
        assert verdicts(cases, make_method(method)) == dict.fromkeys(cases, "equal")


def test_the_table_has_a_row_for_each_reduction_and_names_no_fault() -> None:
    rows = [line for line in PATH.read_text().splitlines() if line.startswith("| ")][1:]
    assert [line.split(" | ")[0] for line in rows] == [f"| {name}" for name in REDUCTIONS]
    assert all("wrong:" not in line and "crash:" not in line for line in rows)


@pytest.mark.slow
def test_the_table_is_what_comes_out() -> None:
    assert PATH.read_text() == page()
