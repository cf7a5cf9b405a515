"""Cost of reading batches in a training loop: a source that takes 80 % of a step's time, read by a `DataLoader`.

The claim: a step with batches of the loader takes at most 1.05 times as long as a step with batches that are on the
devices already. It holds for a source that sleeps, as a source does while it waits for disks or other processes, and
for devices that leave the cores of the host free, as GPUs do. The first case imitates such devices: the loop sleeps
after a small step.

In the other cases the devices are the cores themselves. A step then also takes the seconds to lay out a batch, which
have a column, and all seconds of a source that computes.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np

import minialpa
from benchmarks.registry import Rows, Size, benchmark
from benchmarks.timing import interleaved
from minialpa import models

N_BATCHES = 8
#: Seconds of the source for each batch, as a fraction of the seconds of a step.
SOURCE_PART = 0.8
N_TURNS = 7

#: The compared origins of the batches.
THERE, SLEEPING, COMPUTING, IN_LOOP = "there", "loader, source sleeps", "loader, source computes", "source in the loop"


@benchmark("input_pipeline")
def input_pipeline(size: Size) -> Rows:
    """Seconds of a step that reads its batch, from a loader and by itself, next to a batch on the devices."""
    is_full = size == "full"
    case = models.build("mlp", batch_size=256 if is_full else 16, hidden=512 if is_full else 8)
    small = models.build("mlp", batch_size=256 if is_full else 16, hidden=256 if is_full else 8)
    rows = []
    for name, method in {
        "data parallel": minialpa.DataParallel(),
        "4 micro-batches": minialpa.ShardParallel(num_micro_batches=4),
    }.items():
        for model, device_s in ((small, 0.06 if is_full else 0.002), (case, 0.0)):
            step = minialpa.parallelize(model.train_step(minialpa.value_and_grad), method=method)
            where = ", idle cores" if device_s else ""
            rows += _rows(name + where, step, model, device_s=device_s, repeats=10 if is_full else 2)
    return rows


def _rows(name: str, step: Any, case: Any, *, device_s: float, repeats: int) -> Rows:
    """device_s: seconds by which a device other than the cores would continue with the step."""
    batches = [case.make_batch(i, case.batch_size) for i in range(N_BATCHES)]
    seconds, source_s = _seconds(step, case, batches, device_s=device_s, repeats=repeats)
    place_s = statistics.median(interleaved({"": lambda: _place(step, batches[0])}, repeats)[""])
    return [
        {
            "case": name,
            "batches": how,
            "source_ms": 0.0 if how == THERE else source_s * 1e3,
            "place_ms": 0.0 if how == THERE else place_s * 1e3,
            "step_ms": statistics.median(own) * 1e3,
            "of_step": statistics.median(a / b for a, b in zip(own, seconds[THERE], strict=True)),
        }
        for how, own in seconds.items()
    ]


def _seconds(
    step: Any, case: Any, batches: list[Any], *, device_s: float, repeats: int
) -> tuple[dict[str, list[float]], float]:
    """Seconds of a step in each turn, by the origin of the batches; and seconds of the source for a batch."""
    states = {how: case.init(jax.random.key(0)) for how in (THERE, SLEEPING, COMPUTING, IN_LOOP)}
    step.get_executable(states[THERE], batches[0])
    placed = [step.place_batch(batch) for batch in batches]

    def run(how: str, given: Iterator[Any]) -> Callable[[], Any]:
        def call() -> Any:
            states[how], metrics = step(states[how], next(given))
            jax.block_until_ready(metrics)
            time.sleep(device_s)
            return states[how], metrics

        return call

    source_s = 0.0

    def source(wait: Callable[[float], None]) -> Iterator[Any]:
        for batch in itertools.cycle(batches):
            wait(source_s)
            yield batch

    seconds: dict[str, list[float]] = {how: [] for how in states}
    sources_s: list[float] = []
    with ExitStack() as open_loaders:
        given = {
            THERE: itertools.cycle(placed),
            SLEEPING: open_loaders.enter_context(minialpa.DataLoader(lambda: source(time.sleep), step)),
            COMPUTING: open_loaders.enter_context(minialpa.DataLoader(lambda: source(_compute), step)),
            IN_LOOP: source(time.sleep),
        }
        # A turn has many steps: with one step, the loader would read ahead while the others run. The speed of the
        # source follows the speed of the machine, which other work changes.
        for _ in range(N_TURNS):
            for how in states:
                times = interleaved({how: run(how, given[how])}, repeats, warm_up=4)[how]
                seconds[how].append(statistics.median(times))
                if how == THERE:
                    source_s = SOURCE_PART * seconds[how][-1]
                    sources_s.append(source_s)
    return seconds, statistics.median(sources_s)


def _compute(seconds: float) -> None:
    """Work on one core for a time, as decoding does, mostly without the global interpreter lock."""
    values = np.ones(1 << 14)
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        np.sin(values)


def _place(step: Any, batch: Any) -> None:
    for leaf in jax.tree.leaves(step.place_batch(batch)):
        leaf.block_until_ready()
