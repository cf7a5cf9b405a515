"""Planning time against layers, devices, and distinct layers. No device is used.

python -m benchmarks.plan_scaling layers 8 16          some sizes of one of `layers`, `devices`, `widths`
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import minialpa
from benchmarks.corpus import arguments
from benchmarks.planning import cluster_of, peak_rss_gb, planned, traced_step
from benchmarks.registry import Rows, Size, benchmark
from benchmarks.run import table
from minialpa import ClusterSpec, MinialpaError
from minialpa.models import build
from minialpa.tracing.trace import TracedStep

PRESET = "h100"
#: The sizes of each axis in the full benchmark.
AXES: dict[str, tuple[int, ...]] = {
    "layers": (8, 16, 32, 64, 128),
    "devices": (8, 64, 256, 1024),
    "widths": (1, 4, 16, 32),
}
_TINY: dict[str, tuple[int, ...]] = {"layers": (2,), "devices": (2,), "widths": (2,)}
_BLOCKS = 32


@benchmark("plan_scaling")
def plan_scaling(size: Size) -> Rows:
    """Seconds to plan with AutoParallel against the numbers of layers, of devices and of distinct layers."""
    axes = AXES if size == "full" else _TINY
    return [row(axis, n, size) for axis, numbers in axes.items() for n in numbers]


def row(axis: str, n: int, size: Size = "full") -> dict[str, Any]:
    """A row of the table: `n` layers, devices or distinct layers; all else is constant along an axis."""
    full = size == "full"
    n_devices = n if axis == "devices" else 64 if full else 2
    n_blocks = n if axis == "layers" else _BLOCKS if full else 2
    start = time.perf_counter()
    traced = _widths(n, n_blocks, full) if axis == "widths" else _gpt(n_blocks, full)
    trace_s = time.perf_counter() - start
    cells: dict[str, Any] = {"axis": axis, "n": n, "blocks": n_blocks, "devices": n_devices}
    cells |= {"equations": len(traced.flat.eqns), "trace_s": trace_s}
    return cells | _planned_cells(traced, cluster_of(PRESET, n_devices))


def _planned_cells(traced: TracedStep, cluster: ClusterSpec) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        plan = planned(traced, cluster, minialpa.AutoParallel())
        found: dict[str, Any] = {
            "step_s": plan.cost.total_s,
            "stages": len(plan.stages),
            "micro_batches": plan.n_micro_batches,
        }
    except MinialpaError as error:
        found = {"failure": str(error).splitlines()[0]}
    return {"plan_s": time.perf_counter() - start, "peak_rss_gb": peak_rss_gb()} | found


def _gpt(n_blocks: int, full: bool) -> TracedStep:
    """A GPT with equal blocks."""
    sizes: dict[str, Any] = {"n_layers": n_blocks}
    if full:
        sizes |= {"hidden": 4096, "n_heads": 32, "batch_size": 1024, "seq_len": 1024, "vocab_size": 51200}
        sizes |= {"dtype": jnp.bfloat16}
    case = build("gpt", **sizes)
    return traced_step(case.train_step(minialpa.value_and_grad), *arguments(case))


def _widths(n_widths: int, n_blocks: int, full: bool) -> TracedStep:
    """Residual blocks x + relu(x u) v with `n_widths` hidden widths in turn, trained by gradient descent."""
    hidden, n_examples, unit = (4096, 65536, 1024) if full else (16, 8, 8)
    widths = [unit * (1 + i % n_widths) for i in range(n_blocks)]
    shapes: list[tuple[Any, Any]] = [(_array(hidden, width), _array(width, hidden)) for width in widths]
    return traced_step(_descend, shapes, _array(n_examples, hidden))


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _descend(params: Any, x: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        y = x
        for up, down in params:
            y = y + jax.nn.relu(y @ up) @ down
        return jnp.mean(jnp.square(y - x))

    gradients = minialpa.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.plan_scaling", description=__doc__.splitlines()[0])
    parser.add_argument("axis", choices=tuple(AXES), help="what grows")
    parser.add_argument("numbers", nargs="*", type=int, help="to what; by default all sizes of the benchmark")
    args = parser.parse_args(argv)
    for n in args.numbers or AXES[args.axis]:
        print(table([row(args.axis, n)]), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
