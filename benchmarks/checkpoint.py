"""Checkpoints: bytes per second of saving, next to `numpy.save`, and a training step while a checkpoint is written."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import minialpa
from benchmarks.registry import Rows, Size, benchmark
from minialpa import models


@benchmark("checkpoint")
def checkpoint(size: Size) -> Rows:
    """Saving and restoring a state, against numpy.save of the same bytes; steps during an asynchronous save."""
    model = models.build("mlp", hidden=1024 if size == "full" else 16, batch_size=64)
    step = minialpa.parallelize(model.train_step(minialpa.value_and_grad), method=minialpa.Zero3Parallel())
    batch = model.make_batch(0, model.batch_size)
    state, _ = step(model.init(jax.random.key(0)), batch)
    executable = step.get_last_executable()
    assert executable is not None
    n_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))

    repeats = 3 if size == "full" else 1
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        seconds: dict[str, list[float]] = {"numpy": [], "save": [], "restore": []}
        # In turns, so that all of them meet the same noise of the machine.
        for i in range(repeats):
            seconds["numpy"].append(_seconds(lambda: _numpy_save(root, state)))
            seconds["save"].append(_seconds(lambda i=i: minialpa.save_checkpoint(root / "saved", state, step=i)))
            seconds["restore"].append(
                _seconds(lambda: jax.block_until_ready(minialpa.restore_checkpoint(root / "saved", executable)))
            )
        quiet_s, busy_s, call_s = _steps(step, state, batch, root / "during", n_steps=8 if size == "full" else 2)

    numpy_s, save_s, restore_s = (statistics.median(seconds[name]) for name in ("numpy", "save", "restore"))
    return [
        {
            "case": "mlp, ZeRO-3",
            "mb": n_bytes / 1e6,
            "numpy_mb_per_s": n_bytes / 1e6 / numpy_s,
            "save_mb_per_s": n_bytes / 1e6 / save_s,
            "restore_mb_per_s": n_bytes / 1e6 / restore_s,
            "save_call_ms": call_s * 1e3,
            "step_ms": quiet_s * 1e3,
            "step_while_saving_ms": busy_s * 1e3,
        }
    ]


def _seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _numpy_save(root: Path, state: Any) -> None:
    for i, leaf in enumerate(jax.tree.leaves(state)):
        np.save(root / f"{i}.npy", np.asarray(leaf))


def _steps(step: Any, state: Any, batch: Any, folder: Path, n_steps: int) -> tuple[float, float, float]:
    """Median seconds of a step without and with a save under way, and seconds that the call of `save` takes."""
    quiet, busy, calls = [], [], []

    def train() -> None:
        nonlocal state
        state, _ = step(state, batch)
        jax.block_until_ready(jax.tree.leaves(state))

    with minialpa.CheckpointManager(folder, max_to_keep=1) as manager:
        train()
        for i in range(n_steps):
            quiet.append(_seconds(train))
            calls.append(_seconds(lambda i=i: manager.save(i, state)))
            busy.append(_seconds(train))
            manager.wait_until_finished()
    return statistics.median(quiet), statistics.median(busy), statistics.median(calls)
