"""Plans of `AutoParallel` against plans of other methods, for the models and clusters of Alpa's evaluation.

python -m benchmarks.inter_plans gpt-1.3b 4 [--solves 8]     one model on its number of devices, with progress
python -m benchmarks.inter_plans --list

The steps do not run. The same cost model prices all plans, so a ratio auto / other above 1 shows that the search has
missed a plan that is better by its own prices. The others:

    alpa    the plan that Alpa's authors stored (`alpa_plans`); if it does not fit, also without a memory limit
    hand    data, operator and pipeline parallelism by hand: (dp, tp) stages of equal layers, examples split over dp
    zero3   parameters, gradients and optimizer state sharded over all devices, no pipeline
    equal   equal stages on equal submeshes, with the micro-batches of auto

Hill climbing finds the last three: the best of up to `solves` choices each (zero3: half as many), with and without
rematerialisation of every block.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import minialpa
from benchmarks.alpa_plans import STORED, TINY, StoredPlan
from benchmarks.climbing import Climb, Outcome, climb, outcome
from benchmarks.corpus import arguments
from benchmarks.planning import cluster_of, peak_rss_gb, planned, traced_step
from benchmarks.registry import Rows, Size, benchmark
from minialpa import AutoLayerOption, AutoShardingOption, ClusterSpec, PipeshardParallel, Plan, UniformStageOption
from minialpa.inter.layers.forward import natural_layers
from minialpa.inter.search.submeshes import logical_shapes
from minialpa.inter.search.user_stages import submesh_of
from minialpa.methods import Method, get_3d_parallel_method
from minialpa.options import Remat
from minialpa.tracing.trace import TracedStep

PRESET = "v100-p3.16xlarge"
#: Most solved choices of each kind of baseline.
SOLVES = 16
_ZERO3 = AutoShardingOption(force_data_parallel=True, prefer_reduce_scatter=True, force_zero_stage_3=True)
#: Rematerialisation, the least memory first.
_REMATS: tuple[Remat, ...] = ("full", "dots", "none")

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """One step to plan, for one cluster; `solves` choices per baseline, each reported by `tell`."""

    traced: TracedStep
    cluster: ClusterSpec
    batch_size: int
    solves: int
    tell: Tell

    @property
    def n_devices(self) -> int:
        return self.cluster.n_devices

    def solve(self, label: str, method: Method) -> Outcome:
        start = time.perf_counter()
        out = outcome(label, lambda: planned(self.traced, self.cluster, method))
        text = f"{out.seconds:.4g} s" if out.plan else out.failure
        self.tell(f"  {label}: {text}  (planned in {time.perf_counter() - start:.1f} s)")
        return out


@benchmark("inter_plans")
def inter_plans(size: Size) -> Rows:
    """Seconds of a step that AutoParallel predicts, against Alpa's stored plans and plans of simpler methods."""
    if size == "tiny":
        return [row(TINY, solves=2)]
    return [row(stored) for stored in STORED]


def row(stored: StoredPlan, solves: int = SOLVES, tell: Tell = lambda text: None) -> dict[str, Any]:
    case = minialpa.models.build(stored.model, batch_size=stored.batch_size)
    start = time.perf_counter()
    traced = traced_step(case.train_step(minialpa.value_and_grad), *arguments(case))
    trace_s = time.perf_counter() - start
    setting = Setting(traced, cluster_of(PRESET, stored.n_devices), stored.batch_size, solves, tell)
    tell(f"{stored.model} on {stored.n_devices} devices, traced in {trace_s:.1f} s")
    start = time.perf_counter()
    auto = setting.solve("auto", minialpa.AutoParallel())
    plan_s, rss_gb = time.perf_counter() - start, peak_rss_gb()
    cells: dict[str, Any] = {"model": stored.model, "devices": stored.n_devices}
    cells |= _auto_cells(auto, setting.cluster) | {"trace_s": trace_s, "plan_s": plan_s, "peak_rss_gb": rss_gb}
    others = {"alpa": Climb(setting.solve("alpa", stored.method()), 1)}
    if others["alpa"].best.plan is None:
        others["alpa_any_memory"] = Climb(setting.solve("alpa, any memory", stored.method(math.inf)), 1)
    if solves:
        others |= {"hand": hand(setting), "zero3": zero3(setting)}
    if solves and auto.plan is not None:
        others["equal"] = equal(setting, auto.plan)
    for name, other in others.items():
        cells |= _cells(name, other, auto)
        tell(f"  best of {other.n_solved} for {name}: {other.best.label}")
    return cells


