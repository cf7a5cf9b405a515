"""Trains models in separate processes, several at a time, and continues after a model that ends its process."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.models.all_models import MODELS
from benchmarks.models.row import DONE, ROW
from benchmarks.registry import Rows

#: Most models of one process. A process starts in seconds and keeps its allocated memory.
_PER_PROCESS = 8
#: Seconds for one model, after which its process is ended.
_MOST_S = 600.0

Done = Callable[[str, Rows], None]


def train(names: Sequence[str], n_processes: int, done: Done, is_over: Callable[[], bool] = lambda: False) -> None:
    """Train models, `n_processes` at a time.

    done: called with the name of a model and its complete rows, in one thread at a time.
    is_over: whether no other model may begin. An interruption by the keyboard ends the run in the same way: models in
        training finish first.
    """
    size = max(1, min(_PER_PROCESS, math.ceil(len(names) / n_processes)))
    groups = [list(names[i : i + size]) for i in range(0, len(names), size)]
    lock, interrupted = threading.Lock(), threading.Event()

    def train_group(group: list[str]) -> None:
        for name, rows in _rows_of_group(group, lambda: interrupted.is_set() or is_over()):
            with lock:
                done(name, rows)

    with ThreadPoolExecutor(n_processes) as pool:
        try:
            for future in [pool.submit(train_group, group) for group in groups]:
                future.result()
        except BaseException:
            interrupted.set()
            raise


def _rows_of_group(names: list[str], is_over: Callable[[], bool]) -> Iterator[tuple[str, Rows]]:
    """The rows of each model. If a model ends the process, a new process trains the models after it."""
    while names and not is_over():
        process, rows = _Process(names), list[dict[str, Any]]()
        try:
            for line in process.lines():
                if line.startswith(ROW):
                    rows.append(json.loads(line.removeprefix(ROW)))
                elif line.startswith(DONE):
                    yield names[0], rows
                    names, rows = names[1:], []
                    if is_over():
                        return
        finally:
            process.end()
        if names:
            crash = {"method": "", "outcome": "crash", "detail": f"the process ended with code {process.code}"}
            yield names[0], [*rows, _described(names[0]) | crash]
            names = names[1:]


def _described(name: str) -> dict[str, Any]:
    model = MODELS[name]
    return {"name": name, "package": ", ".join(model.packages), "model": model.model, "optimizer": model.optimizer}


class _Process:
    """A process that trains models. It is ended if one takes too long."""

    def __init__(self, names: Sequence[str]) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.models.row", *names]
        # Neither of the other two frameworks of transformers; keras on jax.
        environment = os.environ | {"USE_TF": "0", "USE_TORCH": "0", "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
        # In its own session, so that an interruption by the keyboard reaches only the parent. An interrupted model
        # would count as a crash.
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.code: int | None = None

    def lines(self) -> Iterator[str]:
        """The lines that the process prints, until it ends."""
        assert self._process.stdout is not None
        timer = self._timer()
        for line in self._process.stdout:
            if line.startswith(DONE):
                timer.cancel()
                timer = self._timer()
            yield line.rstrip("\n")
        timer.cancel()
        self.code = self._process.wait()

    def end(self) -> None:
        """End the process, if it has not ended."""
        self._process.kill()
        self._process.wait()

    def _timer(self) -> threading.Timer:
        timer = threading.Timer(_MOST_S, self._process.kill)
        timer.daemon = True
        timer.start()
        return timer
