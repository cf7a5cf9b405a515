"""Time to alternate training and evaluation on a Ray cluster: a small GPT in two stages, a worker for each.

With `FollowParallel` and without it, the evaluation is planned for the placements of the training state. So it starts
no workers and moves no state. Seconds are medians. The pairs (train, evaluate) and the steps of either alone run in
turns, each after a call of the same kind that does not count.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import optax

import minialpa
from benchmarks.ray_session import ray_session
from benchmarks.registry import Rows, Size, benchmark
from minialpa import models

N_STAGES = 2


@benchmark("ray_train_eval")
def ray_train_eval(size: Size) -> Rows:
    """Training and evaluation in turns on Ray, next to both alone: seconds, and the number of started workers."""
    sizes = {"hidden": 16} if size == "tiny" else {"hidden": 128, "n_layers": 4, "seq_len": 64}
    case = models.build("gpt", batch_size=8, **sizes)
    with ray_session(N_STAGES) as runtime:
        return [row for is_told in (False, True) for row in _rows(case, runtime, is_told, 2 if size == "tiny" else 15)]


def _loss(state: Any, batch: Any) -> Any:
    logits = state.apply_fn({"params": state.params}, batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def _rows(case: Any, runtime: Any, is_told: bool, repeats: int) -> Rows:
    method = minialpa.PipeshardParallel(
        num_micro_batches=2,
        layer_option=minialpa.AutoLayerOption(layer_num=N_STAGES),
        stage_option=minialpa.UniformStageOption(num_stages=N_STAGES),
    )
    train = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=method)
    follow = minialpa.FollowParallel(train) if is_told else None
    evaluate = minialpa.parallelize(_loss, method=follow)
    batch = case.make_batch(0, 8)
    held = {"state": case.init(jax.random.key(0))}

    def train_once() -> None:
        held["state"], _ = train(held["state"], batch)

    def evaluate_once() -> None:
        held["loss"] = evaluate(held["state"], batch)

    def seconds(*calls: Callable[[], None]) -> float:
        runtime.sync()
        start = time.perf_counter()
        for call in calls:
            call()
        runtime.sync()
        return time.perf_counter() - start

    for _ in range(2):
        seconds(train_once, evaluate_once)
    workers = {worker.number for worker in runtime.workers}
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        for name, calls in (("train", [train_once]), ("eval", [evaluate_once]), ("turns", [train_once, evaluate_once])):
            calls[0]()
            found[name].append(seconds(*calls))

    ms = {name: statistics.median(values) * 1e3 for name, values in found.items()}
    name = "FollowParallel" if is_told else "no method"
    started = len({worker.number for worker in runtime.workers} - workers)
    ratio = ms["turns"] / (ms["train"] + ms["eval"])
    return [
        {"case": f"train alone, {name}", "step_ms": ms["train"]},
        {"case": f"eval alone, {name}", "step_ms": ms["eval"]},
        {"case": f"in turns, {name}", "step_ms": ms["turns"], "over_sum": ratio, "workers_started": started},
    ]