def _auto_cells(auto: Outcome, cluster: ClusterSpec) -> dict[str, Any]:
    if auto.plan is None:
        return {"auto_s": auto.failure}
    plan, peak_bytes = auto.plan, max(auto.plan.cost.peak_bytes)
    return {
        "auto_s": auto.seconds,
        "stages": _stages(plan),
        "micro_batches": plan.n_micro_batches,
        "remat": "+".join(remat for remat in _REMATS if remat in plan.remat) or "none",
        "peak_gb": peak_bytes / 1e9,
        "fits": peak_bytes <= cluster.device.memory_bytes,
    }


def _stages(plan: Plan) -> str:
    """Layers and logical shape of each stage; equal neighbours are one entry, such as `2 x (12 on 2x2)`."""
    texts = [f"({len(stage.layers) or 'all'} on {'x'.join(map(str, stage.logical_shape))})" for stage in plan.stages]
    runs: list[tuple[str, int]] = []
    for text in texts:
        runs[-1:] = [(text, runs[-1][1] + 1)] if runs and runs[-1][0] == text else [*runs[-1:], (text, 1)]
    return " ".join(f"{n} x {text}" for text, n in runs)


def _cells(name: str, other: Climb, auto: Outcome) -> dict[str, Any]:
    if other.best.plan is None:
        return {f"{name}_s": other.best.failure, f"{name}_solved": other.n_solved}
    return {
        f"{name}_s": other.best.seconds,
        f"{name}": other.best.label,
        f"auto/{name}": auto.seconds / other.best.seconds,
        f"{name}_solved": other.n_solved,
    }


# ---- baselines ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Degrees:
    """A plan by hand. examples: of a micro-batch on each of the `dp` groups of devices."""

    dp: int
    tp: int
    pp: int
    examples: int
    remat: Remat


