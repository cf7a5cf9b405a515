"""Drawn training steps under drawn methods compute what the serial run does, or an error names the operation."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.equivalence.drawing import Example, example_of
from tests.equivalence.engine import run
from tests.equivalence.layers import Layer
from tests.equivalence.losses import Loss, Term
from tests.equivalence.model import Model
from tests.equivalence.outcomes import Outcome
from tests.equivalence.run import summary
from tests.equivalence.steps import Training
from tests.equivalence.ways import Way

#: The largest part of the examples that may be refused.
MOST_REFUSED = 0.1


def _drawn(n: int) -> list[tuple[Example, Outcome, float]]:
    """What becomes of `n` examples, always the same ones."""
    found: list[tuple[Example, Outcome, float]] = []

    # Every number is an example of its own, so hypothesis does not shrink it: `run.py --smaller` does.
    @settings(
        max_examples=n,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**32).map(example_of))
    def collect(example: Example) -> None:
        found.append((example, run(example), 0.0))

    collect()
    return found


def _check(found: list[tuple[Example, Outcome, float]]) -> None:
    faults = [f"{o.kind}: {o.detail}\n{example}" for example, o, _ in found if o.kind in ("wrong", "crash")]
    assert not faults, "\n\n".join((*faults, summary(found)))
    refused = sum(outcome.kind != "equal" for _, outcome, _ in found)
    assert refused <= MOST_REFUSED * len(found), summary(found)


#: Examples that were wrong or crashed once, made smaller.
_MODEL, _MEAN, _WEIGHTED = Model("vector", ()), Loss((Term("squared", "mean"),)), Loss((Term("squared", "weighted"),))
FOUND = {
    "totals computed again": Example(Training(_MODEL, _WEIGHTED), Way("pipeline", (2,), remat="full")),
    "gradients in a row, computed again": Example(
        Training(Model("vector", (Layer("parted"),), boundary=1), _MEAN, "three gradients"),
        Way("pipeline", (2,), remat="full"),
    ),
    "a maximum, computed again": Example(
        Training(
            Model("vector", (Layer("group_norm"), Layer("maxout"))), Loss((Term("squared", "entropy of the mean"),))
        ),
        Way("pipeline", (2,), remat="full"),
    ),
    "a scan of two is cut": Example(
        Training(
            Model("sequence", (Layer("weight_normalised", "stack"), Layer("attention", "stack"), Layer("attention"))),
            Loss((Term("squared", "mean"),), decay=0.01),
        ),
        Way("3d", (2,)),
    ),
    "rows that the derivative of a scan reads": Example(
        Training(Model("sequence", (Layer("queries_in_blocks"),)), _MEAN), Way("shard", (1,), attention="fused")
    ),
    "a ragged batch behind another": Example(
        Training(Model("sequence", (Layer("halting"),)), _MEAN, batch_size=6), Way("shard", (1,), 4, first=8)
    ),
    "a stage without work": Example(Training(_MODEL, _MEAN, "only the head"), Way("pipeline", (2,))),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_right(name: str) -> None:
    outcome = run(FOUND[name])
    assert outcome.kind in ("equal", "refused"), outcome.detail


def test_six_drawn_steps_equal_the_serial_run() -> None:
    _check(_drawn(6))
