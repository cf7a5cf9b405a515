"""Measured timelines of steps, on the devices of one process and on workers."""

from __future__ import annotations

from pathlib import Path

import pytest

import minialpa
from minialpa.methods import Method
from tests.runtime.cluster.in_process_session import in_process_session
from tests.runtime.steps.timelines import check_order, check_step, pipeline


@pytest.mark.parametrize(
    ("method", "n_meshes"),
    [(pipeline(4), 2), (minialpa.ShardParallel(), 1)],
    ids=["pipeline", "shard"],
)
def test_every_call_has_its_time_on_its_mesh(method: Method, n_meshes: int, tmp_path: Path) -> None:
    program, tasks = check_step(method, [1] * n_meshes, tmp_path)
    check_order(program, tasks)
    arrivals = {task.track for task in tasks if task.track.startswith("from stage")}
    assert arrivals == ({"from stage 0", "from stage 1"} if n_meshes == 2 else set())


def test_every_call_has_its_time_on_every_worker(tmp_path: Path) -> None:
    with in_process_session(2, 2):
        _, tasks = check_step(pipeline(4), [1, 1], tmp_path)
    assert {task.mesh for task in tasks if task.name.startswith("Receive")} == {0, 1}
    assert {(task.mesh, task.host) for task in tasks} == {(0, 0), (1, 1)}