def hand(setting: Setting) -> Climb:
    """Megatron-LM's kind of plan: tp inside a host, then pipeline stages, then dp with sharded optimizer state."""
    n = setting.n_devices
    tp = min(n, setting.cluster.devices_per_host)
    starts = [Degrees(n // (tp * pp), tp, pp, 1, "full") for pp in (n // tp, 1)]
    starts += [Degrees(1, 1, n, 1, "full")]
    return climb(
        [start for start in dict.fromkeys(starts) if _possible(start, setting)],
        lambda at: (choice for choice in _near_degrees(at) if _possible(choice, setting)),
        lambda at: _by_hand(at, setting),
        setting.solves,
    )


def _possible(at: Degrees, setting: Setting) -> bool:
    if min(at.dp, at.tp, at.pp, at.examples) < 1 or at.dp * at.tp * at.pp != setting.n_devices:
        return False
    n_micro_batches, rest = divmod(setting.batch_size, at.dp * at.examples)
    return not rest and n_micro_batches >= at.pp and at.tp <= setting.cluster.devices_per_host


def _near_degrees(at: Degrees) -> Iterator[Degrees]:
    """Other rematerialisation, one degree doubled and another halved, more examples or fewer.

    A plan that recomputes less needs more memory, so such a plan starts with few examples.
    """
    other: Remat = "full" if at.remat == "none" else "none"
    yield dataclasses.replace(at, remat=other, examples=1 if other == "none" else at.examples)
    degrees = ("dp", "pp", "tp")
    for more in degrees:
        for less in degrees:
            if more != less and getattr(at, less) % 2 == 0:
                yield dataclasses.replace(at, **{more: 2 * getattr(at, more), less: getattr(at, less) // 2})
    yield from (dataclasses.replace(at, examples=n) for n in (4 * at.examples, 2 * at.examples, at.examples // 2))


def _by_hand(at: Degrees, setting: Setting) -> Outcome:
    n = setting.batch_size // (at.dp * at.examples)
    method = get_3d_parallel_method(n, at.dp, at.tp, at.pp, False, devices=setting.cluster)
    assert isinstance(method, PipeshardParallel), method
    # Every block is a layer, so that each is recomputed by itself.
    method = dataclasses.replace(method, layer_option=AutoLayerOption(remat=at.remat))
    return setting.solve(f"dp {at.dp} tp {at.tp} pp {at.pp}, {n} micro-batches, remat {at.remat}", method)


def zero3(setting: Setting) -> Climb:
    """ZeRO-3 over all devices as one mesh axis and, across hosts, as two axes with hosts outside.

    A pipeline of one stage equals `Zero3Parallel`, and it can recompute block by block.
    """
    hosts, per_host = setting.cluster.num_hosts, setting.cluster.devices_per_host
    shapes: list[tuple[int, ...]] = [(hosts * per_host,)] + ([(hosts, per_host)] if hosts > 1 else [])
    start: list[tuple[int, Remat, tuple[int, ...]]] = [(1, "full", shape) for shape in shapes[::-1]]
    largest = setting.batch_size // setting.n_devices

    def near(at: tuple[int, Remat, tuple[int, ...]]) -> Iterator[tuple[int, Remat, tuple[int, ...]]]:
        examples, remat, shape = at
        yield from ((1, "none", shape), (examples, "full", shape), (examples * 2, remat, shape))
        yield from ((examples, remat, other) for other in shapes)
        if examples % 2 == 0:
            yield examples // 2, remat, shape

    def solve(at: tuple[int, Remat, tuple[int, ...]]) -> Outcome:
        examples, remat, shape = at
        n = setting.batch_size // setting.n_devices // examples
        option = UniformStageOption(1, submesh_logical_shape=shape, submesh_autosharding_option=_ZERO3)
        method = PipeshardParallel(num_micro_batches=n, layer_option=AutoLayerOption(remat=remat), stage_option=option)
        return setting.solve(f"zero3 {_mesh(shape)}, {n} micro-batches, remat {remat}", method)

    if setting.batch_size % setting.n_devices:
        failure = f"{setting.batch_size} examples are not a multiple of {setting.n_devices} devices"
        return Climb(Outcome("zero3", None, failure), 0)
    return climb(
        start,
        lambda at: (choice for choice in near(at) if largest % choice[0] == 0),
        solve,
        max(1, setting.solves // 2),
    )


def equal(setting: Setting, auto: Plan) -> Climb:
    """Equal layers per stage on equal submeshes, with the number of micro-batches of auto."""
    n, most_layers = setting.n_devices, natural_layers(setting.traced)
    counts = [p for p in range(1, n + 1) if n % p == 0 and p <= most_layers]
    shapes = {p: logical_shapes(submesh_of(n // p, setting.cluster), "all") for p in counts}
    remat = max(_REMATS, key=auto.remat.count)
    nearest = min(counts, key=lambda p: abs(math.log(p / len(auto.stages))))

    def near(at: tuple[int, tuple[int, ...], Remat]) -> Iterator[tuple[int, tuple[int, ...], Remat]]:
        p, shape, remat = at
        i = counts.index(p)
        yield from ((p, other, remat) for other in shapes[p])
        for q in (*counts[i + 1 : i + 2], *counts[max(i - 1, 0) : i]):
            yield from ((q, other, remat) for other in shapes[q] if other[-1] == shape[-1] or len(other) == 1)
        yield from ((p, shape, other) for other in _REMATS)

    def solve(at: tuple[int, tuple[int, ...], Remat]) -> Outcome:
        p, shape, remat = at
        method = PipeshardParallel(
            num_micro_batches=auto.n_micro_batches,
            layer_option=AutoLayerOption(remat=remat),
            stage_option=UniformStageOption(p, submesh_logical_shape=shape),
        )
        return setting.solve(f"equal: {p} stages on {_mesh(shape)}, remat {remat}", method)

    wanted = auto.stages[0].logical_shape
    start = wanted if wanted in shapes[nearest] else shapes[nearest][-1]
    return climb([(nearest, start, remat)], near, solve, setting.solves)


def _mesh(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.inter_plans", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a model of the table")
    parser.add_argument("devices", nargs="?", type=int, help="its number of devices")
    parser.add_argument("--solves", type=int, default=SOLVES, help="choices of each baseline, at most; 0: only alpa")
    parser.add_argument("--list", action="store_true", help="print models and devices")
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(f"{stored.model} {stored.n_devices}" for stored in STORED))
        return 0
    found = [s for s in STORED if s.model == args.model and args.devices in (None, s.n_devices)]
    if not found:
        parser.error(f"no row `{args.model} {args.devices}`; `--list` prints those that there are")
    for name, value in row(found[0], args.solves, lambda text: print(text, flush=True)).items():
        print(f"{name:14} {value:.4g}" if isinstance(value, float) else f"{name:14} {value}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
