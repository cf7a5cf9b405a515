"""Predictions of the planner beside one GPU, within minutes and without a network.

    python -m benchmarks.gpu_all --minutes 8 [--out FOLDER] [--only steps rates ...] [--cpu]

Each part runs in its own processes and ends after its share of the minutes. It appends a row of results to
FOLDER/PART.jsonl as soon as the row is complete, and FOLDER/gpu.md is rewritten after each part. So an interrupted run
keeps all its measurements. The parts:

    steps       training steps of six models: planned and measured seconds and memory
    compiled    the same steps, as XLA for GPUs estimates them; runs on the CPU, beside all other parts
    rates       matrix products and kernels that move bytes, beside the cost model and beside constants fitted to them
    attention   cuDNN's kernel beside the program in blocks
    nccl        the transport's NCCL with one rank: every dtype, and the bandwidth to itself
    numeric     models trained for three steps, beside `jax.jit`

`--cpu` runs tiny sizes on the CPU, to check that the parts work.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import minialpa
from benchmarks.corpus import arguments
from benchmarks.gpu_nccl import one_gpu
from benchmarks.gpu_numeric import one_device, rows_of
from benchmarks.timing import interleaved
from minialpa import ClusterSpec, ShardParallel, models
from minialpa.attention import blockwise, cudnn
from minialpa.attention.kind import AttentionKind
from minialpa.calibration.calibrate import fitted
from minialpa.calibration.measure import Measurements, kernel_times, product_times
from minialpa.models.sizes import SIZES
from minialpa.session import describe_devices
from minialpa.support.files import write_text

Row = dict[str, Any]

#: Steps that fit into the memory of one GPU and keep it busy for some tenths of a second.
_STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-350M": ("gpt", SIZES["gpt-350m"].arguments | {"batch_size": 8, "dtype": "bfloat16"}),
    "Llama-1B": (
        "llama",
        SIZES["llama-3-8b"].arguments
        | {"hidden": 2048, "n_layers": 16, "ffn": 8192, "vocab_size": 32000, "seq_len": 2048, "batch_size": 4},
    ),
    "MoE-380M": ("moe", SIZES["moe-380m"].arguments | {"batch_size": 8, "dtype": "bfloat16"}),
    "ViT-L": ("vit", SIZES["vit-l16"].arguments | {"batch_size": 64, "dtype": "bfloat16"}),
    "Wide-ResNet-250M": ("resnet", SIZES["wresnet-250m"].arguments | {"batch_size": 32}),
    "U-Net": (
        "unet",
        {"image_size": 64, "image_channels": 4, "channels": (256, 512, 1024), "n_groups": 32, "batch_size": 32},
    ),
}
_TINY_STEPS: dict[str, tuple[str, dict[str, Any]]] = {"MLP, tiny": ("mlp", {})}
_N_RUNS = 10


@dataclass(frozen=True, slots=True)
class Part:
    """rows: yields the rows. share: of the minutes. heading: on the page."""

    rows: Callable[[Setting], Iterator[Row]]
    share: float
    heading: str


@dataclass(frozen=True, slots=True)
class Setting:
    """The device and the deadline of a part.

    Attributes:
        device: the GPU, or a CPU with `--cpu`.
        cluster: its description, for which steps are planned.
        is_tiny: whether sizes are tiny.
        end: the time of `time.monotonic` after which no row begins.
    """

    device: jax.Device
    cluster: ClusterSpec
    is_tiny: bool
    end: float

    @property
    def steps(self) -> dict[str, tuple[str, dict[str, Any]]]:
        return _TINY_STEPS if self.is_tiny else _STEPS

    def has_time(self) -> bool:
        return time.monotonic() < self.end


# ---- parts -----------------------------------------------------------------------------------------------------------


def _steps(setting: Setting) -> Iterator[Row]:
    for name, (model, sizes) in setting.steps.items():
        if not setting.has_time():
            return
        case = models.build(model, **sizes)
        step = minialpa.parallelize(
            case.train_step(minialpa.value_and_grad), method=ShardParallel(devices=[setting.device])
        )
        start = time.perf_counter()
        executable = step.get_executable(*arguments(case))
        first_s = time.perf_counter() - start
        cost = executable.get_parallel_plan().cost
        measured_s = statistics.median(executable.profile_with_dummy_inputs(_N_RUNS))
        # The peak of the process: the peak of a larger model hides the peak of a smaller model after it.
        peak = (setting.device.memory_stats() or {}).get("peak_bytes_in_use")
        yield {
            "model": name,
            "planned_ms": cost.total_s * 1e3,
            "measured_ms": measured_s * 1e3,
            "planned / measured": cost.total_s / measured_s,
            "planned_gb": max(cost.peak_bytes) / 1e9,
            "allocated_gb": executable.get_total_allocation_size() / 1e9,
            **({} if peak is None else {"peak_so_far_gb": peak / 1e9}),
            "planned_and_compiled_s": first_s,
        }
        del executable, step
        jax.clear_caches()


def _compiled(setting: Setting) -> Iterator[Row]:
    target = "h100" if setting.is_tiny else setting.cluster.device.name
    cluster = ClusterSpec.preset("h100", devices_per_host=1) if setting.is_tiny else setting.cluster
    for name, (model, sizes) in setting.steps.items():
        if not setting.has_time():
            return
        case = models.build(model, **sizes)
        step = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=ShardParallel(devices=cluster))
        (stage,) = step.check(*arguments(case), target=target).stages
        yield {
            "model": name,
            "planned_ms": stage.planned_s * 1e3,
            "compiled_ms": stage.compiled_s * 1e3,
            "planned / compiled": stage.planned_s / stage.compiled_s,
            "planned_gb": stage.planned_bytes / 1e9,
            "compiled_gb": stage.compiled_bytes / 1e9,
        }


def _rates(setting: Setting) -> Iterator[Row]:
    devices, preset = [setting.device], setting.cluster
    kernels = []
    for one in kernel_times(devices):
        kernels.append(one)
        planned_s = preset.device.kernel_s(0.0, one.n_bytes, "float32") + preset.device.launch_s
        yield {"what": f"kernel, {one.n_bytes / 1e6:.4g} MB"} | _beside(planned_s, one.seconds)
        if setting.is_tiny or not setting.has_time():
            break

    products = []
    for product in product_times(devices):
        products.append(product)
        planned_s = preset.device.product_s(product.flops, product.n_bytes, product.rate) + preset.device.launch_s
        what = f"{product.rate}, {product.flops / 1e9:.4g} Gflop, {product.n_bytes / 1e6:.4g} MB"
        yield {"what": what} | _beside(planned_s, product.seconds)
        if (setting.is_tiny and len(products) == 4) or not setting.has_time():
            break

    found = Measurements(n_devices=1, products=tuple(products), kernels=tuple(kernels), sums=())
    calibration = fitted(preset, found)
    yield {"what": "fitted: " + calibration.summary().replace("\n", "; ")}
    yield {"what": "fitted: " + json.dumps(dataclasses.asdict(calibration.cluster.device))}


def _beside(planned_s: float, measured_s: float) -> Row:
    return {
        "planned_us": planned_s * 1e6,
        "measured_us": measured_s * 1e6,
        "planned / measured": planned_s / measured_s,
    }


def _attention(setting: Setting) -> Iterator[Row]:
    kinds = {
        "causal": AttentionKind(scale=64**-0.5, right=0, masked_score=-1e9),
        "full": AttentionKind(scale=64**-0.5),
    }
    for t in (128,) if setting.is_tiny else (1024, 2048, 4096, 8192):
        for name, kind in kinds.items():
            if not setting.has_time():
                return
            yield _attention_row(t, name, kind, is_tiny=setting.is_tiny)


def _attention_row(t: int, name: str, kind: AttentionKind, *, is_tiny: bool) -> Row:
    """Forward and backward pass of an attention of 64 features; errors are relative to the largest result."""
    b, heads = (1, 2) if is_tiny else (max(1, 16384 // t), 16)
    rng = np.random.default_rng(0)
    shapes = (b, t, heads, 1, 64), (b, t, heads, 64), (b, t, heads, 64), (b, t, heads, 1, 64)
    query, key, value, out_bar = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    positions = [jnp.arange(t, dtype=jnp.int32)] * kind.n_positions

    def both(way: Any) -> Callable[[], Any]:
        @jax.jit
        def run(query: Any, key: Any, value: Any, out_bar: Any, *positions: Any) -> Any:
            out, logsumexp = way.attend(query, key, value, *positions, kind=kind)
            operands = (query, key, value, out, logsumexp, out_bar, *positions)
            return out, way.differentiate(*operands, kind=kind, dtypes=("bfloat16",) * 3, with_bias_gradient=())

        return functools.partial(run, query, key, value, out_bar, *positions)

    ways = {"cudnn": both(cudnn), "blocks": both(blockwise)}
    seconds = {way: statistics.median(times) for way, times in interleaved(ways, 5).items()}
    pairs = zip(jax.tree.leaves(ways["cudnn"]()), jax.tree.leaves(ways["blocks"]()), strict=True)
    errors = [np.abs(np.float32(x) - np.float32(y)).max() / np.abs(np.float32(y)).max() for x, y in pairs]
    return {
        "positions": t,
        "mask": name,
        **{f"{way}_ms": s * 1e3 for way, s in seconds.items()},
        "blocks / cudnn": seconds["blocks"] / seconds["cudnn"],
        "largest_error": float(max(errors)),
    }


def _nccl(setting: Setting) -> Iterator[Row]:
    if setting.device.platform == "cpu":
        yield {"way": "needs a GPU"}
        return
    yield from one_gpu()


def _numeric(setting: Setting) -> Iterator[Row]:
    # TF32 would round the two runs differently.
    with jax.default_matmul_precision("highest"), jax.default_device(setting.device):
        for name in ("mlp",) if setting.is_tiny else models.MODELS:
            if not setting.has_time():
                return
            yield from rows_of(name, setting.device)


PARTS: dict[str, Part] = {
    "steps": Part(_steps, 0.4, "Training steps, planned and measured"),
    "compiled": Part(_compiled, 1.0, "Training steps, planned and by XLA's estimates"),
    "rates": Part(_rates, 0.25, "Products and kernels"),
    "attention": Part(_attention, 0.15, "AttentionKind, forward and backward pass in bfloat16"),
    "nccl": Part(_nccl, 0.08, "NCCL with one rank"),
    "numeric": Part(_numeric, 0.12, "Three steps beside jax.jit: largest relative errors"),
}

# ---- processes -------------------------------------------------------------------------------------------------------


def run_part(name: str, out: Path, seconds: float, *, cpu: bool) -> None:
    """Run a part in this process and append its rows to its file one by one."""
    end = time.monotonic() + seconds
    device = one_device(cpu or name == "compiled")
    if device is None:
        return
    described = out / "cluster.json"
    if name == "compiled" and not cpu:
        while not described.exists():  # the first part on the GPU writes it
            time.sleep(0.5)
        cluster = ClusterSpec.from_json(described.read_text())
    else:
        cluster = describe_devices([device])
        write_text(described, cluster.to_json())
    for row in PARTS[name].rows(Setting(device, cluster, cpu, end)):
        with (out / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def run_parts(names: Sequence[str], out: Path, minutes: float, *, cpu: bool) -> None:
    """Run parts, each within its share of the minutes, and write the page after each part."""
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes
    shares = sum(PARTS[name].share for name in names if name != "compiled") or 1.0
    beside = _started("compiled", out, 60 * minutes, cpu=cpu) if "compiled" in names else None
    for name in names:
        left = end - time.monotonic()
        if name == "compiled" or left <= 0:
            continue
        seconds = min(60 * minutes * PARTS[name].share / shares, left)
        _ended(name, _started(name, out, seconds, cpu=cpu), seconds, out)
    if beside is not None:
        _ended("compiled", beside, max(0.0, end - time.monotonic()), out)


def _started(name: str, out: Path, seconds: float, *, cpu: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.gpu_all", "--part", name, "--out", str(out), "--seconds", str(seconds)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"} if cpu or name == "compiled" else None
    return subprocess.Popen(command + ["--cpu"] * cpu, env=env, start_new_session=True)


def _ended(name: str, process: subprocess.Popen[bytes], seconds: float, out: Path) -> None:
    """Wait until a part ends, and kill it when its time is over."""
    try:
        code = process.wait(seconds)
        note = "" if code == 0 else f"ended with exit code {code}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the compilers that it has started
        process.wait()
        note = "was cut off when its time was over"
    if note:
        with (out / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps({"note": f"This part {note}."}) + "\n")
    write_text(out / "gpu.md", page(out))


def page(out: Path) -> str:
    """The page: a table for each part that has rows."""
    described = out / "cluster.json"
    of = ClusterSpec.from_json(described.read_text()).device.name if described.exists() else "?"
    text = [f"# One GPU beside the planner: {of}, jax {jax.__version__}"]
    for name, part in PARTS.items():
        file = out / f"{name}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        if rows:
            text += [f"## {part.heading}", _table(rows)]
    return "\n\n".join(text) + "\n"


def _table(rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [
        [f"{x:.4g}" if isinstance(x := row.get(column, ""), float) else str(x) for column in columns] for row in rows
    ]
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_all", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=Path("gpu_results"))
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU, to check the script")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        run_part(args.part, args.out, args.seconds, cpu=args.cpu)
        return
    run_parts(args.only, args.out, args.minutes, cpu=args.cpu)
    print((args.out / "gpu.md").read_text())


if __name__ == "__main__":
    main()
