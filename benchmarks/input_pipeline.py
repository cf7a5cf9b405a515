"""What reading batches costs a training loop: a source that takes 80 % of a step's time, read by a `DataLoader`.

The source sleeps, as one does that reads from disks or other processes. Beside it stands the same step on batches that
are on the devices already, and a loop that reads between steps.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

import minialpa
from benchmarks.registry import Rows, Size, benchmark
from benchmarks.timing import interleaved
from minialpa import models

N_BATCHES = 8
#: Seconds of the source for each batch, as a part of the seconds of a step.
SOURCE_PART = 0.8
N_TURNS = 7


@benchmark("input_pipeline")
def input_pipeline(size: Size) -> Rows:
    """Seconds of a step that reads its batch, from a loader and by itself, next to a batch that is there already."""
    is_full = size == "full"
    case = models.build("mlp", batch_size=256 if is_full else 16, hidden=256 if is_full else 8)
    rows = []
    for name, method in {
        "data parallel": minialpa.DataParallel(),
        "4 micro-batches": minialpa.ShardParallel(num_micro_batches=4),
    }.items():
        step = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=method)
        rows += _rows(name, step, case, repeats=15 if is_full else 2)
    return rows


def _rows(name: str, step: Any, case: Any, repeats: int) -> Rows:
    batches = [case.make_batch(i, case.batch_size) for i in range(N_BATCHES)]
    states = {}
    for how in ("there", "loader", "in the loop"):
        states[how] = case.init(jax.random.key(0))
    placed = [step.preshard_dynamic_args(states["there"], batch)[1] for batch in batches]

    def run(how: str, given: Iterator[Any]) -> Callable[[], Any]:
        def call() -> Any:
            states[how], metrics = step(states[how], next(given))
            return states[how], metrics

        return call

    source_s = 0.0

    def source() -> Iterator[Any]:
        for batch in itertools.cycle(batches):
            time.sleep(source_s)
            yield batch

    seconds: dict[str, list[float]] = {how: [] for how in states}
    sources_s: list[float] = []
    with minialpa.DataLoader(source, step) as loader:
        given = {"there": itertools.cycle(placed), "loader": loader, "in the loop": source()}
        # In turns of many steps: in turns of one, the loader would read ahead while the others run. The source follows
        # the speed of the machine, which other work on it changes.
        for _ in range(N_TURNS):
            for how in states:
                times = interleaved({how: run(how, given[how])}, repeats, warm_up=4)[how]
                seconds[how].append(statistics.median(times))
                if how == "there":
                    source_s = SOURCE_PART * seconds[how][-1]
                    sources_s.append(source_s)

    return [
        {
            "case": name,
            "batches": how,
            "source_ms": 0.0 if how == "there" else statistics.median(sources_s) * 1e3,
            "step_ms": statistics.median(seconds[how]) * 1e3,
            "of_step": statistics.median(a / b for a, b in zip(seconds[how], seconds["there"], strict=True)),
        }
        for how in states
    ]
