"""The plans of many models, methods and meshes as JSON files, to find the plans that a change of the planner changes.

python -m benchmarks.plan_cases write FOLDER [PART OF A NAME ...]     plans every case, or the named cases
python -m benchmarks.plan_cases compare OLD_FOLDER NEW_FOLDER        prints differences; exit status 1 if there are any

Run `write` with the planner before the change and with the planner after it. This file uses only the public interface
of minialpa, so that one version of it serves both.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import minialpa
from benchmarks.corpus import Case, arguments, cases
from benchmarks.several_loops import STEPS
from minialpa import (
    AutoLayerOption,
    AutoParallel,
    AutoShardingOption,
    AutoStageOption,
    ClusterSpec,
    DataParallel,
    PipeshardParallel,
    Plan,
    ShardParallel,
    UniformStageOption,
    Zero2Parallel,
    Zero3Parallel,
    get_3d_parallel_method,
)
from minialpa.methods import Method

Step = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class PlanCase:
    """One step on one cluster by one method. `make` gives the step and the shapes of its arguments."""

    name: str
    make: Callable[[], tuple[Step, tuple[Any, ...]]]
    cluster: ClusterSpec
    method: Method


def _one_host(n_devices: int = 8) -> ClusterSpec:
    return ClusterSpec.preset("a100-80gb", num_hosts=1, devices_per_host=n_devices)


def _two_hosts() -> ClusterSpec:
    return ClusterSpec.preset("v100-p3.16xlarge", num_hosts=2, devices_per_host=4)


def _trained(case: Case) -> Callable[[], tuple[Step, tuple[Any, ...]]]:
    def make() -> tuple[Step, tuple[Any, ...]]:
        model = case.build()
        return model.train_step(minialpa.value_and_grad), arguments(model)

    return make


def _several_loops(name: str) -> Callable[[], tuple[Step, tuple[Any, ...]]]:
    shapes = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 12, jax.ShapeDtypeStruct((2048, 512), jnp.float32)
    return lambda: (STEPS[name], shapes)


def _inference() -> tuple[Step, tuple[Any, ...]]:
    def step(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return x

    return step, ([jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 8, jax.ShapeDtypeStruct((64, 256), jnp.float32))


def _layers(n: int, remat: Any = False) -> AutoLayerOption:
    return AutoLayerOption(n, remat=remat)


#: Methods for every model of the corpus.
_ALWAYS: dict[str, tuple[ClusterSpec, Method]] = {
    "shard": (_one_host(), ShardParallel()),
    "shard in 4, two hosts": (_two_hosts(), ShardParallel(num_micro_batches=4, logical_shape=(2, 4))),
    "pipeline": (_one_host(4), PipeshardParallel(num_micro_batches=4, layer_option=_layers(4), stage_option="auto")),
}
#: Published sizes, with fewer examples where the batch is large, and their methods.
_LARGE: tuple[tuple[Case, ClusterSpec, Method], ...] = (
    (
        Case("gpt-1.3b", "gpt-1.3b", (("batch_size", 64),)),
        ClusterSpec.preset("v100-p3.16xlarge", num_hosts=2, devices_per_host=8),
        PipeshardParallel(num_micro_batches=16, layer_option=_layers(8, "full"), stage_option="auto"),
    ),
    (
        Case("wresnet-250m", "wresnet-250m", (("batch_size", 64),)),
        _two_hosts(),
        PipeshardParallel(num_micro_batches=4, layer_option=_layers(8), stage_option="auto"),
    ),
    (
        Case("moe-1.3b", "moe-1.3b", (("batch_size", 64),)),
        _two_hosts(),
        PipeshardParallel(num_micro_batches=8, layer_option=_layers(8), stage_option="auto"),
    ),
    (
        Case("t5-base", "t5-base", (("batch_size", 64),)),
        _two_hosts(),
        PipeshardParallel(
            num_micro_batches=8,
            pipeline_schedule="1f1b-interleaved",
            layer_option=_layers(8),
            stage_option=UniformStageOption(num_stages=4, num_chunks=2),
        ),
    ),
)
#: Methods for some models of the corpus.
_SOME: dict[str, dict[str, tuple[ClusterSpec, Method]]] = {
    "mlp": {
        "data": (_two_hosts(), DataParallel()),
        "everything": (_one_host(), AutoParallel()),
        "zero 3 in 2": (_two_hosts(), Zero3Parallel(num_micro_batches=2)),
    },
    "gpt": {
        "zero 2": (_one_host(), Zero2Parallel()),
        "everything": (_one_host(4), AutoParallel(num_micro_batches=8)),
        "pipeline that computes again": (
            _one_host(4),
            PipeshardParallel(num_micro_batches=4, layer_option=_layers(4, "full"), stage_option="uniform"),
        ),
        "gpipe, two hosts": (
            _two_hosts(),
            PipeshardParallel(
                num_micro_batches=8, pipeline_schedule="gpipe", layer_option=_layers(4), stage_option="uniform"
            ),
        ),
    },
    "gpt, wide": {
        "zero 3": (_one_host(), Zero3Parallel()),
        "short of memory": (
            _one_host(),
            ShardParallel(auto_sharding_option=AutoShardingOption(memory_limit_bytes=120e6)),
        ),
        "three dimensions": (_two_hosts(), get_3d_parallel_method(2, 2, 2, 2, devices=_two_hosts())),
    },
    "llama": {
        "batch on axis 0": (
            _two_hosts(),
            ShardParallel(logical_shape=(2, 4), auto_sharding_option=AutoShardingOption(force_batch_dim_to_mesh_dim=0)),
        ),
        "model parallel stages": (
            _one_host(4),
            PipeshardParallel(
                num_micro_batches=4,
                layer_option=_layers(4),
                stage_option=AutoStageOption(submesh_logical_shape_space="model_parallel_only"),
            ),
        ),
    },
    "llama, scan": {
        "pipeline that may compute again": (
            _one_host(4),
            PipeshardParallel(num_micro_batches=4, layer_option=_layers(4, "auto"), stage_option="auto"),
        ),
        "everything": (_one_host(4), AutoParallel(num_micro_batches=4)),
    },
}


def plan_cases() -> list[PlanCase]:
    """All cases, in a fixed order."""
    found = []
    for case in cases("full"):
        chosen = {**_ALWAYS, **_SOME.get(case.name, {})}
        found += [PlanCase(f"{case.name}, {how}", _trained(case), *pair) for how, pair in chosen.items()]
    found += [PlanCase(f"{case.name}, large", _trained(case), cluster, method) for case, cluster, method in _LARGE]
    for name in STEPS:
        pipeline = PipeshardParallel(num_micro_batches=4, layer_option=_layers(4), stage_option="uniform")
        found.append(PlanCase(f"{name}, shard in 8", _several_loops(name), _one_host(), ShardParallel(None, 8)))
        found.append(PlanCase(f"{name}, pipeline", _several_loops(name), _one_host(2), pipeline))
    inference = PipeshardParallel(
        num_micro_batches=4, pipeline_schedule="inference", layer_option=_layers(4), stage_option="uniform"
    )
    found.append(PlanCase("tower, inference", _inference, _one_host(2), inference))
    return found


def write(folder: Path, parts: list[str]) -> None:
    """Write the plan of each case whose name contains one of `parts`, or of all cases, to a file of its name."""
    folder.mkdir(parents=True, exist_ok=True)
    for case in plan_cases():
        if parts and not any(part in case.name for part in parts):
            continue
        begun_s = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            step, args = case.make()
            plan = minialpa.plan(step, args, cluster=case.cluster, method=case.method)
        plan.save(folder / f"{case.name}.json")
        proven = "" if all(stage.optimal for stage in plan.stages) else ", not proven: another run may find another"
        print(f"{case.name}: {time.monotonic() - begun_s:.1f} s{proven}", flush=True)


def compare(old: Path, new: Path) -> bool:
    """Whether two folders have the same plans; prints the differences."""
    names = sorted({path.name for folder in (old, new) for path in folder.glob("*.json")})
    same = 0
    for name in names:
        if not ((old / name).exists() and (new / name).exists()):
            print(f"{name}: only in {old if (old / name).exists() else new}")
        elif _is_same(old / name, new / name):
            same += 1
        else:
            print(f"{name}:\n{Plan.load(old / name).diff(Plan.load(new / name))}\n")
    print(f"{same} of {len(names)} plans are the same.")
    return same == len(names)


def _is_same(old: Path, new: Path) -> bool:
    """Whether two files have the same plan. Older files have no name of the batch."""
    if old.read_bytes() == new.read_bytes():
        return True
    first, second = Plan.load(old), Plan.load(new)
    return replace(first, batch=second.batch) == second if not first.batch else first == second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writes = commands.add_parser("write")
    writes.add_argument("folder", type=Path)
    writes.add_argument("parts", nargs="*")
    compares = commands.add_parser("compare")
    compares.add_argument("old", type=Path)
    compares.add_argument("new", type=Path)
    given = parser.parse_args()
    if given.command == "write":
        write(given.folder, given.parts)
    elif not compare(given.old, given.new):
        sys.exit(1)


if __name__ == "__main__":
    main()
