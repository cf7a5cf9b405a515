"""The resources that a process uses: memory, arrays, file descriptors and threads. None may grow from step to step."""

from __future__ import annotations

import gc
import math
import os
from pathlib import Path

import jax


def process_usage() -> dict[str, int]:
    """Counts and bytes of this process, after a garbage collection. Only Linux has more than the first two.

    - live_arrays: jax arrays.
    - live_bytes: Bytes of these arrays on devices of this process.
    - private_bytes, shmem_bytes: As in `resident_memory`.
    - descriptors: Open file descriptors.
    - threads: Threads, without the pool of Ray's gRPC, which grows and shrinks by itself.
    """
    gc.collect()
    arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    usage = {
        "live_arrays": len(arrays),
        "live_bytes": sum(map(_local_bytes, arrays)),
    }
    if not Path("/proc/self/status").exists():
        return usage

    return {
        **usage,
        **resident_memory(os.getpid()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": sum(map(_is_counted, Path("/proc/self/task").iterdir())),
    }


def resident_memory(pid: int) -> dict[str, int]:
    """Resident memory of a process of this machine, without mapped files.

    - private_bytes: Memory of this process alone.
    - shmem_bytes: The part of the shared memory of Ray's object store that the process has touched. Ray places each
      object elsewhere in its store until it has used all of it. So this grows for hundreds of steps, though the machine
      uses no more memory.
    """
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines())
    kilobytes = {"private_bytes": fields["RssAnon"], "shmem_bytes": fields["RssShmem"]}
    return {name: int(text.split()[0]) << 10 for name, text in kilobytes.items()}


def _local_bytes(array: jax.Array) -> int:
    """Bytes of an array on devices of this process."""
    shard = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return shard * len(array.sharding.addressable_devices)


def _is_counted(task: Path) -> bool:
    """Whether the thread of this folder in /proc still runs and does not belong to gRPC."""
    try:
        return (task / "comm").read_text(encoding="utf-8").strip() != "event_engine"
    except OSError:  # It has just ended.
        return False
