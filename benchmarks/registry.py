"""The table of benchmarks: a size in, rows of results out. A case is a file of this folder that registers itself."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, Literal

Size = Literal["tiny", "full"]
Rows = list[dict[str, Any]]  # Units are in the names of the columns.
Run = Callable[[Size], Rows]

_CASES: dict[str, Run] = {}


def benchmark(name: str) -> Callable[[Run], Run]:
    """Register a function under `name`. Size `tiny` checks in seconds that it runs; `full` gives meaningful numbers."""

    def register(run: Run) -> Run:
        if name in _CASES:
            raise ValueError(f"There are two benchmarks `{name}`, in {_CASES[name].__module__} and {run.__module__}.")
        _CASES[name] = run
        return run

    return register


def all_benchmarks() -> dict[str, Run]:
    """Every registered benchmark by name, in alphabetical order."""
    package = importlib.import_module("benchmarks")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"benchmarks.{module.name}")
    return dict(sorted(_CASES.items()))
