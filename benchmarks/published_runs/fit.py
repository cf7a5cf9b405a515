"""Runs in, the constants of `KernelRates` that come closest to their seconds out, for each kind of GPU.

At fixed shardings, the seconds of a step are linear in the reciprocals of the constants. So each run is planned once
for each fitted constant, with this constant halved, and the rest is a search over a few numbers.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from benchmarks.planning import planned
from benchmarks.published_runs.predict import cluster_of, method_of, traced
from benchmarks.published_runs.record import Run
from minialpa.cluster import KernelRates
from minialpa.tracing.trace import TracedStep

#: The fitted constants; the products' other constants come from tables.
_FITTED = ("sustained", "memory_efficiency", "attention_efficiency")

#: A memory size without effect, for the fastest shardings.
_PLENTY = 1e15


def fit(runs: Sequence[Run]) -> str:
    """A line for each kind of GPU."""
    groups = defaultdict[str, list[Run]](list)
    for run in runs:
        if run.step_s is not None:
            groups[run.gpu[:4]].append(run)
    return "\n".join(f"{kind}: {_fitted(group)}" for kind, group in groups.items())


def _fitted(runs: Sequence[Run]) -> str:
    parts = np.array([_parts_s(run) for run in runs])
    measured = np.array([run.step_s for run in runs])
    weights = _weights(runs)

    def error(logs: NDArray[np.float64]) -> float:
        predicted = parts[:, -1] + parts[:, :-1] @ np.exp(-logs)
        return float(np.average(np.abs(np.log(predicted / measured)), weights=weights))

    found = min(
        (minimize(error, np.full(len(_FITTED), start), method="Nelder-Mead") for start in (-0.5, 0.0, 0.5)),
        key=lambda result: result.fun,
    )
    start = _kernels(runs[0])
    values = {name: getattr(start, name) * np.exp(log) for name, log in zip(_FITTED, found.x, strict=True)}
    return f"{', '.join(f'{k}={v:.3g}' for k, v in values.items())}; mean error {found.fun:.1%} of {len(runs)} runs"


def _weights(runs: Sequence[Run]) -> NDArray[np.float64]:
    """Equal for each system, for any number of runs."""
    systems = [run.system for run in runs]
    return np.array([1 / systems.count(system) for system in systems])


def _parts_s(run: Run) -> list[float]:
    """Seconds of a step that are proportional to the reciprocal of each constant, and the remaining seconds."""
    step = traced(run)
    whole = _step_s(run, step, {})
    parts = [_step_s(run, step, {name: getattr(_kernels(run), name) / 2}) - whole for name in _FITTED]
    return [*parts, whole - sum(parts)]


def _kernels(run: Run) -> KernelRates:
    kernels = cluster_of(run).device.kernels
    assert kernels is not None
    return kernels


def _step_s(run: Run, step: TracedStep, changed: dict[str, Any]) -> float:
    cluster = cluster_of(run, lambda kernels: dataclasses.replace(kernels, **changed))
    return planned(step, cluster, method_of(run, cluster, _PLENTY)).cost.total_s
