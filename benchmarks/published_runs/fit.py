"""Runs in, the constants of `KernelRates` that come closest to their seconds out.

Each generation of GPUs has its `sustained`, and all have one `memory_efficiency`. The rates of attention are published
(`trainers.py`). The shardings of a run stay (`parts.py`), so a fit is a search over a few numbers. A baseline has a
single constant for each kind of GPU: its part of the peak rate in any run.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from benchmarks.published_runs.gpus import chip_of, device_of, power_part
from benchmarks.published_runs.parts import Parts, Timer
from benchmarks.published_runs.predict import cluster_of
from benchmarks.published_runs.record import Run
from benchmarks.published_runs.trainers import OPERATORS_PART
from minialpa.cluster import KernelRates

#: The name of `memory_efficiency` in `Constants`, beside the generations.
_MEMORY = "memory_efficiency"
#: `sustained` of each generation at full power, and `memory_efficiency`. The start of a fit.
Constants = Mapping[str, float]
#: Chips with the processors of another one.
_SAME = {"a100-40gb": "a100", "a100-80gb": "a100", "h200": "h100"}
#: Runs that ran, with their plans.
Planned = Sequence[tuple[Run, Parts]]


@dataclass(frozen=True, slots=True)
class Split:
    """Runs that set constants, and runs that they are tested on."""

    name: str
    training: Planned
    tested: Planned


def fitted(runs: Planned) -> Constants:
    """The constants with the least mean error. A system with n runs has the weight of sqrt(n) runs."""
    names = [*sorted({_generation(run) for run, _ in runs}), _MEMORY]
    systems = [run.system for run, _ in runs]
    weights = np.array([1 / np.sqrt(systems.count(system)) for system in systems])
    timed = [(run, Timer(parts, cluster_of(run)), _kernels_of(run)) for run, parts in runs]

    def error(logs: NDArray[np.float64]) -> float:
        constants = dict(zip(names, np.exp(logs), strict=True))
        seconds = (timer.seconds(_changed(run, kernels, constants)) / measured(run) for run, timer, kernels in timed)
        return float(np.average(np.abs(np.log(list(seconds))), weights=weights))

    start = np.array([np.log(0.8)] * (len(names) - 1) + [np.log(1.5)])
    # Steps of scipy are in proportion to the start, so that a start of 0 would stay.
    simplex = np.vstack([start, start + 0.2 * np.eye(len(start))])
    options = {"xatol": 1e-3, "fatol": 1e-5, "initial_simplex": simplex}
    found = minimize(error, start, method="Nelder-Mead", options=options)
    return {name: float(value) for name, value in zip(names, np.exp(found.x), strict=True)}


def text_of(constants: Constants) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in constants.items())


def seconds_of(run: Run, parts: Parts, constants: Constants) -> float:
    return Timer(parts, cluster_of(run)).seconds(_changed(run, _kernels_of(run), constants))


def _kernels_of(run: Run) -> KernelRates:
    kernels = cluster_of(run).device.kernels
    assert kernels is not None, run
    return kernels


def _changed(run: Run, kernels: KernelRates, constants: Constants) -> KernelRates:
    """A generation without runs has the mean of the others."""
    others = [value for name, value in constants.items() if name != _MEMORY]
    sustained = constants.get(_generation(run), sum(others) / len(others))
    part = OPERATORS_PART if run.trainer.elementwise == "operators" else 1.0
    return dataclasses.replace(
        kernels, sustained=sustained * power_part(run.gpu), memory_efficiency=constants[_MEMORY] * part
    )


def leave_out_systems(runs: Planned) -> list[Split]:
    names = sorted({run.system for run, _ in runs})
    return [
        Split(name, [one for one in runs if one[0].system != name], [one for one in runs if one[0].system == name])
        for name in names
    ]


def leave_out_scales(runs: Planned, most_gpus: int = 128) -> list[Split]:
    training = [one for one in runs if one[0].n_gpus <= most_gpus]
    return [Split(f"more than {most_gpus} GPUs", training, [one for one in runs if one[0].n_gpus > most_gpus])]


def baseline(training: Planned) -> Callable[[Run], float]:
    """Seconds of a run if all runs of a kind of GPU reach one fraction of its peak rate: the training runs' median."""
    reached = {
        kind: float(np.median([_ideal_s(run) / measured(run) for run, _ in group]))
        for kind, group in _by_gpu(training).items()
    }
    others = float(np.median(list(reached.values())))
    return lambda run: _ideal_s(run) / reached.get(_gpu(run), others)


def _ideal_s(run: Run) -> float:
    return run.model.flops(run.batch) / (device_of(run.gpu).flops_per_s("bfloat16") * run.n_gpus)


def measured(run: Run) -> float:
    assert run.step_s is not None, run
    return run.step_s


def _gpu(run: Run) -> str:
    return run.gpu[:4]


def _generation(run: Run) -> str:
    """Of its chip: "a100" or "h100", for example. Chips that differ in their memory count as one."""
    return _SAME.get(chip_of(run.gpu).preset, chip_of(run.gpu).preset)


def _by_gpu(runs: Planned) -> dict[str, list[tuple[Run, Parts]]]:
    groups = defaultdict[str, list[tuple[Run, Parts]]](list)
    for one in runs:
        groups[_gpu(one[0])].append(one)
    return groups
