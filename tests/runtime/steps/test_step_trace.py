"""Measured timelines of steps, on the devices of one process and on workers, keep some laws."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path

import jax
import pytest

import minialpa
from minialpa import models
from minialpa.methods import Method
from minialpa.programs.program import Accumulate, Program, Run, Transfer, reads, writes
from minialpa.runtime.steps.step_trace import FUNCTIONS, TaskTime
from minialpa.testing import assert_allclose
from tests.runtime.cluster.in_process_session import in_process_session

N_MICRO_BATCHES = 3


def pipeline(n_devices: int) -> Method:
    """Two stages of half the devices each."""
    half = (1, n_devices // 2)
    stages = minialpa.ManualStageOption(
        forward_stage_layer_ids=[[0], [1]],
        submesh_physical_shapes=[half, half],
        submesh_logical_shapes=[half, half],
        submesh_autosharding_option_dicts=[{}, {}],
    )
    layers = minialpa.AutoLayerOption(layer_num=2)
    return minialpa.PipeshardParallel(num_micro_batches=N_MICRO_BATCHES, layer_option=layers, stage_option=stages)


def check_step(method: Method, n_hosts: list[int], folder: Path) -> tuple[Program, tuple[TaskTime, ...]]:
    """Trains a step, traces one, and trains another; returns the trace. n_hosts: of each mesh."""
    model = models.build("mlp", batch_size=4 * N_MICRO_BATCHES, hidden=8, n_layers=2)
    step = minialpa.parallelize(model.train_step(minialpa.value_and_grad), method=method)
    plain = jax.jit(model.train_step(jax.value_and_grad))
    batch = model.make_batch(0, model.batch_size)
    state, _ = step(model.init(jax.random.key(0)), batch)
    expected, _ = plain(model.init(jax.random.key(0)), batch)

    executable = step.get_last_executable()
    executable.dump_stage_execution_trace(folder / "trace.json")
    tasks = executable.stage_timeline()
    program = executable._program

    assert_allclose(state, expected, rtol=1e-4, atol=1e-6)
    assert_allclose(step(state, batch)[0], plain(expected, batch)[0], rtol=1e-4, atol=1e-6)
    _check_laws(program, tasks, n_hosts)
    _check_file(folder / "trace.json", program, n_hosts)
    return program, tasks


def calls(program: Program) -> dict[int, tuple[int, str]]:
    """The mesh and the function of each instruction that calls one."""
    found = {i: x.function for i, x in enumerate(program.instructions) if isinstance(x, Run | Accumulate)}
    return {i: (program.functions[f].mesh, program.functions[f].name) for i, f in found.items()}


def _check_laws(program: Program, tasks: tuple[TaskTime, ...], n_hosts: list[int]) -> None:
    timed = [(t.instruction, t.mesh, t.name) for t in tasks if t.instruction is not None]
    expected = [(i, mesh, name) for i, (mesh, name) in calls(program).items() for _ in range(n_hosts[mesh])]
    assert sorted(timed) == sorted(expected)
    assert len({(t.mesh, t.host, t.instruction) for t in tasks if t.instruction is not None}) == len(expected)
    tracks: dict[tuple[int, int, str], list[TaskTime]] = defaultdict(list)
    for task in tasks:
        assert 0 <= task.start_s <= task.stop_s
        tracks[task.mesh, task.host, task.track].append(task)
    assert min(task.start_s for task in tasks) == 0
    for mine in tracks.values():
        assert all(a.stop_s <= b.start_s for a, b in itertools.pairwise(mine))
    for (_, _, track), mine in tracks.items():
        numbers = [task.instruction for task in mine if task.instruction is not None]
        assert track == FUNCTIONS if numbers else True
        assert numbers == sorted(numbers)


def check_order(program: Program, tasks: tuple[TaskTime, ...]) -> None:
    """A call begins after the end of all calls that make its operands, here or on another mesh."""
    times = {task.instruction: task for task in tasks if task.instruction is not None}
    made_s: dict[int, float] = {}
    for i, instruction in enumerate(program.instructions):
        ready_s = max((made_s.get(b, 0.0) for b in reads(instruction)), default=0.0)
        if i in times:
            assert times[i].start_s >= ready_s
        if not isinstance(instruction, Run | Accumulate | Transfer):
            continue
        made_s.update(dict.fromkeys(writes(instruction), times[i].stop_s if i in times else ready_s))


def _check_file(path: Path, program: Program, n_hosts: list[int]) -> None:
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names) == list(range(len(program.meshes)))
    assert all(name.startswith(f"stage {mesh}, ") for mesh, name in names.items())
    shown = [(e["pid"], e["name"], e["args"]["instruction"]) for e in events if e.get("cat") == FUNCTIONS]
    expected = [(mesh, name, i) for i, (mesh, name) in calls(program).items() for _ in range(n_hosts[mesh])]
    assert sorted(shown) == sorted(expected)
    counts = {e["args"]["call"] for e in events if e.get("cat") == FUNCTIONS and e["name"] == "forward0"}
    assert counts <= set(range(N_MICRO_BATCHES))


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
