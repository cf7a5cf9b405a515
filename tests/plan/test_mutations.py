"""An edited plan runs with the numbers of the serial run, or is refused by the name of the field."""

from __future__ import annotations

import numpy as np
import pytest

from tests.plan.mutations import SUBJECTS, mutation, outcome_of, subject

#: Edits of a short run, and of each of the long ones.
N_SHORT, N_LONG, N_RUNS = 30, 500, 10
#: Of the short run: tables without a pipeline, and stages that end in a loop.
SHORT = ("language", "blocks")


def assert_right_or_refused(first: int, n: int, names: tuple[str, ...]) -> None:
    """Every other edit is one of specs. Plans without edits are right."""
    for name in names:
        assert outcome_of(subject(name), subject(name).plan.to_json()).kind == "right", name
    for seed in range(first, first + n):
        on = subject(names[seed // 2 % len(names)])
        text, edit = mutation(np.random.default_rng(seed), on, of_specs=seed % 2 == 0)
        found = outcome_of(on, text)
        assert found.kind in ("right", "refused"), (seed, edit, found)


def test_edited_plans_are_right_or_refused() -> None:
    assert_right_or_refused(10**6, N_SHORT, SHORT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=pytest.mark.xdist_group(f"edits {run}")) for run in range(N_RUNS)]
)
def test_thousands_of_edited_plans_are_right_or_refused(run: int) -> None:
    assert_right_or_refused(run * N_LONG, N_LONG, tuple(SUBJECTS))
