"""The demo: a small GPT learns sums such as `12+7=19;` on virtual CPU devices and, to compare, on one device."""

from __future__ import annotations

import statistics
import time

import jax
import numpy as np

import minialpa
from minialpa import models
from minialpa.plan.text import seconds_text
from minialpa.support.progress import phase

#: A token is the index of a letter here.
_LETTERS = "0123456789+=;"
_SEQ_LEN = 64
#: Commands to try next, and their results.
NEXT_STEPS = (
    ("minialpa plan gpt-1.3b --cluster h100:2x8", "the plan of a larger model for 16 GPUs; needs no GPU"),
    ("minialpa plan my_model:make --html report.html", "the plan of your own step, as a page"),
)
#: Largest difference between the losses of both runs. Float32 sums in another order differ by about 1e-6.
_TOLERANCE = 1e-3


def synthetic_text(seed: int, n: int) -> dict[str, np.ndarray]:
    """Random sums: `tokens` and the `labels` that follow them, int32 [n, 64]."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(n):
        text = ""
        while len(text) <= _SEQ_LEN:
            a, b = (int(v) for v in rng.integers(0, 50, size=2))
            text += f"{a}+{b}={a + b};"
        rows.append([_LETTERS.index(c) for c in text[: _SEQ_LEN + 1]])
    tokens = np.array(rows, np.int32)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def run_demo(n_devices: int, n_steps: int) -> int:
    """Print the plan, both losses of each step and its time. Returns 0 if the losses agree, else 1."""
    case = models.build("gpt", hidden=128, n_layers=4, n_heads=4, seq_len=_SEQ_LEN, vocab_size=16, learning_rate=3e-3)
    method = minialpa.PipeshardParallel(
        num_micro_batches=4, layer_option=minialpa.AutoLayerOption(layer_num=4), stage_option="auto"
    )
    parallel_step = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=method)
    first_batch = synthetic_text(0, case.batch_size)
    with phase("compiling for one device"):
        parallel_state = serial_state = case.init(jax.random.key(0))
        serial_step = jax.jit(case.train_step(jax.value_and_grad)).lower(serial_state, first_batch).compile()

    start = time.perf_counter()
    executable = parallel_step.get_executable(parallel_state, first_batch)
    plan = executable.get_parallel_plan()
    print(plan.summary())
    print(f"\nPlanned and compiled in {time.perf_counter() - start:.1f} s.\n")

    print(f"step  {n_devices} devices  1 device  difference")
    worst, seconds = 0.0, []
    for step in range(n_steps):
        batch = synthetic_text(step, case.batch_size)
        start = time.perf_counter()
        parallel_state, parallel = parallel_step(parallel_state, batch)
        executable.sync()
        seconds.append(time.perf_counter() - start)
        serial_state, serial = serial_step(serial_state, batch)
        parallel_loss, serial_loss = float(parallel["loss"]), float(serial["loss"])
        difference = abs(parallel_loss - serial_loss)
        worst = max(worst, difference)
        print(f"{step:>4}  {parallel_loss:9.5f}  {serial_loss:8.5f}  {difference:10.1e}")

    print(f"\nThe losses agree to {worst:.1e}.")
    measured_s = statistics.median(seconds[1:] or seconds)  # the first step warms up
    print(
        f"A step takes {seconds_text(measured_s)} (median). The plan predicts {seconds_text(plan.cost.total_s)}, by "
        "figures of a typical CPU for each device.\nVirtual devices share the cores of this machine: `minialpa "
        f"calibrate --virtual-devices {n_devices} --out cpu.json` measures them for `--cluster`.\n"
    )
    print("Next:")
    width = max(len(command) for command, _ in NEXT_STEPS)
    for command, result in NEXT_STEPS:
        print(f"  {command:{width}}  {result}")
    print(f"  {'docs/training.md':{width}}  a training loop with checkpoints and restarts")
    return 0 if worst < _TOLERANCE else 1
