"""The texts of the faults occur in the code. `python -m tests.equivalence.faults` runs with each fault."""

import ast
from collections import Counter

import pytest

from tests.equivalence.drawing import example_of, pieces
from tests.equivalence.faults import FAULTS, Fault, patched
from tests.equivalence.layers import RULES


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_one_place_of_the_code(fault: Fault) -> None:
    ast.parse(patched(fault))


def test_faults_have_names_of_their_own() -> None:
    assert [name for name, n in Counter(fault.name for fault in FAULTS).items() if n > 1] == []


def test_faults_name_parts_that_the_grammar_has() -> None:
    drawn = frozenset[str]().union(RULES, *(pieces(example_of(number)) for number in range(400)))
    assert {part for fault in FAULTS for part in fault.parts} <= drawn
