"""Microseconds to issue an instruction: a pipeline of 4 stages with almost empty tasks, on 4 devices of this process.

The reference is a hand-written loop with the same number of calls of one jitted function and of `device_put`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import minialpa
from benchmarks.registry import Rows, Size, benchmark
from benchmarks.timing import interleaved
from minialpa import models
from minialpa.programs.program import Accumulate, Program, Run, Transfer

N_STAGES = 4


@benchmark("dispatch")
def dispatch(size: Size) -> Rows:
    """A pipeline of tiny tasks: microseconds for each instruction, next to a bare loop with as many tasks."""
    n_micro_batches = 16 if size == "full" else 4
    case = models.build("mlp", batch_size=4 * n_micro_batches, hidden=8)
    method = minialpa.PipeshardParallel(
        devices=jax.devices()[:N_STAGES],
        num_micro_batches=n_micro_batches,
        layer_option=minialpa.AutoLayerOption(layer_num=N_STAGES),
        stage_option=minialpa.UniformStageOption(num_stages=N_STAGES),
    )
    step = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=method)
    state, batch = case.init(jax.random.key(0)), case.make_batch(0, case.batch_size)
    executable = step.get_executable(state, batch)
    program: Program = executable._program
    kinds = [type(instruction) for instruction in program.instructions]
    n_tasks = kinds.count(Run) + kinds.count(Accumulate)
    n_transfers = kinds.count(Transfer)

    def pipeline() -> Any:
        nonlocal state
        state, metrics = step(state, batch)
        return state, metrics

    calls = {"minialpa": pipeline, "bare loop": bare_loop(n_tasks, n_transfers)}
    seconds = interleaved(calls, repeats=50 if size == "full" else 2)
    return [
        {
            "case": name,
            "tasks": n_tasks,
            "transfers": n_transfers,
            "step_us": (step_us := statistics.median(seconds[name]) * 1e6),
            "us_per_task": step_us / n_tasks,
            "us_per_task_or_transfer": step_us / (n_tasks + n_transfers),
        }
        for name in calls
    ]


def bare_loop(n_tasks: int, n_transfers: int) -> Callable[[], Any]:
    """A call that runs `n_tasks` tiny jitted tasks, round robin over the devices, with `n_transfers` moves between."""
    devices = jax.devices()[:N_STAGES]
    task = jax.jit(lambda x, w: jnp.maximum(x @ w, 0))
    weights = [jax.device_put(jnp.eye(8, dtype=jnp.float32), device) for device in devices]

    def loop() -> Any:
        here = [jnp.ones((4, 8), jnp.float32, device=device) for device in devices]
        for i in range(max(n_tasks, n_transfers)):
            k, after = i % N_STAGES, (i + 1) % N_STAGES
            if i < n_tasks:
                here[k] = task(here[k], weights[k])
            if i < n_transfers:
                here[after] = jax.device_put(here[k], devices[after])
        return here

    return loop
