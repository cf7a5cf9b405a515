"""Peak memory and seconds of planning, for each step and method in its own process.

    python -m benchmarks.plan_memory                       all steps, in some hours; needs the extra `table`
    python -m benchmarks.plan_memory --only moe-70b        steps whose names begin so
    python -m benchmarks.plan_memory --rows rows.json      continues an interrupted run

The steps: the corpus of `benchmarks.corpus`, networks for speech with and without loops, the largest models of Alpa's
evaluation on its clusters of 64 devices, and all models of benchmarks/models.md. The measured seconds include tracing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

import minialpa
from benchmarks.alpa_plans import STORED
from benchmarks.corpus import Case, arguments, cases
from benchmarks.planning import cluster_of, peak_rss_gb
from benchmarks.recurrent import ShapedStep, recogniser_step
from benchmarks.registry import Rows, Size, benchmark
from benchmarks.run import table
from minialpa import AutoLayerOption, AutoParallel, ClusterSpec, PipeshardParallel, ShardParallel
from minialpa.methods import Method
from minialpa.support.files import write_text

#: Memory limit of a planning process. Without a step to plan, it has a few hundred megabytes.
MOST_GB = 4.0
#: The models of Alpa's evaluation that need most memory.
_LARGE = ("gpt-39b", "moe-70b", "wresnet-13b")
_PACKAGES = {"USE_TF": "0", "USE_TORCH": "0", "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}


@dataclass(frozen=True, slots=True)
class Subject:
    """One step to plan by some methods.

    Attributes:
        name: name of the model.
        cluster: the cluster to plan for.
        ways: names of methods, see `method`.
        make: returns the step, its state and its batch, as arrays or as shapes.
    """

    name: str
    cluster: ClusterSpec
    ways: tuple[str, ...]
    make: Callable[[], ShapedStep]


def method(way: str, cluster: ClusterSpec) -> Method:
    """`automatic` chooses all options; `stages` has two micro-batches; `shard` has no pipeline."""
    methods: dict[str, Callable[[], Method]] = {
        "automatic": lambda: AutoParallel(devices=cluster),
        "stages": lambda: PipeshardParallel(
            devices=cluster, num_micro_batches=2, layer_option=AutoLayerOption(), stage_option="auto"
        ),
        "shard": lambda: ShardParallel(devices=cluster),
    }
    return methods[way]()


# ---- steps ----------------------------------------------------------------------------------------------------------


def subjects(size: Size) -> list[Subject]:
    ways = ("automatic", "stages", "shard") if size == "full" else ("shard",)
    host = cluster_of("a100-80gb", 8)
    small = [Subject(case.name, host, ways, partial(_of_corpus, case)) for case in cases(size)]
    small += [Subject(name, host, ways, partial(_recogniser, sizes)) for name, sizes in _recognisers(size).items()]
    return small if size == "tiny" else [*small, *_large(), *_of_packages(host)]


def _of_corpus(case: Case) -> ShapedStep:
    built = case.build()
    return built.train_step(minialpa.value_and_grad), *arguments(built)


def _recognisers(size: Size) -> dict[str, dict[str, Any]]:
    """Sizes by name. The ones with "loop" have no scan over frames, and 11,000 and 32,000 equations at full size."""
    if size == "tiny":
        return {
            "recogniser, tiny loop": {"n_frames": 2, "n_layers": 1, "hidden": 16, "n_features": 8, "unrolled": True}
        }
    return {
        "recogniser": {"n_frames": 200, "hidden": 256},
        "recogniser, 4 layers": {"n_frames": 128, "hidden": 256, "n_layers": 4, "batch_size": 64},
        "recogniser, loop": {"n_frames": 32, "unrolled": True},
        "recogniser, long loop": {"n_frames": 100, "unrolled": True},
    }


def _recogniser(sizes: dict[str, Any]) -> ShapedStep:
    return recogniser_step(minialpa.value_and_grad, **sizes)


def _large() -> list[Subject]:
    """Models of billions of parameters, on hosts of eight V100s."""
    chosen = [stored for stored in STORED if stored.model in _LARGE]
    return [
        Subject(
            stored.model,
            cluster_of("v100-p3.16xlarge", stored.n_devices),
            ("automatic",),
            partial(_of_model, stored.model, stored.batch_size),
        )
        for stored in chosen
    ]


def _of_model(name: str, batch_size: int) -> ShapedStep:
    case = minialpa.models.build(name, batch_size=batch_size)
    return case.train_step(minialpa.value_and_grad), *arguments(case)


def _of_packages(cluster: ClusterSpec) -> list[Subject]:
    """The models of benchmarks/models.md whose step takes a state and a batch, which is nearly all."""
    from benchmarks.models.all_models import MODELS

    return [Subject(name, cluster, ("automatic",), partial(_of_package, name)) for name in MODELS]


def _of_package(name: str) -> ShapedStep:
    from benchmarks.models.all_models import MODELS

    training = MODELS[name].build()
    return training.step, training.state, training.batches[0]


# ---- measuring ------------------------------------------------------------------------------------------------------


@benchmark("plan_memory")
def plan_memory(size: Size) -> Rows:
    """Peak memory and seconds of planning, by model and method, each in its own process."""
    return list(measured(subjects(size), []))


def measured(chosen: Sequence[Subject], known: Rows) -> Iterator[dict[str, Any]]:
    """The rows of all methods of each subject, in order of completion; known rows are not measured."""
    rows = {(row["model"], row["method"]): row for row in known}
    for subject in chosen:
        for way in subject.ways:
            yield rows.get((subject.name, way)) or _in_process(subject.name, way)


def _in_process(name: str, way: str) -> dict[str, Any]:
    """The result of `row` in a fresh process, or the last line of its error."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.plan_memory", "--measure", name, way]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | _PACKAGES, check=False)
    if done.returncode:
        return {"model": name, "method": way, "failure": done.stderr.strip().splitlines()[-1][:200], "within": False}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def row(name: str, way: str) -> dict[str, Any]:
    """Plan one model in this process; returns its seconds and peak memory."""
    known = {subject.name: subject for size in ("full", "tiny") for subject in subjects(size)}
    subject = known[name]
    with ExitStack() as stack:
        # Packages rely on what jax allows by default.
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        step, *args = subject.make()
        before_gb, start = peak_rss_gb(), time.process_time()
        plan = minialpa.parallelize(step, method=method(way, subject.cluster), plan_cache=None).plan(*args)
    return {
        "model": name,
        "method": way,
        "devices": subject.cluster.n_devices,
        "plan_cpu_s": time.process_time() - start,
        "before_gb": before_gb,
        "peak_gb": peak_rss_gb(),
        "stages": len(plan.stages),
        "within": peak_rss_gb() <= MOST_GB,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.plan_memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NAME", help="models whose names begin so")
    parser.add_argument("--rows", type=Path, help="a file of rows: what it holds is not measured again")
    parser.add_argument("--measure", nargs=2, metavar=("NAME", "METHOD"), help="one row, in this process, as JSON")
    args = parser.parse_args(argv)
    if args.measure:
        print(json.dumps(row(*args.measure)))
        return 0

    known = json.loads(args.rows.read_text()) if args.rows and args.rows.exists() else []
    rows = []
    for each in measured([s for s in subjects("full") if s.name.startswith(args.only)], known):
        rows.append(each)
        print(table([each]), flush=True)
        if args.rows:
            write_text(args.rows, json.dumps([*rows, *(old for old in known if old not in rows)]))
    return 0 if all(each["within"] for each in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
