"""Bytes per second of saving a checkpoint, next to `numpy.save`, and a training step while a checkpoint is written.

Steps run on two kinds of devices: the cores of this machine, for which the saving threads compete, and devices that
leave the cores idle, as accelerators do. The second kind is a loop that sleeps after each of many small steps.

orbax waits until files are on the disk, so `numpy.save` is also measured with `os.fsync`. All measurements run in
turns, and a ratio is the median of the ratios of neighbouring runs, so that other work on the machine cancels out.
"""

from __future__ import annotations

import functools
import os
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
    """Saving and restoring states, against numpy.save of the same bytes; steps during an asynchronous save."""
    return [_row(hidden, size) for hidden in ([1024, 3072] if size == "full" else [16])]


def _row(hidden: int, size: Size) -> dict[str, Any]:
    """A state of 48 `hidden`^2 bytes in about 200 shards."""
    model = models.build("mlp", hidden=hidden, batch_size=64)
    step = minialpa.parallelize(model.train_step(minialpa.value_and_grad), method=minialpa.Zero3Parallel())
    batch = model.make_batch(0, model.batch_size)
    state, _ = step(model.init(jax.random.key(0)), batch)
    executable = step.get_last_executable()
    assert executable is not None
    n_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))

    repeats = 7 if size == "full" else 1
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        runs: dict[str, list[tuple[float, float]]] = {"numpy": [], "numpy_sync": [], "save": [], "restore": []}
        with minialpa.CheckpointManager(root / "saved", max_to_keep=1) as manager:

            def save(i: int) -> None:
                manager.save(i, state)
                manager.wait_until_finished()

            for i in range(repeats):
                runs["numpy"].append(_settled_seconds(lambda: _numpy_save(root, state, sync=False)))
                runs["numpy_sync"].append(_settled_seconds(lambda: _numpy_save(root, state, sync=True)))
                runs["save"].append(_settled_seconds(functools.partial(save, i)))
                runs["restore"].append(
                    _settled_seconds(lambda: jax.block_until_ready(manager.restore(like=executable).state))
                )
        steps = _steps(step, state, batch, root / "during", n_steps=12 if size == "full" else 2)

    mb = n_bytes / 1e6
    row: dict[str, Any] = {"case": "mlp, ZeRO-3", "mb": mb}
    row |= {f"{name}_mb_per_s": mb / statistics.median(wall for wall, _ in seen) for name, seen in runs.items()}
    row |= {f"{name}_cpu_s": statistics.median(cpu for _, cpu in seen) for name, seen in runs.items()}
    for name in ("numpy", "numpy_sync"):
        pairs = zip(runs[name], runs["save"], strict=True)
        row[f"save_speed_of_{name}"] = statistics.median(theirs / ours for (theirs, _), (ours, _) in pairs)
    return row | steps


def _settled_seconds(call: Any) -> tuple[float, float]:
    """As `_seconds`, after the disk has received all earlier writes."""
    os.sync()
    return _seconds(call)


def _seconds(call: Any) -> tuple[float, float]:
    """(wall-clock seconds, CPU seconds of this process)."""
    start, start_cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - start_cpu


def _numpy_save(root: Path, state: Any, *, sync: bool) -> None:
    for i, leaf in enumerate(jax.tree.leaves(state)):
        with (root / f"{i}.npy").open("wb") as file:
            np.save(file, np.asarray(leaf))
            if sync:
                file.flush()
                os.fsync(file.fileno())


def _steps(step: Any, state: Any, batch: Any, folder: Path, n_steps: int) -> dict[str, float]:
    """Steps without and with a save in progress, on the cores and beside idle cores, and the call of `save`."""
    add = jax.jit(lambda x: x + 1)

    def on_the_cores() -> None:
        nonlocal state
        state, _ = step(state, batch)
        jax.block_until_ready(jax.tree.leaves(state))

    def beside_the_cores() -> None:
        for i in range(20):
            jax.block_until_ready(add(i))
            time.sleep(0.02)

    found: dict[str, float] = {}
    with minialpa.CheckpointManager(folder, max_to_keep=1) as manager:
        for name, train in (("step", on_the_cores), ("idle_step", beside_the_cores)):
            train()
            quiet, busy, calls = [], [], []
            for _ in range(n_steps):
                before, _ = _seconds(train)
                number = (manager.latest_step() or 0) + 1
                calls.append(_seconds(lambda number=number: manager.save(number, state))[0])
                busy.append(_seconds(train)[0])
                manager.wait_until_finished()
                quiet.append((before + _seconds(train)[0]) / 2)
            found |= {
                "save_call_ms": statistics.median(calls) * 1e3,
                f"{name}_ms": statistics.median(quiet) * 1e3,
                f"{name}_ratio": statistics.median(b / q for b, q in zip(busy, quiet, strict=True)),
            }
    return found
