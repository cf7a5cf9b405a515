"""Drawn training steps under drawn methods compute the results of the serial run, or an error names the operation."""

from __future__ import annotations

import pytest

from tests.equivalence.drawing import Example, example_of, pieces
from tests.equivalence.engine import run
from tests.equivalence.layers import Layer
from tests.equivalence.losses import Loss, Term
from tests.equivalence.model import Model
from tests.equivalence.steps import Training
from tests.equivalence.ways import Way

#: Drawn examples that compile fast. Together they have nearly all parts of the grammar.
DRAWN = (66, 71, 104, 127, 142, 145, 149, 181)


@pytest.mark.parametrize("number", DRAWN)
def test_a_drawn_step_equals_the_serial_run(number: int) -> None:
    outcome = run(example_of(number))
    assert outcome.kind == "equal", f"{outcome.detail}\n{example_of(number)}"


def test_drawn_steps_have_nearly_all_parts_of_the_grammar() -> None:
    of_all, of_these = ({piece for n in numbers for piece in pieces(example_of(n))} for numbers in (range(400), DRAWN))
    assert of_all - of_these <= {"absent class", "narrow totals", "norm of the whole batch"}


#: Small versions of examples that were wrong or crashed once.
_MODEL, _MEAN, _WEIGHTED = Model("vector", ()), Loss((Term("squared", "mean"),)), Loss((Term("squared", "weighted"),))
FOUND = {
    "sums recomputed": Example(Training(_MODEL, _WEIGHTED), Way("pipeline", (2,), remat="full")),
    "gradients in a row, recomputed": Example(
        Training(Model("vector", (Layer("parted"),), boundary=1), _MEAN, "three gradients"),
        Way("pipeline", (2,), remat="full"),
    ),
    "a maximum, recomputed": Example(
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
    "a ragged batch after another": Example(
        Training(Model("sequence", (Layer("halting"),)), _MEAN, batch_size=6), Way("shard", (1,), 4, first=8)
    ),
    "a stage without work": Example(Training(_MODEL, _MEAN, "only the head"), Way("pipeline", (2,))),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_right(name: str) -> None:
    outcome = run(FOUND[name])
    assert outcome.kind in ("equal", "refused"), outcome.detail
