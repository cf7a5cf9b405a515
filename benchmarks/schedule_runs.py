"""Steps of pipelines on workers, whose functions take fixed times, beside the simulation with these times.

The workers are threads of this process, with the programs and messages of a cluster. A function sleeps for its time
after its tiny computation, so a busy machine with few cores slows it little.
"""

from __future__ import annotations

import random
import re
import statistics
import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

import minialpa
from benchmarks.registry import Rows, Size, benchmark
from benchmarks.timing import interleaved
from minialpa import AutoLayerOption, PipeshardParallel, Plan, UniformStageOption
from minialpa.cluster import LinkSpec
from minialpa.inter.refine import or_synthesised
from minialpa.runtime.cluster.in_process import InProcessLauncher
from minialpa.runtime.workers.worker_program import WorkerProgram
from minialpa.session import _Current, _session_on

N_STAGES, N_LAYERS, WIDTH = 4, 8, 8
#: Seconds of a pass of one layer, by kind.
_LAYER_S = {"forward": 0.05, "backward": 0.06, "weights": 0.04}
_INSTANT = LinkSpec(0.0, 0.0)


def _step(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        y = x
        for w in params:
            y = y + jnp.tanh(y @ w)
        return jnp.mean(y**2)

    value, gradients = minialpa.value_and_grad(loss)(params)
    return [w - 0.1 * g for w, g in zip(params, gradients, strict=True)], value


def _method(schedule: str, n: int) -> PipeshardParallel:
    n_chunks = 2 if schedule.startswith(("1f1b-interleaved", "zb-v")) else 1
    return PipeshardParallel(
        num_micro_batches=n,
        pipeline_schedule=schedule.removesuffix(" found"),
        layer_option=AutoLayerOption(layer_num=N_LAYERS),
        stage_option=UniformStageOption(num_stages=N_STAGES, num_chunks=n_chunks),
    )


def _with_seconds(plan: Plan) -> tuple[Plan, dict[str, float]]:
    """The plan with unequal seconds of passes, and free updates and transfers; seconds by name of function."""
    rng, seconds, stages = random.Random(0), {}, []
    for stage in plan.stages:
        passes = []
        n_chunks = len({one.chunk for one in stage.passes})
        splits = {one.chunk for one in stage.passes if one.kind == "weights"}
        for one in stage.passes:
            each = _LAYER_S[one.kind]
            if one.kind == "backward" and one.chunk not in splits:
                each += _LAYER_S["weights"]
            taken = len(stage.layers) / n_chunks * each * rng.uniform(0.8, 1.2)
            seconds[f"{one.kind}{one.chunk}"] = taken
            passes.append(replace(one, compute_s=taken, communication_s=0.0))
        stages.append(replace(stage, passes=tuple(passes), update_s=0.0))
    cluster = replace(plan.cluster, intra_host=_INSTANT, inter_host=_INSTANT)
    return replace(plan, stages=tuple(stages), cluster=cluster), seconds


def _slow(seconds: dict[str, float]) -> Any:
    """A patch with which functions of workers also sleep."""
    compile_all = WorkerProgram._compile

    def after_sleep(function: Any, name: str) -> Any:
        pass_s = seconds.get(re.split(r"[^a-z0-9]", name)[0], 0.0)

        def call(*args: Any) -> Any:
            results = function(*args)
            time.sleep(pass_s)
            return results

        return call if pass_s else function

    def compiled(self: WorkerProgram, *args: Any, **kwargs: Any) -> list[Any]:
        functions = compile_all(self, *args, **kwargs)
        return [after_sleep(f, one.name) for f, one in zip(functions, self.program.functions, strict=True)]

    return patch.object(WorkerProgram, "_compile", compiled)


@benchmark("schedule_runs")
def schedule_runs(size: Size) -> Rows:
    """Seconds of steps on four workers with functions of fixed times, and the simulation's, for each schedule."""
    schedules = ["1f1b", "gpipe", "1f1b-interleaved", "zb-h1", "zb-v", "zb-v found"]
    n, repeats = (8, 3) if size == "full" else (2, 1)
    params, x = [0.1 * np.eye(WIDTH, dtype=np.float32)] * N_LAYERS, np.ones((8 * n, WIDTH), np.float32)
    return [_row(schedule, n, repeats, params, x) for schedule in (schedules if size == "full" else schedules[-1:])]


def _row(schedule: str, n: int, repeats: int, params: Any, x: Any) -> dict[str, Any]:
    minialpa.shutdown()
    _Current.session = _session_on(InProcessLauncher(jax.devices()[:N_STAGES], 1), None)
    try:
        planned = minialpa.parallelize(_step, method=_method(schedule, n), donate_argnums=()).plan(params, x)
        timed, seconds = _with_seconds(planned)
        if schedule.endswith("found"):
            timed = or_synthesised(timed)
        with _slow(seconds):
            method = replace(planned, schedule=timed.schedule, orders=timed.orders)
            step = minialpa.parallelize(_step, method=method, donate_argnums=())
            calls = {schedule: lambda: jax.device_get(step(params, x))}
            taken = interleaved(calls, repeats, warm_up=1)[schedule]
    finally:
        minialpa.shutdown()
    simulated_s = minialpa.simulate(timed).total_s
    return {
        "schedule": schedule,
        "simulated_s": simulated_s,
        "measured_s": statistics.median(taken),
        "over": statistics.median(taken) / simulated_s,
        "least_over": min(taken) / simulated_s,
    }
