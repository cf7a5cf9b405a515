"""A pipeline of two stages against its schedule, in one process and on Ray, with a core for each stage.

The bound is the program's instructions on a clock. Each function takes its time of a run alone, a mesh does one thing
at a time, and transfers and all other work take no time. The bound in place is the same clock with the time of each
call in the measured step, because neighbouring functions share caches and memory, and the machine may be busy. These
times include the start of a function, so the bound in place is useful only for functions longer than microseconds.
Beside it are the times of empty calls.

The long functions scan over small layers, because XLA computes larger products on the threads of all devices of a
process. In one process, a function alone, or a function whose neighbour waits, would then have two cores.
The compiler's threads are counted when jax starts, so this runs in a separate process.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import minialpa
from benchmarks.ray_session import ONE_CORE, ray_session
from benchmarks.registry import Rows, Size, benchmark
from minialpa.programs.program import Accumulate, Program, Run, Transfer, reads
from minialpa.runtime.steps.step_trace import TaskTime

N_STAGES = 2
#: Turns before the counted ones: unused memory of Ray's object store takes twenty times as long to write.
N_WARM_UP = 4


@benchmark("ray_dispatch")
def ray_dispatch(size: Size) -> Rows:
    """Two stages, in one process and on Ray: step times next to the bound of 1F1B, and the time of a Ray call."""
    flags = f"{ONE_CORE['XLA_FLAGS']} --xla_force_host_platform_device_count={N_STAGES}"
    env = {**os.environ, **ONE_CORE, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks.ray_dispatch", size]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    rows: Rows = json.loads(done.stdout.splitlines()[-1])
    return rows


def main(size: Size) -> Rows:
    # Hidden size, layers of a stage, rows of a micro-batch, micro-batches, repeats.
    cases = [(8, 2, 4, 4, 2)] if size == "tiny" else [(8, 2, 4, 16, 50), (64, 500, 64, 16, 12)]
    local = [_Case(*case) for case in cases]  # before the session: a step belongs to one
    with ray_session(N_STAGES) as runtime:
        rows = [row for case in local for row in case.rows()]
        worker = next(iter(runtime._meshes.values())).workers[0]
        rows.append(_calls(worker.actor, repeats=3 if size == "tiny" else 300))
    return rows


def _train_step(stages: list[Any], batch: Any) -> Any:
    def loss(stages: list[Any]) -> jax.Array:
        x = batch["x"]
        for i, layers in enumerate(stages):
            if i:
                minialpa.mark_pipeline_boundary()
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)
        return jnp.mean((x - batch["y"]) ** 2)

    value, grads = minialpa.value_and_grad(loss)(stages)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, stages, grads), value


class _Case:
    """One model: its step in this process and, after a session starts, on Ray."""

    def __init__(self, hidden: int, n_layers: int, rows: int, n_micro_batches: int, repeats: int) -> None:
        self.name, self.repeats = f"{n_layers} layers of {hidden}", repeats
        self.method = minialpa.PipeshardParallel(
            num_micro_batches=n_micro_batches,
            layer_option="manual",
            stage_option=minialpa.UniformStageOption(num_stages=N_STAGES),
        )
        rng = np.random.default_rng(0)
        stages = [rng.standard_normal((n_layers, hidden, hidden), np.float32) / hidden**0.5 for _ in range(N_STAGES)]
        x, y = rng.standard_normal((2, rows * n_micro_batches, hidden), np.float32)
        self.state, self.batch = stages, {"x": x, "y": y}
        self.in_process = self._executable()

    def rows(self) -> Rows:
        executables = {"in-process": self.in_process, "ray": self._executable()}
        steps = {name: self._training(executable) for name, executable in executables.items()}
        seconds: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in executables}
        # In turns, with the functions in between, because other work on the machine varies.
        for i in range(N_WARM_UP + self.repeats):
            for name, executable in executables.items():
                found = {kind: value for step in steps[name] for kind, value in step().items()}
                if i % 4 == N_WARM_UP % 4:
                    found["bound"] = bound_alone_s(executable._program, executable.runner.function_seconds(5))
                for kind, value in found.items() if i >= N_WARM_UP else ():
                    seconds[name][kind].append(value)
        medians = {name: {kind: statistics.median(v) for kind, v in kinds.items()} for name, kinds in seconds.items()}
        return [self._row(name, executables[name]._program, medians) for name in executables]

    def _row(self, name: str, program: Program, medians: dict[str, dict[str, float]]) -> dict[str, Any]:
        n_tasks = sum(isinstance(i, Run | Accumulate) for i in program.instructions)
        own, bound = medians[name], medians[name]["bound"]
        return {
            "case": f"{self.name}, {name}",
            "tasks": n_tasks,
            "task_ms": bound / n_tasks * N_STAGES * 1e3,
            "bound_ms": bound * 1e3,
            "step_ms": own["waited for"] * 1e3,
            "ahead_ms": own["ahead"] * 1e3,
            "loss_read_ms": own["loss read"] * 1e3,
            "bound_over_step": bound / own["waited for"],
            "traced_step_ms": own["traced"] * 1e3,
            "timeline_ms": own["timeline"] * 1e3,
            "bound_in_place_ms": own["bound in place"] * 1e3,
            "bound_in_place_over_step": own["bound in place over step"],
            "us_over_bound_per_task": (own["waited for"] - bound) / n_tasks * 1e6,
            "times_in_process": own["waited for"] / medians["in-process"]["waited for"],
        }

    def _executable(self) -> Any:
        step = minialpa.parallelize(_train_step, method=self.method)
        return step.get_executable(self.state, self.batch)

    def _training(self, executable: Any) -> list[Callable[[], Mapping[str, float]]]:
        """Calls that run training steps and return seconds of a step.

        waited for: one step, to its end.
        loss read: one step, to its loss as a number.
        ahead: four steps, each started without waiting for the step before.
        traced: one step whose functions are timed, to its end.
        timeline: from the first event of a worker in the step to the last; the rest is the call and its arguments.
        """
        leaves = executable.place(jax.tree.leaves((self.state, self.batch)))
        n_state = len(jax.tree.leaves(self.state))

        def step(traced: bool = False) -> Any:
            results = executable.run(leaves, traced=traced)
            leaves[:n_state] = results[:n_state]
            return results[n_state:]

        def seconds(n_steps: int, run: Callable[[], Any]) -> float:
            executable.sync()
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) / n_steps

        def traced() -> Mapping[str, float]:
            step_s = seconds(1, lambda: (step(traced=True), executable.sync()))
            tasks = executable.runner.timeline()
            bound = bound_in_place_s(executable._program, tasks)
            return {
                "traced": step_s,
                "timeline": max(task.stop_s for task in tasks),
                "bound in place": bound,
                "bound in place over step": bound / step_s,
            }

        return [
            lambda: {"waited for": seconds(1, lambda: (step(), executable.sync()))},
            lambda: {"loss read": seconds(1, lambda: [float(metric) for metric in step()])},
            lambda: {"ahead": seconds(4, lambda: ([step() for _ in range(4)], executable.sync()))},
            traced,
        ]


def bound_alone_s(program: Program, seconds: Sequence[float]) -> float:
    """The bound of a step whose functions take `seconds`, equal for all calls."""
    calls = [(i, x.function) for i, x in enumerate(program.instructions) if isinstance(x, Run | Accumulate)]
    return bound_s(program, {i: seconds[function] for i, function in calls})


def bound_in_place_s(program: Program, tasks: Iterable[TaskTime]) -> float:
    """The bound of a step whose calls take their times in a timeline; on several hosts, the time of the slowest."""
    seconds: dict[int, float] = defaultdict(float)
    for task in tasks:
        if task.instruction is not None:
            seconds[task.instruction] = max(seconds[task.instruction], task.stop_s - task.start_s)
    return bound_s(program, seconds)


def bound_s(program: Program, seconds: Mapping[int, float]) -> float:
    """Seconds of a step to the end of the last mesh.

    seconds: time of each function call, by its instruction; all other instructions take no time.
    """
    free = [0.0] * len(program.meshes)
    ready: dict[int, float] = {}
    for i, instruction in enumerate(program.instructions):
        begin = max((ready.get(b, 0.0) for b in reads(instruction)), default=0.0)
        match instruction:
            case Run(number, _, made) | Accumulate(number, made, _):
                mesh = program.functions[number].mesh
                free[mesh] = max(free[mesh], begin) + seconds[i]
                ready.update((b, free[mesh]) for b in made)
            case Transfer(_, target):
                ready[target] = begin
    return max(free)


def _calls(actor: Any, repeats: int) -> dict[str, Any]:
    """The time of an empty call of a worker."""
    import ray

    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        ray.get(actor.call("free", []))
        seconds.append(time.perf_counter() - start)
    return {"case": "a Ray call", "step_ms": statistics.median(seconds) * 1e3, "least_ms": min(seconds) * 1e3}


if __name__ == "__main__":
    print(json.dumps(main("tiny" if sys.argv[1:] == ["tiny"] else "full")))
