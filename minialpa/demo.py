"""The demo: a small GPT learns sums such as `12+7=19;` on virtual CPU devices and, to compare, on one device."""

from __future__ import annotations

import time

import jax
import numpy as np

import minialpa
from minialpa import models

#: A token is the index of a letter here.
_LETTERS = "0123456789+=;"
_SEQ_LEN = 64
#: Largest difference between the losses of both runs. Float32 sums in another order differ by about 1e-6.
_TOLERANCE = 1e-3


def synthetic_text(seed: int, n: int) -> dict[str, np.ndarray]:
    """`n` random sequences of sums: `tokens` and the `labels` that follow them, int32 [n, 64]."""
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
    """Print the plan and both losses of each step. Returns the exit status: 0 if the losses agree, else 1."""
    case = models.build("gpt", hidden=128, n_layers=4, n_heads=4, seq_len=_SEQ_LEN, vocab_size=16, learning_rate=3e-3)
    method = minialpa.PipeshardParallel(
        num_micro_batches=4, layer_option=minialpa.AutoLayerOption(layer_num=4), stage_option="auto"
    )
    parallel_step = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=method)
    serial_step = jax.jit(case.train_step(jax.value_and_grad))
    parallel_state = serial_state = case.init(jax.random.key(0))

    start = time.perf_counter()
    executable = parallel_step.get_executable(parallel_state, synthetic_text(0, case.batch_size))
    print(executable.get_parallel_plan().summary())
    print(f"\nPlanned and compiled in {time.perf_counter() - start:.1f} s.\n")

    print(f"step  {n_devices} devices  1 device  difference")
    worst = 0.0
    for step in range(n_steps):
        batch = synthetic_text(step, case.batch_size)
        parallel_state, parallel = parallel_step(parallel_state, batch)
        serial_state, serial = serial_step(serial_state, batch)
        parallel_loss, serial_loss = float(parallel["loss"]), float(serial["loss"])
        difference = abs(parallel_loss - serial_loss)
        worst = max(worst, difference)
        print(f"{step:>4}  {parallel_loss:9.5f}  {serial_loss:8.5f}  {difference:10.1e}")

    print(f"\nThe losses agree to {worst:.1e}.")
    return 0 if worst < _TOLERANCE else 1
