"""Alpa's `global_config`, with all attributes and defaults of Alpa's."""

from __future__ import annotations

from dataclasses import make_dataclass
from typing import Any

from minialpa.compat.alpa.options import Adjustable, Setting

#: Attributes with Alpa's defaults that minialpa reads, or whose behaviour is always on.
_KNOWN = {
    "always_donate_micro_batch_vars": True,
    "collect_trace": False,
    "pipeline_sync_for_timer": False,
    "shard_parallel_sync_for_timer": False,
    "use_local_allgather": True,
}

#: By reason, the other attributes with Alpa's defaults: warnings, and below errors.
_IGNORED: dict[str, dict[str, Any]] = {
    "A step draws the random numbers that its keys determine; pass keys to the step.": {
        "compile_random_seed": 42,
        "runtime_random_seed": 42,
    },
    "minialpa plans each transfer between meshes as the fastest by the links.": {
        "resharding_mode": "send_recv",
        "resharding_loadbalance_mode": "normal",
        "loadbalance_order_algo": "greedy",
    },
    "The session chooses the transport between meshes, and transfers overlap with compute.": {
        "nccl_mode": "cupy",
        "enable_overlapping": False,
        "pipeline_use_signal_send_recv": False,
    },
    "minialpa profiles nothing before it plans.": {
        "profile_with_whole_ray_cluster": True,
        "profile_timeout": 500,
        "profile_maximum_retry": 2,
    },
    "minialpa's session manages its workers and their arrays by itself.": {
        "xla_server_port_start": 20000,
        "xla_server_port_end": 25000,
        "delete_remote_arrays_threshold": 50,
        "pipeline_check_alive": True,
        "pipeline_distributed_compile": True,
        "eagerly_create_communicators": True,
    },
    "Arrays have their real values.": {"use_dummy_value_for_benchmarking": False},
    "A progress bar shows planning and compiling.": {"print_compilation_time": False},
    "`executable.get_parallel_plan().summary()` lists the layers of each stage.": {"print_auto_layer_stats": False},
}
_IN_WORKERS = 'or for workers in `minialpa.init("ray", worker_env=...)`.'
_REFUSED: dict[str, dict[str, Any]] = {
    "Set the environment variable JAX_PLATFORMS before jax is imported.": {"backend": "gpu"},
    f"Set XLA_PYTHON_CLIENT_MEM_FRACTION in the environment, {_IN_WORKERS}": {"xla_client_mem_fraction": 0.9},
    f"Set `--xla_gpu_autotune_level` in XLA_FLAGS, {_IN_WORKERS}": {"xla_gpu_autotune_level": 4},
    "Use `minialpa.plan(step, args, cluster=...)`, which needs no device.": {"debug_with_pipeshard_runtime": False},
    "Use `ManualStageOption`, which takes the submesh of each stage.": {"overwrite_submesh_choices": None},
    "Give the model `flax.linen.Embed(..., dtype=jnp.float16)`.": {"flax_always_use_fp16_embedding": False},
    f"Set the variables of EFA and NCCL in the environment, {_IN_WORKERS}": {"use_aws_efa": False},
}

_SETTINGS = {
    name: Setting(sentence, is_refused=table is _REFUSED)
    for table in (_IGNORED, _REFUSED)
    for sentence, defaults in table.items()
    for name in defaults
}

GlobalConfig = make_dataclass(
    "GlobalConfig",
    [
        (name, Any, value)
        for defaults in (_KNOWN, *_IGNORED.values(), *_REFUSED.values())
        for name, value in defaults.items()
    ],
    bases=(Adjustable,),
    namespace={"SETTINGS": _SETTINGS, "__doc__": "Alpa's knobs; `_KNOWN` has an effect, or is always on."},
)
global_config: Any = GlobalConfig()
