"""What planning takes of the machine: seconds, and the most memory, of each model and method in a process of its own.

python -m benchmarks.plan_memory "gpt, wide" automatic     prints one row as JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import minialpa
from benchmarks.corpus import arguments, cases
from benchmarks.planning import cluster_of, peak_rss_gb, planned, traced_step
from benchmarks.recurrent import ShapedStep, recogniser_step
from benchmarks.registry import Rows, Size, benchmark
from minialpa import AutoLayerOption, AutoParallel, PipeshardParallel, ShardParallel
from minialpa.methods import Method

#: For planning, of which the process without any step to plan has a few hundred megabytes.
MOST_GB = 4.0


@dataclass(frozen=True, slots=True)
class Subject:
    """One model at one size."""

    name: str
    make: Callable[[], ShapedStep]


def _recognisers(size: Size) -> list[Subject]:
    """By name; those with "loop" have no scan over frames, and 11,000 and 32,000 equations at full size."""
    wanted: dict[str, dict[str, Any]] = {
        "recogniser, tiny loop": {"n_frames": 2, "n_layers": 1, "hidden": 16, "n_features": 8, "unrolled": True}
    }
    if size == "full":
        wanted = {
            "recogniser": {"n_frames": 200, "hidden": 256},
            "recogniser, 4 layers": {"n_frames": 128, "hidden": 256, "n_layers": 4, "batch_size": 64},
            "recogniser, loop": {"n_frames": 32, "unrolled": True},
            "recogniser, long loop": {"n_frames": 100, "unrolled": True},
        }
    return [Subject(name, _recogniser(sizes)) for name, sizes in wanted.items()]


def _recogniser(sizes: dict[str, Any]) -> Callable[[], ShapedStep]:
    return lambda: recogniser_step(minialpa.value_and_grad, **sizes)


def _of_corpus(build: Callable[[], minialpa.models.ModelCase]) -> Callable[[], ShapedStep]:
    def make() -> ShapedStep:
        case = build()
        return case.train_step(minialpa.value_and_grad), *arguments(case)

    return make


def subjects(size: Size) -> list[Subject]:
    """The corpus, and the recognisers."""
    return [*(Subject(case.name, _of_corpus(case.build)) for case in cases(size)), *_recognisers(size)]


def methods(preset: str = "a100-80gb") -> dict[str, Method]:
    """On eight devices: all that is chosen for the user; stages with two micro-batches; no pipeline."""
    cluster = cluster_of(preset, 8)
    stages = PipeshardParallel(
        devices=cluster, num_micro_batches=2, layer_option=AutoLayerOption(), stage_option="auto"
    )
    return {"automatic": AutoParallel(devices=cluster), "stages": stages, "shard": ShardParallel(devices=cluster)}


@benchmark("plan_memory")
def plan_memory(size: Size) -> Rows:
    """The most memory and the seconds of planning, by model and method, each in a process of its own."""
    chosen = ("automatic", "stages", "shard") if size == "full" else ("shard",)
    return [_measured(subject.name, method) for subject in subjects(size) for method in chosen]


def _measured(name: str, method: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.plan_memory", name, method]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    if done.returncode:
        raise RuntimeError(f"Planning {name} by {method} failed:\n{done.stderr}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def row(name: str, method: str) -> dict[str, Any]:
    """Plan one model here and say what this process took for it."""
    known = {subject.name: subject for size in ("full", "tiny") for subject in subjects(size)}
    traced = traced_step(*known[name].make())
    before_gb, start = peak_rss_gb(), time.perf_counter()
    plan = planned(traced, cluster_of("a100-80gb", 8), methods()[method])
    return {
        "model": name,
        "method": method,
        "equations": len(traced.flat.eqns),
        "plan_s": time.perf_counter() - start,
        "traced_gb": before_gb,
        "peak_gb": peak_rss_gb(),
        "stages": len(plan.stages),
        "within": peak_rss_gb() <= MOST_GB,
    }


if __name__ == "__main__":
    print(json.dumps(row(*sys.argv[1:])))
