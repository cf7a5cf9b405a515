"""Synthesised orders of pipeline passes, beside named schedules and a bound."""

from __future__ import annotations

import random
import statistics

from benchmarks.registry import Rows, Size, benchmark
from minialpa.inter.schedule.schedules import PipelineSize
from minialpa.inter.schedule.synthesis import StageWork, bound_s, fits, named_orders, seconds_of, synthesise


def _pipeline(rng: random.Random) -> tuple[list[StageWork], int]:
    """Stages of unequal work, with room for as many micro-batches as stages, or for more."""
    p = rng.randint(2, 8)
    room = rng.choice([p, p + 1, 2 * p, 100 * p])
    stages = []
    for _ in range(p):
        forward, until_backward, after_backward = rng.uniform(0.7, 1.3), rng.uniform(0.2, 0.5), rng.uniform(0.1, 0.5)
        stages.append(
            StageWork(
                seconds=(forward, forward * rng.uniform(0.8, 1.3), forward * rng.uniform(0.6, 1.1)),
                kept=(until_backward, 1 - until_backward, after_backward),
                budget=room + after_backward * p / 2,
                sends_s=(rng.uniform(0, 0.1), rng.uniform(0, 0.1)),
            )
        )
    return stages, rng.randint(p, 4 * p)


@benchmark("schedules")
def schedules(size: Size) -> Rows:
    """Orders of passes for random stages and budgets: seconds over those of the best named order, and over a bound."""
    rng = random.Random(0)
    over_named: list[float] = []
    over_bound: list[float] = []
    for _ in range(500 if size == "full" else 10):
        stages, n = _pipeline(rng)
        seconds = seconds_of(stages, synthesise(stages, n))
        named = [one for one in named_orders(PipelineSize(len(stages), n)) if fits(stages, one)]
        over_named.append(seconds / min(seconds_of(stages, one) for one in named))
        over_bound.append(seconds / bound_s(stages, n))
    return [
        {
            "over": what,
            "least": min(ratios),
            "median": statistics.median(ratios),
            "90_percent": statistics.quantiles(ratios, n=10)[-1],
            "most": max(ratios),
        }
        for what, ratios in (("best named order", over_named), ("bound", over_bound))
    ]
