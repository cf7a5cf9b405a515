"""Flags of XLA for test processes: programs that run for milliseconds and compile fast."""

from __future__ import annotations

FLAGS = (
    # Devices share few cores, so threads inside one device would only compete.
    "--xla_cpu_multi_thread_eigen=false",
    # Most of the time is LLVM's. Partitioning and fusion do not change.
    "--xla_backend_optimization_level=0",
    # Programs are small, and cut into parts they take more of it.
    "--xla_cpu_parallel_codegen_split_count=1",
    # The emitters that go through MLIR take twice as long. XLA ignores an extra option that it does not know.
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)
