"""Synthesised orders of pipeline passes, beside named schedules and a bound."""

from __future__ import annotations

import math
import random
import statistics
import time

from benchmarks.registry import Rows, Size, benchmark
from minialpa.inter.schedule.schedules import Layout, PipelineSize
from minialpa.inter.schedule.synthesis import ChunkWork, PipelineWork, bound_s, named_orders, seconds_of, synthesise


def _pipelines(rng: random.Random) -> dict[Layout, PipelineWork]:
    """Stages of unequal work, with room for as many micro-batches as stages, or for more; as one or two chunks each."""
    p = rng.randint(2, 8)
    n = rng.randint(p, 4 * p)
    room = rng.choice([p, p + 1, 2 * p, 100 * p])
    stages, budgets = [], []
    for _ in range(p):
        forward, until_backward, after_backward = rng.uniform(0.7, 1.3), rng.uniform(0.2, 0.5), rng.uniform(0.1, 0.5)
        stages.append(
            ChunkWork(
                seconds=(forward, forward * rng.uniform(0.8, 1.3), forward * rng.uniform(0.6, 1.1)),
                kept=(until_backward, 1 - until_backward, after_backward),
                sends_s=(rng.uniform(0, 0.1), rng.uniform(0, 0.1)),
            )
        )
        budgets.append(room + after_backward * p / 2)
    sizes = PipelineSize(p, n), PipelineSize(p, n, 2), PipelineSize(p, n, 2, is_v=True)
    return {
        size.layout: PipelineWork(
            size, tuple(_part(stages[k], size.stage_of.count(k)) for k in size.stage_of), tuple(budgets)
        )
        for size in sizes
    }


def _part(stage: ChunkWork, n_chunks: int) -> ChunkWork:
    """One of the equal chunks of a stage."""
    (f, b, w), (until_backward, until_weights, after_backward) = stage.seconds, stage.kept
    return ChunkWork(
        seconds=(f / n_chunks, b / n_chunks, w / n_chunks),
        kept=(until_backward / n_chunks, until_weights / n_chunks, after_backward / n_chunks),
        sends_s=stage.sends_s,
    )


@benchmark("schedules")
def schedules(size: Size) -> Rows:
    """Orders of passes for random stages and budgets: seconds over the best named order and a bound, for each layout
    of chunks, and the best of all layouts over the best named order of any layout.
    """
    rng = random.Random(0)
    ratios: dict[str, list[float]] = {}
    taken_s: dict[str, float] = {}
    n_pipelines = 500 if size == "full" else 5
    for _ in range(n_pipelines):
        made_s, least_named_s = [], []
        for layout, work in _pipelines(rng).items():
            start_s = time.perf_counter()
            made_s.append(seconds_of(work, synthesise(work)))
            taken_s[layout] = taken_s.get(layout, 0.0) + time.perf_counter() - start_s
            least_named_s.append(min(seconds_of(work, one) for one in named_orders(work.size)))
            if not math.isinf(least_named_s[-1]):
                ratios.setdefault(f"{layout}, named", []).append(made_s[-1] / least_named_s[-1])
            ratios.setdefault(f"{layout}, bound", []).append(made_s[-1] / bound_s(work))
        ratios.setdefault("best, named", []).append(min(made_s) / min(least_named_s))
    return [
        {
            "chunks": what.split(", ")[0],
            "over": what.split(", ")[1],
            "least": min(one),
            "median": statistics.median(one),
            "90_percent": statistics.quantiles(one, n=10)[-1],
            "most": max(one),
            "s_each": taken_s.get(what.split(", ")[0], 0.0) / n_pipelines,
        }
        for what, one in ratios.items()
    ]
