"""Plans beside published runs, see `__main__.py`."""

from __future__ import annotations

from benchmarks.registry import Rows, Size, benchmark


@benchmark("published_runs")
def published_runs(size: Size) -> Rows:
    """One small run without a measurement, to show that rows are read and predicted.

    `python -m benchmarks.published_runs` takes the file of the record.
    """
    from benchmarks.published_runs.predict import predict
    from benchmarks.published_runs.record import run_of

    row = {
        "system": "nobody", "model": "gpt-tiny", "params_b": 0.01, "layers": 4, "hidden": 256, "seq": 256,
        "global_batch": 64, "gpus": 16, "gpu_kind": "H100-SXM-80GB", "gpus_per_node": 8, "dp": 4, "fsdp": None,
        "tp": 2, "pp": 2, "cp": 1, "ep": 1, "micro_batch": 2, "remat": "full", "dtype": "bf16",
        "tokens_per_s_per_gpu": None, "tflops_per_gpu": None, "mfu": None, "step_s": 1.0, "notes": "heads 4; vocab 512",
    }  # fmt: skip
    found = predict(run_of(0, row))
    return [{"step_s": found.step_s, "peak_gb": found.peak_bytes / 1e9, "fits": found.fits, "plan_s": found.plan_s}]
