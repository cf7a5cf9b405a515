"""Alpa's `global_config`: each attribute that Alpa's has, with Alpa's default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minialpa.compat.alpa.settings import Adjustable, Setting

_KEYS = Setting("A step draws the random numbers that its keys determine; pass keys to the step.")
_ROUTES = Setting("minialpa plans each transfer between meshes as the fastest by the links.")
_TRANSPORT = Setting("The session chooses the transport between meshes, and transfers overlap with compute.")
_PROFILING = Setting("minialpa profiles nothing before it plans.")
_WORKERS = Setting("minialpa's session manages its workers and their arrays by itself.")


@dataclass
class GlobalConfig(Adjustable):
    """Alpa's knobs. Those that are not in `SETTINGS` do what they did, or minialpa always does it.

    Attributes:
        shard_parallel_sync_for_timer: each call of a parallelized function is timed, and waits until its step is done.
        pipeline_sync_for_timer: the same.
        collect_trace: accepted; `get_stage_execution_info` measures a step when it is called.
        always_donate_micro_batch_vars: accepted; memory of micro-batches is reused after the last read.
        use_local_allgather: accepted; the planner gathers on the target mesh where that is fastest.
    """

    backend: str = "gpu"
    xla_client_mem_fraction: float = 0.9
    xla_gpu_autotune_level: int = 4
    xla_server_port_start: int = 20000
    xla_server_port_end: int = 25000
    delete_remote_arrays_threshold: int = 50
    use_aws_efa: bool = False
    compile_random_seed: int = 42
    runtime_random_seed: int = 42
    shard_parallel_sync_for_timer: bool = False
    debug_with_pipeshard_runtime: bool = False
    profile_with_whole_ray_cluster: bool = True
    profile_timeout: float = 500
    profile_maximum_retry: int = 2
    overwrite_submesh_choices: Any = None
    always_donate_micro_batch_vars: bool = True
    pipeline_sync_for_timer: bool = False
    pipeline_distributed_compile: bool = True
    eagerly_create_communicators: bool = True
    pipeline_check_alive: bool = True
    pipeline_use_signal_send_recv: bool = False
    use_local_allgather: bool = True
    resharding_mode: str = "send_recv"
    nccl_mode: str = "cupy"
    enable_overlapping: bool = False
    resharding_loadbalance_mode: str = "normal"
    loadbalance_order_algo: str = "greedy"
    use_dummy_value_for_benchmarking: bool = False
    flax_always_use_fp16_embedding: bool = False
    print_compilation_time: bool = False
    print_auto_layer_stats: bool = False
    collect_trace: bool = False

    SETTINGS = {  # noqa: RUF012
        "backend": Setting("Set the environment variable JAX_PLATFORMS before jax is imported.", is_refused=True),
        "xla_client_mem_fraction": Setting(
            'Set XLA_PYTHON_CLIENT_MEM_FRACTION in the environment, or for workers in `minialpa.init("ray", '
            "worker_env=...)`.",
            is_refused=True,
        ),
        "xla_gpu_autotune_level": Setting(
            'Set `--xla_gpu_autotune_level` in XLA_FLAGS, or for workers in `minialpa.init("ray", worker_env=...)`.',
            is_refused=True,
        ),
        "debug_with_pipeshard_runtime": Setting(
            "Use `minialpa.plan(step, args, cluster=...)`, which needs no device.", is_refused=True
        ),
        "overwrite_submesh_choices": Setting(
            "Use `ManualStageOption`, which takes the submesh of each stage.", is_refused=True
        ),
        "flax_always_use_fp16_embedding": Setting(
            "Give the model `flax.linen.Embed(..., dtype=jnp.float16)`.", is_refused=True
        ),
        "use_aws_efa": Setting(
            'Set the variables of EFA and NCCL for workers in `minialpa.init("ray", worker_env=...)`.', is_refused=True
        ),
        "compile_random_seed": _KEYS,
        "runtime_random_seed": _KEYS,
        "xla_server_port_start": _WORKERS,
        "xla_server_port_end": _WORKERS,
        "delete_remote_arrays_threshold": _WORKERS,
        "pipeline_check_alive": _WORKERS,
        "pipeline_distributed_compile": _WORKERS,
        "eagerly_create_communicators": _WORKERS,
        "profile_with_whole_ray_cluster": _PROFILING,
        "profile_timeout": _PROFILING,
        "profile_maximum_retry": _PROFILING,
        "pipeline_use_signal_send_recv": _TRANSPORT,
        "resharding_mode": _ROUTES,
        "nccl_mode": _TRANSPORT,
        "enable_overlapping": _TRANSPORT,
        "resharding_loadbalance_mode": _ROUTES,
        "loadbalance_order_algo": _ROUTES,
        "use_dummy_value_for_benchmarking": Setting("Arrays have their real values."),
        "print_compilation_time": Setting("A progress bar shows planning and compiling."),
        "print_auto_layer_stats": Setting("`executable.get_parallel_plan().summary()` lists the layers of each stage."),
    }


global_config = GlobalConfig()
