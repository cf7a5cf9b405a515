"""Synthesised orders: within budgets, never slower than named schedules, and near a bound that holds for all orders."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minialpa.errors import ShardingError, VerifyError
from minialpa.inter.schedule.schedules import Layout, Pass, PipelineSize, Schedule, order_texts, parsed_schedule
from minialpa.inter.schedule.synthesis import (
    ChunkWork,
    PipelineWork,
    bound_s,
    named_orders,
    peak_bytes,
    seconds_of,
    synthesise,
)


def part(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


@st.composite
def pipelines(draw: st.DrawFn, most_stages: int, n: st.SearchStrategy[int], *layouts: Layout) -> PipelineWork:
    """Chunks of unequal work, and bytes for at least as many micro-batches as 1F1B needs."""
    p, layout = draw(st.integers(2, most_stages)), draw(st.sampled_from(layouts))
    size = PipelineSize(p, draw(n), 1 if layout == "one" else 2, is_v=layout == "v")
    room = draw(st.sampled_from([0, 1, p, 100]))
    chunks = tuple(
        ChunkWork(
            seconds=(draw(part(0.5, 1.5)), draw(part(0.5, 1.5)), draw(part(0, 1.5))),
            kept=(draw(part(0, 0.5)), draw(part(0, 0.5)), draw(part(0, 0.5))),
            sends_s=(draw(part(0, 0.2)), draw(part(0, 0.2))),
        )
        for _ in size.stage_of
    )
    enough = [3.0 * p] * p if size.n_chunks > 1 else [p - k + 1.0 for k in range(p)]
    return PipelineWork(size, chunks, tuple(one + room for one in enough))


@settings(max_examples=25, deadline=None)
@given(pipelines(6, st.integers(1, 12), "one", "in turn", "v"))
def test_an_order_fits_and_is_never_slower_than_named_schedules(work: PipelineWork) -> None:
    made = synthesise(work)
    assert all(peak <= 1.000001 * budget for peak, budget in zip(peak_bytes(work, made), work.budgets, strict=True))
    assert parsed_schedule("zb", work.size, order_texts(made)).passes == made.passes
    assert bound_s(work) <= 1.000001 * seconds_of(work, made)
    assert seconds_of(work, made) <= 1.000001 * min(seconds_of(work, one) for one in named_orders(work.size))


def test_an_order_that_exceeds_a_budget_never_ends() -> None:
    work = PipelineWork(PipelineSize(2, 2), (ChunkWork(seconds=(1, 1, 1)),) * 2, (1.0, 1.0))
    assert math.isinf(seconds_of(work, named_orders(work.size)[0]))
    with pytest.raises(ValueError, match="No order of passes fits into the bytes"):
        synthesise(replace(work, budgets=(0.5, 1.0)))


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
@given(pipelines(2, st.just(2), "one"))
def test_of_all_orders_of_a_small_pipeline_none_is_below_the_bound(work: PipelineWork) -> None:
    best = min(seconds_of(work, one) for one in _ALL)
    assert bound_s(work) <= 1.000001 * best
    assert best <= 1.000001 * seconds_of(work, synthesise(work)) <= 1.003 * best


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
    # Chunk 1 of a V is all of the last stage.
    v = PipelineSize(2, 1, 2, is_v=True)
    assert parsed_schedule("zb", v, ("f0.0 f0.2 b0.2 b0.0 w0.0 w0.2", "f0.1 b0.1 w0.1")).passes[1][0].chunk == 1
    with pytest.raises(ShardingError, match=r"The order of stage 1 needs the passes f0\.1 to f0\.1"):
        parsed_schedule("zb", v, ("f0.0 f0.2 b0.2 b0.0 w0.0 w0.2", "f0.1 b0.1 w0.0"))
