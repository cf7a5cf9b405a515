"""Predicted seconds of a step on one GPU, from the plan, next to measured ones.

python -m benchmarks.gpu_stage_times [--cpu] [--repeats 10]

The prediction is `plan.cost`: its compute, communication and update for one stage on one device.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import jax

import minialpa
from benchmarks.gpu_numeric import one_device
from benchmarks.run import table
from minialpa import ShardParallel, models

#: Sizes that keep a GPU busy for milliseconds.
GPU_SIZES: dict[str, dict[str, Any]] = {
    "mlp": {"hidden": 8192, "n_layers": 8, "batch_size": 4096},
    "gpt": {"hidden": 1024, "n_layers": 8, "n_heads": 16, "seq_len": 1024, "vocab_size": 32000, "batch_size": 8},
    "bert": {"hidden": 1024, "n_layers": 8, "n_heads": 16, "seq_len": 512, "vocab_size": 32000, "batch_size": 16},
    "resnet": {"filters": 128, "image_size": 64, "batch_size": 128},
}
DTYPES = ("float32", "bfloat16")


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_stage_times", description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="run tiny models on the CPU, to check the script")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    device = one_device(args.cpu)
    if device is None:
        return 0
    rows = []
    with jax.default_device(device):
        for name, sizes in GPU_SIZES.items():
            for dtype in DTYPES:
                case = models.build(name, **({} if args.cpu else sizes), dtype=dtype)
                rows.append(_row(case, dtype, device, args.repeats))
    print(table(rows))
    return 0


def _row(case: models.ModelCase, dtype: str, device: jax.Device, repeats: int) -> dict[str, Any]:
    step = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=ShardParallel(devices=[device]))
    state = jax.eval_shape(case.init, jax.random.key(0))
    executable = step.get_executable(state, case.make_batch(0, case.batch_size))
    cost = executable.get_parallel_plan().cost
    measured_s = statistics.median(executable.profile_with_dummy_inputs(repeats))
    return {
        "model": case.name,
        "dtype": dtype,
        "compute_ms": cost.compute_s * 1e3,
        "communication_ms": cost.communication_s * 1e3,
        "update_ms": cost.update_s * 1e3,
        "predicted_ms": cost.total_s * 1e3,
        "measured_ms": measured_s * 1e3,
        "measured_over_predicted": measured_s / cost.total_s,
        "predicted_gb": max(cost.peak_bytes) / 1e9,
        "allocated_gb": executable.get_total_allocation_size() / 1e9,
    }


if __name__ == "__main__":
    raise SystemExit(main())
