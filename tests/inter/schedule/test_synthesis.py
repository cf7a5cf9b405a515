"""Synthesised orders: within budgets, never slower than named schedules, and near a bound that holds for all orders."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minialpa.errors import ShardingError, VerifyError
from minialpa.inter.schedule.schedules import Pass, PipelineSize, Schedule, order_text, parsed_schedule
from minialpa.inter.schedule.synthesis import StageWork, bound_s, fits, named_orders, seconds_of, synthesise


def part(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


@st.composite
def pipelines(draw: st.DrawFn, most_stages: int) -> list[StageWork]:
    """Stages of unequal work, which keep at least as many micro-batches as 1F1B needs."""
    p = draw(st.integers(2, most_stages))
    room = draw(st.sampled_from([0, 1, p, 100]))
    return [
        StageWork(
            seconds=(draw(part(0.5, 1.5)), draw(part(0.5, 1.5)), draw(part(0, 1.5))),
            kept=(draw(part(0, 0.5)), draw(part(0, 0.5)), draw(part(0, 0.5))),
            budget=p - k + 1 + room,
            sends_s=(draw(part(0, 0.2)), draw(part(0, 0.2))),
        )
        for k in range(p)
    ]


@settings(max_examples=25, deadline=None)
@given(pipelines(6), st.integers(1, 16))
def test_an_order_fits_and_is_never_slower_than_named_schedules(stages: list[StageWork], n: int) -> None:
    made = synthesise(stages, n)
    size = PipelineSize(len(stages), n)
    assert fits(stages, made)
    assert parsed_schedule("zb", size, [order_text(passes) for passes in made.passes]).passes == made.passes
    fitting = [seconds_of(stages, one) for one in named_orders(size) if fits(stages, one)]
    assert bound_s(stages, n) <= 1.000001 * seconds_of(stages, made)
    assert seconds_of(stages, made) <= 1.000001 * min(fitting)


def all_schedules(n: int) -> Iterator[Schedule]:
    """Of two stages."""
    words = set(itertools.permutations("f" * n + "b" * n + "w" * n))
    orders = []
    for word in words:
        counts = {kind: itertools.count() for kind in "fbw"}
        orders.append(" ".join(f"{kind}{next(counts[kind])}" for kind in word))
    for both in itertools.product(orders, repeat=2):
        try:
            yield parsed_schedule("zb", PipelineSize(2, n), both)
        except VerifyError:
            continue


_ALL = list(all_schedules(2))


@settings(max_examples=15, deadline=None)
@given(pipelines(2))
def test_of_all_orders_of_a_small_pipeline_none_is_below_the_bound(stages: list[StageWork]) -> None:
    best = min(seconds_of(stages, one) for one in _ALL if fits(stages, one))
    assert bound_s(stages, 2) <= 1.000001 * best
    assert best <= 1.000001 * seconds_of(stages, synthesise(stages, 2)) <= 1.15 * best


def test_orders_of_a_plan_are_checked() -> None:
    size = PipelineSize(2, 2)
    good = "f0 f1 b0 w0 b1 w1", "f0 b0 f1 b1 w0 w1"
    assert parsed_schedule("zb", size, good).passes[1][1] == Pass("backward", 1, 0)
    for wrong in ("f0 b0 f1 b1 w0", "f0 b0 f1 b1 w1 w0", "f0 b0 f1 b1 w0 x1", "f0 b0 f0 b1 w0 w1"):
        with pytest.raises(ShardingError, match="The order of stage 1 needs the passes f0 to f1"):
            parsed_schedule("zb", size, (good[0], wrong))
    # Stage 0 waits for the gradients of micro-batch 0 before it sends micro-batch 1, and stage 1 for micro-batch 1.
    with pytest.raises(VerifyError, match="stops after 2 of 12 passes"):
        parsed_schedule("zb", size, ("f0 b0 f1 b1 w0 w1", "f0 f1 b0 b1 w0 w1"))
