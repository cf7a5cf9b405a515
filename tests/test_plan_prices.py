"""A plan predicts the seconds of its compiled program's communication, at the prices of its mesh."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import pytest

import minialpa
from benchmarks import compiled_figures
from minialpa import AutoShardingOption, DataParallel, LogicalMesh, ShardParallel, hlo, models

LINE = LogicalMesh((4,))
#: Two halves with slow links between them.
HALVES = LogicalMesh((2, 2))


def step_of(name: str, method: Any) -> tuple[Any, tuple[Any, Any]]:
    """A parallelized step and its arguments."""
    case = models.build(name)
    state = jax.eval_shape(case.init, jax.random.key(0))
    parallel = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=method)
    return parallel, (state, case.make_batch(0, case.batch_size))


def compiled_s(name: str, method: Any) -> tuple[float, float]:
    """Seconds of communication: (predicted by the plan, in the compiled programs)."""
    parallel, args = step_of(name, method)
    executable = parallel.get_executable(*args)
    moved = [one for text in executable.get_hlo_text() for one in compiled_figures.collectives(text)]
    return executable.get_parallel_plan().cost.total_s, hlo.seconds(moved, method.devices)


@pytest.mark.parametrize("mesh", [LINE, HALVES], ids=["line", "halves"])
@pytest.mark.parametrize("name", ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt", "bert"))])
def test_the_loss_and_all_gradients_start_together(name: str, mesh: LogicalMesh) -> None:
    predicted, compiled = compiled_s(name, DataParallel(devices=mesh))
    assert predicted == pytest.approx(compiled, rel=1e-3)


@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt", marks=pytest.mark.slow)])
def test_no_plan_is_dearer_than_data_parallelism(name: str) -> None:
    _, searched = compiled_s(name, ShardParallel(devices=HALVES))
    _, data = compiled_s(name, DataParallel(devices=HALVES))
    assert searched <= data * (1 + 1e-6)


def test_more_memory_is_never_slower() -> None:
    def within(limit_bytes: float | None) -> tuple[float, float]:
        option = AutoShardingOption(memory_limit_bytes=limit_bytes)
        parallel, args = step_of("mlp", ShardParallel(devices=LINE, auto_sharding_option=option))
        plan = parallel.plan(*args)
        seconds, peak_bytes = plan.cost.total_s, max(stage.peak_bytes for stage in plan.stages)
        assert limit_bytes is None or peak_bytes <= limit_bytes
        return seconds, peak_bytes

    best_s, most_bytes = within(None)
    seconds = [within(part * most_bytes)[0] for part in (0.8, 0.95)] + [best_s]
    assert seconds[0] > best_s
    assert all(more <= less * (1 + 1e-3) for less, more in itertools.pairwise(seconds))
