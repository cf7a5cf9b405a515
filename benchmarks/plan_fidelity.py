"""Predictions of plans against programs that XLA compiles: collectives by kind and mesh axes, and bytes per device.

    bytes_error   = sum |compiled - predicted| / max(sum compiled, sum predicted)   over (kind, axes)
    memory_error  = |predicted - compiled| / compiled                               the worst stage

A compiled all-reduce of which each device only reads a slice counts as an all-reduce or as a reduce-scatter, by the
smaller error, because a plan may mean either.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import minialpa
from benchmarks import compiled_figures
from benchmarks.corpus import Case, arguments, cases
from benchmarks.registry import Rows, Size, benchmark
from benchmarks.stderr import captured_stderr
from minialpa import LogicalMesh, hlo

#: Kind of a collective, and the axes of the mesh; None for groups of no set of axes.
Key = tuple[str, tuple[int, ...] | None]
TOLERANCE = 0.02
_SHAPES = ((4,), (8,), (2, 4))
_METHODS = {
    "shard": minialpa.ShardParallel,
    "data": minialpa.DataParallel,
    "zero-2": minialpa.Zero2Parallel,
    "zero-3": minialpa.Zero3Parallel,
}


@dataclass(frozen=True, slots=True)
class Fidelity:
    """One plan and its program: bytes of collectives predicted and compiled, seconds and bytes per device of both."""

    predicted: dict[Key, float]
    compiled: dict[Key, float]
    seconds: tuple[float, float]
    memory_bytes: tuple[float, float]
    rematerialised: int

    @property
    def bytes_error(self) -> float:
        return difference(self.predicted, self.compiled)

    @property
    def memory_error(self) -> float:
        predicted, compiled = self.memory_bytes
        return abs(predicted - compiled) / compiled

    @property
    def same_kinds(self) -> bool:
        return _kinds(self.predicted) == _kinds(self.compiled)


@benchmark("plan_fidelity")
def plan_fidelity(size: Size) -> Rows:
    """Collectives and memory that plans predict, next to the compiled programs, and how many agree."""
    rows, found = [], []
    for case in cases(size):
        for shape in _SHAPES if size == "full" else ((4,),):
            # On further meshes, one method is enough.
            methods = list(_METHODS) if shape == (8,) else ["shard"]
            for method in methods:
                one = fidelity(case, LogicalMesh(shape), method)
                found.append(one)
                rows.append({"model": case.name, "mesh": "x".join(map(str, shape)), "method": method, **_columns(one)})
    return [*rows, _summary(found)]


def fidelity(case: Case, mesh: LogicalMesh, method: str) -> Fidelity:
    built = case.build()
    step = minialpa.parallelize(
        built.train_step(minialpa.value_and_grad), method=_METHODS[method](devices=mesh), plan_cache=None
    )
    with captured_stderr() as printed:
        executable = step.get_executable(*arguments(built))
    plan = executable.get_parallel_plan()
    predicted: defaultdict[Key, float] = defaultdict(float)
    for one in plan.collectives:
        axes = tuple(sorted(axis for axis in set(one.axes) if mesh.shape[axis] > 1))
        predicted[one.kind, axes] += one.times_per_step * one.n_bytes
    texts = executable.get_hlo_text()
    readings = [
        [one for text in texts for one in read(text)] for read in (hlo.collectives, compiled_figures.collectives)
    ]
    nearest = min(readings, key=lambda reading: difference(predicted, compiled_bytes(reading, mesh)))
    memory = zip(plan.cost.peak_bytes, executable.get_stage_allocation_size(), strict=True)
    return Fidelity(
        dict(predicted),
        compiled_bytes(nearest, mesh),
        (plan.cost.communication_s + plan.cost.update_s, hlo.seconds(nearest, mesh)),
        max(memory, key=lambda pair: abs(pair[0] - pair[1]) / pair[1]),
        printed.rematerialised,
    )


def compiled_bytes(found: Sequence[hlo.HloCollective], mesh: LogicalMesh) -> dict[Key, float]:
    """Bytes by kind and axes, without collectives in groups of one device."""
    total: defaultdict[Key, float] = defaultdict(float)
    for one in found:
        axes = None if one.kind == "collective-permute" else compiled_figures.mesh_axes(one.groups, mesh.shape)
        if axes != ():
            total[one.kind, axes] += one.times * one.n_bytes
    return dict(total)


def difference(predicted: dict[Key, float], compiled: dict[Key, float]) -> float:
    """`bytes_error` of the module."""
    wrong = sum(abs(predicted.get(key, 0) - compiled.get(key, 0)) for key in predicted | compiled)
    return wrong / max(sum(predicted.values()), sum(compiled.values()), 1)


def _kinds(found: dict[Key, float]) -> set[str]:
    """Kinds with at least a thousandth of the bytes: XLA sums scalars, such as a loss, with other arrays."""
    total = sum(found.values())
    return {kind for (kind, _), n_bytes in found.items() if n_bytes > total / 1000}


def _columns(one: Fidelity) -> dict[str, Any]:
    predicted, compiled = sum(one.predicted.values()), sum(one.compiled.values())
    return {
        "same_kinds": one.same_kinds,
        "predicted_mb": predicted / 1e6,
        "compiled_mb": compiled / 1e6,
        "bytes_error": one.bytes_error,
        "predicted_us": one.seconds[0] * 1e6,
        "compiled_us": one.seconds[1] * 1e6,
        "predicted_peak_mb": one.memory_bytes[0] / 1e6,
        "compiled_peak_mb": one.memory_bytes[1] / 1e6,
        "memory_error": one.memory_error,
        "rematerialised": one.rematerialised,
        "wrong": "; ".join(_wrong(one)),
    }


def _wrong(one: Fidelity) -> list[str]:
    """The largest differences, such as `all-reduce (0,) 1.2 -> 2.4`: predicted and compiled megabytes."""
    total = max(sum(one.predicted.values()), sum(one.compiled.values()))
    pairs = {key: (one.predicted.get(key, 0.0), one.compiled.get(key, 0.0)) for key in one.predicted | one.compiled}
    worst = sorted(pairs, key=lambda key: -abs(pairs[key][0] - pairs[key][1]))
    return [
        f"{kind} {axes} {pairs[kind, axes][0] / 1e6:.3g} -> {pairs[kind, axes][1] / 1e6:.3g}"
        for kind, axes in worst[:3]
        if abs(pairs[kind, axes][0] - pairs[kind, axes][1]) > TOLERANCE * total
    ]


def _summary(found: Sequence[Fidelity]) -> dict[str, Any]:
    errors = [one.memory_error for one in found]
    return {
        "model": f"all {len(found)}",
        "same_kinds": statistics.mean(one.same_kinds for one in found),
        "within_2_percent": statistics.mean(one.bytes_error <= TOLERANCE for one in found),
        "bytes_error": statistics.median(one.bytes_error for one in found),
        "memory_error": statistics.median(errors),
        "memory_error_p95": float(np.percentile(errors, 95)),
        "rematerialised": sum(one.rematerialised > 0 for one in found),
    }
