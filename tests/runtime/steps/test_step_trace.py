"""Measured timelines of steps on the devices of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

import minialpa
from minialpa.methods import Method
from tests.runtime.steps.timelines import check_order, check_step, pipeline


@pytest.mark.parametrize(
    ("method", "n_meshes"),
    [(pipeline(8), 2), (minialpa.ShardParallel(num_micro_batches=3), 1), (minialpa.ShardParallel(), 1)],
    ids=["pipeline", "micro-batches", "shard"],
)
def test_every_call_has_its_time_on_its_mesh(method: Method, n_meshes: int, tmp_path: Path) -> None:
    program, tasks = check_step(method, [1] * n_meshes, tmp_path)
    check_order(program, tasks)
    arrivals = {task.track for task in tasks if task.track.startswith("from stage")}
    assert arrivals == ({"from stage 0", "from stage 1"} if n_meshes == 2 else set())
